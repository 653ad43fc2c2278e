"""An elastic job as the coordinator runs it: `Membership` decides, and here its decisions are carried out.

    workers report elastic.ready, …, heartbeat ─┐
    a worker raised, exited; a host is lost     ├─▶ Membership ─▶ decisions ─▶ ledger, pushes, kills, starts, the end
    a tick, ten times a second                  ┘

Until every worker has entered its loop a fault is attributed as in any other job: the methods answer False, and the
coordinator goes on by the exit rules.

Late hosts join while the job runs: one that was lost and is back, or a further one.

    host 1                        coordinator
    ──── proved, its request ───▶ `rendezvous`: the same objections as at the start
                                  waits until the job runs, and until it has noticed that the old host 1 is lost
    ◀─── its slots, or why not ── `LateHosts`
    ──── ready: torch is imported, workers can be forked ─▶ `Membership.host_came`
    ◀─── start slot 2, slot 3 ───  they prepare alone and join after a step, as any replacement
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
from paceline.errors import LaunchError
from paceline.launch.agents import Agent, RemoteHosts
from paceline.launch.control import Body, KeyValueStore
from paceline.launch.exit_rules import stopped_as_asked, success
from paceline.launch.failure_attribution import ENDED_WELL, Outcome, Process, attribute_failure, what_happened
from paceline.launch.rendezvous import HostAssignment, HostRendezvous, JoinedHost

TICK_S = 0.1
SERVERS_LEAVE_S = 2.0
LOOK_EVERY_S = 0.1
NOTICED_S = 2.0
"""On top of the heartbeat's deadline: for us to notice that a host is lost, whose supervisor noticed it first."""


class ElasticCoordinator(Protocol):
    """What an elastic job needs of its coordinator."""

    processes: list[Process]
    keys: KeyValueStore
    remote_hosts: RemoteHosts

    @property
    def is_over(self) -> bool: ...
    def clock(self) -> float: ...
    def log(self, line: str) -> None: ...
    def announce(self, line: str) -> None: ...
    def decide(self, outcome: Outcome) -> None: ...
    def agent_of(self, rank: int) -> Agent: ...
    def all_agents(self) -> Iterable[Agent]: ...
    def listen_to(self, host: int) -> None: ...


class FixedJob:
    """A job that is not elastic: it ignores heartbeats, answers no fault itself, and can't lose a host."""

    running = False

    def report(self, slot: int, kind: str, body: Body) -> None:
        pass

    def started(self, slot: int) -> None:
        pass

    def raised(self, process: Process) -> bool:
        return False

    def exited(self, process: Process) -> bool:
        return False

    def is_leaving(self, slot: int) -> bool:
        return False

    def is_missed(self, process: Process) -> bool:
        return True

    def takes_part(self, slot: int) -> bool:
        return True

    def has_ended(self, generation: int | None) -> bool:
        return False

    def where_of(self, process: Process) -> str:
        return process.at_step

    def hung(self, processes: Sequence[Process], how: str) -> None:
        """The errors of those that waited end the job."""

    def can_lose(self, slots: Sequence[int]) -> bool:
        return False

    def host_lost(self, host: int, slots: Sequence[int], why: str) -> bool:
        return False

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


