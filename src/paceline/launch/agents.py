"""Agents: what the coordinator does to workers, on whichever host they are, and how their reports come back.

    coordinator ──▶ `LocalAgent` ──▶ fork server: fork, signal · control channel: push · in-memory checkpoint: empty
         │      ──▶ `RemoteAgent` ═══ sealed link ═══▶ `HostAgent` of host 1 ──▶ its `LocalAgent`
         ▲
         └────── what workers of host 1 report or ask, their starts and exits ═══ `HostAgent`

An `Agent` pushes messages to workers, kills them, and starts them in their slots. `RemoteHosts` is the coordinator's
table of the other hosts: which slot is where, its agent, and its keepalive. A supervisor reports to a `Decider`: on
host 0 that is the `Coordinator`, on every other host a `HostAgent`, which passes reports on and decisions back.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from paceline.elastic.decisions import Rules
from paceline.elastic.slots import SlotAssignment
from paceline.errors import WorldError
from paceline.launch.control import MALFORMED, Body, ControlServer, Sender
from paceline.launch.failure_attribution import RENDEZVOUS_FAILED, Outcome, signal_name
from paceline.launch.folders import empty
from paceline.launch.fork_server import ForkServerProcess
from paceline.launch.host_link import Keepalive, NoKeepalive, SealedLink
from paceline.launch.output import Stream
from paceline.launch.rendezvous import HostAssignment, JoinedHost
from paceline.world import environment
from paceline.world.world import Elasticity, LaunchSettings, World

RELAY_MARGIN_S = 2.0

Members: TypeAlias = Sequence[tuple[int, int]] | None
"""The slots that start together, each with its host; None: all slots of the job."""


class Agent(Protocol):
    def push(self, ranks: Sequence[int], kind: str, body: Body) -> None:
        """Send a message, unasked, to the workers in these slots."""

    def fence(self, rank: int) -> None:
        """SIGKILL, whatever state it is in; its exit is reported as any other."""

    def show_stack(self, rank: int) -> None:
        """Have it write the stacks of its threads, or say that it is stopped."""

    def start(self, rank: int, incarnation: int, members: Members) -> None:
        """Start a new process in a slot whose last one has ended."""

    def empty_memory(self) -> None:
        """Delete what dead workers left in the in-memory checkpoint; no worker reads it."""


class Decider(Protocol):
    """What a supervisor reports to, and the outcome it waits for."""

    outcome: asyncio.Future[Outcome]
    a_process_ended: bool
    """From then on supervisors report which of their processes are `busy`."""
    signals_to_pass_on: asyncio.Queue[signal.Signals]
    """Each goes to every worker once."""
    agent: Agent
    """Set by the supervisor before it starts a worker; acts on the processes of its host."""

    def report(self, rank: int, kind: str, body: Body) -> None: ...
    async def answer(self, rank: int, kind: str, body: Body, timeout_s: float) -> Body: ...
    def ready(self) -> None:
        """This host joined late, and can start workers now."""

    def started(self, rank: int, pid: int) -> None: ...
    def exited(self, rank: int, status: int) -> None: ...
    def interrupted(self, by: signal.Signals) -> None: ...
    def stop_now(self, by: signal.Signals) -> None: ...
    def fail(self, text: str, code: int) -> None: ...
    async def close(self) -> None: ...


# ---- this host -------------------------------------------------------------------------------------------------


class LocalAgent:
    """Acts on the processes of this host; `show_output` reads what a new one writes, `show_stack` where it is."""

    def __init__(
        self,
        show_output: Callable[[World, Mapping[Stream, int]], None],
        fork_server: ForkServerProcess,
        server: ControlServer,
        assignment: HostAssignment,
        memory: Path | None,
        show_stack: Callable[[int], None],
    ) -> None:
        self.show_stack = show_stack
        self._show_output, self._fork_server, self._server = show_output, fork_server, server
        self._assignment, self._memory = assignment, memory

    def start_all(self) -> None:
        for local_rank in range(self._assignment.processes):
            self._start(local_rank, 0, None)

    def push(self, ranks: Sequence[int], kind: str, body: Body) -> None:
        self._server.push(ranks, kind, body)

    def fence(self, rank: int) -> None:
        self._fork_server.signal_worker(rank, signal.SIGKILL)

    def ask_to_stop(self, rank: int, number: signal.Signals) -> None:
        """Workers alone: their loader processes and the servers must live until the workers have saved."""
        if rank < self._assignment.size:
            self._fork_server.signal_worker(rank, number)

    def start(self, rank: int, incarnation: int, members: Members) -> None:
        self._start(self._assignment.local_rank_of(rank), incarnation, members)

    def empty_memory(self) -> None:
        if self._memory is not None:
            empty(self._memory)

    def _start(self, local_rank: int, incarnation: int, members: Members) -> None:
        rules, memory = self._assignment.elastic, None if self._memory is None else str(self._memory)
        elastic = None
        if rules is not None:
            elastic = Elasticity(incarnation, memory, rules.copies, tuple(members or ()), self._assignment.spans_hosts)
        world = self._assignment.world(local_rank, str(self._server.path), elastic)
        pipes = {stream: os.pipe() for stream in Stream}
        outputs = [writing for _, writing in pipes.values()]
        self._fork_server.start_worker(world.rank, worker_variables(world, self._assignment), outputs)
        for writing in outputs:
            os.close(writing)
        self._show_output(world, {stream: reading for stream, (reading, _) in pipes.items()})


def default_threads(settings: LaunchSettings, size: int) -> int | None:
    """Threads per worker until the engine sets them: a function of lanes, so that bits don't depend on workers."""
    if settings.threads is not None:
        return settings.threads
    if environment.thread_limit() is not None:
        return None
    return max(1, len(os.sched_getaffinity(0)) // (settings.lanes or settings.default_lanes or size))


def worker_variables(world: World, assignment: HostAssignment) -> dict[str, str]:
    """One process's environment: paceline's variables, and torchrun's names for scripts that know only those."""
    # Without this gloo listens on whatever address the host's name resolves to.
    gloo = {"GLOO_SOCKET_IFNAME": "lo"} if not assignment.spans_hosts else {}
    return {
        **environment.worker_environment(world),
        **gloo,
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": str(world.host_rank),
        "MASTER_ADDR": assignment.master_address,
        "MASTER_PORT": str(assignment.master_port),
    }


# ---- other hosts, as the coordinator sees them -----------------------------------------------------------------


class RemoteAgent:
    """The agent of another host: its calls travel as messages, which `carry_out` turns into calls again."""

    def __init__(self, link: Sender) -> None:
        self._link = link

    def push(self, ranks: Sequence[int], kind: str, body: Body) -> None:
        self._link.send({"kind": "push", "ranks": list(ranks), "what": kind, "body": body})

    def fence(self, rank: int) -> None:
        self._link.send({"kind": "fence", "rank": rank})

    def show_stack(self, rank: int) -> None:
        self._link.send({"kind": "show_stack", "rank": rank})

    def start(self, rank: int, incarnation: int, members: Members) -> None:
        self._link.send({"kind": "start", "rank": rank, "incarnation": incarnation, "members": members})

    def empty_memory(self) -> None:
        self._link.send({"kind": "empty_memory"})


def carry_out(agent: Agent, message: Body) -> bool:
    """Do on this host what a `RemoteAgent` was asked for; False where the message is of another kind."""
    match message.get("kind"):
        case "push":
            agent.push(message["ranks"], message["what"], message["body"])
        case "fence":
            agent.fence(message["rank"])
        case "show_stack":
            agent.show_stack(message["rank"])
        case "start":
            members = message["members"]
            among = None if members is None else [(slot, host) for slot, host in members]
            agent.start(message["rank"], message["incarnation"], among)
        case "empty_memory":
            agent.empty_memory()
        case _:
            return False
    return True


@dataclass
class RemoteHost:
    link: SealedLink
    agent: RemoteAgent
    keepalive: Keepalive | NoKeepalive
    is_there: bool = True
    leaves_because: str = ""
    """Known before its link ends."""

    async def receive(self, handle: Callable[[Body], None]) -> str:
        """Handle its messages until it is lost; the reason why it was."""
        try:
            while (message := await self.link.receive()) is not None:
                self.keepalive.heard()
                handle(message)
        except WorldError as error:
            return str(error)
        return self.leaves_because or self.keepalive.silence or "its supervisor ended without giving a reason"


class RemoteHosts:
    """The other hosts: which are there, which slots they have, how they are reached."""

    def __init__(
        self, assignment: HostAssignment, joined: Mapping[int, JoinedHost], clock: Callable[[], float]
    ) -> None:
        self._rules, self._clock = assignment.elastic, clock
        size = assignment.size
        self.seating = SlotAssignment(
            [assignment.workers, *(joined[host].workers for host in sorted(joined))],
            most=size if assignment.elastic is None else assignment.elastic.max_workers or size,
            lanes=assignment.settings.lanes or size,
            servers=assignment.servers,
        )
        self._hosts: dict[int, RemoteHost] = {}
        for number, host in joined.items():
            self.add(number, host.link)

    def __getitem__(self, host: int) -> RemoteHost:
        return self._hosts[host]

    def add(self, host: int, link: SealedLink) -> None:
        keepalive: Keepalive | NoKeepalive = NoKeepalive()
        if self._rules is not None:
            keepalive = Keepalive(link, self._rules.heartbeat_timeout_s, self._clock)
        self._hosts[host] = RemoteHost(link, RemoteAgent(link), keepalive)

    def drop(self, host: int) -> Sequence[int]:
        """It is lost; the slots that it had."""
        self.seating.leave(host)
        self._hosts[host].is_there = False
        self._hosts[host].link.abort()
        return self.seating.slots_of(host)

    def send_away(self, host: int, why: str) -> None:
        """None of its workers can join, but it may be started again."""
        self._hosts[host].leaves_because = why
        line = f"paceline: the coordinator dismissed this host: {why}; fix that, and start it again"
        self._hosts[host].link.send({"kind": "outcome", **Outcome(RENDEZVOUS_FAILED, (line,)).as_message()})

    def send(self, message: Body) -> None:
        """To every host that is there."""
        for host in self._there():
            host.link.send(message)

    def agent_of(self, slot: int) -> Agent | None:
        """None: the slot is on this host, or a server's."""
        host = self.host_of(slot)
        return self._hosts[host].agent if host else None

    def all_agents(self) -> list[Agent]:
        return [host.agent for host in self._there()]

    def host_of(self, slot: int) -> int:
        return self.seating.host_of(slot) if slot < self.seating.size else 0

    def neighbours(self, slot: int) -> Sequence[int]:
        """The slots of its host, if that is another than this."""
        host = self.host_of(slot)
        return self.seating.slots_of(host) if host else ()

    def slots_of_silent_hosts(self) -> list[int]:
        """Slots whose workers can't be heard, because nothing comes from their host."""
        late = [number for number, host in self._hosts.items() if host.is_there and host.keepalive.is_late]
        return [slot for number in late for slot in self.seating.slots_of(number)]

    async def close(self) -> None:
        for host in self._there():
            await host.link.close()

    def _there(self) -> list[RemoteHost]:
        return [host for host in self._hosts.values() if host.is_there]


# ---- the supervisor of another host ----------------------------------------------------------------------------


class HostAgent:
    """The `Decider` of a host that is not the coordinator's: reports go to the coordinator, decisions come back."""

    agent: Agent

    def __init__(self, link: SealedLink, log: Callable[[str], None], rules: Rules | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        self.a_process_ended = False
        self.signals_to_pass_on: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._log = log
        self._link = link
        self._answers: dict[int, asyncio.Future[Body]] = {}
        self._asked = 0
        self._keepalive: Keepalive | NoKeepalive = NoKeepalive()
        if rules is not None:
            self._keepalive = Keepalive(link, rules.heartbeat_timeout_s, loop.time)
        self._tasks = [asyncio.create_task(self._keepalive.run()), asyncio.create_task(self._receive())]
        self._tasks[1].add_done_callback(self._received_all)

    def report(self, rank: int, kind: str, body: Body) -> None:
        self._link.send({"kind": "report", "rank": rank, "what": kind, "body": body})

    async def answer(self, rank: int, kind: str, body: Body, timeout_s: float) -> Body:
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._link.send({"kind": kind, "body": body, "timeout_s": timeout_s, "id": number, "rank": rank})
            message = await asyncio.wait_for(answer, timeout_s + RELAY_MARGIN_S)
        except TimeoutError:
            raise WorldError(f"the coordinator did not answer {kind!r} within {timeout_s:g} s") from None
        finally:
            del self._answers[number]
        if "error" in message:
            raise WorldError(message["error"])
        answered: Body = message["body"]
        return answered

    def ready(self) -> None:
        self._link.send({"kind": "ready"})

    def started(self, rank: int, pid: int) -> None:
        self._link.send({"kind": "started", "rank": rank, "pid": pid})

    def exited(self, rank: int, status: int) -> None:
        self._link.send({"kind": "exited", "rank": rank, "status": status})

    def interrupted(self, by: signal.Signals) -> None:
        self._link.send({"kind": "interrupted", "signal": int(by)})

    def stop_now(self, by: signal.Signals) -> None:
        self._link.send({"kind": "stop_now", "signal": int(by)})
        how = "Ctrl-C" if by == signal.SIGINT else signal_name(by)
        self._decide(128 + by, f"stopped by {how}")

    def fail(self, text: str, code: int) -> None:
        self._link.send({"kind": "fail", "text": text, "code": code})
        self._decide(code, text)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()

    async def _receive(self) -> None:
        why = "; its own output says why"
        try:
            while (message := await self._link.receive()) is not None:
                self._keepalive.heard()
                self._handle(message)
        except WorldError as error:
            self._decide(RENDEZVOUS_FAILED, str(error))
        except MALFORMED as error:
            self._decide(
                RENDEZVOUS_FAILED,
                f"the coordinator (host 0) sent a malformed message: {type(error).__name__}: {str(error)[:200]}; "
                "use one version of paceline on all hosts",
            )
        if self._keepalive.silence:
            why = f": {self._keepalive.silence}; this host's workers are stopped"
        self._decide(RENDEZVOUS_FAILED, f"lost the coordinator (host 0){why}")

    def _handle(self, message: Body) -> None:
        match message.get("kind"):
            case "outcome":
                self._set_outcome(Outcome.from_message(message))
            case "log":
                self._log(message["line"])
            case "ping":
                pass
            case "a_process_ended":
                self.a_process_ended = True
            case "pass_on":
                self.signals_to_pass_on.put_nowait(signal.Signals(message["signal"]))
            case None:
                answer = self._answers.get(message["id"])
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case kind:
                if not carry_out(self.agent, message):
                    raise ValueError(f"message {str(kind)[:80]!r} is not known")

    def _decide(self, code: int, text: str) -> None:
        self._set_outcome(Outcome(code, (f"paceline: {text}",)))

    def _set_outcome(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def _received_all(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.outcome.done():
            self.outcome.set_exception(error)
