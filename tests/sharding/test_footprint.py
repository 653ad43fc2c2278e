"""What a strategy holds and moves, by formula: the literature's numbers, and the general case at a few points."""

from __future__ import annotations

import pytest

from paceline.collectives.canonical_sum import sum_plan
from paceline.errors import ConfigError
from paceline.sharding.footprint import FOOTPRINTS, Footprint, Model, footprint
from tests.benchmarks import script

theory = script("traffic_theory")

PSI = 840_000  # divides by every number of workers here


def of(strategy: str, workers: int, lanes: int | None = None, **more: int) -> Footprint:
    return footprint(strategy, Model(PSI), workers=workers, lanes=lanes or workers, **more)


def held(strategy: str, workers: int, model: Model = Model(PSI)) -> float:  # noqa: B008 (a frozen value)
    """In bytes per parameter."""
    return footprint(strategy, model, workers=workers, lanes=workers).held / PSI


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_in_single_precision_it_is_the_formula(n: int) -> None:
    assert held("ddp", n) == held("star", n) == 16
    assert held("zero1", n) == 8 + 8 / n
    assert held("zero2", n) == 4 + 12 / n
    assert held("zero3", n) == held("fsdp", n) == held("hybrid", n) == 16 / n


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_in_mixed_precision_it_is_the_formula(n: int) -> None:
    assert held("ddp", n, Model.mixed(PSI)) == 16
    assert held("zero1", n, Model.mixed(PSI)) == 4 + 12 / n
    assert held("zero2", n, Model.mixed(PSI)) == 2 + 14 / n
    assert held("zero3", n, Model.mixed(PSI)) == 16 / n


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_zero_sends_what_ddp_sends_and_the_star_everything_through_one(n: int) -> None:
    ring = 2 * PSI * (n - 1) // n * 4
    assert [of(s, n).sent for s in ("ddp", "zero1", "zero2")] == [ring] * 3
    assert of("zero3", n).sent == ring * 3 // 2
    assert of("star", n).sent == (n - 1) * PSI * 4
    assert {of(strategy, 1).sent for strategy in FOOTPRINTS} == {0}


@pytest.mark.parametrize(("workers", "lanes"), [(2, 5), (3, 8), (4, 8), (3, 7)])
def test_with_several_lanes_the_busiest_worker_sends_what_the_schedules_say(workers: int, lanes: int) -> None:
    plan = sum_plan(lanes, workers, tuple(range(lanes)))
    owned = [PSI // workers] * workers
    roots = [len(plan.roots(worker)) for worker in range(workers)]
    own_lanes = [len(range(worker, lanes, workers)) for worker in range(workers)]
    gathered = theory.gather_from_owners(owned)[0].sent
    for strategy, nodes in (("ddp", roots), ("zero1", roots), ("zero2", own_lanes)):
        scattered = max(moved.sent for moved in theory.scatter_to_owners(owned, nodes))
        assert of(strategy, workers, lanes=lanes).sent == 4 * (scattered + gathered), strategy
    star = max(moved.sent for moved in theory.canonical_star(PSI, plan))
    assert of("star", workers, lanes=lanes).sent == 4 * star


def test_lanes_of_one_worker_are_added_up_in_a_binary_counter() -> None:
    gradients = [of("ddp", 1, lanes=lanes).gradients // (4 * PSI) for lanes in (1, 2, 3, 4, 8, 16)]
    assert gradients == [1, 2, 2, 3, 4, 5]


@pytest.mark.parametrize(("workers", "lanes", "sums"), [(2, 4, 1), (2, 8, 2), (4, 8, 1), (4, 16, 2)])
def test_owners_hold_one_or_two_partial_sums_of_their_range(workers: int, lanes: int, sums: int) -> None:
    assert of("zero2", workers, lanes=lanes).gradients == sums * 4 * PSI // workers


def test_micro_batches_of_a_lane_are_added_up_whole_under_zero2_and_cost_no_bytes_on_the_way() -> None:
    once, twice = (of("zero2", 4, accumulate=count) for count in (1, 2))
    assert twice.gradients - once.gradients == 4 * PSI
    assert twice.sent == once.sent
    assert of("zero1", 4, accumulate=2) == of("zero1", 4)


def test_a_second_holder_of_each_shard_doubles_state_and_reduce_scatter() -> None:
    one, two = (of("zero2", 4, copies=copies) for copies in (1, 2))
    assert two.optimizer_state == 2 * one.optimizer_state
    assert two.gradients == 2 * one.gradients
    assert two.sent - one.sent == 4 * PSI * 3 // 4
    assert of("ddp", 4, copies=2) == of("ddp", 4)


def test_zero3_gathers_weights_for_every_micro_batch_forward_and_backward() -> None:
    once = 4 * PSI * 3 // 4  # a reduce-scatter or a gather, on four workers
    assert of("zero3", 4, lanes=8).sent == 2 * once + 4 * once
    assert of("zero3", 4, accumulate=3).sent == once + 6 * once
    assert of("zero3", 4, per_host=4).sent == once
    assert of("zero3", 4, per_host=4).held == of("zero3", 4).held


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_weights_once_per_host_are_shared_by_all_and_not_gathered(strategy: str) -> None:
    apart, together = (of(strategy, 4, per_host=workers) for workers in (2, 4))
    assert apart == of(strategy, 4)
    assert together.parameters == apart.parameters // 4
    assert together.sent == apart.sent - 4 * PSI * 3 // 4
    assert together.optimizer_state == apart.optimizer_state


@pytest.mark.parametrize(("workers", "group"), [(4, 2), (8, 4), (6, 2), (8, 1)])
def test_hybrid_holds_what_fsdp_holds_in_a_group_and_crosses_groups_once(workers: int, group: int) -> None:
    hybrid, fsdp = of("hybrid", workers, shard_over=group), of("fsdp", group)
    assert hybrid.held == fsdp.held
    groups = workers // group
    assert hybrid.sent - fsdp.sent == 2 * (groups - 1) * PSI // group // groups * 4
    assert of("hybrid", workers) == of("fsdp", workers)


def test_roots_of_a_group_that_are_no_part_of_the_tree_cross_one_by_one() -> None:
    """Six lanes for four workers in two groups: the first group's three are two roots, (0, 1) and 2."""
    hybrid, share = of("hybrid", 4, lanes=6, shard_over=2), PSI // 2
    assert hybrid.gradients == 2 * share * 4
    assert hybrid.sent - of("fsdp", 2, lanes=3).sent == (2 * share // 2 + share // 2) * 4


def test_what_can_t_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="weights shared by 3 of 4 workers: these are no equal groups"):
        of("hybrid", 4, shard_over=3)
    with pytest.raises(ConfigError, match="3 workers and 2 lanes"):
        of("ddp", 3, lanes=2)
    with pytest.raises(ConfigError, match="5 holders of each shard, of 4 workers"):
        of("zero1", 4, copies=5)
    with pytest.raises(ConfigError, match=r"strategy='zero9' is not known; known are ddp, star, zero1, zero2, zero3"):
        of("zero9", 2)
