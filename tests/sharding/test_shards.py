"""Every bucket is cut into one range per worker, between blocks, and over all buckets everybody gets the same."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sharding.bucket import (
    ALIGNED,
    Bucket,
    BucketShards,
    GradientSpec,
    OwnedPiece,
    Shards,
    cut_buckets,
    plan_buckets,
)
from paceline.sharding.flat_layout import BLOCK, Piece

CPU = torch.device("cpu")


def buckets_of(*shapes: tuple[int, ...], bucket_bytes: int, dtype: torch.dtype = torch.float32) -> tuple[Bucket, ...]:
    specs = [GradientSpec(shape, dtype, CPU) for shape in shapes]
    return plan_buckets(specs, range(len(specs)), bucket_bytes, aligned=False)


@st.composite
def models(draw: st.DrawFn) -> tuple[Bucket, ...]:
    shape = st.one_of(st.just(()), st.tuples(st.integers(0, 5 * BLOCK)), st.tuples(st.integers(0, 9), st.just(BLOCK)))
    dtype = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
    specs = draw(st.lists(st.builds(GradientSpec, shape, dtype, st.just(CPU)), max_size=12))
    return plan_buckets(specs, draw(st.permutations(range(len(specs)))), draw(st.integers(1, 400_000)))


def everything(shards: Shards) -> list[Piece]:
    return [piece for worker in range(shards.workers) for piece in shards.pieces(worker)]


def test_a_small_model_looks_like_the_drawing() -> None:
    (bucket,) = buckets_of((2, BLOCK), (10,), (BLOCK + 5,), bucket_bytes=10**6)
    (shards,) = cut_buckets([bucket], 2).buckets
    assert shards.ranges == ((0, 2 * BLOCK), (2 * BLOCK, 3 * BLOCK + 15))
    assert shards.pieces(0) == (OwnedPiece(Piece(0, 0, 2 * BLOCK), 0),)
    assert shards.pieces(1) == (OwnedPiece(Piece(1, 0, 10), 0), OwnedPiece(Piece(2, 0, BLOCK + 5), 10))


@settings(max_examples=150, deadline=None)
@given(models(), st.integers(1, 9))
def test_every_element_has_one_owner_and_pieces_start_at_blocks(buckets: tuple[Bucket, ...], workers: int) -> None:
    shards = cut_buckets(buckets, workers)
    owners = shards.owners
    for entry in (entry for bucket in buckets for entry in bucket.entries):
        pieces = [piece for _, piece in owners.get(entry.parameter, ())]
        assert [piece.start for piece in pieces] + [entry.elements] == [0, *(piece.stop for piece in pieces)]
        assert all(piece.start % BLOCK == 0 for piece in pieces)
    assert sum(map(len, owners.values())) == len(everything(shards))


@settings(max_examples=150, deadline=None)
@given(models(), st.integers(1, 9))
def test_over_all_buckets_workers_own_the_same_up_to_two_blocks(buckets: tuple[Bucket, ...], workers: int) -> None:
    size = {m.parameter: b.dtype.itemsize for b in buckets for m in b.entries}
    owned = [
        sum(p.elements * size[p.parameter] for p in ps)
        for ps in map(cut_buckets(buckets, workers).pieces, range(workers))
    ]
    for bytes_owned in owned:
        assert abs(bytes_owned - sum(owned) / workers) <= 2 * BLOCK * 8


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 9), st.data())
def test_a_parameter_that_may_not_be_cut_has_one_owner(
    buckets: tuple[Bucket, ...], workers: int, data: st.DataObject
) -> None:
    parameters = [entry.parameter for bucket in buckets for entry in bucket.entries]
    uncut = data.draw(st.sets(st.sampled_from(parameters))) if parameters else set()
    shards = cut_buckets(buckets, workers, uncut)
    assert all(len(shards.owners[parameter]) == 1 for parameter in uncut if parameter in shards.owners)


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 9))
def test_offsets_lead_into_the_owners_range(buckets: tuple[Bucket, ...], workers: int) -> None:
    for shards in cut_buckets(buckets, workers).buckets:
        offset_of = {entry.parameter: entry.offset for entry in shards.bucket.entries}
        for worker, (start, _) in enumerate(shards.ranges):
            ends = 0
            for owned in shards.pieces(worker):
                assert owned.offset >= ends
                assert start + owned.offset == offset_of[owned.piece.parameter] + owned.piece.start
                ends = owned.offset + owned.piece.elements
            assert ends <= shards.width(worker)


def test_many_small_buckets_don_t_all_go_to_one_worker() -> None:
    buckets = buckets_of(*[(100,)] * 40, bucket_bytes=100)
    assert len(buckets) == 40
    assert [len(cut_buckets(buckets, 4).pieces(worker)) for worker in range(4)] == [10] * 4


def test_ranges_that_are_no_cut_are_refused() -> None:
    (bucket,) = buckets_of((10,), bucket_bytes=100)
    with pytest.raises(ValueError, match="not a cut of 10 elements"):
        BucketShards(bucket, ((0, 4), (5, 10)))
    with pytest.raises(ValueError, match="at least one worker"):
        cut_buckets([bucket], 0)


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 9), st.randoms())
def test_fewer_parameters_keep_their_owners(buckets: tuple[Bucket, ...], workers: int, random: Random) -> None:
    for shards in cut_buckets(buckets, workers).buckets:
        kept = [entry.parameter for entry in shards.bucket.entries if random.random() < 0.7]
        fewer = shards.only({number: number for number in kept})
        if not kept:
            assert fewer is None
            continue
        assert fewer is not None
        for worker in range(workers):
            before = [owned.piece for owned in shards.pieces(worker) if owned.piece.parameter in kept]
            assert [owned.piece for owned in fewer.pieces(worker)] == before
        assert all(entry.offset * fewer.bucket.dtype.itemsize % ALIGNED == 0 for entry in fewer.bucket.entries)
