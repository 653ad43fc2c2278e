"""One flat space for all parameters, cut between blocks only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.optim import gradient_norm
from paceline.sharding.flat_layout import BLOCK, FlatLayout, Piece, Shard, joined, part_of

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 5 * BLOCK)),
    st.tuples(st.integers(0, 9), st.integers(0, BLOCK)),
)


def layout(*given_shapes: tuple[int, ...]) -> FlatLayout:
    count = len(given_shapes)
    return FlatLayout(tuple(f"p{place}" for place in range(count)), given_shapes, (torch.float32,) * count)


layouts = st.lists(shapes, max_size=8).map(lambda drawn: layout(*drawn))


def covered(pieces: list[Piece], whole: FlatLayout) -> list[list[int]]:
    """How often each element of each parameter lies in a piece."""
    counts = [torch.zeros(size, dtype=torch.int64) for size in whole.sizes]
    for piece in pieces:
        counts[piece.parameter][piece.start : piece.stop] += 1
    return [count.unique().tolist() for count in counts]


def test_a_block_is_the_block_of_the_gradient_norm() -> None:
    assert BLOCK == gradient_norm.BLOCK


def test_a_small_model_looks_like_the_drawing() -> None:
    model = layout((2, BLOCK + 25), (100,), (2, BLOCK + 100))
    assert model.offsets == (0, 3 * BLOCK, 4 * BLOCK, 7 * BLOCK)
    assert model.cut(2) == (
        Shard(0, 4 * BLOCK, (Piece(0, 0, 2 * BLOCK + 50), Piece(1, 0, 100))),
        Shard(4 * BLOCK, 7 * BLOCK, (Piece(2, 0, 2 * BLOCK + 200),)),
    )


@settings(max_examples=100, deadline=None)
@given(layouts)
def test_every_parameter_starts_at_a_block_boundary_and_nothing_overlaps(model: FlatLayout) -> None:
    for offset, size, following in zip(model.offsets, model.sizes, model.offsets[1:], strict=False):
        assert offset % BLOCK == 0
        assert offset + size <= following < offset + size + BLOCK


@settings(max_examples=100, deadline=None)
@given(layouts, st.integers(1, 9))
def test_the_shards_of_a_cut_hold_every_element_once(model: FlatLayout, parts: int) -> None:
    pieces = [piece for shard in model.cut(parts) for piece in shard.pieces]
    assert covered(pieces, model) == [[1] if size else [] for size in model.sizes]


@settings(max_examples=100, deadline=None)
@given(layouts, st.integers(1, 9))
def test_shards_follow_each_other_and_are_cut_between_blocks(model: FlatLayout, parts: int) -> None:
    shards = model.cut(parts)
    assert len(shards) == parts
    assert [shard.start for shard in shards] == [0, *[shard.stop for shard in shards[:-1]]]
    assert shards[-1].stop == model.extent
    for piece in (piece for shard in shards for piece in shard.pieces):
        assert piece.start % BLOCK == 0
        assert piece.stop % BLOCK == 0 or piece.stop == model.sizes[piece.parameter]


@settings(max_examples=100, deadline=None)
@given(layouts, st.integers(1, 9))
def test_shards_are_alike_up_to_one_block(model: FlatLayout, parts: int) -> None:
    for shard in model.cut(parts):
        assert abs(shard.elements - model.elements / parts) <= BLOCK + 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 9 * BLOCK), st.integers(1, 12))
def test_one_parameter_is_split_into_pieces_alike_up_to_a_block(size: int, parts: int) -> None:
    pieces = layout((size,)).split(0, parts)
    assert len(pieces) == min(parts, -(-size // BLOCK))
    assert covered(list(pieces), layout((size,))) == ([[1]] if size else [[]])
    assert all(piece.start % BLOCK == 0 and piece.elements > 0 for piece in pieces)
    blocks = [-(-piece.elements // BLOCK) for piece in pieces]
    assert not blocks or max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize(("start", "stop"), [(1, BLOCK), (0, 100), (BLOCK, 0), (0, 9 * BLOCK), (-BLOCK, BLOCK)])
def test_a_shard_of_broken_blocks_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\) is not a range of whole blocks of \[0, 8192\)"):
        layout((2 * BLOCK,)).shard(start, stop)


def test_a_layout_is_not_cut_into_nothing() -> None:
    with pytest.raises(ValueError, match="at least one part, not 0"):
        layout((1,)).cut(0)


def test_an_empty_model_has_empty_shards() -> None:
    assert layout().cut(2) == (Shard(0, 0, ()), Shard(0, 0, ()))


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(1, 6))
def test_pieces_of_a_tensor_joined_are_the_tensor(shape: tuple[int, ...], parts: int) -> None:
    tensor = torch.randn(shape)
    pieces = layout(shape).split(0, parts)
    if pieces:
        assert torch.equal(joined([part_of(tensor, piece) for piece in pieces], shape), tensor)


def test_a_piece_is_a_view_in_logical_order_and_a_copy_where_memory_is_not() -> None:
    rows = torch.arange(2.0 * BLOCK).view(2, BLOCK)
    second = Piece(0, BLOCK, 2 * BLOCK)
    assert part_of(rows, second).data_ptr() == rows[1].data_ptr()
    columns = rows.t().contiguous().t()
    assert torch.equal(part_of(columns, second), rows[1])


def test_the_piece_of_a_scalar_is_a_scalar() -> None:
    assert part_of(torch.tensor(3.0), Piece(0, 0, 1)).shape == ()


def test_the_digest_knows_names_shapes_dtypes_and_their_order() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
    named = list(model.named_parameters())
    others = [
        [("other.weight", named[0][1]), *named[1:]],
        [(named[0][0], torch.zeros(3, 4)), *named[1:]],
        [(named[0][0], named[0][1].double()), *named[1:]],
        named[::-1],
        named[:-1],
    ]
    assert FlatLayout.of(named).digest == FlatLayout.of(model.named_parameters()).digest
    assert len({FlatLayout.of(rows).digest for rows in [named, *others]}) == 1 + len(others)


def test_a_layout_needs_a_shape_and_a_dtype_for_each_name() -> None:
    with pytest.raises(ValueError, match="2 names, 1 shapes and 1 dtypes"):
        FlatLayout(("a", "b"), ((1,),), (torch.float32,))
