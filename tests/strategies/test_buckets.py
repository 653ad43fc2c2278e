"""What leaves, when, and what is in it: a worker's roots once a step, or the gradient of each lane on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.collectives.canonical_sum import sum_plan
from paceline.collectives.communicator import SingleWorker
from paceline.errors import LoopError
from paceline.sharding.bucket import plan_buckets
from paceline.strategies.buckets import GradientBuckets
from paceline.strategies.strategy import ItemPlace

LANES = 3


class Departures:
    """A model of three layers whose buckets hold about one gradient each, and a list of what has left."""

    def __init__(self, *, bucket_bytes: int = 300, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.left: list[tuple[int, dict[int, Tensor]]] = []
        self.buckets = GradientBuckets(
            list(self.model.named_parameters()),
            worker=0,
            cut=lambda specs, order: plan_buckets(specs, order, bucket_bytes, aligned=False),
            leave=lambda number, nodes: self.left.append((number, {k: v.clone() for k, v in nodes.items()})),
            **options,
        )
        self.data = torch.randn(LANES, 4, 8)

    def loss(self, lane: int) -> Tensor:
        return self.model(self.data[lane]).square().mean()

    def start(self) -> None:
        self.left.clear()
        self.buckets.start_step(sum_plan(LANES, 1, tuple(range(LANES))))

    def place(self, lane: int, **changes: Any) -> ItemPlace:
        place = {"last_of_lane": True, "last_of_step": lane == LANES - 1, "shadow": False} | changes
        return ItemPlace(lane, **place)

    def run(self, place: ItemPlace) -> None:
        self.buckets.start_backward(place, last=True)
        self.loss(place.lane).backward()  # type: ignore[no-untyped-call]
        self.buckets.finish_backward(place)

    def gradient(self, lane: int, number: int) -> Tensor:
        """What bucket `number` holds of the lane's gradient, found without any of this."""
        parameters = self.buckets.parameters
        gradients = torch.autograd.grad(self.loss(lane), parameters)
        entries = self.buckets.sums[number].bucket.entries
        return torch.cat([gradients[entry.parameter].reshape(-1) for entry in entries])


@pytest.fixture
def by_lane() -> Departures:
    found = Departures(by_lane=True, rebuilds=False)
    assert len(found.buckets.sums) > 2
    return found


def test_by_lane_every_bucket_leaves_once_for_each_lane_in_the_order_of_their_numbers(by_lane: Departures) -> None:
    by_lane.start()
    for lane in range(LANES):
        by_lane.run(by_lane.place(lane))
    count = len(by_lane.buckets.sums)
    assert [(number, *nodes) for number, nodes in by_lane.left] == [
        (number, lane) for lane in range(LANES) for number in range(count)
    ]
    for number, nodes in by_lane.left:
        for lane, found in nodes.items():
            assert torch.equal(found, by_lane.gradient(lane, number))


def test_by_lane_buckets_leave_while_the_lanes_backward_runs(by_lane: Departures) -> None:
    by_lane.start()
    by_lane.run(by_lane.place(0))
    assert by_lane.buckets.left_during_backward == len(by_lane.buckets.sums)


def test_roots_leave_once_a_step_in_the_last_items_backward() -> None:
    roots = Departures(rebuilds=False)
    roots.start()
    for lane in range(LANES - 1):
        roots.run(roots.place(lane))
        assert roots.left == []
    roots.run(roots.place(LANES - 1))
    for number, nodes in roots.left:
        ((lane, total),) = nodes.items()
        assert lane == 0
        expected = roots.gradient(0, number).add(roots.gradient(1, number)).add(roots.gradient(2, number))
        assert torch.equal(total, expected)
    assert [number for number, _ in roots.left] == list(range(len(roots.buckets.sums)))


@pytest.mark.parametrize("by_lane", [True, False])
def test_without_overlap_nothing_leaves_before_backward_is_done(by_lane: bool) -> None:
    late = Departures(overlap=False, by_lane=by_lane)
    late.start()
    place = late.place(LANES - 1)
    late.buckets.start_backward(place, last=True)
    late.loss(place.lane).backward()  # type: ignore[no-untyped-call]
    assert late.left == []
    for lane in range(LANES - 1):
        if not by_lane:  # lanes before it, of which nothing is known here
            for sums in late.buckets.sums:
                sums.take_nothing(lane)
    late.buckets.finish_backward(place)
    assert len(late.left) == len(late.buckets.sums)
    assert late.buckets.left_during_backward == 0


def test_micro_batches_of_a_lane_leave_together(by_lane: Departures) -> None:
    by_lane.start()
    by_lane.run(by_lane.place(1, last_of_lane=False))
    assert by_lane.left == []
    by_lane.run(by_lane.place(1))
    for number, nodes in by_lane.left:
        assert torch.equal(nodes[1], 2 * by_lane.gradient(1, number))


def test_a_lane_without_any_backward_leaves_zeros_and_a_shadow_leaves_nothing(by_lane: Departures) -> None:
    by_lane.start()
    by_lane.buckets.skip(by_lane.place(1))
    assert [number for number, _ in by_lane.left] == list(range(len(by_lane.buckets.sums)))
    assert not any(nodes[1].any() for _, nodes in by_lane.left)
    by_lane.left.clear()
    by_lane.run(by_lane.place(2, shadow=True))
    assert by_lane.left == []


def test_a_lane_whose_last_micro_batch_is_skipped_leaves_what_it_has(by_lane: Departures) -> None:
    by_lane.start()
    by_lane.run(by_lane.place(1, last_of_lane=False))
    by_lane.buckets.skip(by_lane.place(1))
    for number, nodes in by_lane.left:
        assert torch.equal(nodes[1], by_lane.gradient(1, number))


def test_the_next_lane_does_not_find_gradients_of_the_one_before(by_lane: Departures) -> None:
    by_lane.start()
    by_lane.run(by_lane.place(0))
    assert all(parameter.grad is None for parameter in by_lane.buckets.parameters)
    by_lane.left.clear()
    by_lane.buckets.skip(by_lane.place(1))
    assert not any(nodes[1].any() for _, nodes in by_lane.left)


def test_a_second_gradient_after_its_bucket_left_is_an_error_that_says_what_to_write(by_lane: Departures) -> None:
    by_lane.start()
    place = by_lane.place(0)
    by_lane.buckets.start_backward(place, last=True)
    by_lane.loss(0).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(LoopError, match=r"got a second gradient after its bucket had left.*last=False"):
        by_lane.loss(0).backward()  # type: ignore[no-untyped-call]


def test_the_order_is_learned_once_and_cuts_the_buckets_after_the_step() -> None:
    learning = Departures(bucket_bytes=100_000)
    learning.start()
    for lane in range(LANES):
        learning.run(learning.place(lane))
    learning.buckets.plan_rebuild(learning.buckets.used, comm=SingleWorker())
    assert learning.buckets.rebuild()
    assert not learning.buckets.rebuild()
    entries = [entry.parameter for sums in learning.buckets.sums for entry in sums.bucket.entries]
    assert sorted(entries) == list(range(len(learning.buckets.parameters)))
    assert set(entries[:2]) == {4, 5}, "the last layer's gradients are ready first"


def test_closing_removes_the_hooks(by_lane: Departures) -> None:
    by_lane.buckets.close()
    assert not any(p._post_accumulate_grad_hooks for p in by_lane.buckets.parameters)
