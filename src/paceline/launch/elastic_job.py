"""An elastic job as the coordinator runs it: `Membership` decides, and here its decisions are carried out.

    worker says elastic.ready, …, heartbeat ─┐
    a worker raised, exited; a host is lost  ├─▶ Membership ─▶ decisions ─▶ ledger, pushes, kills, starts, the end
    a tick, ten times a second               ┘

Until every worker has entered its loop a fault is judged as in any other job: the methods answer False, and whoever
called goes on as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol

from paceline.elastic.decisions import (
    Begin,
    Commit,
    Decision,
    End,
    Fence,
    Generation,
    Refuse,
    Replace,
    Rewind,
    Rules,
    Say,
    StartAnew,
    Wait,
)
from paceline.elastic.membership import Membership
from paceline.elastic.slots import Ready, Standing
from paceline.elastic.step_log import StepLog
from paceline.launch.control_channel import Body, KeyValues
from paceline.launch.ending import good_end
from paceline.launch.far_hosts import FarHosts
from paceline.launch.hands import Hands
from paceline.launch.stopping import obeyed
from paceline.launch.verdict import ENDED_WELL, Outcome, Process, happened, judge

TICK_S = 0.1
SERVERS_LEAVE_S = 2.0


class Chief(Protocol):
    """What an elastic job needs of its coordinator."""

    processes: list[Process]
    keys: KeyValues
    far: FarHosts

    @property
    def is_over(self) -> bool: ...
    def clock(self) -> float: ...
    def announce(self, line: str) -> None: ...
    def decide(self, outcome: Outcome) -> None: ...
    def hands_of(self, rank: int) -> Hands: ...
    def all_hands(self) -> Iterable[Hands]: ...


class ElasticJob:
    def __init__(self, size: int, rules: Rules, ledger: StepLog, chief: Chief, servers: int = 0) -> None:
        self.membership = Membership(size, rules, servers)
        self._ledger = ledger
        self._chief = chief
        self._to_start: dict[int, int] = {}
        self._starters: list[tuple[int, int]] | None = None
        self._told: set[tuple[str, str]] = set()
        self._unfinished: list[Process] = []
        """Those whose code failed after their loop, where nobody does their work again."""

    async def tick(self) -> None:
        """For as long as the job lasts."""
        while True:
            await asyncio.sleep(TICK_S)
            if not self._chief.is_over:
                now = self._chief.clock()
                for slot in self._chief.far.out_of_earshot():
                    self.membership.count_anew(slot, now)
                self._carry_out(self.membership.tick(now))
                self._dismiss_servers(now)

    def _dismiss_servers(self, now: float) -> None:
        """All workers have ended well, and a server waits where the last generation meets, for nobody."""
        processes = self._chief.processes
        left = [process for process in processes if process.is_server and not process.ended]
        ends = [process.ended_at for process in processes if not process.is_server and process.ended_at is not None]
        if not left or not ends or not self.membership.running or self.membership.members:
            return
        if now - max(ends) > SERVERS_LEAVE_S:
            for process in left:
                process.lost = True
            if (outcome := good_end(processes)) is not None:
                self._chief.decide(outcome)

    def close(self) -> None:
        self._ledger.close()

    def stop(self) -> None:
        """The job was asked to stop; nobody is replaced any more."""
        self.membership.stop()

    # ---- what workers say ---------------------------------------------------------------------------------

    def is_leaving(self, slot: int) -> bool:
        """All start anew, and its old process has not gone yet: nothing that this one says counts any more."""
        return slot in self._to_start

    def told(self, slot: int, kind: str, body: Body) -> None:
        if self.is_leaving(slot):
            return
        now, members = self._chief.clock(), self.membership
        match kind:
            case "heartbeat":
                if body.get("computing"):  # said by the supervisor of its host
                    self._carry_out(members.computes(slot, now))
                else:
                    self._carry_out(members.beat(slot, now, ending=bool(body.get("ending"))))
            case "elastic.here":
                pass  # the control channel remembers where it listens
            case "elastic.enter":
                if int(body["generation"]) == members.generation:  # else it hears of the newer one, and enters in that
                    facts = dict(body["facts"])
                    self._carry_out(members.entered(slot, int(body["loop"]), int(body["step"]), facts, now))
            case "elastic.leave":
                self._carry_out(members.left(slot, int(body["loop"])))
            case "elastic.ready":
                ready = Ready(int(body["step"]), int(body["update"]), int(body["check"]), bool(body["more"]))
                self._chief.processes[slot].step = ready.step
                self._carry_out(members.readied(slot, int(body["generation"]), ready, now))
            case "elastic.failed":
                self._carry_out(members.failed(slot, int(body["generation"]), str(body["why"]), now))
            case "elastic.lost":
                self._carry_out(members.state_lost(slot, int(body["generation"]), str(body["why"])))
            case "elastic.join":
                self._carry_out(members.asks_to_join(slot, int(body["loop"]), dict(body["facts"])))
            case "elastic.grouped":
                self._carry_out(members.grouped(slot, int(body["generation"])))
            case _:
                raise ValueError("this supervisor does not know it")

    # ---- what happens to them; True where that is all there is to do ---------------------------------------

    def started(self, slot: int) -> None:
        self.membership.count_anew(slot, self._chief.clock())

    def is_missed(self, process: Process) -> bool:
        """It has ended, and those who are left have not met since without it."""
        return self.membership.is_missed(process.rank)

    def raised(self, process: Process) -> bool:
        if self.is_leaving(process.rank):
            return True
        assert process.raised is not None
        cause, members = not process.raised.is_consequence, self.membership
        if self._goes_as_asked(process) or self._chief.is_over:
            return False
        if not members.running and not members.starts_anew:
            return False
        if not members.running and not cause:
            return True  # of whose end it is the consequence we hear in a moment; if of no other's, then of its own
        how = happened(process, self._chief.processes, where=members.where)
        now = self._chief.clock()
        if not process.is_server:
            self._remember(process, by_code=cause)
        decisions = members.raised(process.rank, how, now, cause=cause)
        self._lose(process, decisions)
        if any(isinstance(decision, Say) for decision in decisions) and self._is_news(process):
            self._chief.announce(process.raised.traceback.rstrip())
        return True

    def exited(self, process: Process) -> bool:
        slot, members = process.rank, self.membership
        if self._chief.is_over:
            return False
        if slot in self._to_start:
            self._start(slot, self._to_start.pop(slot))
            return True
        well = process.status in ENDED_WELL and process.raised is None
        answered = members.running or (members.starts_anew and not well)
        if process.is_server:
            return answered and self._server_exited(process, well=well)
        if self._goes_as_asked(process):
            # A replacement is missed by nobody; one that starts with the others has to be there like them.
            process.lost = members.running and members.slots[slot].standing is not Standing.MEMBER
            members.went_as_asked(slot)
            return False
        if not answered:
            return False
        if well and not members.slots[slot].in_loop:
            self._carry_out(members.ended_well(slot, self._chief.clock()))
            self._leave_replacements()
            return False
        by_code = _by_code(process)
        self._remember(process, by_code=by_code)
        how = happened(process, self._chief.processes, where=members.where)
        self._lose(process, members.died(slot, how, self._chief.clock(), by_code=by_code))
        far = self._chief.far
        if (there := far.neighbours(slot)) and (why := members.table.why_idle(there)):
            far.send_away(far.host_of(slot), f"none of its workers can join ({why})")
        return True

    def _server_exited(self, process: Process, *, well: bool) -> bool:
        """Where no worker is left to go on, the launcher looks whether all is well."""
        how = happened(process, self._chief.processes, where=self.membership.where)
        now, members = self._chief.clock(), self.membership
        if well:
            decisions = members.server_ended_well(process.rank, how, now)
        else:
            decisions = members.died(process.rank, how, now, by_code=_by_code(process))
        if decisions or not well:
            self._lose(process, decisions)
        return process.lost and bool(members.members)

    def can_lose(self, slots: Sequence[int]) -> bool:
        """Whether the job goes on without the host of these slots."""
        return self.membership.can_lose(slots) and not self._chief.is_over

    def host_lost(self, host: int, slots: Sequence[int], why: str) -> bool:
        if not self.can_lose(slots):
            return False
        for slot in slots:
            self._chief.processes[slot].lost = True
            self._to_start.pop(slot, None)
        self._carry_out(self.membership.host_lost(slots, f"host {host} is lost ({why})", self._chief.clock()))
        return True

    def make_room(self, size: int) -> None:
        """So many slots in all, for a host that is about to come."""
        for slot in self.membership.table.add(size - len(self.membership.slots)):
            self._chief.processes.append(Process(slot, lost=True))

    def host_came(self, host: int, slots: Sequence[int], *, is_new: bool) -> None:
        for slot in slots:
            self._chief.processes[slot] = Process(slot, lost=True)  # until it is started
        who = f"host {host} {'has come' if is_new else 'is back'}"
        self._carry_out(self.membership.host_came(slots, who, self._chief.clock()))

    def _remember(self, process: Process, *, by_code: bool) -> None:
        """A loop that a worker leaves by an exception is left; only others who are in it tell whether it was over."""
        slots = self.membership.slots
        is_member = slots[process.rank].standing is Standing.MEMBER
        if by_code and is_member and not any(slot.in_loop for slot in slots):
            self._unfinished.append(process)

    def _goes_as_asked(self, process: Process) -> bool:
        return self.membership.stopping and obeyed(process)

    def _lose(self, process: Process, decisions: list[Decision]) -> None:
        """The job goes on without the process, or ends because of it."""
        if any(isinstance(decision, End) and decision.code is None for decision in decisions):
            process.failed_as = 0
            if process.raised is not None and not self._is_news(process):
                process.raised = replace(process.raised, traceback="")  # told when it happened the first time
        else:
            process.lost = True
        self._carry_out(decisions)

    def _is_news(self, process: Process) -> bool:
        """An exception whose traceback has not been shown."""
        raised = process.raised
        if raised is None or raised.ours or not raised.traceback or (raised.type, raised.text) in self._told:
            return False
        self._told.add((raised.type, raised.text))
        return True

    def _leave_replacements(self) -> None:
        """All members have ended well: nobody is left for a replacement to join."""
        if self.membership.members:
            return
        late = [slot for slot in self.membership.slots if slot.standing is not Standing.FINISHED]
        serving = (Standing.MEMBER, Standing.FINISHED)
        late += [slot for slot in self.membership.table.servers if slot.standing not in serving]
        for slot in late:
            self._chief.processes[slot.number].lost = True
        for process in self._unfinished:
            if process in self._chief.processes:
                process.lost, process.failed_as = False, 0
                self._chief.decide(judge(self._chief.processes))

    # ---- decisions ----------------------------------------------------------------------------------------

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        goes_on = any(isinstance(one, Commit | Begin) for one in decisions)  # and who waited may join
        joined = next((one.number for one in decisions if isinstance(one, Generation) and goes_on), None)
        for decision in decisions:
            match decision:
                case Commit():
                    self._commit(decision, then=joined)
                case Begin(loop, slots):
                    self._push(slots, "elastic.begin", {"loop": loop, "then": joined})
                case Generation(number, slots):
                    self._chief.keys.begin(number)
                    self._push((*slots, *decision.servers), "elastic.generation", decision.as_message())
                case Fence(slot):
                    self._chief.processes[slot].fenced = True
                    self._chief.hands_of(slot).fence(slot)
                case Replace(slot, incarnation):
                    self._start(slot, incarnation)
                case Refuse(slot, why):
                    self._push([slot], "elastic.refused", {"why": why})
                case Wait(slot, loop):
                    self._push([slot], "elastic.wait", {"loop": loop})
                case Rewind(step):
                    self._ledger.rewind(step)
                case StartAnew(_, members):
                    self._start_anew(members)
                case Say(line):
                    self._chief.announce(f"paceline: {line}")
                case End(code, why):
                    said = (f"paceline: {why}",) if why else ()
                    judged = Outcome(code) if code is not None else judge(self._chief.processes)
                    self._chief.decide(replace(judged, lines=(*judged.lines, *said)))

    def _commit(self, commit: Commit, then: int | None) -> None:
        """`then`: the generation in which somebody joins after this step; all members change to it there."""
        self._ledger.commit(commit)
        body: Body = {"generation": commit.generation, "step": commit.step, "update": commit.update, "then": then}
        self._push(commit.members, "elastic.commit", body)

    def _push(self, slots: Sequence[int], kind: str, body: Body) -> None:
        """One line to each host, for all of its workers."""
        for hands, there in groupby(sorted(slots), key=self._chief.hands_of):
            hands.push(list(there), kind, body)

    def _start(self, slot: int, incarnation: int) -> None:
        self._chief.processes[slot] = Process(slot, self._chief.processes[slot].server_index)
        self._chief.hands_of(slot).start(slot, incarnation, self._starters if incarnation == 0 else None)

    def _start_anew(self, members: Sequence[int]) -> None:
        """In the slots of the hosts that are there, once what is in them has gone."""
        self._chief.keys.clear()
        for hands in self._chief.all_hands():
            hands.empty_vault()
        # Said even where it is everybody: hosts have joined since, of which the others' seats know nothing.
        self._starters = [(slot, self._chief.far.host_of(slot)) for slot in members]
        for slot in (*members, *self.membership.table.serving):
            process = self._chief.processes[slot]
            if process.ended or (process.lost and process.pid is None):
                self._start(slot, 0)
            else:
                self._to_start[slot] = 0
                self._chief.hands_of(slot).fence(slot)


def _by_code(process: Process) -> bool:
    """It has ended by an exit that the script chose."""
    return process.raised is None and (process.status or 0) >= 0
