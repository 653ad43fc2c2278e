"""Server processes of an elastic job, as the coordinator knows them: who serves, and who serves instead.

    lost            its keys go to                        in the next generation
    server 1 of 2   server 0                              the same workers, servers (0,)
    the last one    the first worker, who doubles as one  the same workers, no servers
    its fresh process stands in front of its work         after the next commit: the same workers, servers (0, 1)

A server says neither READY nor that it enters a loop. What it holds goes with a worker's part of the state to the vault
before that worker is ready, so a commit is as safe as without it; and who joins gets it from there, as all do.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.decisions import Replace, Rules
from paceline.elastic.slots import PRESENT, Facts, Slot, Standing, difference

MOST_ATTEMPTS = 5


class Servers:
    """Their ranks come after those of all `workers`."""

    def __init__(self, workers: int, count: int, rules: Rules) -> None:
        self._workers, self._rules = workers, rules
        self._newcomers: set[int] = set()
        self.slots = [Slot(workers + index, standing=Standing.MEMBER) for index in range(count)]

    @property
    def here(self) -> tuple[int, ...]:
        """Those who serve, by rank."""
        return tuple(slot.number for slot in self.slots if slot.standing is Standing.MEMBER)

    def has(self, rank: int) -> bool:
        return 0 <= rank - self._workers < len(self.slots)

    def slot(self, rank: int) -> Slot:
        return self.slots[rank - self._workers]

    def name(self, rank: int) -> str:
        """Of a worker too."""
        return f"server {rank - self._workers}" if self.has(rank) else f"worker {rank}"

    def anew(self) -> Servers:
        """All of them, started again."""
        return Servers(self._workers, len(self.slots), self._rules)

    # ---- leaving ------------------------------------------------------------------------------------------

    def lose(self, rank: int, now: float, *, fence: bool) -> bool:
        """False where it was lost before."""
        slot = self.slot(rank)
        if slot.standing not in PRESENT:
            return False
        self._newcomers.discard(rank)
        slot.fall(now, fenced=fence)
        slot.attempts += 1
        return True

    def instead(self, members: Sequence[int]) -> str:
        """Who serves from now on what the lost one did, in words."""
        if not members:
            return "nobody needs its keys any more"
        left = [str(rank - self._workers) for rank in self.here]
        if not left:
            return f"worker {members[0]} serves its keys"
        return f"its keys go to server{'s' if len(left) > 1 else ''} {' and '.join(left)}"

    # ---- coming back --------------------------------------------------------------------------------------

    def may_refill(self, rank: int) -> bool:
        slot = self.slot(rank)
        return self._rules.restart_workers and not slot.closed and slot.attempts < MOST_ATTEMPTS

    def refill(self, now: float) -> list[Replace]:
        vacant = [slot for slot in self.slots if slot.standing is Standing.VACANT and self.may_refill(slot.number)]
        for slot in vacant:
            slot.start_again(now)
        return [Replace(slot.number, slot.incarnation) for slot in vacant]

    def asks(self, rank: int, known: Facts, facts: Facts) -> str:
        """It stands in front of its work; how it differs from the workers in what both know, if it does."""
        slot = self.slot(rank)
        slot.closed = difference({name: known[name] for name in facts if name in known}, _only(facts, known))
        if not slot.closed and slot.standing is Standing.STARTING:
            slot.standing = Standing.WAITING
        return slot.closed

    def admit(self) -> list[str]:
        """Those who wait serve from now on; their names."""
        waiting = [slot for slot in self.slots if slot.standing is Standing.WAITING]
        for slot in waiting:
            slot.standing = Standing.MEMBER
            self._newcomers.add(slot.number)
        return [self.name(slot.number) for slot in waiting]

    def begin_generation(self) -> None:
        for slot in self.slots:
            slot.grouped = slot.standing is not Standing.MEMBER

    def came(self, rank: int) -> bool:
        """It has come to where a generation meets; whether for the first time."""
        self.slot(rank).grouped = True
        new = rank in self._newcomers
        self._newcomers.discard(rank)
        return new

    def absent(self) -> list[int]:
        """Those who have not come there: the workers wait for them."""
        return [slot.number for slot in self.slots if slot.standing is Standing.MEMBER and not slot.grouped]

    def served(self) -> None:
        """A step was committed with those who are here."""
        for slot in self.slots:
            slot.attempts = 0 if slot.standing is Standing.MEMBER else slot.attempts


def _only(facts: Facts, known: Facts) -> Facts:
    return {name: value for name, value in facts.items() if name in known}
