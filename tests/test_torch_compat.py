"""A private name that torch drops takes down the feature that needs it, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Precision, torch_compat
from paceline.errors import ConfigError
from paceline.torch_compat import Missing, attribute, memory_written_by, nothing_else_views, require, resolve


def test_a_name_that_torch_has_is_itself() -> None:
    assert resolve("torch:_foreach_copy_", "anything") is torch._foreach_copy_
    assert not [name for name, value in vars(torch_compat).items() if isinstance(value, Missing)]


def test_an_attribute_that_a_class_neither_defines_nor_declares_raises() -> None:
    with pytest.raises(ConfigError, match=r"a look needs torch.Tensor._no_such_attribute"):
        attribute(torch.Tensor, "_no_such_attribute", "a look")(torch.zeros(1))


def test_a_name_that_torch_has_not_raises_when_it_is_used_and_says_what_for() -> None:
    gone = [resolve("torch:_no_such_name", "clip_grad_norm_()"), resolve("torch._no_such_module:name", "fsdp")]
    for missing, words in zip(
        gone, ("clip_grad_norm_() needs torch._no_such_name", "fsdp needs torch._no"), strict=True
    ):
        for use in (missing, lambda missing=missing: require(print, missing)):
            with pytest.raises(ConfigError, match=words.replace("(", r"\(").replace(")", r"\)")):
                use()
    with pytest.raises(ConfigError, match=torch.__version__.replace("+", r"\+")):
        gone[0]()


WITHOUT = """
import torch, torch._dynamo, torch.utils._python_dispatch as dispatch  # torch itself uses these names as well
del torch._C._storage_Use_Count, dispatch._disable_current_modes
import paceline, sys
from torch.utils.data import DataLoader, TensorDataset

engine = paceline.Engine(strategy=sys.argv[1])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4))
for (x,) in loader:
    engine.backward(model(x).sum())
    optimizer.step()
print("trained", engine.step)
"""


@pytest.mark.job
def test_ddp_trains_without_the_names_that_weights_in_shards_need() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, "ddp"], capture_output=True, text=True, timeout=120)
    assert "trained 2" in done.stdout, done.stderr


def test_weights_in_shards_refuse_a_torch_that_lacks_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.strategies.fsdp import fsdp

    monkeypatch.setattr(fsdp, "NEEDED", (*fsdp.NEEDED, Missing("torch._C._gone", "weights in shards")))
    job: Any = SimpleNamespace(facts={"offload": "parameters"}, precision=Precision())
    with pytest.raises(ConfigError, match=r"weights in shards needs torch._C._gone"):
        fsdp.open_weights(job, "fsdp", None, None)


def test_views_of_memory_are_counted() -> None:
    tensor = torch.empty(3)
    assert nothing_else_views(tensor)
    view = tensor[1:]
    assert not nothing_else_views(tensor)
    del view
    assert nothing_else_views(tensor)


@pytest.mark.parametrize("counts", [lambda _: 2, lambda _: 1])
def test_a_torch_that_counts_views_otherwise_is_found_out(
    monkeypatch: pytest.MonkeyPatch, counts: Callable[[int], int]
) -> None:
    monkeypatch.setattr(torch_compat, "_use_count", counts)
    assert not torch_compat._counts_views()


def test_writes_to_memory_are_seen_also_on_the_meta_device() -> None:
    with torch.device("meta"):
        layer = nn.Linear(3, 2)
    written = memory_written_by(lambda: nn.init.zeros_(layer.bias))
    assert written == {torch_compat.memory_id(layer.bias)}
