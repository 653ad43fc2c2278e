"""Keys: slices of buckets, cut between blocks, dealt to servers by size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.parameter_server.key_ranges import KEY_BYTES, MOST_PIECES, Key, KeyTable, plan_keys
from paceline.sharding.bucket import Bucket, GradientSpec, plan_buckets
from paceline.sharding.flat_layout import BLOCK, FlatLayout, Piece

CPU = torch.device("cpu")
Model = tuple[FlatLayout, tuple[Bucket, ...]]


def model_of(
    shapes: list[tuple[int, ...]],
    dtypes: list[torch.dtype] | None = None,
    order: list[int] | None = None,
    bucket_bytes: int = 16 << 20,
) -> Model:
    dtypes = dtypes or [torch.float32] * len(shapes)
    specs = [GradientSpec(shape, dtype, CPU) for shape, dtype in zip(shapes, dtypes, strict=True)]
    order = list(reversed(range(len(shapes)))) if order is None else order
    names = tuple(f"p{place}" for place in range(len(shapes)))
    return FlatLayout(names, tuple(shapes), tuple(dtypes)), plan_buckets(specs, order, bucket_bytes, aligned=False)


@st.composite
def models(draw: st.DrawFn) -> Model:
    shape = st.one_of(st.just(()), st.tuples(st.integers(0, 300)), st.tuples(st.integers(0, 9), st.integers(0, BLOCK)))
    shapes = draw(st.lists(shape, min_size=1, max_size=12))
    dtype = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
    dtypes = draw(st.lists(dtype, min_size=len(shapes), max_size=len(shapes)))
    order = draw(st.permutations(range(len(shapes))))
    return model_of(shapes, dtypes, list(order), draw(st.integers(1, 200_000)))


key_bytes = st.integers(1, 30 * BLOCK)


def sliced(table: KeyTable, buckets: tuple[Bucket, ...], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every key's part of the flat gradients of its bucket."""
    flats = [
        torch.cat([parameters[entry.parameter].reshape(-1).to(bucket.dtype) for entry in bucket.entries])
        for bucket in buckets
    ]
    return [key.of_bucket(flats[key.bucket]) for key in table.keys]


@settings(max_examples=100, deadline=None)
@given(models(), key_bytes)
def test_keys_hold_every_element_of_every_parameter_once(model: Model, size: int) -> None:
    layout, buckets = model
    counts = [torch.zeros(elements, dtype=torch.int64) for elements in layout.sizes]
    for key in plan_keys(layout, buckets, key_bytes=size).keys if layout.elements else ():
        for piece in key.pieces:
            counts[piece.parameter][piece.start : piece.stop] += 1
    assert all(bool((count == 1).all()) for count in counts)


@settings(max_examples=100, deadline=None)
@given(models().filter(lambda model: model[0].elements > 0), key_bytes)
def test_a_key_is_a_slice_of_its_bucket_and_its_pieces_are_cut_between_blocks(model: Model, size: int) -> None:
    layout, buckets = model
    table = plan_keys(layout, buckets, key_bytes=size)
    values = [torch.randn(shape, dtype=torch.float64).to(torch.bfloat16).double() for shape in layout.shapes]
    for key, flat in zip(table.keys, sliced(table, buckets, values), strict=True):
        assert torch.equal(flat.double(), key.gathered(values).double())
        for piece, view in zip(key.pieces, key.views(flat), strict=True):
            assert view.numel() == piece.elements > 0
            assert piece.start % BLOCK == 0
            assert piece.stop % BLOCK == 0 or piece.stop == layout.sizes[piece.parameter]


@settings(max_examples=100, deadline=None)
@given(models().filter(lambda model: model[0].elements > 0), key_bytes)
def test_a_key_has_one_dtype_few_pieces_and_about_the_size_asked_for(model: Model, size: int) -> None:
    layout, buckets = model
    for key in plan_keys(layout, buckets, key_bytes=size).keys:
        assert {layout.dtypes[piece.parameter] for piece in key.pieces} == {key.dtype}
        assert key.sum_dtype == buckets[key.bucket].dtype
        assert len(key.pieces) <= MOST_PIECES
        assert key.gradient_bytes <= max(size, 0) + BLOCK * key.sum_dtype.itemsize


@settings(max_examples=50, deadline=None)
@given(models().filter(lambda model: model[0].elements > 0), key_bytes)
def test_keys_are_numbered_in_the_order_in_which_they_become_ready(model: Model, size: int) -> None:
    layout, buckets = model
    table = plan_keys(layout, buckets, key_bytes=size)
    assert [key.number for key in table.keys] == list(range(len(table.keys)))
    assert sorted((key.bucket, key.start) for key in table.keys) == [(key.bucket, key.start) for key in table.keys]
    assert [key for bucket in range(len(buckets)) for key in table.of_bucket(bucket)] == list(table.keys)


