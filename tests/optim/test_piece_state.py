"""Optimizer state for whole parameters and for pieces, there and back again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.optim.piece_state import gather_state, scatter_state
from paceline.sharding.flat_layout import BLOCK, FlatLayout, Piece

shapes = st.one_of(
    st.just(()), st.tuples(st.integers(1, 3 * BLOCK)), st.tuples(st.integers(1, 5), st.integers(1, BLOCK))
)


def cut(shape: tuple[int, ...], parts: int) -> tuple[Piece, ...]:
    return FlatLayout(("p",), (shape,), (torch.float32,)).split(0, parts)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) if isinstance(one[name], Tensor) else one[name] == other[name]
        for name in one
    )


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(1, 5))
def test_scattering_and_gathering_changes_no_bit(shape: tuple[int, ...], parts: int) -> None:
    parameter = torch.randn(shape)
    whole = {
        "step": torch.tensor(7.0),
        "exp_avg": torch.randn(shape),
        "low": torch.randn(shape).bfloat16(),
        "mu_product": 0.25,
        "momentum_buffer": None,
    }
    pieces = cut(shape, parts)
    assert same(gather_state(scatter_state(whole, shape, pieces), pieces, parameter, "p"), whole)


def test_pieces_do_not_share_memory_with_each_other_or_with_the_whole() -> None:
    whole = {"step": torch.tensor(1.0), "sum": torch.zeros(2 * BLOCK)}
    first, second = scatter_state(whole, (2 * BLOCK,), cut((2 * BLOCK,), 2))
    first["step"] += 1
    first["sum"] += 1
    assert (float(second["step"]), float(whole["step"])) == (1.0, 1.0)
    assert not bool(second["sum"].any())
    assert not bool(whole["sum"].any())


def test_gathered_state_lies_in_memory_as_the_parameter_does() -> None:
    parameter = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    whole = {"exp_avg": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    pieces = cut((2, 3, 4, 5), 1)
    gathered = gather_state(scatter_state(whole, parameter.shape, pieces), pieces, parameter, "p")
    assert torch.equal(gathered["exp_avg"], whole["exp_avg"])
    assert gathered["exp_avg"].stride() == parameter.stride()


def test_pieces_that_were_never_updated_gather_to_nothing() -> None:
    pieces = cut((2 * BLOCK,), 2)
    assert gather_state([{}, {}], pieces, torch.zeros(2 * BLOCK), "p") == {}


def test_what_belongs_to_the_whole_comes_from_the_piece_with_the_most_steps() -> None:
    states = [{"step": torch.tensor(3.0), "mu": 0.5}, {"step": torch.tensor(4.0), "mu": 0.25}]
    gathered = gather_state(states, cut((2 * BLOCK,), 2), torch.zeros(2 * BLOCK), "p")
    assert (float(gathered["step"]), gathered["mu"]) == (4.0, 0.25)


def test_a_missing_piece_is_named() -> None:
    pieces = cut((3 * BLOCK,), 3)
    with pytest.raises(CheckpointError, match=r"'layer.weight' has 12,288 elements but its pieces are \[\(0, 4096\), "):
        gather_state([{}, {}], [pieces[0], pieces[2]], torch.zeros(3 * BLOCK), "layer.weight")


def test_state_of_some_pieces_only_is_refused_with_the_range() -> None:
    states: list[dict[str, Any]] = [{"step": 1}, {}]
    with pytest.raises(CheckpointError) as caught:
        gather_state(states, cut((2 * BLOCK,), 2), torch.zeros(2 * BLOCK), "p")
    assert str(caught.value) == (
        "the optimizer keeps ['step'] for elements 0 to 4096 of 'p' but [] for 4096 to 8192: not all of it was "
        "updated yet; save after a step that updates everything"
    )
