"""`paceline run`: start this host's workers and servers, watch them, end them all, and report how it went.

    rendezvous with the other hosts ─▶ fork server ─▶ fork workers ─▶ wait for the outcome ─▶ stop what still runs

It imports no torch, so it is up before torchrun has read its first line, and it runs on asyncio alone. What it opens
(run folder, sockets, pipes, processes) it closes on every way out; if it is killed itself, the fork server does so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.elastic.step_log import StepLog
from paceline.launch.agents import Decider, HostAgent, LocalAgent, default_threads
from paceline.launch.busy_check import ActivityCheck, BusyCheck
from paceline.launch.control import ControlServer
from paceline.launch.coordinator import Coordinator
from paceline.launch.exit_rules import NOTICE
from paceline.launch.failure_attribution import ENDED_WELL, WORKER_FAILED, Outcome, signal_name
from paceline.launch.folders import elsewhere_than_asked, memory_folder, run_folder
from paceline.launch.fork_server import LAST_MOMENT_S, ForkServerProcess
from paceline.launch.job import Hosts, Job
from paceline.launch.output import Screen, Stream, WorkerOutput
from paceline.launch.rendezvous import HostAssignment, HostRendezvous, JoinedHost, JoinRequest, free_port, join
from paceline.launch.worker_main import STACK_SIGNAL
from paceline.world import environment, messages
from paceline.world.processor_time import own_processor_seconds
from paceline.world.world import LOOPBACK, World

PRELOADED: tuple[str, ...] = (
    "torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel.distributed", "paceline.engine.engine",
)  # fmt: skip
"""What the first lines of a training script import; the first optimizer or DDP object imports `torch._dynamo`. Our own
modules are half a second of a processor for each worker, and for each that takes a dead one's place."""

ACTIVITY_EVERY_S = 1.0
STACKS_S = 0.3
"""For a process that hangs to write where; faulthandler needs neither the interpreter's lock nor its main thread."""
DRAIN_S = 0.5
LAST_MESSAGES_S = 0.2
"""For messages of a worker that has ended well; they take longer only where a child of its own holds the connection."""
SCREEN_CLOSE_S = 5.0
OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


async def supervise(job: Job, shows: Callable[[str], None] | None = None) -> int:
    """Run the job on this host; the exit code (see `failure_attribution`). `shows` gets the folder of each run."""
    return await Supervisor(job, shows).run()