class ElasticJob:
    def __init__(
        self, size: int, rules: Rules, ledger: StepLog, coordinator: ElasticCoordinator, servers: int = 0
    ) -> None:
        self.membership = Membership(size, rules, servers)
        self._ledger = ledger
        self._coordinator = coordinator
        self._to_start: dict[int, int] = {}
        self._starters: list[tuple[int, int]] | None = None
        self._shown: set[tuple[str, str]] = set()
        """Exceptions whose traceback was announced."""
        self._ended_by_a_loss = 0
        """The last generation that did, and with it all before it."""
        self._unfinished: list[Process] = []
        """Processes whose code failed after their loop, where no other worker does their work again."""

    @property
    def running(self) -> bool:
        """Every worker has entered its loop."""
        return self.membership.running

    async def tick(self) -> None:
        """For as long as the job lasts."""
        while True:
            await asyncio.sleep(TICK_S)
            if not self._coordinator.is_over:
                now = self._coordinator.clock()
                for slot in self._coordinator.remote_hosts.slots_of_silent_hosts():
                    self.membership.count_anew(slot, now)
                self._carry_out(self.membership.tick(now))
                self._dismiss_servers(now)

    def _dismiss_servers(self, now: float) -> None:
        """All workers have ended well, and a server waits at a rendezvous that no worker will come to."""
        processes = self._coordinator.processes
        left = [process for process in processes if process.is_server and not process.ended]
        ends = [process.ended_at for process in processes if not process.is_server and process.ended_at is not None]
        if not left or not ends or not self.membership.running or self.membership.members:
            return
        if now - max(ends) > SERVERS_LEAVE_S:
            for process in left:
                process.lost = True
            if (outcome := success(processes)) is not None:
                self._coordinator.decide(outcome)

    def close(self) -> None:
        self._ledger.close()

    def stop(self) -> None:
        """The job was asked to stop; no worker is replaced any more."""
        self.membership.stop()

    # ---- reports of workers --------------------------------------------------------------------------------

    def is_leaving(self, slot: int) -> bool:
        """All workers start anew, and the old process of this slot has not ended yet: its messages are ignored."""
        return slot in self._to_start

    def report(self, slot: int, kind: str, body: Body) -> None:
        if self.is_leaving(slot):
            return
        now, members = self._coordinator.clock(), self.membership
        match kind:
            case "heartbeat":
                if body.get("computing"):  # reported by the supervisor of its host
                    self._carry_out(members.computes(slot, now))
                else:
                    self._carry_out(members.beat(slot, now, ending=bool(body.get("ending"))))
            case "elastic.here":
                pass  # the control channel remembers where it listens
            case "elastic.enter":
                if int(body["generation"]) == members.generation:  # else it learns of the newer one, and enters in that
                    facts = dict(body["facts"])
                    self._carry_out(members.entered(slot, int(body["loop"]), int(body["step"]), facts, now))
            case "elastic.leave":
                self._carry_out(members.left(slot, int(body["loop"])))
            case "elastic.ready":
                ready = Ready(int(body["step"]), int(body["update"]), int(body["check"]), bool(body["more"]))
                self._coordinator.processes[slot].step = ready.step
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
                raise ValueError("unknown message kind; use one version of paceline on all hosts")

    # ---- starts, failures and exits of processes; True: handled here, False: the exit rules apply ----------

    def started(self, slot: int) -> None:
        self.membership.count_anew(slot, self._coordinator.clock())

    def is_missed(self, process: Process) -> bool:
        """It has ended, and the workers that are left have not regrouped since without it."""
        return self.membership.is_missed(process.rank)

    def takes_part(self, slot: int) -> bool:
        """Not a replacement that has yet to join."""
        return slot in self.membership.members or not self.membership.running

    def has_ended(self, generation: int | None) -> bool:
        """For the loss of a worker: then a wait in it failed for that, whatever its error says."""
        return generation is not None and generation <= self._ended_by_a_loss

    def where_of(self, process: Process) -> str:
        return f" {self.membership.where}" if self.membership.running else process.at_step

    def hung(self, processes: Sequence[Process], how: str) -> None:
        """The others have waited for them in vain, and go on without them."""
        if not self._coordinator.is_over:
            self._carry_out(self.membership.hung([one.rank for one in processes], how, self._coordinator.clock()))

    def raised(self, process: Process) -> bool:
        if self.is_leaving(process.rank):
            return True
        assert process.raised is not None
        cause, members = not process.raised.is_consequence, self.membership
        if self._goes_as_asked(process) or self._coordinator.is_over:
            return False
        if not members.running and not members.starts_anew:
            return False
        if not members.running and not cause:
            return True  # the process that caused it is reported in a moment; if there is none, its own exit is
        how = what_happened(process, self._coordinator.processes, where=members.where)
        now = self._coordinator.clock()
        if not process.is_server:
            self._remember(process, by_code=cause)
        decisions = members.raised(process.rank, how, now, cause=cause)
        self._lose(process, decisions)
        if any(isinstance(decision, Say) for decision in decisions) and self._is_news(process):
            self._coordinator.announce(process.raised.traceback.rstrip())
        return True

    def exited(self, process: Process) -> bool:
        slot, members = process.rank, self.membership
        if self._coordinator.is_over:
            return False
        if slot in self._to_start:
            self._start(slot, self._to_start.pop(slot))
            return True
        well = process.status in ENDED_WELL and process.raised is None
        answered = members.running or (members.starts_anew and not well)
        if process.is_server:
            return answered and self._server_exited(process, well=well)
        if self._goes_as_asked(process):
            # No worker waits for a replacement; one that starts with the others has to be there like them.
            process.lost = members.running and members.slots[slot].standing is not Standing.MEMBER
            members.went_as_asked(slot)
            return False
        if not answered:
            return False
        if well and not members.slots[slot].in_loop:
            self._carry_out(members.ended_well(slot, self._coordinator.clock()))
            self._leave_replacements()
            return False
        by_code = _by_code(process)
        self._remember(process, by_code=by_code)
        how = what_happened(process, self._coordinator.processes, where=members.where)
        self._lose(process, members.died(slot, how, self._coordinator.clock(), by_code=by_code))
        remote_hosts = self._coordinator.remote_hosts
        if (there := remote_hosts.neighbours(slot)) and (why := members.table.why_idle(there)):
            remote_hosts.send_away(remote_hosts.host_of(slot), f"none of its workers can join ({why})")
        return True

    def _server_exited(self, process: Process, *, well: bool) -> bool:
        """Where no worker is left to go on, the exit rules decide whether the job ended well."""
        how = what_happened(process, self._coordinator.processes, where=self.membership.where)
        now, members = self._coordinator.clock(), self.membership
        if well:
            decisions = members.server_ended_well(process.rank, how, now)
        else:
            decisions = members.died(process.rank, how, now, by_code=_by_code(process))
        if decisions or not well:
            self._lose(process, decisions)
        return process.lost and bool(members.members)

    def can_lose(self, slots: Sequence[int]) -> bool:
        """Whether the job goes on without the host of these slots."""
        return self.membership.can_lose(slots) and not self._coordinator.is_over

    def host_lost(self, host: int, slots: Sequence[int], why: str) -> bool:
        if not self.can_lose(slots):
            return False
        for slot in slots:
            self._coordinator.processes[slot].lost = True
            self._to_start.pop(slot, None)
        self._carry_out(self.membership.host_lost(slots, f"host {host} is lost ({why})", self._coordinator.clock()))
        return True

    def make_room(self, size: int) -> None:
        """So many slots in all, for a host that is about to join."""
        for slot in self.membership.table.add(size - len(self.membership.slots)):
            self._coordinator.processes.append(Process(slot, lost=True))

    def host_came(self, host: int, slots: Sequence[int], *, is_new: bool) -> None:
        for slot in slots:
            self._coordinator.processes[slot] = Process(slot, lost=True)  # until it is started
        who = f"host {host} {'has joined' if is_new else 'is back'}"
        self._carry_out(self.membership.host_came(slots, who, self._coordinator.clock()))

    def _remember(self, process: Process, *, by_code: bool) -> None:
        """A worker that raises has left its loop; only others that are still in the loop show that it was not over."""
        slots = self.membership.slots
        is_member = slots[process.rank].standing is Standing.MEMBER
        if by_code and is_member and not any(slot.in_loop for slot in slots):
            self._unfinished.append(process)

    def _goes_as_asked(self, process: Process) -> bool:
        return self.membership.stopping and stopped_as_asked(process)

    def _lose(self, process: Process, decisions: list[Decision]) -> None:
        """The job goes on without the process, or ends because of it."""
        if any(isinstance(decision, End) and decision.code is None for decision in decisions):
            process.failed_as = 0
            if process.raised is not None and not self._is_news(process):
                process.raised = replace(process.raised, traceback="")  # announced when it was first raised
        else:
            process.lost = True
        self._carry_out(decisions)

    def _is_news(self, process: Process) -> bool:
        """An exception whose traceback has not been shown."""
        raised = process.raised
        if raised is None or raised.ours or not raised.traceback or (raised.type, raised.text) in self._shown:
            return False
        self._shown.add((raised.type, raised.text))
        return True

    def _leave_replacements(self) -> None:
        """All members have ended well: no worker is left for a replacement to join."""
        if self.membership.members:
            return
        late = [slot for slot in self.membership.slots if slot.standing is not Standing.FINISHED]
        serving = (Standing.MEMBER, Standing.FINISHED)
        late += [slot for slot in self.membership.table.servers if slot.standing not in serving]
        for slot in late:
            self._coordinator.processes[slot.number].lost = True
        for process in self._unfinished:
            if process in self._coordinator.processes:
                process.lost, process.failed_as = False, 0
                self._coordinator.decide(attribute_failure(self._coordinator.processes))

    # ---- decisions ----------------------------------------------------------------------------------------

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        goes_on = any(isinstance(one, Commit | Begin) for one in decisions)  # and waiting workers may join
        joined = next((one.number for one in decisions if isinstance(one, Generation) and goes_on), None)
        for decision in decisions:
            match decision:
                case Commit():
                    self._commit(decision, then=joined)
                case Begin(loop, slots):
                    self._push(slots, "elastic.begin", {"loop": loop, "then": joined})
                case Generation(number, slots):
                    # Where a worker only joins, the members stay in the generation before until the next step begins.
                    self._coordinator.keys.forget_before(number - 1 if number == joined else number)
                    self._ended_by_a_loss = self._ended_by_a_loss if number == joined else number - 1
                    self._push((*slots, *decision.servers), "elastic.generation", decision.as_message())
                case Fence(slot):
                    self._coordinator.processes[slot].fenced = True
                    self._coordinator.agent_of(slot).fence(slot)
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
                    self._coordinator.announce(f"paceline: {line}")
                case End(code, why):
                    outcome = Outcome(code) if code is not None else attribute_failure(self._coordinator.processes)
                    lines = (f"paceline: {why}",) if why else ()
                    self._coordinator.decide(replace(outcome, lines=(*outcome.lines, *lines)))

    def _commit(self, commit: Commit, then: int | None) -> None:
        """`then`: the generation in which a worker joins after this step; all members change to it there."""
        self._ledger.commit(commit)
        body: Body = {"generation": commit.generation, "step": commit.step, "update": commit.update, "then": then}
        self._push(commit.members, "elastic.commit", body)

    def _push(self, slots: Sequence[int], kind: str, body: Body) -> None:
        """One message to each host, for all of its workers."""
        for agent, there in groupby(sorted(slots), key=self._coordinator.agent_of):
            agent.push(list(there), kind, body)

    def _start(self, slot: int, incarnation: int) -> None:
        self._coordinator.processes[slot] = Process(slot, self._coordinator.processes[slot].server_index)
        self._coordinator.agent_of(slot).start(slot, incarnation, self._starters if incarnation == 0 else None)

    def _start_anew(self, members: Sequence[int]) -> None:
        """In the slots of the hosts that are there, once what is in them has gone."""
        self._coordinator.keys.clear()
        for agent in self._coordinator.all_agents():
            agent.empty_memory()
        # Sent even where all slots start: hosts may have joined since, which the others' assignments don't list.
        self._starters = [(slot, self._coordinator.remote_hosts.host_of(slot)) for slot in members]
        for slot in (*members, *self.membership.table.serving):
            process = self._coordinator.processes[slot]
            if process.ended or (process.lost and process.pid is None):
                self._start(slot, 0)
            else:
                self._to_start[slot] = 0
                self._coordinator.agent_of(slot).fence(slot)


