"""`paceline run`: start this host's workers and servers, watch them, end them all, and say how it went.

    meet the other hosts ─▶ stable ─▶ fork workers ─▶ wait for the outcome ─▶ stop what still runs ─▶ last words

It imports no torch, so it is up before torchrun has read its first line, and it runs on asyncio alone. What it opens
(run folder, sockets, pipes, processes) it closes on every way out; if it is killed itself, the stable does so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.elastic.step_log import StepLog
from paceline.launch.activity import Activity
from paceline.launch.control_channel import ControlServer
from paceline.launch.decision import Coordinator, Decider
from paceline.launch.door import Door
from paceline.launch.folders import elsewhere_than_asked, run_folder, vault_folder
from paceline.launch.hosts import Arrival, Guest, Seat, free_port, join
from paceline.launch.job import Hosts, Job
from paceline.launch.member import Member
from paceline.launch.output import Screen, Stream, WorkerOutput
from paceline.launch.own_hands import OwnHands
from paceline.launch.stable_process import LAST_MOMENT_S, StableProcess
from paceline.launch.stopping import NOTICE
from paceline.launch.verdict import ENDED_WELL, WORKER_FAILED, Outcome, signal_name
from paceline.launch.vigil import Vigil
from paceline.launch.worker_main import STACK_SIGNAL
from paceline.launch.worker_place import default_threads
from paceline.world import environment
from paceline.world.world import LOOPBACK, World

PRELOADED: tuple[str, ...] = (
    "torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel.distributed", "paceline.engine.engine",
)  # fmt: skip
"""What the first lines of a training script import; the first optimizer or DDP object imports `torch._dynamo`. Our own
modules are half a second of a processor for each worker, and for each that takes a dead one's place."""

PULSE_EVERY_S = 1.0
STACKS_S = 0.3
"""For a process that hangs to write where; faulthandler needs neither the interpreter's lock nor its main thread."""
DRAIN_S = 0.5
HEAR_OUT_S = 0.2
"""For what a worker that has ended well said last; longer only where a process of its own holds the connection."""
LAST_WORDS_S = 5.0
OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


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
        self._passed_on: signal.Signals | None = None
        self._hurry = asyncio.Event()
        self._outputs: list[WorkerOutput] = []
        self._running: dict[int, int] = {}
        self._all_ended = asyncio.Event()

    async def run(self) -> int:
        self._loop.set_exception_handler(self._in_the_loop)
        try:
            with self._signals(), run_folder() as folder, contextlib.ExitStack() as owned:
                if (line := elsewhere_than_asked(folder, environment.temporary_folder())) is not None:
                    self._screen.say(line)
                return await self._run(folder, owned)
        finally:
            self._screen.close(LAST_WORDS_S)

    async def _run(self, folder: Path, owned: contextlib.ExitStack) -> int:
        met = await self._meet()
        if met is None:
            self._screen.say("paceline: stopped while waiting for the other hosts")
            return 128 + self._interrupted.result()
        seat, decider = met
        self._decider = decider
        control = folder / "control.sock"
        server = ControlServer(control, decider, self._screen.say)
        threads = default_threads(seat.settings, seat.size)
        vault = owned.enter_context(vault_folder(folder, say=self._screen.say)) if seat.elastic is not None else None
        stable = StableProcess(self._job.script, folder, threads, PRELOADED, keep_memory=self._job.keep_memory)
        decider.hands = OwnHands(self.listen_to, stable, server, seat, vault)
        try:
            await server.start()
            watching = asyncio.create_task(self._watch(stable, server, decider.hands))
            looking = [asyncio.create_task(self._feel_pulses(decider))]
            if seat.elastic is not None:
                vigil = Vigil(seat.elastic.heartbeat_timeout_s, server.silence_s, self._loop.time)
                looking.append(asyncio.create_task(vigil.keep(self._running, decider)))
            asking = asyncio.create_task(self._ask_to_stop(decider.hands, decider))
            # Whichever ends first: a report that makes no sense must not leave us waiting for an outcome.
            either: set[asyncio.Future[Any]] = {watching, *looking, decider.outcome}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, *looking):
                if task.done():
                    task.result()
            outcome = await decider.outcome
            for task in (*looking, asking):
                task.cancel()
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
            settings, here = job.settle(job.workers), LOOPBACK
            seat = Seat(0, 1, 0, job.workers, job.workers, settings, here, here, port, job.servers, job.elastic)
            return seat, self._coordinate(seat, {}, None)
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
        arrival = Arrival(hosts.rank, hosts.count, job.workers, job.settings, job.servers, job.elastic)
        if hosts.rank > 0:
            seat, link = await join(hosts.coordinator, arrival, hosts.secret, hosts.meet_timeout_s)
            return seat, Member(link, self._screen.say, seat.elastic)
        door = Door(hosts.coordinator, arrival, hosts.secret, self._screen.say)
        seat, guests = await door.meet(hosts.meet_timeout_s, job.settle)
        return seat, self._coordinate(seat, guests, door)

    def _coordinate(self, seat: Seat, guests: Mapping[int, Guest], door: Door | None) -> Coordinator:
        ledger = StepLog(self._job.ledger, self._screen.say)
        return Coordinator(seat, guests, self._screen.show, self._screen.say, self._job.grace_s, ledger, door)

    async def _watch(self, stable: StableProcess, server: ControlServer, hands: OwnHands) -> None:
        """Pass on what the stable reports, from `ready` to the last exit."""
        assert self._decider is not None
        while (message := await stable.receive()) is not None:
            match message["kind"]:
                case "ready" if hands.is_late:
                    self._decider.ready()
                case "ready":
                    hands.start_all()
                case "started":
                    self._running[message["rank"]] = message["pid"]
                    if self._passed_on is not None:  # it was forked while the others were asked
                        hands.ask(message["rank"], self._passed_on)
                    server.welcome(message["pid"])
                    self._decider.started(message["rank"], message["pid"])
                case "failed":
                    self._decider.broken(
                        f"a process for rank {message['rank']} could not be started: {message['text']}; raise the "
                        "limit of processes (ulimit -u, pids.max of the container) or use fewer workers",
                        WORKER_FAILED,
                    )
                case "exited":
                    pid = self._running.pop(message["rank"])
                    if not self._running:
                        self._all_ended.set()
                    if message["status"] in ENDED_WELL:
                        await server.hear_out(pid, HEAR_OUT_S)
                    else:
                        server.retire(pid)
                    self._decider.exited(message["rank"], message["status"])
        self._decider.broken(*await self._explain_end(stable))

    def listen_to(self, world: World, pipes: Mapping[Stream, int]) -> None:
        """Show what a new process writes, each line with its name before it."""
        alone = world.size + world.servers == 1
        prefix = b"" if alone else f"[{world.name if world.is_server else world.rank}] ".encode()
        self._outputs = [output for output in self._outputs if output.is_open]
        for stream, reading in pipes.items():
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

    async def _ask_to_stop(self, hands: OwnHands, decider: Decider) -> None:
        while True:
            self._passed_on = await decider.to_pass_on.get()
            for rank in self._running:
                hands.ask(rank, self._passed_on)

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

    def _in_the_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that no task waits for. asyncio says of each connection that it can't accept so, for ever."""
        error = context.get("exception")
        if self._decider is None or not isinstance(error, OSError) or error.errno not in OUT_OF:
            loop.default_exception_handler(context)
            return
        self._decider.broken(
            f"the launcher can't take further connections of workers: {error.strerror}; raise the limit (of open "
            "files: ulimit -n), or use fewer workers",
            WORKER_FAILED,
        )

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
