"""Who belongs to an elastic job, and which steps are done: events in, decisions out, no process and no clock.

    members compute ─▶ READY of all, with equal checks ─▶ Commit (once, ever) ─▶ newcomers, if there are any
    members enter a loop ─▶ all stand at its first step ─▶ Begin ─▶ newcomers, if there are any
    a death, a silence, a difference ─▶ Regroup: a new generation of those who are left redoes the step

Only the coordinator has a `Membership`, so there is one place where a step is committed. What a process says counts
only as long as it stands in its slot: a fenced one is never heard again. `now` is the caller's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from paceline.elastic.deadlines import Deadlines
from paceline.elastic.decisions import (
    TOO_FEW_LEFT,
    Begin,
    Commit,
    Decision,
    End,
    Fence,
    Refuse,
    Regroup,
    Rewind,
    Rules,
    Say,
    StartAnew,
    Wait,
)
from paceline.elastic.places import Places
from paceline.elastic.servers import Servers
from paceline.elastic.slots import PRESENT, Facts, Ready, Slot, Standing, difference, named, workers

FEW_BREAKS, MOST_BREAKS = 2, 5
MOST_STARTS = 3
WHOLE_STEP = 1 << 62
"""As the update of a step that is done with all its updates."""


class Membership:
    def __init__(self, size: int, rules: Rules, servers: int = 0) -> None:
        self.rules = rules
        self.places = Places(size, rules)
        self.servers = Servers(size, servers, rules)
        self.generation = 1
        self.running = False
        """Everyone has entered the loop; before that a fault is one of starting up, and the launcher's to judge."""
        self.over = False
        self._leaving = False  # members have gone because the job was asked to stop
        self._committed = (0, WHOLE_STEP)
        self._main = 0  # of all workers, who reports
        self._starts = 0
        self._breaks = 0
        self._ties = 0
        self._deadlines = Deadlines(rules)
        self._newcomers: set[int] = set()
        self._raised_in: set[tuple[int, int]] = set()
        self._one_step_loops = self._had_more = False

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
        return self._committed[0]

    @property
    def where(self) -> str:
        """What is being worked on, in words."""
        step, update = self._committed
        if any(slot.in_loop for slot in self._member_slots()):
            return f"in step {step + 1 if update == WHOLE_STEP or update == 0 else step}"
        if step:
            return f"after step {step}"
        return "before its first step" if self.running else "while starting"

    def _counts(self, slot: Slot) -> bool:
        if not self.running:
            return slot.standing in (Standing.STARTING, Standing.MEMBER)
        return slot.standing is Standing.MEMBER

    def _member_slots(self) -> list[Slot]:
        return [slot for slot in self.slots if self._counts(slot)]

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

    def _name(self, slot: int) -> str:
        return self.servers.name(slot) if self.servers.has(slot) else f"worker {slot}"

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
        begun = self._take_up(step, members, first=first)
        if self.over:
            return begun
        self._one_step_loops, self._had_more = not first and not self._had_more, False
        begun.append(Begin(loop, self.members))
        return [*begun, *self._call_in(loop, now), *self._admit(now), *self._refill(now)]

    def _take_up(self, step: int, members: list[Slot], *, first: bool) -> list[Decision]:
        """The loop begins where all of them say that it does: at the step that a checkpoint left, or that was last."""
        said = {other.number: other.entered_at for other in members if other.entered_at is not None}
        if len(set(said.values())) > 1:
            told = ", ".join(f"worker {number} after step {at}" for number, at in said.items())
            return self._end(1, f"the workers begin at different steps ({told}); they loaded different checkpoints?")
        elsewhere = step != self.step
        if elsewhere:
            self._committed = (step, WHOLE_STEP)
        return [Rewind(step)] if elsewhere or first else []

    def _call_in(self, loop: int, now: float) -> list[Decision]:
        """Those who wait in front of a loop that is over skip to this one."""
        late = [slot for slot in self.slots if slot.standing is Standing.WAITING and 0 < slot.loop < loop]
        deaf = [(slot.number, f"{slot.number} came too late for its loop") for slot in late if slot.came_in_vain]
        called = [self._call(slot, loop) for slot in late if not slot.came_in_vain]
        return [*called, *(self._drop(deaf, now, fence=True) if deaf else [])]

    def _call(self, slot: Slot, loop: int) -> Decision:
        """Loops of one step may be over whenever it comes to them: it is called to the next then, to be in time."""
        slot.called_to = loop + (slot.called_to > 0 and self._one_step_loops)
        slot.standing = Standing.STARTING
        return Wait(slot.number, slot.called_to)

    def left(self, slot: int, loop: int) -> list[Decision]:
        one = self.slots[slot]
        if one.standing is Standing.MEMBER and one.loop == loop:
            one.in_loop = False
        return []

    def readied(self, slot: int, generation: int, ready: Ready, now: float) -> list[Decision]:
        one = self.slots[slot]
        if one.standing is not Standing.MEMBER or generation != self.generation or self.over:
            return []
        if self.running and ready.place <= self._committed:
            how = f"{slot} is ready for step {ready.step} again, though step {self.step} is committed"
            return self._drop([(slot, how)], now, fence=True)
        one.ready = ready
        self._deadlines.first_ready(now)
        members = self._member_slots()
        readies = {other.number: other.ready for other in members if other.ready is not None}
        return self._compare(readies, now) if len(readies) == len(members) else []

    def _compare(self, readies: dict[int, Ready], now: float) -> list[Decision]:
        """All are ready: for the same step, and with the same result?"""
        if len({ready.place for ready in readies.values()}) > 1:
            told = ", ".join(f"worker {number} for step {ready.step}" for number, ready in readies.items())
            return self._end(1, f"the workers are ready for different steps: {told}")
        first = next(iter(readies.values()))
        checks = Counter(ready.check for ready in readies.values() if ready.check)
        if len(checks) > 1:
            return self._disagree(first, {n: ready.check for n, ready in readies.items() if ready.check}, now)
        self._committed = first.place
        self._breaks = self._ties = 0
        self._deadlines.begin_step()
        members = self.members
        self.servers.served()
        for slot in self._member_slots():
            slot.ready = None
        more = all(ready.more for ready in readies.values())
        self._had_more |= more
        commit = Commit(first.step, first.update, self.generation, members, self.servers.here)
        return [commit, *(self._admit(now) if more else [])]

    def _disagree(self, ready: Ready, checks: dict[int, int], now: float) -> list[Decision]:
        """Full copies that should be equal are not: what the majority has is right."""
        most, holders = Counter(checks.values()).most_common(1)[0]
        where = f"in step {ready.step}"
        if holders * 2 > len(checks):
            wrong = [number for number, check in checks.items() if check != most]
            right = named([number for number, check in checks.items() if check == most])
            how = f"weights differ from those of {right} {where}: silent corruption"
            return self._drop([(number, f"{number}'s {how}") for number in wrong], now, fence=True)
        self._ties += 1
        both = named(list(checks))
        if self._ties > 1:
            return self._end(1, f"the weights of {both} differ {where}, twice: silent corruption, and nobody "
                                "can say whose are right")  # fmt: skip
        why = f"the weights of {both} differ {where}; the step is done again"
        return [Say(why), *self._regroup(why, now)]

    def failed(self, slot: int, generation: int, why: str, now: float) -> list[Decision]:
        """Communication broke, though nobody has died so far as the slot knows."""
        if self._place(slot).standing is Standing.MEMBER and generation == self.generation:
            self._deadlines.broken = self._deadlines.broken or (now, f"{self._name(slot)}: {why}")
            self._deadlines.complained.add(slot)
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
            return [Say(f"{self._name(slot)} is back after step {self.step}")] if self.servers.came(slot) else []
        one.grouped = True
        if all(other.grouped for other in self._member_slots()):
            self._deadlines.regrouping_since = None
        if slot not in self._newcomers:
            return []
        self._newcomers.discard(slot)
        one.attempts = 0
        came, one.has_joined = "is back" if one.has_joined else "joined", True
        return [Say(f"worker {slot} {came} after step {self.step}")]

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
        if unlike := difference(known, facts):
            one.closed = unlike
            return self._refuse(slot, unlike)
        one.standing, one.loop, one.asked, one.facts = Standing.WAITING, loop, loop, facts
        now_in = max((member.loop for member in members if member.in_loop), default=0)
        return [self._call(one, now_in)] if 0 < loop < now_in else []

    def _refuse(self, slot: int, unlike: str) -> list[Decision]:
        why = f"{self._name(slot)}'s replacement does not fit: {unlike}"
        return [Refuse(slot, why), Say(f"{why}; its place stays empty")]

    def _admit(self, now: float) -> list[Decision]:
        """Those who wait in front of the loop that the members are in, and servers."""
        loop = self._member_slots()[0].loop
        joining = [slot for slot in self.slots if slot.standing is Standing.WAITING and slot.loop in (0, loop)]
        who = self.servers.admit()
        if not joining and not who:
            return []
        for slot in joining:
            slot.standing, slot.loop, slot.in_loop, slot.entered_at = Standing.MEMBER, loop, True, None
        numbers = [slot.number for slot in joining]
        self._newcomers.update(numbers)
        who = [*([named(numbers)] if numbers else []), *who]
        return self._regroup(f"{' and '.join(who)} joined after step {self.step}", now, admitting=True)

    # ---- what happens to them -----------------------------------------------------------------------------

    def raised(self, slot: int, how: str, now: float, *, cause: bool = True) -> list[Decision]:
        """An exception escaped the script; the process will end in a moment. `cause`: it is not another's fault."""
        return self._drop([(slot, f"{slot} {how}")], now, code_failed=cause)

    def died(self, slot: int, how: str, now: float, *, by_code: bool = False) -> list[Decision]:
        """Its process is gone; `by_code`: by an exit that the script chose."""
        one = self.slots[slot]
        known = one.standing in (Standing.FENCED, Standing.DYING)
        decided = [] if known else self._drop([(slot, f"{slot} {how}")], now, code_failed=by_code)
        one.vacate()
        return decided if self.over else [*decided, *self._refill(now)]

    def ended_well(self, slot: int, now: float) -> list[Decision]:
        one = self.slots[slot]
        if one.standing is Standing.MEMBER and one.in_loop and self.running:
            return self.died(slot, f"left the job {self.where}, while others were training", now, by_code=True)
        if one.standing is Standing.MEMBER or not self.running:
            one.standing, one.ready, one.grouped = Standing.FINISHED, None, True
            return []
        one.attempts += 1
        one.vacate()
        return []

    def went_as_asked(self, slot: int) -> None:
        """The job was asked to stop, and it did: nobody regroups any more, and only the stop has a deadline."""
        self._leaving = self._leaving or self.slots[slot].standing is Standing.MEMBER

    def can_lose(self, slots: Collection[int]) -> bool:
        """Whether their host may go: at the first start all are waited for, and a fault is the launcher's to judge."""
        missed = any(self.slots[number].standing in PRESENT for number in slots)
        return not self.over and (self.running or self._starts > 0 or not missed)

    def host_lost(self, slots: Collection[int], why: str, now: float) -> list[Decision]:
        """All at once; nobody can be started there any more."""
        there = [(number, f"{number} went with it") for number in slots if self.slots[number].standing in PRESENT]
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

    def server_lost(self, ranks: Collection[int], how: str, now: float, *, fence: bool = False) -> list[Decision]:
        """Server processes are gone, or have to go: the step is done again with those who are left."""
        served = self.servers.here
        lost = [rank for rank in ranks if self.servers.lose(rank, now, fence=fence)]
        decided: list[Decision] = [Fence(rank) for rank in lost] if fence else []
        what = "; ".join(f"{self.servers.name(rank)} {how}" for rank in lost)
        if not lost or self.over or not self.running:
            return [*decided, Say(f"{what}; it is stopped")] if decided else []
        and_so = ", a replacement starts" if self._may_join() and all(map(self.servers.may_refill, lost)) else ""
        if not set(lost) & set(served):
            refused = all(self.servers.slot(rank).closed for rank in lost)
            return (
                decided
                if refused
                else [*decided, Say(f"{what}, before it had joined{and_so or '; its place stays empty'}")]
            )
        again = self._regroup(what, now) if self.members else []
        return [*decided, Say(f"{what}; {self.servers.instead(self.members)}{and_so}"), *again]

    def server_ended(self, rank: int, how: str, now: float, *, well: bool) -> list[Decision]:
        """Its process is gone: `well`, because all workers had said goodbye."""
        if well and not self._may_join():
            self.servers.slot(rank).standing = Standing.FINISHED
            return []
        decided = self.server_lost([rank], how, now)
        self.servers.slot(rank).vacate()
        return [*decided, *self._refill(now)]

    def _drop(
        self,
        fallen: list[tuple[int, str]],
        now: float,
        *,
        fence: bool = False,
        code_failed: bool = False,
        said: str = "",
    ) -> list[Decision]:
        """Take processes out of the job, and go on with those who are left."""
        fallen = [(number, how) for number, how in fallen if self.slots[number].standing in PRESENT]
        if not fallen:
            return [Say(said)] if said else []
        members = self.members
        decided: list[Decision] = []
        for number, _ in fallen:
            slot = self.slots[number]
            slot.attempts += slot.standing is not Standing.MEMBER or number in self._newcomers
            self._newcomers.discard(number)
            slot.standing, slot.since, slot.ready = Standing.FENCED if fence else Standing.DYING, now, None
            slot.in_loop = False
            decided += [Fence(number)] if fence else []
        what = said or "; ".join(f"worker {how}" for _, how in fallen)
        if not self.running:
            return [*decided, Say(f"{what}; it is stopped")] if fence else decided
        was_member = any(number in members for number, _ in fallen)
        if code_failed and was_member:
            if self._committed in self._raised_in:
                return [*decided, *self._end(None, "the same step failed before: it is the code, not the machine")]
            self._raised_in.add(self._committed)
        return [*decided, *self._go_on(what, was_member, [number for number, _ in fallen], now)]

    def _go_on(self, what: str, was_member: bool, fallen: list[int], now: float) -> list[Decision]:
        left = len(self._member_slots())
        with_state = any(slot.number not in self._newcomers for slot in self._member_slots())
        finished = any(slot.standing is Standing.FINISHED for slot in self.slots)
        if was_member and not with_state:
            if finished:
                return self._end(None, "")
            return self._start_anew(f"{what}; no worker is left")
        if was_member and left < self.rules.min_workers:
            rest = f"{workers(left)} left, and --min-workers is {self.rules.min_workers}"
            return self._end(TOO_FEW_LEFT, f"{what}; {rest}")
        in_time = any(slot.in_loop for slot in self._member_slots())
        replaced = in_time and any(self.places.may_refill(self.slots[number]) for number in fallen)
        and_so = ", a replacement starts" if replaced else ""
        if not was_member:
            refused = all(self.slots[number].closed for number in fallen)
            and_so = and_so or ("" if self.slots[fallen[0]].away else "; its place stays empty")
            return [] if refused else [Say(f"{what}, before it had joined{and_so}")]
        goes_on = "go on" if left > 1 else "goes on"
        return [Say(f"{what}; {workers(left)} {goes_on}{and_so}"), *self._regroup(what, now)]

    def _start_anew(self, what: str) -> list[Decision]:
        """No copy of the state is left: begin again, from a checkpoint if the script resumes from one."""
        if not self.rules.restart_workers or self._starts == MOST_STARTS or self.stopping:
            return self._end(TOO_FEW_LEFT, what)
        here = len(self.places.here)
        if here < self.rules.min_workers:
            rest = f"{workers(here)} could start anew, and --min-workers is {self.rules.min_workers}"
            return self._end(TOO_FEW_LEFT, f"{what}; {rest}")
        self._starts += 1
        self.generation, self.running = 1, False
        self._breaks = self._ties = 0
        self._deadlines.forget()
        self._newcomers.clear()
        members = self.places.begin_anew()
        self.servers = self.servers.anew()
        self._main = members[0]
        left = f"the {workers(here)} of the hosts that are left start{'s' if here == 1 else ''}"
        who = "all start" if here == len(self.slots) else left
        said = f"{what}: {who} anew ({self._starts} of at most {MOST_STARTS} times)"
        return [Say(said), StartAnew(self._starts, members)]

    def _regroup(self, why: str, now: float, *, admitting: bool = False) -> list[Decision]:
        """Who was admitted and has not come as far as to have the state waits for the next committed step."""
        if not admitting:
            for number in self._newcomers:
                slot = self.slots[number]
                slot.standing, slot.loop, slot.in_loop, slot.came_in_vain = Standing.WAITING, slot.asked, False, True
            self._newcomers.clear()
        self.generation += 1
        self._deadlines.begin_generation(now)
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
        return self.running and not self.over and any(slot.in_loop for slot in self._member_slots())

    def _end(self, code: int | None, why: str) -> list[Decision]:
        self.over = True
        return [End(code, why)]

    # ---- deadlines ----------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Decision]:
        """What time alone brings; call it a few times a second."""
        if self.over or self._leaving or not self._deadlines.tick(self._processes, now):
            return []
        decided: list[Decision] = []
        for look in (self._fence_lingering, self._fence_silent, self._fence_late, self._mend):
            decided += [] if self.over else look(now)
        return decided

    @property
    def _processes(self) -> list[Slot]:
        return [*self.slots, *self.servers.slots]

    def _fence_lingering(self, now: float) -> list[Decision]:
        lingering = [slot for slot in self._processes if self._deadlines.lingers(slot, now)]
        for slot in lingering:
            slot.standing = Standing.FENCED
        return [Fence(slot.number) for slot in lingering]

    def _fence_silent(self, now: float) -> list[Decision]:
        excused = [slot.number for slot in self._processes if self._deadlines.is_excused(slot, now)]
        limit = f"a call holds Python's lock? It is given {self._deadlines.longest_silence_s:g} s"
        said: list[Decision] = [
            Say(f"{self._name(number)} is silent {self.where}, but computes: {limit}") for number in excused
        ]
        late = [(slot.number, why) for slot in self._processes if (why := self._deadlines.silence(slot, now))]
        fallen = [(number, f"{number} {why} {self.where}") for number, why in late if not self.servers.has(number)]
        said += self._drop(fallen, now, fence=True)
        for number, why in late:
            if self.servers.has(number):
                said += self.server_lost([number], f"{why} {self.where}", now, fence=True)
        return said

    def _fence_late(self, now: float) -> list[Decision]:
        if not self.running:
            return []
        slow, limit_s = self._deadlines.late(self._member_slots(), now)
        told = f"is alive, but {limit_s:g} s late {self.where}"
        if slow and (absent := self.servers.absent()):
            return self.server_lost(absent, told, now, fence=True)
        return self._drop([(slot.number, f"{slot.number} {told}") for slot in slow], now, fence=True)

    def _mend(self, now: float) -> list[Decision]:
        why = self._deadlines.unexplained(now)
        if not why or not self.running:
            return []
        if self._breaks >= FEW_BREAKS and (absent := self._deadlines.absent(self._member_slots())):
            told = f"is alive, but does not come to where the others meet {self.where}"
            fallen = [(number, f"{number} {told}") for number in absent]
            return self._drop(fallen, now, fence=True) if self._deadlines.is_long_broken(now) else []
        self._breaks += 1
        if self._breaks > MOST_BREAKS:
            return self._end(1, f"the workers lost each other {self._breaks} times {self.where}; the last: {why}")
        return [Say(f"the workers lost each other {self.where} ({why}); they meet again"), *self._regroup(why, now)]
