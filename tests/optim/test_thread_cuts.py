"""An optimizer whose bits depend on how many threads share a tensor is refused where pieces are updated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import Parameter

from paceline.errors import ConfigError
from paceline.optim.range_optimizer import SHARED_FROM, check_thread_cuts


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def large(dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.randn(SHARED_FROM + 1).to(dtype))


@pytest.mark.usefixtures("two_threads")
def test_sgd_in_bf16_is_refused_with_what_to_do_and_nothing_changes() -> None:
    parameter = large(torch.bfloat16)
    before = parameter.detach().clone()
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match=r"SGD gives bfloat16 parameters other bits where 2 threads.*--threads 1"):
        check_thread_cuts(optimizer)
    assert torch.get_num_threads() == 2
    assert not optimizer.state
    assert torch.equal(parameter, before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_single_precision_is_not_refused(optimizer: type[torch.optim.Optimizer]) -> None:
    check_thread_cuts(optimizer([{"params": [large()]}, {"params": []}], lr=0.1))  # type: ignore[call-arg]


def test_one_thread_and_small_tensors_are_never_cut_by_threads() -> None:
    optimizer = torch.optim.SGD([Parameter(torch.randn(100).bfloat16())], lr=0.1)
    before = torch.get_num_threads()
    check_thread_cuts(optimizer)
    torch.set_num_threads(1)
    check_thread_cuts(torch.optim.SGD([large(torch.bfloat16)], lr=0.1))
    torch.set_num_threads(before)