@settings(max_examples=100, deadline=None)
@given(models().filter(lambda model: model[0].elements > 0), key_bytes, st.integers(1, 5))
def test_servers_share_the_keys_and_none_has_more_than_one_key_above_the_least(
    model: Model, size: int, servers: int
) -> None:
    layout, buckets = model
    servers = min(servers, len(plan_keys(layout, buckets, key_bytes=size).keys))
    table = plan_keys(layout, buckets, servers=servers, key_bytes=size)
    held = [table.of_server(server) for server in range(servers)]
    assert sorted(key.number for keys in held for key in keys) == list(range(len(table.keys)))
    loads = [sum(key.gradient_bytes for key in keys) for keys in held]
    largest = max(key.gradient_bytes for key in table.keys)
    assert min(loads) > 0
    assert max(loads) - min(loads) <= largest


def test_a_large_gradient_becomes_several_keys_and_small_ones_share_one() -> None:
    layout, buckets = model_of([(2048, 1024), (64,), (64,)])
    table = plan_keys(layout, buckets, servers=2, key_bytes=KEY_BYTES)
    small, first, second = sorted(table.keys, key=lambda key: key.elements)
    assert [piece.parameter for piece in small.pieces] == [2, 1]
    assert (first.pieces, second.pieces) == ((Piece(0, 0, 1 << 20),), (Piece(0, 1 << 20, 1 << 21),))
    assert first.gradient_bytes == KEY_BYTES
    assert first.server != second.server


def test_many_tiny_gradients_make_keys_of_at_most_as_many_pieces_as_a_push_has_bits() -> None:
    layout, buckets = model_of([(1,)] * 200)
    assert [len(key.pieces) for key in plan_keys(layout, buckets).keys] == [62, 62, 62, 14]


def test_parameters_of_another_precision_get_keys_of_their_own() -> None:
    layout, buckets = model_of([(4,), (4,), (4,)], [torch.float32, torch.bfloat16, torch.bfloat16])
    table = plan_keys(layout, buckets)
    assert [(key.dtype, [piece.parameter for piece in key.pieces]) for key in table.keys] == [
        (torch.bfloat16, [2, 1]),
        (torch.float32, [0]),
    ]


@pytest.mark.parametrize("servers", [1, 2, 3, 8])
def test_every_server_of_a_model_of_some_size_gets_several_keys(servers: int) -> None:
    layout, buckets = model_of([(1024, 1024)] * 4 + [(1024,)] * 4)
    table = plan_keys(layout, buckets, servers=servers)
    assert all(len(table.of_server(server)) >= 3 for server in range(servers))
    assert max(key.gradient_bytes for key in table.keys) <= KEY_BYTES


def test_a_large_model_has_keys_of_4_mib() -> None:
    layout, buckets = model_of([(4096, 4096)] * 2, bucket_bytes=1 << 20)
    assert {key.gradient_bytes for key in plan_keys(layout, buckets, servers=2).keys} == {KEY_BYTES}


@pytest.mark.parametrize("servers", [1, 2, 3, 4])
def test_a_tiny_model_is_cut_as_finely_as_its_servers_need(servers: int) -> None:
    layout, buckets = model_of([(8, 4), (8,), (2, 8), (2,)])
    table = plan_keys(layout, buckets, servers=servers)
    assert len(table.keys) == 1 if servers == 1 else len(table.keys) >= servers


def test_more_servers_than_keys_is_one_clear_line_with_both_numbers() -> None:
    layout, buckets = model_of([(3, 3), (3,)])
    with pytest.raises(ConfigError) as caught:
        plan_keys(layout, buckets, servers=3)
    assert str(caught.value) == (
        "3 servers but only 2 keys to hold: 1 of them would have nothing to do; start with --servers 2"
    )


@pytest.mark.parametrize(("option", "value"), [("servers", 0), ("servers", -1), ("key_bytes", 0)])
def test_no_servers_and_no_bytes_are_refused(option: str, value: int) -> None:
    layout, buckets = model_of([(3, 3)])
    with pytest.raises(ConfigError, match=f"{option}={value}: .* at least one"):
        plan_keys(layout, buckets, **{option: value})  # type: ignore[arg-type]


def test_the_digest_knows_the_model_and_the_keys() -> None:
    layout, buckets = model_of([(100_000,), (5,)])
    other, other_buckets = model_of([(100_000,), (6,)])
    tables = [
        plan_keys(layout, buckets),
        plan_keys(layout, buckets, key_bytes=50_000),
        plan_keys(layout, buckets, servers=2),
        plan_keys(other, other_buckets),
    ]
    assert len({table.digest for table in tables}) == len(tables)
    assert plan_keys(*model_of([(100_000,), (5,)])).digest == tables[0].digest
    assert all(0 <= table.digest < 2**63 for table in tables)


def test_a_key_is_named_by_what_lies_in_it() -> None:
    layout, buckets = model_of([(2 * BLOCK,), (3,), (3,)])
    table = plan_keys(layout, buckets, key_bytes=4 * BLOCK)
    names = {table.name(key.number) for key in table.keys}
    assert names == {"key 0 (p2 … p1)", "key 1 (p0[0:4096])", "key 2 (p0[4096:8192])"}


def test_the_weights_of_a_key_are_a_copy_in_their_own_precision() -> None:
    weights = torch.randn(2 * BLOCK, dtype=torch.bfloat16)
    key = Key(0, 0, 0, 0, (Piece(0, BLOCK, 2 * BLOCK),), torch.bfloat16, torch.float32)
    copy = key.gathered([weights])
    assert copy.dtype == torch.bfloat16
    copy.zero_()
    assert bool((weights != 0).any())
