"""The parts of fsdp without processes: units, rows, ends of blocks, and that nothing is left when it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline import Engine, World
from paceline.errors import ConfigError
from paceline.optim.gradient_norm import all_block_norms, norm_of_blocks
from paceline.sharding.flat_layout import Piece
from paceline.sharding.shards import Shards
from paceline.strategies.fsdp_norms import BlockNorms, block_ends
from paceline.strategies.fsdp_rows import RowMember, RowShards
from paceline.strategies.fsdp_units import AtLeast, Units, kept_whole, unit_modules
from tests.bits.programs import TiedGpt

CPU = torch.device("cpu")

# -- units -------------------------------------------------------------------------------------------------------------


def units_of(model: nn.Module, wanted: Units) -> list[str]:
    found = unit_modules(model, wanted)
    return [name for name, module in model.named_modules() if any(module is unit for unit in found)]


def test_blocks_of_a_list_are_units_and_what_repeats_inside_them_is_not() -> None:
    assert units_of(TiedGpt(), None) == ["blocks.0", "blocks.1"]


def test_layers_of_a_sequential_are_units_where_they_repeat() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.LayerNorm(2))
    assert units_of(model, None) == ["0", "2"]


def test_units_by_class_and_by_name_may_be_inside_each_other() -> None:
    assert units_of(TiedGpt(), (nn.Sequential, "_Block")) == ["blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp"]


def test_units_by_size_grow_from_below() -> None:
    """A block has 12,704 elements: 3,136 before its mlp's two layers of 4,224 and 4,128, which come to 8,352."""
    assert units_of(TiedGpt(), AtLeast(8000)) == ["blocks.0.mlp", "blocks.1.mlp"]
    assert units_of(TiedGpt(), AtLeast(12000)) == ["blocks.0", "blocks.1"]
    with pytest.raises(ConfigError, match=r"AtLeast\(0\)"):
        AtLeast(0)


def test_what_can_not_be_cut_or_is_shared_between_units_is_kept_whole() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 2).double())
    model[1].weight = model[0].weight
    model.scalar = nn.Parameter(torch.ones(()))
    model.sideways = nn.Parameter(torch.ones(3, 2).t())
    names = {id(p): name for name, p in model.named_parameters()}
    whole = kept_whole(model, unit_modules(model, None))
    assert sorted(names[id(p)] for p in whole) == ["0.weight", "2.bias", "2.weight", "scalar", "sideways"]


# -- rows --------------------------------------------------------------------------------------------------------------


def rows(*shapes: tuple[int, ...], workers: int) -> RowShards:
    members = [RowMember(number, shape) for number, shape in enumerate(shapes)]
    return RowShards.of(members, workers, torch.float32, CPU)


def test_the_picture() -> None:
    cut = rows((5, 3), (5,), workers=2)
    assert cut.ranges == ((0, 12), (12, 24))
    assert [(owned.piece, owned.offset) for owned in cut.pieces(1)] == [(Piece(0, 9, 15), 0), (Piece(1, 3, 5), 9)]


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@settings(max_examples=100, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=4), st.integers(2, 5))
def test_pieces_find_their_elements_where_torch_lays_them(all_shapes: list[tuple[int, ...]], workers: int) -> None:
    cut = rows(*all_shapes, workers=workers)
    tensors = [torch.randn(shape) for shape in all_shapes]
    flat = torch.empty(cut.bucket.elements)
    torch._chunk_cat(tensors, 0, workers, out=flat.view(workers, -1))
    seen = [0] * len(tensors)
    for worker, (start, _) in enumerate(cut.ranges):
        for owned in cut.pieces(worker):
            piece = owned.piece
            there = flat[start + owned.offset : start + owned.offset + piece.elements]
            assert torch.equal(there, tensors[piece.parameter].view(-1)[piece.start : piece.stop])
            seen[piece.parameter] += piece.elements
    assert seen == [tensor.numel() for tensor in tensors]


def test_members_that_got_no_gradient_are_zeros() -> None:
    cut = rows((3,), (2, 2), (1,), workers=2)
    given_rows = torch.tensor([1.0, 2, 9, 3, 0, 8])  # of the first and the last: 1 2 | 9 and 3 · | 8
    out = cut.spread(given_rows, [True, False, True], torch.full((cut.bucket.elements,), 7.0))
    assert out.tolist() == [1, 2, 0, 0, 9, 3, 0, 0, 0, 8]


# -- norms -------------------------------------------------------------------------------------------------------------


def test_ends_of_blocks_go_to_the_owner_of_the_first_element() -> None:
    owners = {0: [(0, Piece(0, 0, 5000)), (1, Piece(0, 5000, 6000)), (2, Piece(0, 6000, 9000))]}
    told = [(end.piece.start, end.piece.stop, end.holder, end.owner) for end in block_ends(owners)]
    assert told == [(5000, 6000, 1, 0), (6000, 8192, 2, 0)]


def test_alone_the_norm_is_that_of_whole_gradients() -> None:
    tensors = [torch.randn(3, 4001), torch.randn(10)]
    shards = Shards(1, (rows((3, 4001), (10,), workers=1),))
    found = BlockNorms(shards.owners, None).norms({Piece(n, 0, t.numel()): t for n, t in enumerate(tensors)})
    assert norm_of_blocks(found) == norm_of_blocks(all_block_norms(tensors))


# -- alone -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fsdp", "hybrid"])
def test_an_optimizer_that_is_not_elementwise_is_refused(strategy: str) -> None:
    model = nn.Linear(8, 1)
    with (
        pytest.raises(ConfigError, match=r"LBFGS can't run on ranges.*strategy='ddp'"),
        Engine(world=World(), strategy=strategy) as engine,
    ):
        engine.prepare(model, torch.optim.LBFGS(model.parameters()))
