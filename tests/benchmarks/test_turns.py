"""Parts that take turns: who comes first changes, warm-up is dropped, and disturbed rounds are marked."""

from __future__ import annotations

from collections.abc import Callable

from tests.benchmarks import script

turns = script("turns")
Round, WARM_UP_ROUNDS, in_turns = turns.Round, turns.WARM_UP_ROUNDS, turns.in_turns
rounds_as_json, spread_of = turns.rounds_as_json, turns.spread_of


def test_every_part_runs_once_a_round_and_each_comes_first_in_its_turn() -> None:
    ran: list[str] = []

    def part(name: str) -> Callable[[], dict[str, float]]:
        return lambda: {name: float(ran.append(name) or len(ran))}  # type: ignore[func-returns-value]

    rounds = in_turns([part("a"), part("b"), part("c")], 4)
    assert "".join(ran) == "abc" + "bca" + "cab" + "abc" + "bca"
    assert len(rounds) == len(ran) // 3 - WARM_UP_ROUNDS == 4
    assert rounds[0].figures == {"b": 4.0, "c": 5.0, "a": 6.0}


def test_a_spread_is_over_all_rounds_and_its_quiet_median_over_those_that_nobody_disturbed() -> None:
    rounds = [Round({"s": value}, foreign, 0.0) for value, foreign in ((1.0, 0.01), (2.0, 0.0), (9.0, 0.5))]
    spread = spread_of(rounds, lambda figures: figures["s"])
    assert (spread["median"], spread["most"], spread["median_of_quiet_rounds"]) == (2.0, 9.0, 1.5)
    assert rounds_as_json(rounds)["disturbed_rounds"] == 1


def test_without_a_quiet_round_there_is_no_quiet_median() -> None:
    assert spread_of([Round({"s": 1.0}, 0.9, 0.0)], lambda figures: figures["s"])["median_of_quiet_rounds"] is None
