"""The clock says how old the weights may be that a worker computes with; `WeightsInHand` is how a worker obeys it.

Bounded staleness: a window of s rounds slides with each worker, and what is older must be in the weights it reads.

    s = 2, a worker about to start round 5

    round    0   1   2 │ 3   4 │ 5
             must be in│ may be│        needs(5) = 5 - 2 - 1 = 2
                       │missing│

    s = 0    synchronous: every round reads all updates before it, so rounds are summed canonically
    s ≥ 1    each push is applied on arrival; no worker is more than s rounds ahead of the slowest
    s = ∞    asynchronous: no worker waits

Bounded delay: groups of d+1 rounds run on the same weights, and the next group waits for all of their updates.

    d = 1     rounds   8   9 │ 10  11 │ 12  13
              read       w   │   w'   │   w''       w'' = w' + updates of 10 and 11
              needs    7   7 │  9   9 │ 11  11

A worker knows three states of each key's weights: those it reads, those that came since and wait for a round to start,
and those it asked for. Between rounds it looks at the newest that came: when they are new enough for all keys it goes
on, also while an answer is still on the way.

    ask ──► on the way ──arrived()──► waiting ──start(round)──► read         only start() changes what is read, so the
                                                                             lanes of a round see the same weights

`tests/parameter_server/test_clock_model.py` tries this file with random schedules: no read misses an update that the
bound requires, no worker waits for one that it does not, and all workers always come to their end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import ConfigError, ReplicaError

OPENS = 100  # measured: docs/concepts/parameter_server.md, "The demo GPT"


class Clock(Protocol):
    """When a worker may go on. *complete*, of weights: the last round such that all updates up to it are in."""

    @property
    def synchronous(self) -> bool:
        """Every round reads all updates before it."""
        ...

    @property
    def deterministic(self) -> bool:
        """Rounds are summed canonically and applied in order, and a round reads exactly what it `needs`."""
        ...

    @property
    def see_own_updates(self) -> bool:
        """A worker's own updates of all earlier rounds must be in what it reads, however large the bound."""
        ...

    def needs(self, round: int) -> int:
        """The smallest `complete` that the weights read in `round` must have; -1: none."""
        ...

    def pulls_before(self, round: int) -> bool:
        """Whether `round` may read other weights than the round before it."""
        ...


@dataclass(frozen=True)
class BoundedStaleness:
    """A worker may start round c when the updates of all lanes for rounds up to c-s-1 are in the weights it reads.

    With `see_own_updates` its own pushes of all earlier rounds must be in them too; every round then begins with a
    round trip to the servers.

    Early rounds move the weights furthest, and there staleness costs most: in the demo GPT all of what s = 2 loses. So
    updates of rounds before `from_round` are waited for whatever the bound: by default the first 100 where there is
    one, and none where s = ∞ asks not to wait.
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


@dataclass(frozen=True)
class BoundedDelay:
    """Round c reads the weights after all rounds before its group, and no others.

    All lanes of a round are summed canonically and rounds are applied in order, so nothing depends on who was first: a
    run has one hash for any number of workers. d = 0 is synchronous.
    """

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


def parse_clock(text: str) -> Clock:
    """The clock of a command line: s=2, s=inf, s=2,own, s=2,from=0 or d=1; `str(clock)` writes one that it reads."""
    found = re.fullmatch(r"s=(\d+|inf)(,own)?(?:,from=(\d+))?|d=(\d+)", text.strip())
    if found is None:
        raise ConfigError(
            f"clock {text!r} is not known; write s=N or s=inf (bounded staleness, with ,own to see own updates "
            "and ,from=N to wait for each other up to round N, 100 if you don't say) or d=N (bounded delay), such as "
            "s=2, s=2,from=0 or d=1"
        )
    if found[4] is not None:
        return BoundedDelay(int(found[4]))
    steps = math.inf if found[1] == "inf" else int(found[1])
    opens = {} if found[3] is None else {"from_round": int(found[3])}
    return BoundedStaleness(steps, see_own_updates=found[2] is not None, **opens)


# -- a worker's weights ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PullRequest:
    """What to ask the servers for: these keys, as soon as they have all updates up to round `complete`."""

    round: int
    complete: int
    keys: tuple[int, ...]


@dataclass(frozen=True)
class KeyWeights:
    """What is known of one key's weights."""

    version: int  # updates since this start of the job
    complete: int
    asked_before: int  # the round they were asked for: this worker's pushes of all earlier rounds are in


