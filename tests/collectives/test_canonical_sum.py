"""The canonical sum on paper: the tree, who performs which merge, and who owns which elements."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.canonical_sum import (
    Merge,
    SumPlan,
    merges,
    owner_ranges,
    sum_plan,
)
from tests.collectives.one_process import lane_values, one_process_sum, roots_of, same_bits, walk

MOST_LANES = 16


@st.composite
def plans(draw: st.DrawFn, among: tuple[int, ...] = tuple(range(1, MOST_LANES + 3))) -> SumPlan:
    """Workers with neighbouring lanes, of which any may be absent."""
    lanes = draw(st.integers(1, MOST_LANES))
    present = draw(st.sets(st.integers(0, lanes - 1), min_size=1))
    return sum_plan(lanes, draw(st.sampled_from(among)), tuple(sorted(present)))


@st.composite
def scattered_plans(draw: st.DrawFn) -> SumPlan:
    """Every lane with any worker, as after a recovery."""
    present = sorted(draw(st.sets(st.integers(0, MOST_LANES - 1), min_size=1)))
    workers = draw(st.integers(1, 6))
    holder = {lane: draw(st.integers(0, workers - 1)) for lane in present}
    holders = tuple(tuple(lane for lane in present if holder[lane] == worker) for worker in range(workers))
    return SumPlan(tuple(present), holders)


# -- the tree ----------------------------------------------------------------------------------------------------------


def test_the_tree_over_five_lanes_is_the_one_of_the_drawing() -> None:
    assert [(merge.left, merge.right) for merge in merges((0, 1, 2, 3, 4))] == [(0, 1), (2, 3), (0, 2), (0, 4)]


def test_a_node_with_one_present_child_is_that_child() -> None:
    assert merges((1, 6, 7)) == (Merge(6, 7, level=1), Merge(1, 6, level=3))


def test_one_lane_needs_no_merge() -> None:
    assert merges((5,)) == ()


@settings(max_examples=150, deadline=None)
@given(st.sets(st.integers(0, MOST_LANES - 1), min_size=1))
def test_performing_the_merges_builds_the_tree_walked_from_its_root(present: set[int]) -> None:
    nodes: dict[int, object] = {lane: lane for lane in present}
    for merge in merges(tuple(present)):
        nodes[merge.left] = (nodes[merge.left], nodes.pop(merge.right))
    assert list(nodes.values()) == [walk({lane: lane for lane in present}, lambda left, right: (left, right))]


# -- the cut between workers -------------------------------------------------------------------------------------------


def finished(plan: SumPlan, elements: int = 32) -> bool:
    """Whether local merges on every worker, then the rest, give the bits of one process."""
    values = lane_values(plan.present, elements)
    nodes = {}
    for worker in range(len(plan.holders)):
        roots = roots_of(plan, worker, values)
        assert tuple(sorted(roots)) == plan.roots(worker)
        nodes |= roots
    for merge in plan.between_workers:
        nodes[merge.left].add_(nodes.pop(merge.right))
    (total,) = nodes.values()
    return same_bits(total, one_process_sum(values))


@settings(max_examples=150, deadline=None)
@given(plans())
def test_any_number_of_workers_gives_the_bits_of_one_process(plan: SumPlan) -> None:
    assert finished(plan)


@settings(max_examples=100, deadline=None)
@given(scattered_plans())
def test_lanes_scattered_over_workers_give_the_bits_of_one_process(plan: SumPlan) -> None:
    assert finished(plan)


def test_the_values_of_these_tests_show_another_order_in_their_bits() -> None:
    values = lane_values((0, 1, 2, 3), 32)
    running = values[0] + values[1] + values[2] + values[3]
    assert not same_bits(running, one_process_sum(values))


@pytest.mark.parametrize(("lanes", "workers"), [(8, 1), (8, 2), (8, 4), (16, 4), (4, 4)])
def test_a_worker_with_an_aligned_power_of_two_of_lanes_is_left_with_one_root(lanes: int, workers: int) -> None:
    assert sum_plan(lanes, workers, tuple(range(lanes))).one_root_each


def test_a_worker_without_present_lanes_has_no_root_and_no_merge() -> None:
    plan = sum_plan(4, 2, (0, 1))
    assert (plan.roots(1), plan.between_workers) == ((), ())


@pytest.mark.parametrize("holders", [((0,), (0, 1)), ((0,),), ((0, 1), (2,))])
def test_a_plan_whose_holders_are_not_the_present_lanes_is_refused(holders: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"lanes \[0, 1\] are present but workers hold"):
        SumPlan(present=(0, 1), holders=holders)


# -- recursive halving -------------------------------------------------------------------------------------------------


def tree_of_halving(plan: SumPlan) -> set[object]:
    """What every worker ends with when partners at distance 1, 2, 4, … add up; {a, b} since an addition commutes."""

    def join(left: object, right: object) -> frozenset[object]:
        return frozenset({left, right})

    held = [walk({lane: lane for lane in lanes}, join) for lanes in plan.holders]
    distance = 1
    while distance < len(held):
        held = [join(held[worker], held[worker ^ distance]) for worker in range(len(held))]
        distance *= 2
    return set(held)


@settings(max_examples=200, deadline=None)
@given(plans(among=(2, 4, 8)))
def test_a_plan_is_pairwise_exactly_when_halving_walks_the_canonical_tree(plan: SumPlan) -> None:
    tree = walk({lane: lane for lane in plan.present}, lambda left, right: frozenset({left, right}))
    halving_is_the_tree = plan.one_root_each and tree_of_halving(plan) == {tree}
    assert plan.is_pairwise == halving_is_the_tree


@settings(max_examples=100, deadline=None)
@given(scattered_plans())
def test_a_scattered_plan_is_pairwise_only_when_halving_walks_the_canonical_tree(plan: SumPlan) -> None:
    tree = walk({lane: lane for lane in plan.present}, lambda left, right: frozenset({left, right}))
    assert not plan.is_pairwise or tree_of_halving(plan) == {tree}


@pytest.mark.parametrize(
    ("lanes", "workers", "present", "pairwise"),
    [
        (4, 4, (0, 1, 2, 3), True),
        (8, 4, tuple(range(8)), True),
        (8, 4, (1, 3, 4, 6), True),  # one lane of each is left: the same tree with fewer leaves
        (3, 3, (0, 1, 2), False),  # not a power of two
        (6, 4, tuple(range(6)), False),  # workers 1 and 3 have lanes of two subtrees
        (4, 4, (0, 1, 2), False),  # worker 3 has nothing
        (5, 4, (0, 1, 2, 3, 4), False),
    ],
)
def test_which_plans_are_pairwise(lanes: int, workers: int, present: tuple[int, ...], pairwise: bool) -> None:
    assert sum_plan(lanes, workers, present).is_pairwise is pairwise


# -- who owns ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 100_000), st.integers(1, 40), st.sampled_from([1, 7, 64]))
def test_owners_cover_all_elements_once(elements: int, owners: int, block: int) -> None:
    ranges = owner_ranges(elements, owners, block)
    assert [low for low, _ in ranges] + [elements] == [0] + [high for _, high in ranges]
    assert len(ranges) == owners
    assert all(low <= high for low, high in ranges)


@given(st.integers(0, 100_000), st.integers(1, 40), st.sampled_from([1, 7, 64]))
def test_owners_are_cut_on_block_boundaries(elements: int, owners: int, block: int) -> None:
    assert all(low % block == 0 or low == elements for low, _ in owner_ranges(elements, owners, block))


@given(st.integers(0, 100_000), st.integers(1, 40))
def test_no_owner_has_two_blocks_more_than_another(elements: int, owners: int) -> None:
    blocks = [-(-(high - low) // 64) for low, high in owner_ranges(elements, owners)]
    assert max(blocks) - min(blocks) <= 1


def test_of_one_block_and_four_owners_the_last_owns_it() -> None:
    assert owner_ranges(3, 4) == [(0, 0), (0, 0), (0, 0), (0, 3)]
