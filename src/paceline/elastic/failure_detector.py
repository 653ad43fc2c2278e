"""The failure detector of an elastic job: each look at the clock and at who is there finds whose time is up.

    a tick ─▶ lingering ─▶ silent ─▶ late ─▶ disconnected           each sees what the one before it has led to

| look         | waited for                                      | at most                  | then                     |
|--------------|-------------------------------------------------|--------------------------|--------------------------|
| lingering    | the exit of one that said why it failed         | DYING_S                  | it is fenced             |
| silent       | a heartbeat                                     | heartbeat_timeout_s      | fenced, unless it's busy |
|              | a heartbeat of one that is busy all the while   | longest_silence_s        | fenced                   |
| late         | the last READY of a step, since the first       | step_timeout_s           | the late are fenced; if  |
|              | the last to regroup, since the generation began | regroup_timeout_s        | servers are, only those  |
| disconnected | a death that explains why communication broke   | SETTLE_S                 | all members meet again   |
|              | one who says nothing where others meet in vain  | ABSENT_S, the third time | it is fenced             |

A process that holds Python's lock for long sends no heartbeat, and uses a processor; one that is stopped or blocked
does not. The supervisor of its host looks, four times in a deadline, and tells of it (the launcher's busy check): a
process is busy while one of the last two looks has seen it compute.

A tick of our own that comes late means that we were stopped or starved. Others' silence proves nothing then, and all of
it is counted anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.elastic.decisions import End, Fence, Rules, Say
from paceline.elastic.slots import PRESENT, Slot, Standing

LATE_TICK_S = 1.0
FIRST_BEAT_S = 5.0
"""What a new process gets on top of the heartbeat's deadline, to be born."""
BUSY_TIMES, BUSY_S = 6, 30.0
"""A busy process may be silent for so many times the heartbeat's deadline, and for so long at least."""
SETTLE_S = 0.15
ABSENT_S = 6.0
"""Longer than a group may take to be built: who tries to meet the others says by then that it can't."""
DYING_S = 2.0
FEW_BREAKS, MOST_BREAKS = 2, 5
"""So often may communication break in one step before one that stays away is fenced, and before the job ends."""


@dataclass(frozen=True)
class Lost:
    """Processes, all of them workers or all of them servers, that are to be taken out of the job."""

    how: Mapping[int, str]
    """By slot, what is said of it: `worker 2 sent no heartbeat for 5 s in step 3`."""


@dataclass(frozen=True)
class Retry:
    """The same members have to do the step again, in a new generation."""

    why: str
    said: str
    """For people."""


Finding: TypeAlias = Lost | Retry | End
"""What is found wrong; `membership` decides what follows. End: there is no going on."""


@dataclass(frozen=True)
class JobView:
    """The job at the moment of a look."""

    workers: Sequence[Slot]
    members: Sequence[Slot]
    """Those of `workers` that belong to the current generation."""
    servers: Sequence[Slot]
    running: bool
    where: str
    """What is being worked on, in words."""

    @property
    def processes(self) -> list[Slot]:
        return [*self.workers, *self.servers]

    def lost(self, slots: Iterable[Slot], how: str) -> Lost:
        return Lost({slot.number: f"{slot.name} {how} {self.where}" for slot in slots})


