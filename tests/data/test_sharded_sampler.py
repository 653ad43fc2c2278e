"""Every sample once per epoch, whatever the lanes, micro-batches and workers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.sharded_sampler import BatchPlan, ItemKey, assigned_items
from paceline.errors import ConfigError
from paceline.world.lanes import neighbouring_lanes, strided_lanes
from tests.data.logged_runs import assigned


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    batch_size, lanes, accumulate = draw(st.integers(1, 6)), draw(st.integers(1, 8)), draw(st.integers(1, 4))
    drop_last = draw(st.booleans())
    least = batch_size * lanes * accumulate if drop_last else 1
    return BatchPlan(draw(st.integers(least, least + 400)), batch_size, lanes, accumulate, drop_last)


def dealt(plan: BatchPlan, step: int) -> list[int]:
    return [place for ranges in plan.micro_batches(step).values() for positions in ranges for place in positions]


def test_a_step_looks_like_the_drawing() -> None:
    plan = BatchPlan(samples=24, batch_size=4, lanes=3, accumulate=2)
    assert plan.micro_batches(0) == {
        0: [range(4), range(12, 16)],
        1: [range(4, 8), range(16, 20)],
        2: [range(8, 12), range(20, 24)],
    }


def test_the_last_step_is_dealt_into_few_equal_micro_batches() -> None:
    plan = BatchPlan(samples=24 + 10, batch_size=4, lanes=3, accumulate=2)
    assert plan.micro_batches(1) == {0: [range(24, 28)], 1: [range(28, 31)], 2: [range(31, 34)]}


def test_a_lane_that_gets_nothing_is_absent() -> None:
    assert BatchPlan(samples=5, batch_size=4, lanes=3, accumulate=1).micro_batches(0) == {
        0: [range(3)],
        1: [range(3, 5)],
    }


@settings(max_examples=80, deadline=None)
@given(plans())
def test_every_position_is_dealt_once_per_epoch(plan: BatchPlan) -> None:
    positions = [place for step in range(plan.steps) for place in sorted(dealt(plan, step))]
    assert positions == list(range(plan.samples_per_epoch))


@settings(max_examples=80, deadline=None)
@given(plans())
def test_drop_last_drops_less_than_one_global_batch_and_otherwise_nothing_is_dropped(plan: BatchPlan) -> None:
    dropped = plan.samples - plan.samples_per_epoch
    assert 0 <= dropped < (plan.global_batch if plan.drop_last else 1)


@settings(max_examples=80, deadline=None)
@given(plans())
def test_every_step_has_as_few_and_as_equal_micro_batches_as_hold_it(plan: BatchPlan) -> None:
    for step in {0, plan.steps - 1}:
        low, high = plan.step_range(step)
        lengths = [len(positions) for ranges in plan.micro_batches(step).values() for positions in ranges]
        assert len(lengths) == -(-(high - low) // plan.batch_size)
        assert max(lengths) - min(lengths) <= 1
        assert max(lengths) <= plan.batch_size


@settings(max_examples=80, deadline=None)
@given(plans())
def test_lower_lanes_and_first_micro_batches_are_filled_first(plan: BatchPlan) -> None:
    cut = plan.micro_batches(plan.steps - 1)
    counts = [len(cut.get(lane, [])) for lane in range(plan.lanes)]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1
    assert max(counts) <= plan.accumulate


@settings(max_examples=80, deadline=None)
@given(plans(), st.integers(1, 10))
def test_the_workers_together_do_every_micro_batch_once(plan: BatchPlan, workers: int) -> None:
    step = plan.steps - 1
    done = [item for own_lanes in neighbouring_lanes(plan.lanes, workers) for item in assigned(plan, step, own_lanes)]
    real = [(lane, number, positions) for lane, number, positions, shadow in done if not shadow]
    cut = plan.micro_batches(step)
    assert real == [(lane, number, positions) for lane in cut for number, positions in enumerate(cut[lane])]


@settings(max_examples=80, deadline=None)
@given(plans(), st.integers(1, 10))
def test_a_worker_without_samples_gets_one_shadow_and_no_other_worker_gets_any(plan: BatchPlan, workers: int) -> None:
    cut = plan.micro_batches(plan.steps - 1)
    for own_lanes in neighbouring_lanes(plan.lanes, workers):
        shadows = [item for item in assigned(plan, plan.steps - 1, own_lanes) if item[3]]
        assert shadows == ([] if set(own_lanes) & set(cut) else [(0, 0, cut[0][0], True)])


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.integers(0, 8), st.integers(1, 3), min_size=1),
    st.integers(1, 9),
    st.sampled_from([strided_lanes, neighbouring_lanes]),
)
def test_every_micro_batch_is_run_once_and_no_worker_has_nothing_to_run(counts, workers, lanes_of) -> None:  # type: ignore[no-untyped-def]
    items = [assigned_items(counts, lanes) for lanes in lanes_of(9, workers)]
    real = [(item.lane, item.micro_batch) for mine in items for item in mine if not item.shadow]
    assert sorted(real) == sorted((lane, number) for lane, count in counts.items() for number in range(count))
    assert all(mine for mine in items)
    assert all(mine[-1].last_of_lane for mine in items)


def test_a_worker_without_samples_runs_the_lowest_lanes_first_micro_batch() -> None:
    assert assigned_items({1: 2, 3: 1}, (0, 2)) == [ItemKey(1, 0, shadow=True, last_of_lane=True)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_empty_dataset_is_refused(drop_last: bool) -> None:
    with pytest.raises(ConfigError, match="the dataset is empty: there is nothing to train on"):
        BatchPlan(0, 4, 2, 1, drop_last)


def test_fewer_samples_than_a_global_batch_are_refused_with_the_arithmetic_when_drop_last_is_set() -> None:
    text = r"23 samples are fewer than one global batch of 24 \(3 lanes × 2 micro-batches × 4\) and drop_last is set"
    with pytest.raises(ConfigError, match=text):
        BatchPlan(23, 4, 3, 2, drop_last=True)
    assert BatchPlan(23, 4, 3, 2).steps == 1
