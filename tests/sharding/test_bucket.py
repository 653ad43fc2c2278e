"""Which gradients travel together."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sharding.bucket import ALIGNED, Bucket, GradientSpec, plan_buckets

CPU = torch.device("cpu")
Plan = tuple[list[GradientSpec], list[int], int]


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> GradientSpec:
    return GradientSpec(shape, dtype, CPU)


@st.composite
def models(draw: st.DrawFn) -> Plan:
    """Gradients of some shapes and dtypes, the order in which they finish, and the size of a bucket in bytes."""
    shape = st.lists(st.integers(0, 12), max_size=3).map(tuple)
    dtype = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
    specs = draw(st.lists(st.builds(GradientSpec, shape, dtype, st.just(CPU)), max_size=20))
    return specs, draw(st.permutations(range(len(specs)))), draw(st.integers(1, 2000))


def entries(buckets: tuple[Bucket, ...]) -> list[int]:
    return [entry.parameter for bucket in buckets for entry in bucket.entries]


def size_bytes(bucket: Bucket) -> int:
    return bucket.elements * bucket.dtype.itemsize


@settings(max_examples=100, deadline=None)
@given(models())
def test_every_parameter_is_in_exactly_one_bucket(model: Plan) -> None:
    specs, _, _ = model
    assert sorted(entries(plan_buckets(*model, aligned=False))) == list(range(len(specs)))


@settings(max_examples=100, deadline=None)
@given(models())
def test_members_lie_one_after_the_other_with_the_shapes_of_their_parameters(model: Plan) -> None:
    specs, _, _ = model
    for bucket in plan_buckets(*model, aligned=False):
        ends = [0] + [entry.offset + entry.elements for entry in bucket.entries]
        assert ends == [entry.offset for entry in bucket.entries] + [bucket.elements]
        assert all(entry.shape == specs[entry.parameter].shape for entry in bucket.entries)


@settings(max_examples=100, deadline=None)
@given(models())
def test_a_bucket_is_closed_by_the_member_that_fills_it(model: Plan) -> None:
    *_, bucket_bytes = model
    """Buckets are filled from the end, so it is the first entry that closes one."""
    for bucket in plan_buckets(*model, aligned=False):
        without_the_first = size_bytes(bucket) - bucket.entries[0].elements * bucket.dtype.itemsize
        assert without_the_first < bucket_bytes


def test_the_last_bucket_is_small_and_those_before_it_grow() -> None:
    specs = [spec(64) for _ in range(40)]  # 256 bytes each
    buckets = plan_buckets(specs, range(40), bucket_bytes=2048, aligned=False)
    assert [size_bytes(bucket) // 256 for bucket in buckets] == [1, 8, 8, 8, 8, 4, 2, 1]


@settings(max_examples=100, deadline=None)
@given(models())
def test_a_gradient_of_half_a_bucket_or_more_travels_alone(model: Plan) -> None:
    *_, bucket_bytes = model
    for bucket in plan_buckets(*model, aligned=False):
        largest = max(entry.elements * bucket.dtype.itemsize for entry in bucket.entries)
        assert bucket.alone or largest * 2 < bucket_bytes


@settings(max_examples=100, deadline=None)
@given(models())
def test_precisions_are_not_mixed_in_a_bucket(model: Plan) -> None:
    specs, _, _ = model
    for bucket in plan_buckets(*model, aligned=False):
        assert {specs[entry.parameter].sum_dtype for entry in bucket.entries} == {bucket.dtype}


@settings(max_examples=100, deadline=None)
@given(models())
def test_buckets_are_numbered_by_the_place_of_their_last_member(model: Plan) -> None:
    _, order, _ = model
    last = [
        max(order.index(entry.parameter) for entry in bucket.entries) for bucket in plan_buckets(*model, aligned=False)
    ]
    assert all(a < b for a, b in pairwise(last)), last


@settings(max_examples=50, deadline=None)
@given(models())
def test_members_keep_the_order_in_which_gradients_finish(model: Plan) -> None:
    _, order, _ = model
    for bucket in plan_buckets(*model, aligned=False):
        places = [order.index(entry.parameter) for entry in bucket.entries]
        assert places == sorted(places)


def test_a_small_model_looks_like_the_drawing() -> None:
    head, norm, bias, layer = spec(100), spec(4), spec(4), spec(100)
    buckets = plan_buckets([head, norm, bias, layer], [0, 1, 2, 3], bucket_bytes=32, aligned=False)
    assert [tuple(entry.parameter for entry in bucket.entries) for bucket in buckets] == [(0,), (1,), (2,), (3,)]
    buckets = plan_buckets([head, norm, bias, layer], [0, 1, 2, 3], bucket_bytes=256, aligned=False)
    assert [tuple(entry.parameter for entry in bucket.entries) for bucket in buckets] == [(0,), (1, 2), (3,)]


def test_low_precisions_are_added_in_fp32_and_fp64_stays() -> None:
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    assert [spec(1, dtype=dtype).sum_dtype for dtype in dtypes] == [torch.float32] * 3 + [torch.float64]


@settings(max_examples=100, deadline=None)
@given(models())
def test_aligned_members_start_where_torchs_own_memory_would_and_gaps_are_no_members(model: Plan) -> None:
    for bucket in plan_buckets(*model):
        assert all(entry.offset * bucket.dtype.itemsize % ALIGNED == 0 for entry in bucket.entries)
        held = sum(entry.elements for entry in bucket.entries)
        assert held + sum(stop - start for start, stop in bucket.gaps) == bucket.elements