class FailureDetector:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._ticked_at: float | None = None
        self._breaks = 0
        self.forget()

    # ---- from when on time counts -------------------------------------------------------------------------

    def forget(self) -> None:
        """All start anew."""
        self._breaks = 0
        self._ready_since: float | None = None
        self._regrouping_since: float | None = None
        self._broken: tuple[float, str] | None = None
        self._complained: set[int] = set()

    def one_is_ready(self, now: float) -> None:
        self._ready_since = now if self._ready_since is None else self._ready_since

    def step_counts(self) -> None:
        self._breaks = 0
        self._ready_since = self._broken = None

    def begin_generation(self, now: float) -> None:
        self._ready_since = self._broken = None
        self._regrouping_since = now
        self._complained.clear()

    def all_have_met(self) -> None:
        self._regrouping_since = None

    def complains(self, slot: int, why: str, now: float) -> None:
        """Communication broke for it, and it says so."""
        self._broken = self._broken or (now, why)
        self._complained.add(slot)

    def may_judge(self, view: JobView, now: float) -> bool:
        """Not where our own tick was late: then everything is counted anew."""
        late = self._ticked_at is not None and now - self._ticked_at > LATE_TICK_S
        self._ticked_at = now
        if late:
            for slot in view.processes:
                slot.heard_at = now if slot.heard_at is not None else None
            self._ready_since = now if self._ready_since is not None else None
            self._regrouping_since = now if self._regrouping_since is not None else None
        return not late

    # ---- looks --------------------------------------------------------------------------------------------

    def lingering(self, view: JobView, now: float) -> list[Fence]:
        lingering = [slot for slot in view.processes if slot.standing is Standing.DYING and now - slot.since >= DYING_S]
        for slot in lingering:
            slot.standing = Standing.FENCED
        return [Fence(slot.number) for slot in lingering]

    def silent(self, view: JobView, now: float) -> list[Say | Finding]:
        excused = [slot for slot in view.processes if not slot.excused and self._is_excused(slot, now)]
        for slot in excused:
            slot.excused = True
        limit = f"(a C call may hold the GIL); it is killed after {self._longest_silence_s:g} s"
        found: list[Say | Finding] = [
            Say(f"{slot.name} missed its heartbeat {view.where} but is using CPU {limit}") for slot in excused
        ]
        how = {slot.number: f"{why} {view.where}" for slot in view.processes if (why := self._silence(slot, now))}
        silent = [slot for slot in view.processes if slot.number in how]
        found.append(Lost({slot.number: f"{slot.name} {how[slot.number]}" for slot in silent if not slot.is_server}))
        found += [Lost({slot.number: f"{slot.name} {how[slot.number]}"}) for slot in silent if slot.is_server]
        return found

    def late(self, view: JobView, now: float) -> list[Finding]:
        """Those who are alive, and yet don't come: to a step that others are ready for, or to the new generation."""
        if not view.running:
            return []
        step_s, regroup_s = self._rules.step_timeout_s, self._rules.regroup_timeout_s
        if self._ready_since is not None and now - self._ready_since > step_s:
            slow, limit_s = [slot for slot in view.members if slot.ready is None], step_s
        elif self._regrouping_since is not None and now - self._regrouping_since > regroup_s:
            slow, limit_s = [slot for slot in view.members if not slot.grouped], regroup_s
        else:
            return []
        self._ready_since = self._regrouping_since = None
        absent = [slot for slot in view.servers if slot.standing is Standing.MEMBER and not slot.grouped]
        late = absent if slow and absent else slow  # workers wait for servers
        return [view.lost(late, f"is alive, but {limit_s:g} s late")]

    def disconnected(self, view: JobView, now: float) -> list[Finding]:
        """Communication broke, no process has died, and none is late that is busy."""
        if self._broken is None or not view.running or not view.members:
            return []
        since, why = self._broken
        if now - since < SETTLE_S or any(self._is_excused(slot, now) for slot in view.members):
            return []
        silent = [slot for slot in view.members if not slot.grouped and slot.number not in self._complained]
        if self._breaks >= FEW_BREAKS and silent:
            gone = view.lost(silent, "is alive, but does not come to where the others meet")
            return [gone] if now - since >= ABSENT_S else []
        self._breaks += 1
        if self._breaks > MOST_BREAKS:
            return [End(1, f"the workers lost each other {self._breaks} times {view.where}; the last: {why}")]
        return [Retry(why, said=f"the workers lost each other {view.where} ({why}); they meet again")]

    # ---- heartbeats ---------------------------------------------------------------------------------------

    @property
    def _longest_silence_s(self) -> float:
        return max(BUSY_TIMES * self._rules.heartbeat_timeout_s, BUSY_S)

    def _is_excused(self, slot: Slot, now: float) -> bool:
        """Its heartbeat is late, and it is not fenced because it is busy."""
        return self._is_late(slot, now) and not self._silence(slot, now)

    def _silence(self, slot: Slot, now: float) -> str:
        """Why it is to be fenced, if it is: it has not sent a heartbeat for too long."""
        if not self._is_late(slot, now) or slot.heard_at is None:
            return ""
        busy = slot.computed_at is not None and now - slot.computed_at <= self._rules.heartbeat_timeout_s / 2
        if not busy:
            return f"sent no heartbeat for {self._rules.heartbeat_timeout_s:g} s"
        too_long = now - slot.heard_at > self._longest_silence_s
        return f"was busy, but sent no heartbeat for {self._longest_silence_s:g} s" if too_long else ""

    def _is_late(self, slot: Slot, now: float) -> bool:
        if slot.standing not in PRESENT or slot.ending or slot.heard_at is None:
            return False
        return now - slot.heard_at > self._rules.heartbeat_timeout_s + (0 if slot.beating else FIRST_BEAT_S)
