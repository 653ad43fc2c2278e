"""The places of an elastic job: which of its slots can have a process now, and which are to get one.

    VACANT ─refill─▶ STARTING           its host is there, and flags, attempts and facts allow it
    its host is lost ─▶ away            nobody can be started there, and none is missed; until `come`
    nobody has the state any more ─▶ `begin_anew`: every place whose host is there starts at incarnation 0

A slot's number is its own for the life of the job; slots that hosts bring along later are added at the end.
"""

from __future__ import annotations

from collections.abc import Collection

from paceline.elastic.decisions import Replace, Rules
from paceline.elastic.slots import Slot, Standing, workers

MOST_ATTEMPTS, MOST_STARTS = 5, 3


class Places:
    def __init__(self, size: int, rules: Rules) -> None:
        self._rules = rules
        self.slots = [Slot(number) for number in range(size)]
        self.starters = size
        """How many make the first generation."""
        self.starts = 0
        """How often all began anew without having come further than ever before."""
        self.stopping = False

    @property
    def here(self) -> list[Slot]:
        """Those whose host is there."""
        return [slot for slot in self.slots if not slot.away]

    def may_refill(self, slot: Slot) -> bool:
        asked_for = self._rules.restart_workers or slot.invited
        return asked_for and not (self.stopping or slot.closed or slot.away) and slot.attempts < MOST_ATTEMPTS

    def why_idle(self, numbers: Collection[int]) -> str:
        """Why none of these slots gets a process any more; empty where one has, or may get, one."""
        slots = [self.slots[number] for number in numbers]
        if self.stopping or any(slot.standing is not Standing.VACANT or self.may_refill(slot) for slot in slots):
            return ""
        refused = [slot.closed for slot in slots if slot.closed]
        died = "none is started for one that died" if not self._rules.restart_workers else "they died too often"
        return refused[0] if refused else died

    def refill(self, now: float) -> list[Replace]:
        """Fresh processes for vacant slots."""
        vacant = [slot for slot in self.slots if slot.standing is Standing.VACANT and self.may_refill(slot)]
        for slot in vacant:
            slot.start_again(now)
        return [Replace(slot.number, slot.incarnation) for slot in vacant]

    def go(self, numbers: Collection[int]) -> None:
        """Their host is lost."""
        for number in numbers:
            self.slots[number].away, self.slots[number].invited = True, False

    def come(self, numbers: Collection[int]) -> None:
        """Their host is there, for the first time or again; what befell older processes there counts no more."""
        for number in numbers:
            slot = self.slots[number]
            slot.vacate()
            slot.away, slot.invited, slot.attempts, slot.closed = False, True, 0, ""

    def add(self, count: int) -> list[int]:
        """At the end, for a host that is about to come."""
        added = [Slot(len(self.slots) + index, standing=Standing.VACANT, away=True) for index in range(count)]
        self.slots += added
        return [slot.number for slot in added]

    @property
    def restarts(self) -> bool:
        """Whether fresh processes are started for those that died."""
        return self._rules.restart_workers and not self.stopping

    def may_begin_anew(self) -> bool:
        return self.restarts and self.starts < MOST_STARTS

    def got_on(self) -> None:
        """A step was committed that none of the starts before had reached: what they cost is made up for."""
        self.starts = 0

    def begin_anew(self) -> tuple[int, ...]:
        """As at the start, but without those whose host is lost; the slots that begin."""
        self.starts += 1
        self.slots = [
            Slot(one.number, standing=Standing.VACANT, away=True, has_joined=one.has_joined) if one.away
            else Slot(one.number)
            for one in self.slots
        ]  # fmt: skip
        starting = tuple(slot.number for slot in self.here)
        self.starters = len(starting)
        return starting

    def told_anew(self) -> str:
        """Who begins anew, in words."""
        left = f"the {workers(self.starters)} of the hosts that are left start{'s' if self.starters == 1 else ''}"
        who = "all start" if self.starters == len(self.slots) else left
        return f"{who} anew ({self.starts} of at most {MOST_STARTS} times)"
