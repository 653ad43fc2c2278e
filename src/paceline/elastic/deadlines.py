"""What an elastic job waits for, since when, and for how long at most.

| waited for                                         | at most                    | then                             |
|----------------------------------------------------|----------------------------|----------------------------------|
| a heartbeat                                        | heartbeat_timeout_s        | the silent one is fenced,        |
| a look that sees a silent one compute, the last    | half of it                 | if it does not compute either    |
| a heartbeat of one that computes all the while     | longest_silence_s          | it is fenced too                 |
| the last READY of a step, since the first          | step_timeout_s             | those who are not are fenced     |
| the last to regroup, since the generation began    | regroup_timeout_s          | those who have not are fenced    |
| a death that explains why communication broke      | SETTLE_S                   | the same workers meet again      |
| one who says nothing where others meet in vain     | ABSENT_S, the third time   | it is fenced                     |
| the exit of one who said why it failed             | DYING_S                    | it is fenced                     |

Who holds Python's lock for long gives no heartbeat, and computes; who is stopped or blocked does not. The supervisor of
its host looks, and tells of it (`launch/vigil.py`).

A tick of our own that comes late means that we were stopped or starved. Others' silence proves nothing then, and all of
it is counted anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.elastic.decisions import Rules
from paceline.elastic.slots import PRESENT, Slot, Standing

LATE_TICK_S = 1.0
FIRST_BEAT_S = 5.0
"""What a new process gets on top of the heartbeat's deadline, to be born."""
COMPUTES_TIMES, COMPUTES_S = 6, 30.0
"""Silence of one that computes is borne for so many times the heartbeat's deadline, and for so long at least."""
SETTLE_S = 0.15
ABSENT_S = 6.0
"""Longer than a group may take to be built: who tries to meet the others says by then that it can't."""
DYING_S = 2.0


@dataclass
class Deadlines:
    rules: Rules
    ready_since: float | None = None
    regrouping_since: float | None = None
    broken: tuple[float, str] | None = None
    complained: set[int] = field(default_factory=set)
    _ticked_at: float | None = None

    def begin_step(self) -> None:
        self.ready_since = self.broken = None

    def begin_generation(self, now: float) -> None:
        self.ready_since = self.broken = None
        self.regrouping_since = now
        self.complained.clear()

    def forget(self) -> None:
        self.ready_since = self.regrouping_since = self.broken = None

    def first_ready(self, now: float) -> None:
        self.ready_since = now if self.ready_since is None else self.ready_since

    def tick(self, slots: list[Slot], now: float) -> bool:
        """Whether anything may be judged now; everything is counted anew where our own tick was late."""
        late = self._ticked_at is not None and now - self._ticked_at > LATE_TICK_S
        self._ticked_at = now
        if late:
            for slot in slots:
                slot.heard_at = now if slot.heard_at is not None else None
            self.ready_since = now if self.ready_since is not None else None
            self.regrouping_since = now if self.regrouping_since is not None else None
        return not late

    @property
    def longest_silence_s(self) -> float:
        return max(COMPUTES_TIMES * self.rules.heartbeat_timeout_s, COMPUTES_S)

    def silence(self, slot: Slot, now: float) -> str:
        """Why it is to be fenced, if it is: it has not said anything for too long."""
        if not self._is_late(slot, now) or slot.heard_at is None:
            return ""
        if not self._computes(slot, now):
            return f"gave no sign of life for {self.rules.heartbeat_timeout_s:g} s"
        too_long = now - slot.heard_at > self.longest_silence_s
        return f"computed, but gave no sign of life for {self.longest_silence_s:g} s" if too_long else ""

    def is_borne(self, slot: Slot, now: float) -> bool:
        """It is late, and not fenced because it computes."""
        return self._is_late(slot, now) and not self.silence(slot, now)

    def is_excused(self, slot: Slot, now: float) -> bool:
        """Whether it is late for the first time, and not fenced because it computes."""
        excused = not slot.excused and self.is_borne(slot, now)
        slot.excused = slot.excused or excused
        return excused

    def _is_late(self, slot: Slot, now: float) -> bool:
        if slot.standing not in PRESENT or slot.ending or slot.heard_at is None:
            return False
        return now - slot.heard_at > self.rules.heartbeat_timeout_s + (0 if slot.beating else FIRST_BEAT_S)

    def _computes(self, slot: Slot, now: float) -> bool:
        """Looks come four times in a deadline: two of them have seen nothing."""
        return slot.computed_at is not None and now - slot.computed_at <= self.rules.heartbeat_timeout_s / 2

    def lingers(self, slot: Slot, now: float) -> bool:
        """It has failed, said why, and does not go."""
        return slot.standing is Standing.DYING and now - slot.since >= DYING_S

    def late(self, members: list[Slot], now: float) -> tuple[list[Slot], float]:
        """Those who are alive, and yet don't come: to a step that others are ready for, or to the new generation."""
        step_s, regroup_s = self.rules.step_timeout_s, self.rules.regroup_timeout_s
        if self.ready_since is not None and now - self.ready_since > step_s:
            slow, limit_s = [slot for slot in members if slot.ready is None], step_s
        elif self.regrouping_since is not None and now - self.regrouping_since > regroup_s:
            slow, limit_s = [slot for slot in members if not slot.grouped], regroup_s
        else:
            return [], 0.0
        self.ready_since = self.regrouping_since = None
        return slow, limit_s

    def absent(self, members: list[Slot]) -> list[int]:
        """Those who have neither come to where the others meet, nor said that they can't."""
        return [slot.number for slot in members if not slot.grouped and slot.number not in self.complained]

    def is_long_broken(self, now: float) -> bool:
        return self.broken is not None and now - self.broken[0] >= ABSENT_S

    def unexplained(self, now: float) -> str:
        """Why communication broke, where no death has told so meanwhile."""
        return self.broken[1] if self.broken is not None and now - self.broken[0] >= SETTLE_S else ""