class WeightsInHand:
    """One worker's weights, as numbers: which are there, which to ask for, and whether a round may start on them.

    On a channel that keeps its order the answer to a request has everything that was pushed before it. So under
    `see_own_updates` ask for a round after the pushes of the round before; under other clocks ask as early as you like.
    """

    def __init__(self, clock: Clock, keys: Iterable[int], first_round: int = 0) -> None:
        """The weights that the job starts or goes on from: all updates before `first_round`, and nothing else."""
        self._clock = clock
        self._newest = {key: KeyWeights(0, first_round - 1, first_round) for key in keys}
        self._read = dict(self._newest)
        self._asked: dict[int, int] = {}
        self._last_pushed = -1

    def forget(self) -> None:
        """Something else is in the model: no round may start before new weights have come."""
        self._newest = dict.fromkeys(self._newest, KeyWeights(-1, -2, -1))
        self._asked.clear()

    def pushed(self, round: int) -> None:
        """This worker had lanes in `round`, and their pushes have left."""
        self._last_pushed = round

    def request_for(self, round: int) -> PullRequest | None:
        """What to ask for so that `round` may start, taken as asked from now on; None: nothing, or it was asked."""
        keys = tuple(key for key in self._newest if self._worth_asking(key, round))
        for key in keys:
            self._asked[key] = round
        return PullRequest(round, self._clock.needs(round), keys) if keys else None

    def arrived(self, key: int, *, version: int, complete: int, round: int) -> bool:
        """The answer to the request for `round`; False: not newer than what is there, and to be thrown away."""
        if self._asked.get(key, round) <= round:
            self._asked.pop(key, None)
        there = self._newest[key]
        newer = version > there.version or complete > there.complete
        self._newest[key] = KeyWeights(
            max(version, there.version), max(complete, there.complete), max(round, there.asked_before)
        )
        return newer

    def lacking(self, round: int) -> tuple[int, ...]:
        """The keys whose newest weights are too old for `round`."""
        least = self._clock.needs(round)
        return tuple(
            key
            for key, there in self._newest.items()
            if there.complete < least or not self._has_own_updates(there.asked_before)
        )

    def start(self, round: int) -> dict[int, int]:
        """Read the newest weights from now on; their versions, by key."""
        lacking = self.lacking(round)
        if lacking:
            raise ReplicaError(
                f"round {round} was started without the weights of keys {list(lacking)} it must wait for"
            )
        if self._clock.pulls_before(round):
            self._read = dict(self._newest)
        if self._clock.deterministic:
            self._check_exact(round)
        return {key: read.version for key, read in self._read.items()}

    def _worth_asking(self, key: int, round: int) -> bool:
        needs = self._clock.needs
        if not self._clock.pulls_before(round):
            return False
        asked = self._asked.get(key)
        if asked is None:
            return not self._clock.deterministic or self._newest[key].complete < needs(round)
        return needs(asked) < needs(round) or not self._has_own_updates(asked)

    def _has_own_updates(self, asked_before: int) -> bool:
        return not self._clock.see_own_updates or asked_before > self._last_pushed

    def _check_exact(self, round: int) -> None:
        expected = self._clock.needs(round)
        for key, read in self._read.items():
            if read.complete != expected:
                raise ReplicaError(
                    f"round {round} reads the weights after round {expected}, but those of key {key} have the updates "
                    f"up to round {read.complete}; a server went on without this worker, or the job was resumed "
                    f"inside a group of {self._clock}: resume from a step at which a group starts"
                )
