"""`paceline run`: start this host's workers and servers, watch them, end them all, and say how it went.

    meet the other hosts ─▶ stable ─▶ fork workers ─▶ wait for the outcome ─▶ stop what still runs ─▶ last words

It imports no torch, so it is up before torchrun has read its first line, and it runs on asyncio alone. What it opens
(run folder, sockets, pipes, processes) it closes on every way out; if it is killed itself, the stable does so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.launch.activity import Activity
from paceline.launch.control_channel import ControlServer
from paceline.launch.decision import Coordinator, Decider
from paceline.launch.hosts import Address, Arrival, Gathering, Seat, free_port, join
from paceline.launch.member import Member
from paceline.launch.output import Screen, Stream, WorkerOutput
from paceline.launch.stable_process import LAST_MOMENT_S, StableProcess
from paceline.launch.stopping import GRACE_S, NOTICE
from paceline.launch.verdict import Outcome, signal_name
from paceline.launch.worker_main import STACK_SIGNAL, Script
from paceline.world import environment
from paceline.world.world import LOOPBACK, LaunchSettings

PRELOADED: tuple[str, ...] = ("torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel.distributed")
"""What the first lines of a training script import; the first optimizer or DDP object imports `torch._dynamo`."""

SERVERS_ON_ANY_HOST = 8
"""So many are allowed even where there are fewer cores, to try things out; more than cores only wait for each other."""

PULSE_EVERY_S = 1.0
STACKS_S = 0.3
"""For a process that hangs to write where; faulthandler needs neither the interpreter's lock nor its main thread."""
DRAIN_S = 0.5
LAST_WORDS_S = 5.0
LONGEST_SOCKET_PATH = 100


@dataclass(frozen=True)
class Hosts:
    """Where several supervisors meet."""

    count: int
    rank: int
    coordinator: Address
    secret: bytes
    meet_timeout_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise LaunchError(f"--host-rank {self.rank} of --hosts {self.count}; host ranks count from 0")


@dataclass(frozen=True)
class Job:
    """All that `paceline run` was asked for."""

    script: Script
    workers: int
    settings: LaunchSettings
    hosts: Hosts | None = None
    servers: int = 0
    keep_memory: bool = False
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise LaunchError(f"--workers {self.workers}; a job has at least one")
        if not 0 <= self.grace_s < float("inf"):
            raise LaunchError(f"--grace-s {self.grace_s:g}; workers that are asked to stop get 0 or more seconds")
        if self.servers < 0:
            raise LaunchError(f"--servers {self.servers}; a job has none (worker 0 doubles as the server) or more")
        cores = len(os.sched_getaffinity(0))
        if self.servers > max(cores, SERVERS_ON_ANY_HOST) and (self.hosts is None or self.hosts.rank == 0):
            raise LaunchError(
                f"--servers {self.servers}, but they all run on this host, which has {cores} "
                f"core{'s' if cores > 1 else ''}; use at most {max(cores, SERVERS_ON_ANY_HOST)}"
            )
        if self.hosts is None:
            settle(self.settings, self.workers)


def settle(settings: LaunchSettings, size: int) -> LaunchSettings:
    """The settings of a job of this many workers; an error where they can't be honoured."""
    lanes = settings.lanes
    if lanes is not None and lanes < size:
        raise LaunchError(
            f"{size} workers but only {lanes} lane{'s' if lanes > 1 else ''}; every worker rides at least one: "
            f"use --workers {lanes}, or --lanes {size} or more (lanes are fixed for the life of a job)"
        )
    return settings


