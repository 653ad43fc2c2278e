"""Who belongs to an elastic job, and which steps are done: events in, decisions out, no process and no clock.

    members compute ─▶ READY of all, with equal checks ─▶ Commit (once, ever) ─▶ joining workers, if there are any
    members enter a loop ─▶ all stand at its first step ─▶ Begin ─▶ joining workers, if there are any
    a death, a silence, a difference ─▶ Generation: a new one, of those who are left, redoes the step

| after a loss, left are                          | then                                                            |
|-------------------------------------------------|-----------------------------------------------------------------|
| members who have the state                      | they meet again and redo the step; a replacement may start      |
| fewer of them than --min-workers                | the job ends with code 4                                        |
| none that has the state                         | all start anew, where that is allowed and enough can            |
| none that has it, and some have finished        | the job ends; the launcher judges                               |
| all members: the lost one had not joined        | there is no new generation; it is only said                     |

`Membership` asks `SlotTable` which slots can have a process and who waits to join, `CommittedSteps` whether the READYs
of all agree, and `FailureDetector` whose time is up.

Only the coordinator has a `Membership`, so there is one place where a step is committed. What a process says counts
only as long as it stands in its slot: a fenced one is never heard again. `now` is the caller's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from paceline.elastic.decisions import (
    LAST_UPDATE,
    TOO_FEW_LEFT,
    Begin,
    Commit,
    Decision,
    End,
    Fence,
    Generation,
    Refuse,
    Rewind,
    Rules,
    Say,
    StartAnew,
)
from paceline.elastic.failure_detector import FailureDetector, Finding, JobView, Lost, Retry
from paceline.elastic.slots import (
    MOST_STARTS,
    PRESENT,
    Facts,
    Ready,
    Slot,
    SlotTable,
    Standing,
    named,
    workers,
)

WHOLE_STEP = 1 << 62
"""As the update of a step that is done with all its updates."""


class CommittedSteps:
    """Which steps are committed, and what the READYs of all members say of the next one.

    | all are ready                            | found   | then                                              |
    |------------------------------------------|---------|---------------------------------------------------|
    | for one step, with equal checks          | nothing | it is committed, once and for ever                |
    | for one step, most with equal checks     | Lost    | those who differ are out: silent corruption       |
    | for one step, no check has a majority    | Retry   | it is done again; the second time in a row: End   |
    | for different steps                      | End     | the job ends                                      |

    A step may be committed in several updates, so a place is (step, update). Places only grow, but for `take_up`: a
    loop begins where a checkpoint has brought the workers to.
    """

    def __init__(self) -> None:
        self._committed = (0, WHOLE_STEP)
        self._furthest = (0, 0)
        self.is_new = False
        """The last one: no earlier start of the job had come so far."""
        self._ties = 0
        self._raised_in: set[tuple[tuple[int, int], bool]] = set()

    @property
    def last(self) -> int:
        """The last one that is committed."""
        return self._committed[0]

    def is_behind(self, ready: Ready) -> bool:
        """Whether it is for a place that is committed."""
        return ready.place <= self._committed

    def where(self, *, in_loop: bool, running: bool) -> str:
        """What is being worked on, in words."""
        step, update = self._committed
        if in_loop:
            return f"in step {step + 1 if update in (0, LAST_UPDATE, WHOLE_STEP) else step}"
        if step:
            return f"after step {step}"
        return "before its first step" if running else "while starting"

    def take_up(self, said: Mapping[int, int], *, first: bool) -> Rewind | End | None:
        """The loop begins where all, by slot, say: at the step that a checkpoint left, or that was last."""
        if len(set(said.values())) > 1:
            told = ", ".join(f"worker {number} after step {at}" for number, at in said.items())
            return End(1, f"the workers begin at different steps ({told}); they loaded different checkpoints?")
        step = next(iter(said.values()))
        elsewhere = step != self.last
        if elsewhere:
            self._committed = (step, WHOLE_STEP)
        return Rewind(step) if elsewhere or first else None

    def begin_anew(self) -> None:
        """All start again, and will say where."""
        self._ties = 0

    def failed_before(self, *, at_start: bool = False) -> bool:
        """The code of a script failed in the step that is being worked on, or before it: not for the first time?"""
        place = self._committed, at_start
        again = place in self._raised_in
        self._raised_in.add(place)
        return again

    def commit_if_equal(self, readies: Mapping[int, Ready]) -> Finding | None:
        """All are ready, by slot: for the same step, and with the same result? Then it is committed."""
        if len({ready.place for ready in readies.values()}) > 1:
            told = ", ".join(f"worker {number} for step {ready.step}" for number, ready in readies.items())
            return End(1, f"the workers are ready for different steps: {told}")
        first = next(iter(readies.values()))
        checks = {number: ready.check for number, ready in readies.items() if ready.check}
        if len(set(checks.values())) > 1:
            return self._disagree(first.step, checks)
        self._committed = first.place
        self._ties = 0
        self.is_new, self._furthest = first.place > self._furthest, max(first.place, self._furthest)
        return None

    def _disagree(self, step: int, checks: dict[int, int]) -> Finding:
        """Full copies that should be equal are not: what the majority has is right."""
        most, holders = Counter(checks.values()).most_common(1)[0]
        if holders * 2 > len(checks):
            right = named([number for number, check in checks.items() if check == most])
            how = f"weights differ from those of {right} in step {step}: silent corruption"
            return Lost({n: f"worker {n}'s {how}" for n, check in checks.items() if check != most})
        self._ties += 1
        both = f"the weights of {named(list(checks))} differ in step {step}"
        if self._ties > 1:
            return End(1, f"{both}, twice: silent corruption, and no majority has the right ones")
        why = f"{both}; the step is done again"
        return Retry(why, said=why)


class Membership:
    def __init__(self, size: int, rules: Rules, servers: int = 0) -> None:
        self.rules = rules
        self.table = SlotTable(size, servers, rules)
        self.generation = 1
        self.running = False
        """Everyone has entered the loop. Who falls before that takes the others along: see `starts_anew`."""
        self.over = False
        self._leaving = False  # members have gone because the job was asked to stop
        self._main = 0  # of all workers, who reports
        self._steps = CommittedSteps()
        self._detector = FailureDetector(rules)

    @property
    def slots(self) -> list[Slot]:
        return self.table.workers

    @property
    def stopping(self) -> bool:
        return self.table.stopping

    def stop(self) -> None:
        """The job was asked to stop: no process is replaced any more."""
        self.table.stopping = True

    @property
    def members(self) -> tuple[int, ...]:
        """Of the current generation; before it has begun, those that started."""
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
        self.table[slot].heard_at = now

    def beat(self, slot: int, now: float, *, ending: bool = False) -> list[Decision]:
        """A heartbeat; the last one says that the script has ended, and what is left of the process may take long."""
        one = self.table[slot]
        one.heard_at, one.beating, one.ending = now, True, ending
        return []

    def computes(self, slot: int, now: float) -> list[Decision]:
        """It says nothing, and was seen to use a processor."""
        self.table[slot].computed_at = now
        return []

    def entered(self, slot: int, loop: int, step: int, facts: Facts, now: float) -> list[Decision]:
        one = self.slots[slot]
        if not self._counts(one):
            return []
        one.standing, one.loop, one.in_loop, one.entered_at, one.facts = Standing.MEMBER, loop, True, step, facts
        one.entered_in = self.generation
        one.has_joined = True
        members = self._member_slots()
        if len(members) < self.table.starters and not self.running:
            return []  # a worker fell on the way here
        here = {(other.standing, other.in_loop, other.loop, other.entered_in) for other in members}
        if here != {(Standing.MEMBER, True, loop, self.generation)}:
            return []
        first, self.running = not self.running, True
        said = {other.number: other.entered_at for other in members if other.entered_at is not None}
        taken_up = self._steps.take_up(said, first=first)
        begun = self._act_on(taken_up, now) if taken_up else []
        if self.over:
            return begun
        self.table.begin_loop(first=first)
        begun.append(Begin(loop, self.members))
        called, unreachable = self.table.call_in(loop)
        too_late = {number: f"worker {number} came too late for its loop" for number in unreachable}
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
        self._detector.one_is_ready(now)
        members = self._member_slots()
        readies = {other.number: other.ready for other in members if other.ready is not None}
        if len(readies) < len(members):
            return []
        found = self._steps.commit_if_equal(readies)
        more = all(ready.more for ready in readies.values())
        return self._act_on(found, now) if found else self._commit(ready, now, more=more)

    def _commit(self, ready: Ready, now: float, *, more: bool) -> list[Decision]:
        """`more`: no worker's loop ends with this step."""
        if self._steps.is_new:
            self.table.got_on()
        self._detector.step_counts()
        self.table.step_counts(more=more)
        for slot in self._member_slots():
            slot.ready = None
        commit = Commit(ready.step, ready.update, self.generation, self.members, self.table.serving)
        return [commit, *(self._admit(now) if more else [])]

    def failed(self, slot: int, generation: int, why: str, now: float) -> list[Decision]:
        """Communication broke, though no process has died so far as the slot knows."""
        if self.table[slot].standing is Standing.MEMBER and generation == self.generation:
            self._detector.complains(slot, f"{self.table[slot].name}: {why}", now)
        return []

    def hung(self, slots: Sequence[int], how: str, now: float) -> list[Decision]:
        """Members that are alive, and for which the others have waited in vain."""
        if not self.running or self.over or self._leaving:
            return []
        late = [self.slots[slot] for slot in slots if self.slots[slot].standing is Standing.MEMBER]
        return self._act_on(self._view.lost(late, how), now) if late else []

    def state_lost(self, slot: int, generation: int, why: str) -> list[Decision]:
        """A part of the state has gone with the only host that had it: as if no worker were left."""
        here = self.slots[slot].standing is Standing.MEMBER and generation == self.generation
        return self._start_anew(why) if here and self.running and not self.over else []

    def grouped(self, slot: int, generation: int) -> list[Decision]:
        one = self.table[slot]
        if one.standing is not Standing.MEMBER or generation != self.generation:
            return []
        came = self.table.arrive(one)
        if all(other.grouped for other in self._member_slots()):
            self._detector.all_have_met()
        return [Say(f"{one.name} {came} after step {self.step}")] if came else []

    def asks_to_join(self, slot: int, loop: int, facts: Facts) -> list[Decision]:
        """It stands in front of this loop; 0: of whichever the members are in."""
        one = self.table[slot]
        if one.standing not in (Standing.STARTING, Standing.WAITING) or not self.running:
            return []
        if 0 < loop < one.called_to:  # said before it heard that it is to skip this one
            return []
        members = self._member_slots()
        known = members[0].facts if members else {}
        if unlike := self.table.ask(one, loop, facts, known):
            why = f"{one.name}'s replacement does not fit: {unlike}"
            return [Refuse(slot, why), Say(f"{why}; its place stays empty")]
        now_in = max((member.loop for member in members if member.in_loop), default=0)
        return [self.table.call(one, now_in)] if 0 < loop < now_in else []

    def _admit(self, now: float) -> list[Decision]:
        """Those who wait in front of the loop that the members are in, and servers."""
        loop = self._member_slots()[0].loop
        who = self.table.admit(loop)
        return self._regroup(f"{who} joined after step {self.step}", now, admitting=True) if who else []

    # ---- what happens to them -----------------------------------------------------------------------------

    def raised(self, slot: int, how: str, now: float, *, cause: bool = True) -> list[Decision]:
        """An exception escaped the script; the process will end in a moment. `cause`: it is not another's fault."""
        return self._drop({slot: f"{self.table[slot].name} {how}"}, now, code_failed=cause)

    def died(self, slot: int, how: str, now: float, *, by_code: bool = False) -> list[Decision]:
        """Its process is gone; `by_code`: by an exit that the script chose."""
        one = self.table[slot]
        decided = self._drop({slot: f"{one.name} {how}"}, now, code_failed=by_code)
        one.vacate()
        return [*decided, *self._refill(now)]

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

    def server_ended_well(self, rank: int, how: str, now: float) -> list[Decision]:
        """All workers had said goodbye; or so it took it."""
        if self._may_join():
            return self.died(rank, how, now)
        self.table[rank].standing = Standing.FINISHED
        return []

    def is_missed(self, slot: int) -> bool:
        """Of one that ended well: whether the generation that it belonged to is that of the others still."""
        one = self.slots[slot]
        return not self.running or (one.standing is Standing.FINISHED and one.ended_in == self.generation)

    def went_as_asked(self, slot: int) -> None:
        """The job was asked to stop, and it did: no worker regroups any more, and only the stop has a deadline."""
        self._leaving = self._leaving or self.slots[slot].standing is Standing.MEMBER

    @property
    def starts_anew(self) -> bool:
        """Another start answers who falls before all have met; at the first one that is the launcher's to judge."""
        return not self.running and not self.over and self.table.starts > 0 and self.table.restarts

    def can_lose(self, slots: Collection[int]) -> bool:
        """Whether their host may go: at the first start all are waited for, and a fault is the launcher's to judge."""
        missed = any(self.slots[number].standing in PRESENT for number in slots)
        return not self.over and (self.running or self.table.starts > 0 or not missed)

    def host_lost(self, slots: Collection[int], why: str, now: float) -> list[Decision]:
        """All at once; no process can be started there any more."""
        there = {number: "went with it" for number in slots if self.slots[number].standing in PRESENT}
        self.table.host_lost(slots)
        if there and not self.running:
            return self._start_anew(why)
        decided = self._drop(there, now, said=why)
        for number in slots:
            if self.slots[number].standing is not Standing.FINISHED:
                self.slots[number].vacate()
        return decided

    def host_came(self, slots: Collection[int], who: str, now: float) -> list[Decision]:
        """A host has come that can start processes in these slots, which none has now."""
        self.table.host_came(slots)
        its = f"its {workers(len(slots))} {'join' if len(slots) > 1 else 'joins'}"
        return [Say(f"{who}; {its} after a step"), *self._refill(now)]

    # ---- what follows from a loss -------------------------------------------------------------------------

    def _drop(
        self, fallen: Mapping[int, str], now: float, *, fence: bool = False, code_failed: bool = False, said: str = ""
    ) -> list[Decision]:
        """Take processes out of the job, by slot with what is said of each, and go on with those who are left.

        All of them are workers, or all are servers.
        """
        belonged = {*self.members, *self.table.serving}
        lost = self.table.lose(fallen, now, fence=fence)
        if not lost:
            return [Say(said)] if said else []
        decided: list[Decision] = [Fence(number) for number in lost] if fence else []
        what = said or "; ".join(fallen[number] for number in lost)
        if self.over:
            return decided
        if not self.running:
            return [*decided, *self._fell_at_start(what, code_failed=code_failed, fence=fence)]
        if belonged.isdisjoint(lost):
            return [*decided, *self._go_on_without_waiting(what, lost)]
        if self.table[lost[0]].is_server:
            return [*decided, *self._go_on_without_servers(what, lost, now)]
        if code_failed and self._steps.failed_before():
            return [*decided, *self._end(None, "the same step failed before: it is the code, not the machine")]
        return [*decided, *self._go_on_without_members(what, lost, now)]

    def _go_on_without_members(self, what: str, lost: Sequence[int], now: float) -> list[Decision]:
        """`what` befell workers of whom one at least was a member."""
        left = self._member_slots()
        if all(slot.joining for slot in left):
            if any(slot.standing is Standing.FINISHED for slot in self.slots):
                return self._end(None, "")
            return self._start_anew(f"{what}; no worker is left")
        if len(left) < self.rules.min_workers:
            rest = f"{workers(len(left))} left, and --min-workers is {self.rules.min_workers}"
            return self._end(TOO_FEW_LEFT, f"{what}; {rest}")
        goes_on = f"{workers(len(left))} {'go on' if len(left) > 1 else 'goes on'}"
        return [Say(f"{what}; {goes_on}{self._replacement_of(lost)}"), *self._regroup(what, now)]

    def _go_on_without_servers(self, what: str, lost: Sequence[int], now: float) -> list[Decision]:
        staying = [slot.number for slot in self._member_slots() if not slot.joining]
        said = Say(f"{what}; {self.table.instead(staying)}{self._replacement_of(lost)}")
        return [said, *(self._regroup(what, now) if staying else [])]

    def _go_on_without_waiting(self, what: str, lost: Sequence[int]) -> list[Decision]:
        """It befell processes that had not joined; of those who were refused that is known."""
        slots = [self.table[number] for number in lost]
        if all(slot.closed for slot in slots):
            return []
        and_so = self._replacement_of(lost) or ("" if slots[0].away else "; its place stays empty")
        return [Say(f"{what}, before it had joined{and_so}")]

    def _replacement_of(self, lost: Sequence[int]) -> str:
        replaced = self._in_loop() and any(self.table.may_refill(self.table[number]) for number in lost)
        return ", a replacement starts" if replaced else ""

    def _fell_at_start(self, what: str, *, code_failed: bool, fence: bool) -> list[Decision]:
        """Before all have met none has the state, so that none can go on without the others."""
        if not self.starts_anew:
            return [Say(f"{what}; it is stopped")] if fence else []
        if code_failed and self._steps.failed_before(at_start=True):
            return self._end(None, "a start failed so before: it is the code, not the machine")
        return self._start_anew(what)

    def _start_anew(self, what: str) -> list[Decision]:
        """No copy of the state is left: begin again, from a checkpoint if the script resumes from one."""
        here, fewest = len(self.table.here), self.rules.min_workers
        if not self.table.may_begin_anew():
            often = f", after {MOST_STARTS} starts anew without a new step" if self.table.restarts else ""
            return self._end(TOO_FEW_LEFT, f"{what}{often}")
        if here < fewest:
            rest = f"{workers(here)} could start anew, and --min-workers is {fewest}"
            return self._end(TOO_FEW_LEFT, f"{what}; {rest}")
        self.generation, self.running = 1, False
        self._steps.begin_anew()
        self._detector.forget()
        members = self.table.begin_anew()
        self._main = members[0]
        return [Say(f"{what}: {self.table.begins_in_words()}"), StartAnew(self.table.starts, members)]

    def _regroup(self, why: str, now: float, *, admitting: bool = False) -> list[Decision]:
        """A new generation, in which the step is done again; or, `admitting`, the next one begins."""
        if not admitting:
            self.table.send_back()
        self.generation += 1
        self._detector.begin_generation(now)
        members = self._member_slots()
        self.table.begin_generation(members)
        joining = tuple(slot.number for slot in members if slot.joining)
        staying = [slot.number for slot in members if not slot.joining]
        if self._main not in staying:  # and who comes back does not take it back: each handing over costs
            self._main = staying[0]
        return [Generation(self.generation, self.members, joining, self.step, why, self._main, self.table.serving)]

    def _refill(self, now: float) -> list[Decision]:
        """Fresh processes for vacant slots."""
        return [*self.table.refill(now)] if self._may_join() else []

    def _may_join(self) -> bool:
        """Whether there is a loop that a new process could join."""
        return self.running and not self.over and self._in_loop()

    def _end(self, code: int | None, why: str) -> list[Decision]:
        self.over = True
        return [End(code, why)]

    # ---- what is found wrong ------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Decision]:
        """What time alone brings; call it a few times a second."""
        detector = self._detector
        if self.over or self._leaving or not detector.may_judge(self._view, now):
            return []
        decided: list[Decision] = []
        for look in (detector.lingering, detector.silent, detector.late, detector.disconnected):
            starts = self.table.starts
            for found in [] if self.over else look(self._view, now):
                if self.table.starts == starts:  # who was found silent before all start anew is gone with the others
                    decided += self._act_on(found, now)
        return decided

    @property
    def _view(self) -> JobView:
        return JobView(self.slots, self._member_slots(), self.table.servers, self.running, self.where)

    def _act_on(self, found: Finding | Decision, now: float) -> list[Decision]:
        """A finding is answered; what is a decision already stands."""
        match found:
            case Lost(how):
                return self._drop(how, now, fence=True)
            case Retry(why, said):
                return [Say(said), *self._regroup(why, now)]
            case End(code, why):
                return self._end(code, why)
            case _:
                return [found]
