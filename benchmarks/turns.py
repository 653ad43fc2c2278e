"""Parts that take turns in this process, round after round, so that each meets the machine as the others do.

round 1   a ▓▓▓   b ▓▓▓   c ▓▓▓        each part returns its figures; a round is all of them side by side
round 2   b ▓▓▓   c ▓▓▓   a ▓▓▓        and it knows how busy the machine was with other work
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from paceline.bench.statistics import CpuClock, Spread, foreign_and_steal, is_disturbed

WARM_UP_ROUNDS = 1
"""Run like the others and dropped: processes start in it, and caches fill."""

Part = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Round:
    """The figures of all parts, and the shares of the cores that other programs and other machines had meanwhile."""

    figures: dict[str, float]
    foreign: float
    steal: float

    @property
    def disturbed(self) -> bool:
        return is_disturbed(self.foreign, self.steal)


def in_turns(parts: Sequence[Part], rounds: int) -> list[Round]:
    """`rounds` rounds, after those that warm up."""
    measured = []
    for number in range(WARM_UP_ROUNDS + rounds):
        first = number % len(parts)
        before, cpu_before = CpuClock.read(), _ours_s()
        figures: dict[str, float] = {}
        for part in (*parts[first:], *parts[:first]):
            figures |= part()
        measured.append(Round(figures, *foreign_and_steal(before, CpuClock.read(), _ours_s() - cpu_before)))
    return measured[WARM_UP_ROUNDS:]


def spread_of(rounds: Sequence[Round], figure: Callable[[Mapping[str, float]], float]) -> dict[str, Any]:
    """A figure's spread over all rounds, and its median in those that nobody disturbed."""
    quiet = [figure(each.figures) for each in rounds if not each.disturbed]
    spread = asdict(Spread.of([figure(each.figures) for each in rounds]))
    return spread | {"median_of_quiet_rounds": Spread.of(quiet).median if quiet else None}


def rounds_as_json(rounds: Sequence[Round]) -> dict[str, Any]:
    return {
        "disturbed_rounds": sum(each.disturbed for each in rounds),
        "rounds": [asdict(each) | {"disturbed": each.disturbed} for each in rounds],
    }


def _ours_s() -> float:
    """CPU seconds of this process and its children; those of loader processes are nobody's until they end."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
