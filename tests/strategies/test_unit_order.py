"""The order of an item is that of the item before, until it is not; then it is found again."""

from __future__ import annotations

from paceline.strategies.fsdp.weights import UnitOrder


def run(order: UnitOrder, forward: list[int]) -> list[int | None]:
    uses = [(unit, False) for unit in forward] + [(unit, True) for unit in reversed(forward)]
    followed = [order.after(unit, in_backward=backward) for unit, backward in uses]
    order.item_ended()
    return followed


def test_the_first_item_knows_nothing_and_the_next_ones_know_what_follows() -> None:
    order = UnitOrder()
    assert run(order, [0, 1, 2]) == [None] * 6
    assert run(order, [0, 1, 2]) == [1, 2, 2, 1, 0, None]


def test_a_unit_used_again_and_again_counts_once() -> None:
    order = UnitOrder()
    run(order, [0, 1])
    assert [order.after(0, in_backward=False), order.after(0, in_backward=False)] == [1, 1]
    assert order.following == 1


def test_another_branch_is_followed_from_where_it_meets_the_known_order() -> None:
    order = UnitOrder()
    run(order, [0, 1, 2, 3])
    assert [order.after(unit, in_backward=False) for unit in (0, 5, 2, 3)] == [1, None, 3, 3]


def test_an_evaluation_follows_the_order_and_leaves_it_as_it_is() -> None:
    order = UnitOrder()
    run(order, [0, 1])
    for _ in range(2):
        assert [order.after(unit, in_backward=False, records=False) for unit in (0, 1)] == [1, 1]
    order.item_ended()
    run(order, [0, 1])
    assert run(order, [0, 1]) == [1, 1, 0, None]
