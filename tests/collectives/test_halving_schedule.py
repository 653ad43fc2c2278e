"""The schedule of recursive halving, without moving a byte."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.halving_doubling import Halving, halvings

sizes = st.sampled_from([1, 2, 4, 8, 16])
elements = st.integers(0, 3000)


def schedules(size: int, count: int) -> list[list[Halving]]:
    return [list(halvings(rank, size, count)) for rank in range(size)]


def test_four_workers_and_four_blocks_look_like_the_drawing() -> None:
    assert list(halvings(0, 4, 256)) == [
        Halving(partner=1, keep=(0, 128), send=(128, 256)),
        Halving(partner=2, keep=(0, 64), send=(64, 128)),
    ]
    assert list(halvings(3, 4, 256)) == [
        Halving(partner=2, keep=(128, 256), send=(0, 128)),
        Halving(partner=1, keep=(192, 256), send=(128, 192)),
    ]


@settings(max_examples=60, deadline=None)
@given(sizes, elements)
def test_what_i_send_is_what_my_partner_keeps(size: int, count: int) -> None:
    plan = schedules(size, count)
    for rank, steps in enumerate(plan):
        for number, step in enumerate(steps):
            theirs = plan[step.partner][number]
            assert (theirs.partner, theirs.keep, theirs.send) == (rank, step.send, step.keep)


@settings(max_examples=60, deadline=None)
@given(sizes, elements)
def test_each_step_cuts_in_two_what_the_step_before_kept(size: int, count: int) -> None:
    for steps in schedules(size, count):
        held = (0, count)
        for step in steps:
            lower, upper = sorted([step.keep, step.send])
            assert (lower[0], lower[1], upper[1]) == (held[0], upper[0], held[1])
            held = step.keep


@settings(max_examples=60, deadline=None)
@given(sizes, elements)
def test_finished_ranges_cover_all_elements_once(size: int, count: int) -> None:
    owned = sorted(steps[-1].keep if steps else (0, count) for steps in schedules(size, count))
    assert [low for low, _ in owned] + [count] == [0] + [high for _, high in owned]


@settings(max_examples=60, deadline=None)
@given(sizes, elements)
def test_ranges_are_cut_on_block_boundaries(size: int, count: int) -> None:
    cuts = {low for steps in schedules(size, count) for step in steps for low in (step.keep[0], step.send[0])}
    assert all(cut % 64 == 0 or cut == count for cut in cuts)
