"""Bounded staleness: a window of s rounds slides with each worker, and what is older must be in the weights it reads.

s = 2, a worker about to start round 5

round    0   1   2 │ 3   4 │ 5
         must be in│ may be│        needs(5) = 5 - 2 - 1 = 2
                   │missing│

s = 0    synchronous: every round reads all updates before it, so rounds are summed canonically
s ≥ 1    each push is applied on arrival; no worker is more than s rounds ahead of the slowest
s = ∞    asynchronous: nobody waits

Early rounds move the weights furthest, and there staleness costs most: in the demo GPT all of what s = 2 loses. So the
window opens in round 100, and the rounds before it wait for each other; `from_round=0` opens it at once, as it is for
s = ∞, where nobody asked to wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import ConfigError

OPENS = 100  # measured: docs/concepts/parameter_server.md, "The demo GPT"


@dataclass(frozen=True)
class BoundedStaleness:
    """A worker may start round c when the updates of all lanes for rounds up to c-s-1 are in the weights it reads.

    With `see_own_updates` its own pushes of all earlier rounds must be in them too; every round then begins with a
    round trip to the servers. Updates of rounds before `from_round` are waited for whatever the bound: by default the
    first 100 where there is one.
    """

    steps: int | float = 0
    see_own_updates: bool = False
    from_round: int | None = None  # a number from birth on

    def __post_init__(self) -> None:
        whole = isinstance(self.steps, int) and not isinstance(self.steps, bool) and self.steps >= 0
        if not (whole or self.steps == math.inf):
            raise ConfigError(
                f"BoundedStaleness(steps={self.steps!r}): the bound is a whole number of rounds, from 0 (synchronous), "
                "or math.inf (asynchronous)"
            )
        if self.from_round is None:
            object.__setattr__(self, "from_round", OPENS if self._waits_a_little else 0)
        if not isinstance(self.from_round, int) or isinstance(self.from_round, bool) or self.from_round < 0:
            raise ConfigError(
                f"BoundedStaleness(from_round={self.from_round!r}): the window opens in a round, from 0 (at once)"
            )

    @property
    def synchronous(self) -> bool:
        return self.steps == 0

    @property
    def deterministic(self) -> bool:
        return self.synchronous

    def needs(self, round: int) -> int:
        bound = -1 if self.steps == math.inf else round - int(self.steps) - 1
        return max(-1, bound, min(round, self.opens) - 1)

    def pulls_before(self, round: int) -> bool:
        return True

    def __str__(self) -> str:
        own = ",own" if self.see_own_updates else ""
        opens = f",from={self.opens}" if self.opens or self._waits_a_little else ""
        return f"s={self.steps}{own}{opens}"

    @property
    def opens(self) -> int:
        """The first round that need not read all updates before it."""
        return self.from_round or 0

    @property
    def _waits_a_little(self) -> bool:
        return 1 <= self.steps < math.inf