def default_threads(settings: LaunchSettings, size: int) -> int | None:
    """Threads per worker before the engine has its say: a function of lanes, so that bits don't depend on workers."""
    if settings.threads is not None:
        return settings.threads
    if environment.thread_limit() is not None:
        return None
    return max(1, len(os.sched_getaffinity(0)) // (settings.lanes or size))


def worker_variables(seat: Seat, local_rank: int, control: str) -> dict[str, str]:
    """One process's environment: ours, and torchrun's names for scripts that know only those."""
    world = seat.world(local_rank, control)
    # gloo listens on whatever the host's name resolves to, unless it is told where.
    gloo = {"GLOO_SOCKET_IFNAME": "lo"} if seat.hosts == 1 else {}
    return {
        **environment.worker_environment(world),
        **gloo,
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": str(world.host_rank),
        "MASTER_ADDR": seat.master_address,
        "MASTER_PORT": str(seat.master_port),
    }


async def supervise(job: Job) -> int:
    """Run the job on this host; the exit code (see `verdict`)."""
    return await Supervisor(job).run()


class Supervisor:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._screen = Screen(sys.stdout.fileno(), sys.stderr.fileno(), on_room=self._make_room)
        self._decider: Decider | None = None
        self._interrupted: asyncio.Future[signal.Signals] = self._loop.create_future()
        self._asked: signal.Signals | None = None
        self._hurry = asyncio.Event()
        self._outputs: list[WorkerOutput] = []
        self._running: dict[int, int] = {}
        self._all_ended = asyncio.Event()

    async def run(self) -> int:
        try:
            with self._signals(), run_folder() as folder:
                return await self._run(folder)
        finally:
            self._screen.close(LAST_WORDS_S)

    async def _run(self, folder: Path) -> int:
        met = await self._meet()
        if met is None:
            self._screen.say("paceline: stopped while waiting for the other hosts")
            return 128 + self._interrupted.result()
        seat, decider = met
        self._decider = decider
        control = folder / "control.sock"
        server = ControlServer(control, decider, self._screen.say)
        threads = default_threads(seat.settings, seat.size)
        stable = StableProcess(self._job.script, folder, threads, PRELOADED, keep_memory=self._job.keep_memory)
        try:
            await server.start()
            watching = asyncio.create_task(self._watch(stable, seat, str(control)))
            feeling = asyncio.create_task(self._feel_pulses(decider))
            asking = asyncio.create_task(self._ask_to_stop(stable, seat, decider))
            # Whichever ends first: a report that makes no sense must not leave us waiting for an outcome.
            either: set[asyncio.Future[Any]] = {watching, feeling, decider.outcome}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, feeling):
                if task.done():
                    task.result()
            outcome = await decider.outcome
            feeling.cancel()
            asking.cancel()
            await self._catch_up()
            self._say(outcome.lines)
            await self._show_stacks(stable, outcome)
            await self._stop(stable)
            watching.cancel()
        finally:
            await stable.close()
            await server.close()
            await decider.close()
        await self._drain()
        self._say(outcome.closing)
        return outcome.code

    async def _meet(self) -> tuple[Seat, Decider] | None:
        """This host's seat and who decides; None when we were interrupted before everyone was there."""
        job, hosts = self._job, self._job.hosts
        if hosts is None:
            port = free_port(LOOPBACK)
            seat = Seat(0, 1, 0, job.workers, job.workers, job.settings, LOOPBACK, LOOPBACK, port, job.servers)
            return seat, Coordinator(seat, {}, self._screen.show, self._screen.say, job.grace_s)
        meeting = asyncio.create_task(self._meet_hosts(hosts))
        either: set[asyncio.Future[Any]] = {meeting, self._interrupted}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if meeting.done():
            return meeting.result()
        meeting.cancel()
        await asyncio.gather(meeting, return_exceptions=True)
        return None

    async def _meet_hosts(self, hosts: Hosts) -> tuple[Seat, Decider]:
        job = self._job
        arrival = Arrival(hosts.rank, hosts.count, job.workers, job.settings, job.servers)
        if hosts.rank > 0:
            seat, link = await join(hosts.coordinator, arrival, hosts.secret, hosts.meet_timeout_s)
            return seat, Member(link, self._screen.say)
        gathering = Gathering(hosts.coordinator, arrival, hosts.secret, self._screen.say)
        seat, links = await gathering.meet(hosts.meet_timeout_s, lambda size: settle(job.settings, size))
        return seat, Coordinator(seat, links, self._screen.show, self._screen.say, job.grace_s)

    async def _watch(self, stable: StableProcess, seat: Seat, control: str) -> None:
        """Pass on what the stable reports, from `ready` to the last exit."""
        assert self._decider is not None
        while (message := await stable.receive()) is not None:
            match message["kind"]:
                case "ready":
                    for local_rank in range(seat.processes):
                        self._start_worker(stable, seat, local_rank, control)
                case "started":
                    self._running[message["rank"]] = message["pid"]
                    self._decider.started(message["rank"], message["pid"])
                case "exited":
                    del self._running[message["rank"]]
                    if not self._running:
                        self._all_ended.set()
                    self._decider.exited(message["rank"], message["status"])
        self._decider.broken(*await self._explain_end(stable))

    def _start_worker(self, stable: StableProcess, seat: Seat, local_rank: int, control: str) -> None:
        world = seat.world(local_rank, control)
        prefix = (
            b"" if seat.size + seat.servers == 1 else f"[{world.name if world.is_server else world.rank}] ".encode()
        )
        pipes = {stream: os.pipe() for stream in Stream}
        variables = worker_variables(seat, local_rank, control)
        stable.start_worker(world.rank, control, variables, [writing for _, writing in pipes.values()])
        for stream, (reading, writing) in pipes.items():
            os.close(writing)
            self._outputs.append(WorkerOutput(reading, world.rank, stream, prefix, self._screen, self._loop))

    async def _explain_end(self, stable: StableProcess) -> tuple[str, int]:
        """The stable ended by itself: its workers die with it by the kernel's hand, their children by ours."""
        for pid in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._running.clear()
        self._all_ended.set()
        status = await stable.wait(LAST_MOMENT_S)
        if status is not None and status < 0:
            number = -status
            return f"the process that workers are forked from was killed by {signal_name(number)}", 128 + number
        return f"the process that imports torch for the workers ended with code {status}; its error is above", 1

    async def _feel_pulses(self, decider: Decider) -> None:
        """Tell of every process here that does something, once there is somebody whose end it may have missed."""
        activities: dict[int, Activity] = {}
        while True:
            await asyncio.sleep(PULSE_EVERY_S)
            if not decider.someone_ended:
                continue
            for rank, pid in self._running.items():
                printed = sum(output.received for output in self._outputs if output.rank == rank)
                if activities.setdefault(rank, Activity(pid)).seen(printed, self._loop.time()):
                    decider.told(rank, "busy", {})

    async def _show_stacks(self, stable: StableProcess, outcome: Outcome) -> None:
        """Have those that hang write their stacks to stderr, and show them."""
        here = [rank for rank in outcome.hung if rank in self._running]
        for rank in here:
            stable.signal_worker(rank, STACK_SIGNAL)
        if here:
            await asyncio.sleep(STACKS_S)
            await self._catch_up()

    async def _ask_to_stop(self, stable: StableProcess, seat: Seat, decider: Decider) -> None:
        """The workers alone: their loader processes and the servers must live until they have saved."""
        while True:
            number = await decider.to_pass_on.get()
            for rank in self._running:
                if rank < seat.size:
                    stable.signal_worker(rank, number)

    async def _stop(self, stable: StableProcess) -> None:
        """SIGTERM, a last moment, SIGKILL; a second Ctrl-C skips the moment."""
        if not self._running:
            return
        self._all_ended.clear()
        stable.signal_workers(signal.SIGTERM)
        hurry = asyncio.create_task(self._hurry.wait())
        ended = asyncio.create_task(self._all_ended.wait())
        await asyncio.wait({hurry, ended}, timeout=LAST_MOMENT_S, return_when=asyncio.FIRST_COMPLETED)
        if self._running:
            stable.signal_workers(signal.SIGKILL)
            await asyncio.wait({ended}, timeout=LAST_MOMENT_S)
        hurry.cancel()
        ended.cancel()

    # ---- output -------------------------------------------------------------------------------------------

    async def _catch_up(self) -> None:
        """Show what workers have written so far, so that the verdict comes after it."""
        for output in self._outputs:
            output.read_all()
        await asyncio.sleep(0)

    async def _drain(self) -> None:
        """Everyone has ended: read to the end. A grandchild that kept our pipe open is not waited for."""
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

    def _say(self, lines: tuple[str, ...]) -> None:
        for line in lines:
            self._screen.say(line)

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
                self._decider.leave_now(number)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A folder that only this user can enter, gone when the job is. Its name must fit a Unix socket address."""
    place = tempfile.gettempdir()
    if len(place) > LONGEST_SOCKET_PATH - len("/paceline-12345678/control.sock"):
        place = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="paceline-", dir=place))
    try:
        yield folder
    finally:
        with contextlib.suppress(FileNotFoundError):  # a stable that was told twice may have been quicker
            shutil.rmtree(folder)
