"""Who belongs to an elastic job, and which steps are done: events in, decisions out, no process and no clock.

    members compute ─▶ READY of all, with equal checks ─▶ Commit (once, ever) ─▶ newcomers, if there are any
    members enter a loop ─▶ all stand at its first step ─▶ Begin ─▶ newcomers, if there are any
    a death, a silence, a difference ─▶ Regroup: a new generation of those who are left redoes the step

| `Membership` asks     |                                                                                 |
|-----------------------|---------------------------------------------------------------------------------|
| `places`, `servers`   | which slots and server ranks can have a process, and which are to get one       |
| `steps`               | what is committed, and whether the READYs of all agree                          |
| `newcomers`           | who waits in front of which loop, and who has been let in but has not come      |
| `timekeeper`          | whose time is up                                                                |
| `outlook`             | after a loss: who goes on, whether all have to start anew, or it is the end     |

Only the coordinator has a `Membership`, so there is one place where a step is committed. What a process says counts
only as long as it stands in its slot: a fenced one is never heard again. `now` is the caller's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from paceline.elastic.decisions import Begin, Commit, Decision, End, Fence, Refuse, Regroup, Rules, Say, StartAnew
from paceline.elastic.findings import FenceServers, FenceWorkers, Finding, Hopeless, MeetAgain, StateLost
from paceline.elastic.newcomers import Newcomers
from paceline.elastic.outlook import Outlook
from paceline.elastic.places import Places
from paceline.elastic.servers import Servers
from paceline.elastic.slots import PRESENT, Facts, Ready, Slot, Standing, named, workers
from paceline.elastic.steps import Agreed, Steps
from paceline.elastic.timekeeper import Scene, Timekeeper


class Membership:
    def __init__(self, size: int, rules: Rules, servers: int = 0) -> None:
        self.rules = rules
        self.places = Places(size, rules)
        self.servers = Servers(size, servers, rules)
        self.generation = 1
        self.running = False
        """Everyone has entered the loop. Who falls before that takes the others along: see `starts_anew`."""
        self.over = False
        self._leaving = False  # members have gone because the job was asked to stop
        self._main = 0  # of all workers, who reports
        self._steps = Steps()
        self._newcomers = Newcomers()
        self._time = Timekeeper(rules)
        self._outlook = Outlook(rules, self.places, self._newcomers)

    @property
    def slots(self) -> list[Slot]:
        return self.places.slots

    @property
    def stopping(self) -> bool:
        return self.places.stopping

    def stop(self) -> None:
        """The job was asked to stop: nobody is replaced any more."""
        self.places.stopping = True

    @property
    def members(self) -> tuple[int, ...]:
        """Of the current generation; before it has begun, whoever started."""
        return tuple(slot.number for slot in self.slots if self._counts(slot))

    @property
    def step(self) -> int:
        """The last committed."""
        return self._steps.last

    @property
    def where(self) -> str:
        """What is being worked on, in words."""
        if self.starts_anew:
            return "while all start anew"
        return self._steps.where(in_loop=self._in_loop(), running=self.running)

    def _counts(self, slot: Slot) -> bool:
        if not self.running:
            return slot.standing in (Standing.STARTING, Standing.MEMBER)
        return slot.standing is Standing.MEMBER

    def _member_slots(self) -> list[Slot]:
        return [slot for slot in self.slots if self._counts(slot)]

    def _in_loop(self) -> bool:
        return any(slot.in_loop for slot in self._member_slots())

    # ---- what processes say -------------------------------------------------------------------------------

    def count_anew(self, slot: int, now: float) -> None:
        """It was just started, or could not have been heard."""
        self._place(slot).heard_at = now

    def beat(self, slot: int, now: float, *, ending: bool = False) -> list[Decision]:
        """A heartbeat; the last one says that the script has ended, and what is left of the process may take long."""
        one = self._place(slot)
        one.heard_at, one.beating, one.ending = now, True, ending
        return []

    def computes(self, slot: int, now: float) -> list[Decision]:
        """It says nothing, and was seen to use a processor."""
        self._place(slot).computed_at = now
        return []

    def _place(self, slot: int) -> Slot:
        return self.servers.slot(slot) if self.servers.has(slot) else self.slots[slot]

    def entered(self, slot: int, loop: int, step: int, facts: Facts, now: float) -> list[Decision]:
        one = self.slots[slot]
        if not self._counts(one):
            return []
        one.standing, one.loop, one.in_loop, one.entered_at, one.facts = Standing.MEMBER, loop, True, step, facts
        one.entered_in = self.generation
        one.has_joined = True
        members = self._member_slots()
        if len(members) < self.places.starters and not self.running:
            return []  # somebody fell on the way here
        here = {(other.standing, other.in_loop, other.loop, other.entered_in) for other in members}
        if here != {(Standing.MEMBER, True, loop, self.generation)}:
            return []
        first, self.running = not self.running, True
        said = {other.number: other.entered_at for other in members if other.entered_at is not None}
        taken_up = self._steps.take_up(said, first=first)
        begun = self._act_on(taken_up, now) if taken_up else []
        if self.over:
            return begun
        self._newcomers.begin_loop(first=first)
        begun.append(Begin(loop, self.members))
        called, deaf = self._newcomers.call_in(self.slots, loop)
        too_late = {number: f"worker {number} came too late for its loop" for number in deaf}
        begun += [*called, *self._drop(too_late, now, fence=True)]
        return [*begun, *self._admit(now), *self._refill(now)]

    def left(self, slot: int, loop: int) -> list[Decision]:
        one = self.slots[slot]
        if one.standing is Standing.MEMBER and one.loop == loop:
            one.in_loop = False
        return []

    def readied(self, slot: int, generation: int, ready: Ready, now: float) -> list[Decision]:
        one = self.slots[slot]
        if one.standing is not Standing.MEMBER or generation != self.generation or self.over:
            return []
        if self.running and self._steps.is_behind(ready):
            how = f"worker {slot} is ready for step {ready.step} again, though step {self.step} is committed"
            return self._drop({slot: how}, now, fence=True)
        one.ready = ready
        self._time.one_is_ready(now)
        members = self._member_slots()
        readies = {other.number: other.ready for other in members if other.ready is not None}
        if len(readies) < len(members):
            return []
        found = self._steps.compare(readies)
        return self._commit(found, now) if isinstance(found, Agreed) else self._act_on(found, now)

    def _commit(self, agreed: Agreed, now: float) -> list[Decision]:
        if agreed.is_new:
            self.places.got_on()
        self._time.step_counts()
        self._newcomers.step_counts(more=agreed.more)
        self.servers.served()
        for slot in self._member_slots():
            slot.ready = None
        commit = Commit(agreed.step, agreed.update, self.generation, self.members, self.servers.here)
        return [commit, *(self._admit(now) if agreed.more else [])]

    def failed(self, slot: int, generation: int, why: str, now: float) -> list[Decision]:
        """Communication broke, though nobody has died so far as the slot knows."""
        if self._place(slot).standing is Standing.MEMBER and generation == self.generation:
            self._time.complains(slot, f"{self.servers.name(slot)}: {why}", now)
        return []

    def state_lost(self, slot: int, generation: int, why: str) -> list[Decision]:
        """A part of the state has gone with the only host that had it: as if no worker were left."""
        here = self.slots[slot].standing is Standing.MEMBER and generation == self.generation
        return self._start_anew(why) if here and self.running and not self.over else []

    def grouped(self, slot: int, generation: int) -> list[Decision]:
        one = self._place(slot)
        if one.standing is not Standing.MEMBER or generation != self.generation:
            return []
        if self.servers.has(slot):
            return [Say(f"{self.servers.name(slot)} is back after step {self.step}")] if self.servers.came(slot) else []
        one.grouped = True
        if all(other.grouped for other in self._member_slots()):
            self._time.all_have_met()
        came = self._newcomers.came(one)
        return [Say(f"worker {slot} {came} after step {self.step}")] if came else []

    def asks_to_join(self, slot: int, loop: int, facts: Facts) -> list[Decision]:
        """It stands in front of this loop; 0: of whichever the members are in."""
        one = self._place(slot)
        if one.standing not in (Standing.STARTING, Standing.WAITING) or not self.running:
            return []
        if 0 < loop < one.called_to:  # said before it heard that it is to skip this one
            return []
        members = self._member_slots()
        known = members[0].facts if members else {}
        if self.servers.has(slot):
            unlike = self.servers.asks(slot, known, facts)
            return self._refuse(slot, unlike) if unlike else []
        if unlike := self._newcomers.asks(one, loop, facts, known):
            return self._refuse(slot, unlike)
        now_in = max((member.loop for member in members if member.in_loop), default=0)
        return [self._newcomers.call(one, now_in)] if 0 < loop < now_in else []

    def _refuse(self, slot: int, unlike: str) -> list[Decision]:
        why = f"{self.servers.name(slot)}'s replacement does not fit: {unlike}"
        return [Refuse(slot, why), Say(f"{why}; its place stays empty")]

    def _admit(self, now: float) -> list[Decision]:
        """Those who wait in front of the loop that the members are in, and servers."""
        loop = self._member_slots()[0].loop
        joining = self._newcomers.admit(self.slots, loop)
        who = [*([named(joining)] if joining else []), *self.servers.admit()]
        if not who:
            return []
        return self._regroup(f"{' and '.join(who)} joined after step {self.step}", now, admitting=True)

    # ---- what happens to them -----------------------------------------------------------------------------

    def raised(self, slot: int, how: str, now: float, *, cause: bool = True) -> list[Decision]:
        """An exception escaped the script; the process will end in a moment. `cause`: it is not another's fault."""
        return self._drop({slot: f"worker {slot} {how}"}, now, code_failed=cause)

    def died(self, slot: int, how: str, now: float, *, by_code: bool = False) -> list[Decision]:
        """Its process is gone; `by_code`: by an exit that the script chose."""
        one = self.slots[slot]
        known = one.standing in (Standing.FENCED, Standing.DYING)
        decided = [] if known else self._drop({slot: f"worker {slot} {how}"}, now, code_failed=by_code)
        one.vacate()
        return decided if self.over else [*decided, *self._refill(now)]

    def ended_well(self, slot: int, now: float) -> list[Decision]:
        one = self.slots[slot]
        if one.standing is Standing.MEMBER and one.in_loop and self.running:
            return self.died(slot, f"left the job {self.where}, while others were training", now, by_code=True)
        if one.standing is Standing.MEMBER or not self.running:
            one.standing, one.ready, one.grouped, one.ended_in = Standing.FINISHED, None, True, self.generation
            return []
        one.attempts += 1
        one.vacate()
        return []

    def is_missed(self, slot: int) -> bool:
        """Of one that ended well: whether the generation that it belonged to is that of the others still."""
        one = self.slots[slot]
        return not self.running or (one.standing is Standing.FINISHED and one.ended_in == self.generation)

    def went_as_asked(self, slot: int) -> None:
        """The job was asked to stop, and it did: nobody regroups any more, and only the stop has a deadline."""
        self._leaving = self._leaving or self.slots[slot].standing is Standing.MEMBER

    @property
    def starts_anew(self) -> bool:
        """Another start answers who falls before all have met; at the first one that is the launcher's to judge."""
        return not self.running and not self.over and self.places.starts > 0 and self.places.restarts

    def can_lose(self, slots: Collection[int]) -> bool:
        """Whether their host may go: at the first start all are waited for, and a fault is the launcher's to judge."""
        missed = any(self.slots[number].standing in PRESENT for number in slots)
        return not self.over and (self.running or self.places.starts > 0 or not missed)

    def host_lost(self, slots: Collection[int], why: str, now: float) -> list[Decision]:
        """All at once; nobody can be started there any more."""
        there = {number: "went with it" for number in slots if self.slots[number].standing in PRESENT}
        self.places.go(slots)
        if there and not self.running:
            return self._start_anew(why)
        decided = self._drop(there, now, said=why)
        for number in slots:
            if self.slots[number].standing is not Standing.FINISHED:
                self.slots[number].vacate()
        return decided

    def host_came(self, slots: Collection[int], who: str, now: float) -> list[Decision]:
        """A host has come that can start processes in these slots, which none has now."""
        self.places.come(slots)
        its = f"its {workers(len(slots))} {'join' if len(slots) > 1 else 'joins'}"
        return [Say(f"{who}; {its} after a step"), *self._refill(now)]

    def server_lost(
        self, ranks: Collection[int], how: str, now: float, *, fence: bool = False, code_failed: bool = False
    ) -> list[Decision]:
        """Server processes are gone, or have to go: the step is done again with those who are left."""
        served = set(self.servers.here)
        lost = [rank for rank in ranks if self.servers.lose(rank, now, fence=fence)]
        decided: list[Decision] = [Fence(rank) for rank in lost] if fence else []
        what = "; ".join(f"{self.servers.name(rank)} {how}" for rank in lost)
        if not lost or self.over:
            return decided
        if not self.running:
            return [*decided, *self._fell_at_start(what, code_failed=code_failed, fence=fence)]
        left, was_serving = self._member_slots(), not served.isdisjoint(lost)
        found = self._outlook.after_servers(what, lost, self.servers, left, served=was_serving)
        return [*decided, *(self._act_on(found, now) if found else [])]

    def server_ended(self, rank: int, how: str, now: float, *, well: bool, by_code: bool = False) -> list[Decision]:
        """Its process is gone: `well`, because all workers had said goodbye."""
        one = self.servers.slot(rank)
        if well and not self._may_join():
            one.standing = Standing.FINISHED
            return []
        decided = self.server_lost([rank], how, now, code_failed=by_code)
        one.vacate()
        return [*decided, *self._refill(now)]

    def _drop(
        self, fallen: Mapping[int, str], now: float, *, fence: bool = False, code_failed: bool = False, said: str = ""
    ) -> list[Decision]:
        """Take processes out of the job, by slot with what is said of each, and go on with those who are left."""
        fallen = {number: how for number, how in fallen.items() if self.slots[number].standing in PRESENT}
        if not fallen:
            return [Say(said)] if said else []
        members = set(self.members)
        decided: list[Decision] = []
        for number in fallen:
            slot = self.slots[number]
            self._newcomers.lose(slot)
            slot.fall(now, fenced=fence)
            decided += [Fence(number)] if fence else []
        what = said or "; ".join(fallen.values())
        if not self.running:
            return [*decided, *self._fell_at_start(what, code_failed=code_failed, fence=fence)]
        lost, left = list(fallen), self._member_slots()
        if members.isdisjoint(lost):
            return [*decided, *self._outlook.after_others(what, lost, left)]
        if code_failed and self._steps.failed_before():
            return [*decided, *self._end(None, "the same step failed before: it is the code, not the machine")]
        return [*decided, *self._act_on(self._outlook.after_members(what, lost, left), now)]

    def _fell_at_start(self, what: str, *, code_failed: bool, fence: bool) -> list[Decision]:
        """Before all have met nobody has the state, so that none can go on without the others."""
        if not self.starts_anew:
            return [Say(f"{what}; it is stopped")] if fence else []
        if code_failed and self._steps.failed_before(at_start=True):
            return self._end(None, "a start failed so before: it is the code, not the machine")
        return self._start_anew(what)

    def _start_anew(self, what: str) -> list[Decision]:
        """No copy of the state is left: begin again, from a checkpoint if the script resumes from one."""
        if hopeless := self._outlook.without_state(what):
            return self._end(hopeless.code, hopeless.why)
        self.generation, self.running = 1, False
        self._steps.begin_anew()
        self._time.begin_anew()
        self._newcomers.forget()
        members = self.places.begin_anew()
        self.servers = self.servers.anew()
        self._main = members[0]
        return [Say(f"{what}: {self.places.told_anew()}"), StartAnew(self.places.starts, members)]

    def _regroup(self, why: str, now: float, *, admitting: bool = False) -> list[Decision]:
        """A new generation, in which the step is done again; or, `admitting`, the next one begins."""
        if not admitting:
            self._newcomers.send_back(self.slots)
        self.generation += 1
        self._time.begin_generation(now)
        for slot in self._member_slots():
            slot.ready, slot.grouped = None, not slot.in_loop
        self.servers.begin_generation()
        members = self.members
        joining = tuple(number for number in members if number in self._newcomers)
        staying = [number for number in members if number not in joining]
        if self._main not in staying:  # and who comes back does not take it back: each handing over costs
            self._main = staying[0]
        return [Regroup(self.generation, members, joining, self.step, why, self._main, self.servers.here)]

    def _refill(self, now: float) -> list[Decision]:
        """Fresh processes for vacant slots."""
        if not self._may_join():
            return []
        return [*self.places.refill(now), *(self.servers.refill(now) if not self.stopping else [])]

    def _may_join(self) -> bool:
        """Whether there is a loop that somebody new could join."""
        return self.running and not self.over and self._in_loop()

    def _end(self, code: int | None, why: str) -> list[Decision]:
        self.over = True
        return [End(code, why)]

    # ---- what is found wrong ------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Decision]:
        """What time alone brings; call it a few times a second."""
        if self.over or self._leaving or not self._time.may_judge(self._scene, now):
            return []
        decided: list[Decision] = []
        for look in (self._time.lingering, self._time.silent, self._time.late, self._time.lost_each_other):
            starts = self.places.starts
            for found in [] if self.over else look(self._scene, now):
                if self.places.starts == starts:  # who was found silent before all start anew is gone with the others
                    decided += self._act_on(found, now)
        return decided

    @property
    def _scene(self) -> Scene:
        return Scene(self.slots, self._member_slots(), self.servers, self.running, self.where)

    def _act_on(self, found: Finding | Decision, now: float) -> list[Decision]:
        """A finding is answered; what is a decision already stands."""
        match found:
            case FenceWorkers(how):
                return self._drop(how, now, fence=True)
            case FenceServers(ranks, how):
                return self.server_lost(ranks, how, now, fence=True)
            case MeetAgain(why, said):
                return [Say(said), *self._regroup(why, now)]
            case StateLost(why):
                return self._start_anew(why)
            case Hopeless(why, code):
                return self._end(code, why)
            case _:
                return [found]
