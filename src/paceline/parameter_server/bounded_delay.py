"""Bounded delay: groups of d+1 rounds run on the same weights, and the next group waits for all of their updates.

    d = 1     rounds   8   9 │ 10  11 │ 12  13
              read       w   │   w'   │   w''       w'' = w' + updates of 10 and 11
              needs    7   7 │  9   9 │ 11  11

All lanes of a round are summed canonically and rounds are applied in order, so nothing depends on who was first: a run
has one hash for any number of workers. d = 0 is synchronous.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True)
class BoundedDelay:
    """Round c reads the weights after all rounds before its group, and no others."""

    rounds: int

    def __post_init__(self) -> None:
        if not isinstance(self.rounds, int) or isinstance(self.rounds, bool) or self.rounds < 0:
            raise ConfigError(
                f"BoundedDelay(rounds={self.rounds!r}): the delay is a whole number of rounds, from 0 (synchronous); "
                "to run without a bound use BoundedStaleness(steps=math.inf)"
            )

    @property
    def synchronous(self) -> bool:
        return self.rounds == 0

    @property
    def deterministic(self) -> bool:
        return True

    @property
    def see_own_updates(self) -> bool:
        return False

    def needs(self, round: int) -> int:
        return round // (self.rounds + 1) * (self.rounds + 1) - 1

    def pulls_before(self, round: int) -> bool:
        return round % (self.rounds + 1) == 0

    def __str__(self) -> str:
        return f"d={self.rounds}"
