"""From `.grad` to roots: what is moved, what is copied, and that neither changes a bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.canonical_sum import sum_plan
from paceline.sharding.bucket import ALIGNED, Bucket, BucketEntry, GradientSpec, plan_buckets
from paceline.strategies.buckets import LaneSums
from tests.collectives.one_process import lane_values, one_process_sum, same_bits


def sums_of(*parameters: Tensor) -> LaneSums:
    owned = [Parameter(parameter) for parameter in parameters]
    specs = [GradientSpec(tuple(p.shape), p.dtype, p.device) for p in owned]
    (bucket,) = plan_buckets(specs, range(len(specs)), bucket_bytes=1 << 20, aligned=False)
    return LaneSums(bucket, owned)


def signs_of_zero(tensor: Tensor) -> list[str]:
    return ["-0" if torch.signbit(value) else "+0" for value in tensor.view(-1)]


def test_gradients_are_handed_out_where_torchs_own_memory_would_start_wherever_they_were_summed() -> None:
    sums = sums_of(torch.zeros(3), torch.zeros(5), torch.zeros(2, 7))
    total = torch.arange(22.0)
    sums.hand_out(total, [True] * 3)
    handed = [parameter.grad for parameter in sums._parameters]
    assert all(gradient is not None and gradient.data_ptr() % ALIGNED == 0 for gradient in handed)
    assert torch.cat([gradient.flatten() for gradient in handed if gradient is not None]).tolist() == total.tolist()


# -- taking ------------------------------------------------------------------------------------------------------------


def test_a_gradient_that_travels_alone_is_moved_not_copied() -> None:
    sums, gradient = sums_of(torch.zeros(3, 4)), torch.randn(3, 4)
    sums.take(0, [gradient])
    assert sums.nodes[0].data_ptr() == gradient.data_ptr()


def test_packed_gradients_are_copied_in_member_order() -> None:
    sums = sums_of(torch.zeros(2), torch.zeros(2, 2))
    sums.take(0, [torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])])
    assert sums.nodes[0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_moved_gradient_lies_in_logical_order_whatever_its_strides() -> None:
    sums, gradient = sums_of(torch.zeros(2, 3)), torch.arange(6.0).view(3, 2).t()
    sums.take(0, [gradient])
    assert sums.nodes[0].tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]


def test_gradients_that_were_put_as_they_came_make_the_same_node() -> None:
    sums, gradients = sums_of(torch.zeros(2), torch.zeros(3), torch.zeros(1)), [torch.randn(n) for n in (2, 3, 1)]
    assert sums.put(2, gradients[2])
    assert sums.put(0, gradients[0])
    assert (sums.has(0), sums.has(1), sums.has(2)) == (True, False, True)
    sums.take(0, [None, gradients[1], None])
    assert same_bits(sums.nodes[0], torch.cat(gradients))
    sums.take(1, gradients)  # nothing of the first is left
    assert same_bits(sums.nodes[1], torch.cat(gradients))


def test_what_was_neither_put_nor_taken_is_plus_zero() -> None:
    sums = sums_of(torch.zeros(2), torch.zeros(2))
    sums.give_back(torch.full((4,), -1.0))
    sums.put(0, torch.ones(2))
    sums.take(0, [None, None])
    assert sums.nodes[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert signs_of_zero(sums.nodes[0][2:]) == ["+0", "+0"]


def test_a_gradient_that_comes_in_two_parts_is_their_sum() -> None:
    sums = sums_of(torch.zeros(2), torch.zeros(2))
    assert sums.put(0, torch.tensor([1.0, 2.0]))
    assert not sums.put(0, torch.tensor([10.0, 20.0]))
    sums.take(0, [None, torch.zeros(2)])
    assert sums.nodes[0].tolist() == [11.0, 22.0, 0.0, 0.0]


@pytest.mark.parametrize("together", [1, 2], ids=["alone", "packed"])
def test_with_a_home_the_first_lane_and_so_the_root_lives_there_step_after_step(together: int) -> None:
    sums, home = sums_of(*[torch.zeros(2)] * together), torch.zeros(2 * together)
    sums.use_slot(home)
    plan = sum_plan(2, 1, (0, 1))
    for step in range(3):
        for lane in (0, 1):
            sums.take(lane, [torch.full((2,), float(step + lane))] * together)
            sums.merge(plan.merges_after[0][lane])
        (root,) = sums.nodes.values()
        assert root.data_ptr() == home.data_ptr()
        assert root.tolist() == [2.0 * step + 1] * 2 * together
        sums.nodes = {}
        sums.give_back(root)


@pytest.mark.parametrize("together", [1, 2], ids=["alone", "packed"])
def test_gradients_of_low_precision_become_fp32(together: int) -> None:
    sums = sums_of(*[torch.zeros(2, dtype=torch.bfloat16)] * together)
    sums.take(0, [torch.tensor([1.5, -2.0], dtype=torch.bfloat16)] * together)
    assert (sums.nodes[0].dtype, sums.nodes[0].tolist()) == (torch.float32, [1.5, -2.0] * together)


@pytest.mark.parametrize("together", [1, 2], ids=["alone", "packed"])
def test_a_parameter_unused_in_a_lane_counts_as_plus_zero(together: int) -> None:
    sums = sums_of(*[torch.zeros(2)] * together)
    sums.give_back(torch.full((2 * together,), -1.0))  # what a buffer held before must not show
    sums.take(0, [None, *[torch.ones(2)] * (together - 1)])
    assert sums.nodes[0].tolist() == [0.0, 0.0] + [1.0, 1.0] * (together - 1)
    assert signs_of_zero(sums.nodes[0][:2]) == ["+0", "+0"]


def test_a_lane_that_was_skipped_adds_plus_zero() -> None:
    sums = sums_of(torch.zeros(2), torch.zeros(1))
    sums.give_back(torch.full((3,), -1.0))
    sums.take_nothing(0)
    assert (sums.nodes[0].tolist(), signs_of_zero(sums.nodes[0])) == ([0.0] * 3, ["+0"] * 3)


# -- merging -----------------------------------------------------------------------------------------------------------


def root_of(sums: LaneSums, lanes: dict[int, list[Tensor | None]]) -> Tensor:
    plan = sum_plan(max(lanes) + 1, 1, tuple(sorted(lanes)))
    for lane in sorted(lanes):
        sums.take(lane, lanes[lane])
        sums.merge(plan.merges_after[0][lane])
    (root,) = sums.nodes.values()
    return root


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 15), min_size=1), st.booleans())
def test_the_root_of_one_worker_has_the_bits_of_the_canonical_tree(present: set[int], alone: bool) -> None:
    lanes = tuple(sorted(present))
    values = lane_values(lanes, 40)
    sums = sums_of(torch.zeros(40)) if alone else sums_of(torch.zeros(25), torch.zeros(15))
    cuts = [40] if alone else [25, 15]
    root = root_of(sums, {lane: list(value.clone().split(cuts)) for lane, value in values.items()})
    assert same_bits(root, one_process_sum(values))


@pytest.mark.parametrize("together", [1, 2], ids=["moved", "copied"])
@pytest.mark.parametrize(("first", "second", "sign"), [(-0.0, -0.0, "-0"), (-0.0, 0.0, "+0"), (-0.0, None, "+0")])
def test_the_sign_of_zero_is_that_of_the_two_lanes_added(
    together: int, first: float, second: float | None, sign: str
) -> None:
    def gradients(value: float | None) -> list[Tensor | None]:
        return [None if value is None else torch.full((1,), value) for _ in range(together)]

    root = root_of(sums_of(*[torch.zeros(1)] * together), {0: gradients(first), 1: gradients(second)})
    assert signs_of_zero(root) == [sign] * together


@pytest.mark.parametrize("together", [1, 2], ids=["moved", "copied"])
def test_one_lane_keeps_its_minus_zero(together: int) -> None:
    root = root_of(sums_of(*[torch.zeros(1)] * together), {0: [torch.full((1,), -0.0)] * together})
    assert signs_of_zero(root) == ["-0"] * together


def test_sixteen_lanes_need_five_buffers() -> None:
    sums, plan = sums_of(torch.zeros(2), torch.zeros(2)), sum_plan(16, 1, tuple(range(16)))
    used = set()
    for lane in range(16):
        sums.take(lane, [torch.ones(2), torch.ones(2)])
        used |= {node.data_ptr() for node in sums.nodes.values()}
        sums.merge(plan.merges_after[0][lane])
    assert (len(used), sums.nodes[0].tolist()) == (5, [16.0] * 4)


# -- handing out -------------------------------------------------------------------------------------------------------


def test_parameters_get_their_part_of_the_sum_and_unused_ones_none() -> None:
    first, second = Parameter(torch.zeros(2)), Parameter(torch.zeros(1, 2))
    bucket = Bucket((BucketEntry(0, 0, (2,)), BucketEntry(1, 2, (1, 2))), torch.float32, torch.device("cpu"))
    second.grad = torch.ones(1, 2)
    LaneSums(bucket, [first, second]).hand_out(torch.arange(4.0), [True, False])
    assert first.grad is not None
    assert (first.grad.tolist(), second.grad) == ([0.0, 1.0], None)


def test_a_contiguous_parameter_gets_the_memory_of_the_sum() -> None:
    parameter, total = Parameter(torch.zeros(2, 3)), torch.arange(6.0)
    bucket = Bucket((BucketEntry(0, 0, (2, 3)),), torch.float32, torch.device("cpu"))
    LaneSums(bucket, [parameter]).hand_out(total, [True])
    assert parameter.grad is not None
    assert parameter.grad.data_ptr() == total.data_ptr()


@pytest.mark.parametrize(
    "values",
    [torch.zeros(3, 2).t(), torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)],
    ids=["transposed", "channels last"],
)
def test_a_parameter_that_is_not_contiguous_gets_a_gradient_with_its_strides(values: Tensor) -> None:
    parameter, total = Parameter(values), torch.arange(float(values.numel()))
    bucket = Bucket((BucketEntry(0, 0, tuple(values.shape)),), torch.float32, torch.device("cpu"))
    LaneSums(bucket, [parameter]).hand_out(total, [True])
    assert parameter.grad is not None
    assert parameter.grad.stride() == parameter.stride()
    assert torch.equal(parameter.grad, total.view(values.shape))


def test_a_parameter_of_low_precision_gets_a_gradient_of_its_dtype() -> None:
    parameter = Parameter(torch.zeros(2, dtype=torch.bfloat16))
    bucket = Bucket((BucketEntry(0, 0, (2,)),), torch.float32, torch.device("cpu"))
    LaneSums(bucket, [parameter]).hand_out(torch.tensor([1.0, 2.0]), [True])
    assert parameter.grad is not None
    assert (parameter.grad.dtype, parameter.grad.tolist()) == (torch.bfloat16, [1.0, 2.0])
