"""Newcomers of an elastic job: who stands in front of which loop, who is called to another, admitted, and has come.

    STARTING ─asks─▶ WAITING ─admit─▶ MEMBER, and new ─came─▶ a member like the others
                        │  ▲             │
                        │  └─send_back───┘                   its generation was over before it had come
                        └─call─▶ STARTING ─asks─▶ …           the members are past the loop that it stands in front of

A newcomer is admitted only where all members stand at the same place: after a commit, or at the first step of a loop.
Until it has come to where the new generation meets it has no state, so it can't go on alone, and its death is one more
attempt of its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.decisions import Wait
from paceline.elastic.slots import Facts, Slot, Standing, difference


class Newcomers:
    """Of workers; `Servers` has its own."""

    def __init__(self) -> None:
        self._new: set[int] = set()
        self._one_step_loops = self._had_more = False

    def __contains__(self, number: int) -> bool:
        """It was admitted, and has not come."""
        return number in self._new

    # ---- in front of a loop -------------------------------------------------------------------------------

    def begin_loop(self, *, first: bool) -> None:
        self._one_step_loops, self._had_more = not first and not self._had_more, False

    def step_counts(self, *, more: bool) -> None:
        """A step was committed; `more` of the loop follow."""
        self._had_more |= more

    def asks(self, slot: Slot, loop: int, facts: Facts, known: Facts) -> str:
        """It stands in front of this loop, 0: any; how it differs from what is `known` of the members, if it does."""
        if unlike := difference(known, facts):
            slot.closed = unlike
            return unlike
        slot.standing, slot.loop, slot.asked, slot.facts = Standing.WAITING, loop, loop, facts
        return ""

    def call(self, slot: Slot, loop: int) -> Wait:
        """Loops of one step may be over whenever it comes to them: it is called to the next then, to be in time."""
        slot.called_to = loop + (slot.called_to > 0 and self._one_step_loops)
        slot.standing = Standing.STARTING
        return Wait(slot.number, slot.called_to)

    def call_in(self, slots: Sequence[Slot], loop: int) -> tuple[list[Wait], list[int]]:
        """Those who wait in front of a loop that is over skip to this one; and those who would not hear of it."""
        late = [slot for slot in slots if slot.standing is Standing.WAITING and 0 < slot.loop < loop]
        deaf = [slot.number for slot in late if slot.came_in_vain]
        return [self.call(slot, loop) for slot in late if not slot.came_in_vain], deaf

    # ---- into the job -------------------------------------------------------------------------------------

    def admit(self, slots: Sequence[Slot], loop: int) -> list[int]:
        """Those who wait in front of this loop, which the members are in."""
        joining = [slot for slot in slots if slot.standing is Standing.WAITING and slot.loop in (0, loop)]
        for slot in joining:
            slot.standing, slot.loop, slot.in_loop, slot.entered_at = Standing.MEMBER, loop, True, None
            self._new.add(slot.number)
        return [slot.number for slot in joining]

    def came(self, slot: Slot) -> str:
        """It is where its generation meets: what that makes of a newcomer, in words; empty where it is none."""
        if slot.number not in self._new:
            return ""
        self._new.discard(slot.number)
        came = "is back" if slot.has_joined else "joined"
        slot.attempts, slot.has_joined = 0, True
        return came

    def send_back(self, slots: Sequence[Slot]) -> None:
        """Who was admitted and has not come as far as to have the state waits for the next committed step."""
        for slot in slots:
            if slot.number in self._new:
                slot.standing, slot.loop, slot.in_loop, slot.came_in_vain = Standing.WAITING, slot.asked, False, True
        self._new.clear()

    def lose(self, slot: Slot) -> None:
        """Its process falls."""
        slot.attempts += slot.standing is not Standing.MEMBER or slot.number in self._new
        self._new.discard(slot.number)

    def forget(self) -> None:
        self._new.clear()
