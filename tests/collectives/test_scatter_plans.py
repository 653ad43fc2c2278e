"""Owners do every merge of the canonical tree once, as soon as its lanes have come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.canonical_sum import (
    ScatterPlan,
    SumPlan,
    scatter_plan_of_roots,
    scatter_plans_by_lane,
    sum_plan,
)
from paceline.world.lanes import strided_lanes
from tests.collectives.one_process import walk


def strided(lanes: int, workers: int, present: tuple[int, ...]) -> SumPlan:
    there = set(present)
    return SumPlan(
        present, tuple(tuple(lane for lane in own if lane in there) for own in strided_lanes(lanes, workers))
    )


def held_after(sent_now: ScatterPlan, held: dict[int, Any], values: dict[int, Any]) -> dict[int, Any]:
    """What an owner holds, with the shape of the tree in place of sums."""
    known = held | {node: values[node] for nodes in sent_now.sent for node in nodes}
    out = {}
    for total in sent_now.sums:
        rows = [known[part] for part in total.parts]
        for left, right in total.merges:
            rows[left] = (rows[left], rows[right])
        out[total.node] = rows[total.merges[-1][0] if total.merges else 0]
    return out


jobs = st.tuples(st.integers(1, 17), st.integers(1, 6), st.data())


def drawn(lanes: int, data: st.DataObject) -> tuple[int, ...]:
    return tuple(sorted(data.draw(st.sets(st.integers(0, lanes - 1), min_size=1))))


@settings(max_examples=200, deadline=None)
@given(jobs)
def test_lane_by_lane_owners_end_with_the_canonical_tree(job: tuple[int, int, st.DataObject]) -> None:
    lanes, workers, data = job
    present = drawn(lanes, data)
    held: dict[int, Any] = {}
    for sent_now in scatter_plans_by_lane(strided(lanes, workers, present)):
        held = held_after(sent_now, held, {lane: lane for lane in present})
    assert held == {present[0]: walk({lane: lane for lane in present}, lambda a, b: (a, b))}


@settings(max_examples=200, deadline=None)
@given(jobs)
def test_every_lane_is_sent_once_by_its_rider_one_at_a_time(job: tuple[int, int, st.DataObject]) -> None:
    lanes, workers, data = job
    plan = strided(lanes, workers, drawn(lanes, data))
    plans = scatter_plans_by_lane(plan)
    for worker, own in enumerate(plan.holders):
        assert tuple(lane for sent_now in plans for lane in sent_now.sent[worker]) == own
    assert all(len(nodes) <= 1 for sent_now in plans for nodes in sent_now.sent)


@settings(max_examples=200, deadline=None)
@given(jobs)
def test_roots_end_with_the_canonical_tree_at_once(job: tuple[int, int, st.DataObject]) -> None:
    lanes, workers, data = job
    present = drawn(lanes, data)
    plan = sum_plan(lanes, workers, present)
    values = {root: _below(plan, worker, root) for worker in range(workers) for root in plan.roots(worker)}
    assert held_after(scatter_plan_of_roots(plan), {}, values) == {
        present[0]: walk({lane: lane for lane in present}, lambda a, b: (a, b))
    }


def _below(plan: SumPlan, worker: int, root: int) -> Any:
    nodes: dict[int, Any] = {}
    for lane in plan.holders[worker]:
        nodes[lane] = lane
        for merge in plan.merges_after[worker][lane]:
            nodes[merge.left] = (nodes[merge.left], nodes.pop(merge.right))
    return nodes[root]


@pytest.mark.parametrize(("workers", "lanes", "most"), [(2, 4, 1), (2, 8, 2), (4, 8, 1), (4, 16, 2)])
def test_strided_riders_leave_owners_with_one_or_two_partial_sums(workers: int, lanes: int, most: int) -> None:
    """Before the last lanes come: afterwards it is always one."""
    plans = scatter_plans_by_lane(strided(lanes, workers, tuple(range(lanes))))
    assert max(len(sent_now.sums) for sent_now in plans) == most
    assert len(plans) == lanes // workers