class Supervisor:
    def __init__(self, job: Job, shows: Callable[[str], None] | None = None) -> None:
        self._job, self._shows = job, shows
        self._loop = asyncio.get_running_loop()
        self._screen = Screen(sys.stdout.fileno(), sys.stderr.fileno(), on_room=self._make_room)
        self._messages = messages.logger("launch")
        self._decider: Decider | None = None
        self._interrupted: asyncio.Future[signal.Signals] = self._loop.create_future()
        self._asked: signal.Signals | None = None
        self._passed_on: signal.Signals | None = None
        self._hurry = asyncio.Event()
        self._outputs: list[WorkerOutput] = []
        self._running: dict[int, int] = {}
        self._all_ended = asyncio.Event()

    async def run(self) -> int:
        self._loop.set_exception_handler(self._on_loop_error)
        try:
            with (
                messages.handed_to(self._screen.log, quiet=self._job.quiet),
                self._signals(),
                run_folder() as folder,
                contextlib.ExitStack() as owned,
            ):
                if (line := elsewhere_than_asked(folder, environment.temporary_folder())) is not None:
                    self._log(line)
                return await self._run(folder, owned)
        finally:
            self._screen.close(SCREEN_CLOSE_S)

    async def _run(self, folder: Path, owned: contextlib.ExitStack) -> int:
        joined = await self._rendezvous()
        if joined is None:
            self._messages.error("paceline: stopped while waiting for the other hosts")
            return 128 + self._interrupted.result()
        assignment, decider = joined
        self._decider = decider
        server = ControlServer(folder / "control.sock", decider, self._log)
        threads = default_threads(assignment.settings, assignment.size)
        memory = None
        if assignment.elastic is not None:
            memory = owned.enter_context(memory_folder(folder, log=self._log))
        fork_server = ForkServerProcess(
            self._job.script,
            folder,
            threads,
            PRELOADED,
            keep_memory=self._job.keep_memory,
            quiet=self._job.quiet,
        )
        show_stack = partial(self._show_stack, fork_server, assignment)
        decider.agent = agent = LocalAgent(self.show_output, fork_server, server, assignment, memory, show_stack)
        try:
            await server.start()
            watching = asyncio.create_task(self._watch(fork_server, server, agent, is_late=assignment.late))
            checking = [asyncio.create_task(self._report_activity(decider))]
            if assignment.elastic is not None:
                busy_check = BusyCheck(assignment.elastic.heartbeat_timeout_s, server.silence_s, self._loop.time)
                checking.append(asyncio.create_task(busy_check.run(self._running, decider)))
            asking = asyncio.create_task(self._ask_to_stop(agent, decider))
            # The first to end: an error in one of the tasks must not leave us waiting for an outcome.
            either: set[asyncio.Future[Any]] = {watching, *checking, decider.outcome}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, *checking):
                if task.done():
                    task.result()
            outcome = await decider.outcome
            for task in (*checking, asking):
                task.cancel()
            await self._catch_up()
            self._tell(outcome, outcome.lines)
            await self._show_stacks(agent, outcome)
            await self._stop(fork_server)
            watching.cancel()
        finally:
            await fork_server.close()
            await server.close()
            await decider.close()
        await self._drain()
        self._tell(outcome, outcome.closing)
        return outcome.code

    async def _rendezvous(self) -> tuple[HostAssignment, Decider] | None:
        """This host's slots, and what decides; None when a signal came before all hosts were there."""
        job, hosts = self._job, self._job.hosts
        if hosts is None:
            port = free_port(LOOPBACK)
            settings, here = job.settings_for(job.workers), LOOPBACK
            assignment = HostAssignment(
                0, 1, 0, job.workers, job.workers, settings, here, here, port, job.servers, job.elastic
            )
            return assignment, self._coordinate(assignment, {}, None)
        joining = asyncio.create_task(self._join_hosts(hosts))
        either: set[asyncio.Future[Any]] = {joining, self._interrupted}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if joining.done():
            return joining.result()
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        return None

    async def _join_hosts(self, hosts: Hosts) -> tuple[HostAssignment, Decider]:
        job = self._job
        request = JoinRequest(hosts.rank, hosts.count, job.workers, job.settings, job.servers, job.elastic)
        if hosts.rank > 0:
            assignment, link = await join(hosts.coordinator, request, hosts.secret, hosts.meet_timeout_s)
            return assignment, HostAgent(link, self._log, assignment.elastic)
        rendezvous = HostRendezvous(hosts.coordinator, request, hosts.secret, self._log)
        assignment, joined = await rendezvous.meet(hosts.meet_timeout_s, job.settings_for)
        return assignment, self._coordinate(assignment, joined, rendezvous)

    def _coordinate(
        self, assignment: HostAssignment, joined: Mapping[int, JoinedHost], rendezvous: HostRendezvous | None
    ) -> Coordinator:
        ledger = StepLog(self._job.ledger, self._log)
        return Coordinator(
            assignment, joined, self._screen.show, self._log, self._job.grace_s, ledger, rendezvous, self._shows
        )

    async def _watch(
        self, fork_server: ForkServerProcess, server: ControlServer, agent: LocalAgent, *, is_late: bool
    ) -> None:
        """Pass on what the fork server reports, from `ready` to the last exit."""
        assert self._decider is not None
        while (message := await fork_server.receive()) is not None:
            match message["kind"]:
                case "ready" if is_late:
                    self._decider.ready()
                case "ready":
                    agent.start_all()
                case "started":
                    self._running[message["rank"]] = message["pid"]
                    if self._passed_on is not None:  # it was forked while the others were asked
                        agent.ask_to_stop(message["rank"], self._passed_on)
                    server.register(message["pid"])
                    self._decider.started(message["rank"], message["pid"])
                case "failed":
                    self._decider.fail(
                        f"a process for rank {message['rank']} could not be started: {message['text']}; raise the "
                        "limit of processes (ulimit -u, pids.max of the container) or use fewer workers",
                        WORKER_FAILED,
                    )
                case "exited":
                    pid = self._running.pop(message["rank"])
                    if not self._running:
                        self._all_ended.set()
                    if message["status"] in ENDED_WELL:
                        await server.drain(pid, LAST_MESSAGES_S)
                    else:
                        server.retire(pid)
                    self._decider.exited(message["rank"], message["status"])
        self._decider.fail(*await self._explain_end(fork_server))

    def show_output(self, world: World, pipes: Mapping[Stream, int]) -> None:
        """Show what a new process writes, each line with its name before it."""
        alone = world.size + world.servers == 1
        prefix = b"" if alone else f"[{world.name if world.is_server else world.rank}] ".encode()
        self._outputs = [output for output in self._outputs if output.is_open]
        for stream, reading in pipes.items():
            self._outputs.append(WorkerOutput(reading, world.rank, stream, prefix, self._screen, self._loop))

    async def _explain_end(self, fork_server: ForkServerProcess) -> tuple[str, int]:
        """The fork server ended by itself: its workers die with it by the kernel's hand, their children by ours."""
        for pid in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._running.clear()
        self._all_ended.set()
        status = await fork_server.wait(LAST_MOMENT_S)
        if status is not None and status < 0:
            number = -status
            what = "the process that workers are forked from was killed by"
            return f"{what} {signal_name(number)}, and all of them with it: start the job again", 128 + number
        return f"the process that imports torch for the workers ended with code {status}; its error is above", 1

    async def _report_activity(self, decider: Decider) -> None:
        """Once a process has ended, report which of the others do something: they may wait for it in vain."""
        activities: dict[int, ActivityCheck] = {}
        while True:
            await asyncio.sleep(ACTIVITY_EVERY_S)
            if not decider.a_process_ended:
                continue
            for rank, pid in self._running.items():
                printed = sum(output.received for output in self._outputs if output.rank == rank)
                if activities.setdefault(rank, ActivityCheck(pid)).seen(printed, self._loop.time()):
                    decider.report(rank, "busy", {})

    async def _show_stacks(self, agent: LocalAgent, outcome: Outcome) -> None:
        """Have the processes that hang write their stacks to stderr, and show them."""
        here = [rank for rank in outcome.hung if rank in self._running]
        for rank in here:
            agent.show_stack(rank)
        if here:
            await asyncio.sleep(STACKS_S)
            await self._catch_up()

    def _show_stack(self, fork_server: ForkServerProcess, assignment: HostAssignment, rank: int) -> None:
        pid = self._running.get(rank)
        if pid is None:
            return
        if own_processor_seconds(pid) is None:
            name = f"worker {rank}" if rank < assignment.size else f"server {rank - assignment.size}"
            self._log(f"paceline: {name} (pid {pid}) does not answer: it is stopped (SIGSTOP?)")
        else:
            fork_server.signal_worker(rank, STACK_SIGNAL)

    async def _ask_to_stop(self, agent: LocalAgent, decider: Decider) -> None:
        while True:
            self._passed_on = await decider.signals_to_pass_on.get()
            for rank in self._running:
                agent.ask_to_stop(rank, self._passed_on)

    async def _stop(self, fork_server: ForkServerProcess) -> None:
        """SIGTERM, a last moment, SIGKILL; a second Ctrl-C skips the moment."""
        if not self._running:
            return
        self._all_ended.clear()
        fork_server.signal_workers(signal.SIGTERM)
        hurry = asyncio.create_task(self._hurry.wait())
        ended = asyncio.create_task(self._all_ended.wait())
        await asyncio.wait({hurry, ended}, timeout=LAST_MOMENT_S, return_when=asyncio.FIRST_COMPLETED)
        if self._running:
            fork_server.signal_workers(signal.SIGKILL)
            await asyncio.wait({ended}, timeout=LAST_MOMENT_S)
        hurry.cancel()
        ended.cancel()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that no task waits for, such as asyncio's about each connection that it can't accept."""
        error = context.get("exception")
        if self._decider is None or not isinstance(error, OSError) or error.errno not in OUT_OF:
            loop.default_exception_handler(context)
            return
        self._decider.fail(
            f"the launcher can't take further connections of workers: {error.strerror}; raise the limit (of open "
            "files: ulimit -n), or use fewer workers",
            WORKER_FAILED,
        )

    # ---- output -------------------------------------------------------------------------------------------

    async def _catch_up(self) -> None:
        """Show what workers have written so far, so that the outcome is printed after it."""
        for output in self._outputs:
            output.read_all()
        await asyncio.sleep(0)

    async def _drain(self) -> None:
        """Every process has ended: read to the end. A grandchild that kept our pipe open is not waited for."""
        deadline = self._loop.time() + DRAIN_S
        while any(output.is_open for output in self._outputs) and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        for output in self._outputs:
            output.close()

    def _make_room(self) -> None:
        """Called on the screen's thread."""
        self._loop.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        for output in self._outputs:
            output.resume()

    def _log(self, line: str) -> None:
        """While the job runs: warnings of ours, and tracebacks of workers that it goes on without."""
        self._messages.log(logging.WARNING if line.startswith("paceline: ") else logging.ERROR, line)

    def _tell(self, outcome: Outcome, lines: tuple[str, ...]) -> None:
        for line in lines:
            self._messages.log(logging.ERROR if outcome.code else logging.WARNING, line)

    # ---- signals ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        watched = [signal.SIGINT, signal.SIGTERM, NOTICE]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asked us to outlive the terminal
            watched.append(signal.SIGHUP)
        for number in watched:
            self._loop.add_signal_handler(number, self._interrupt, number)
        try:
            yield
        finally:
            for number in watched:
                self._loop.remove_signal_handler(number)

    def _interrupt(self, number: signal.Signals) -> None:
        """The first is passed on; so is an order after a notice. Only Ctrl-C has a second meaning: at once."""
        if self._asked is None or (self._asked == NOTICE and number != signal.SIGINT):
            again, self._asked = self._asked == number, number
            if not self._interrupted.done():
                self._interrupted.set_result(number)
            if self._decider is not None and not again:
                self._decider.interrupted(number)
        elif number == signal.SIGINT:
            self._hurry.set()
            if self._decider is not None:
                self._decider.stop_now(number)