def _by_code(process: Process) -> bool:
    """It has ended by an exit that the script chose."""
    return process.raised is None and (process.status or 0) >= 0


class LateHosts:
    """Assigns slots to hosts that join an elastic job while it runs."""

    def __init__(self, assignment: HostAssignment, elastic: ElasticJob, coordinator: ElasticCoordinator) -> None:
        assert assignment.elastic is not None
        self._assignment, self._elastic, self._coordinator = assignment, elastic, coordinator
        self._seating = coordinator.remote_hosts.seating
        self._patience_s = assignment.elastic.heartbeat_timeout_s + NOTICED_S
        self._new: set[int] = set()

    async def accept(self, rendezvous: HostRendezvous) -> None:
        """For as long as the job lasts."""
        async with asyncio.TaskGroup() as waiting:
            while True:
                waiting.create_task(self._join(await rendezvous.late.get()))

    def ready(self, host: int) -> None:
        """It can start workers."""
        self._elastic.host_came(host, self._seating.slots_of(host), is_new=host in self._new)
        self._new.discard(host)

    async def _join(self, host: JoinedHost) -> None:
        number = host.request.host_rank
        try:
            await self._wait_for_slots(number)
            self._assign(number, host)
        except LaunchError as error:
            self._coordinator.log(f"paceline: refused host {number}: {error}")
            await host.refuse(str(error))
        except asyncio.CancelledError:
            host.link.abort()
            raise

    async def _wait_for_slots(self, host: int) -> None:
        """Until there may be slots for it; the host that waits has its own deadline."""
        since = self._coordinator.clock()
        while not self._elastic.membership.running or self._seating.is_there(host):
            if not self._elastic.membership.running:
                since = self._coordinator.clock()
            elif self._coordinator.clock() - since > self._patience_s:
                raise LaunchError(f"host {host} is there, and alive; give every host its own --host-rank")
            await asyncio.sleep(LOOK_EVERY_S)
        if self._elastic.membership.stopping or self._coordinator.is_over:
            raise LaunchError("the job is about to end")

    def _assign(self, number: int, host: JoinedHost) -> None:
        is_new = not self._seating.was_there(number)
        place = self._seating.take(number, host.workers)
        if is_new:
            self._new.add(number)
        self._elastic.make_room(self._seating.size)
        hosts = max(self._seating.most_hosts, self._assignment.hosts)
        assignment = replace(
            self._assignment,
            host_rank=number,
            hosts=hosts,
            first_rank=place.first,
            workers=place.workers,
            # Numbers of hosts that are not there count as workers, as far as a world has to add up.
            size=max(self._seating.size, hosts),
            late=True,
        )
        host.link.send({"assignment": assignment.as_message()})
        self._coordinator.remote_hosts.add(number, host.link)
        self._coordinator.listen_to(number)
