"""What a worker does from its fork to its end: take on its environment, run the script, report why it failed.

The script runs as `__main__`, with the `sys.argv` and `sys.path[0]` that `python script.py ARGS` would give it, so the
same file runs under `paceline run`, torchrun and plain python.

An exception that escapes is not printed here: it is reported, traceback and all, and the supervisor prints the one
that explains the others. Only when the supervisor does not take the report does it go to stderr.

A server is started the same way and runs the same script, as far as the line where it begins to serve.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from paceline.elastic.worker_agent import WorkerAgent
from paceline.errors import GenerationEnded, PacelineError, PeerLostError, WorldError
from paceline.world import environment, messages, out_of_memory
from paceline.world.control import ControlClient, no_thread
from paceline.world.process import SERVER, set_process_name
from paceline.world.script_line import place_of_error
from paceline.world.world import ControlSocket, World

STACK_SIGNAL = int(signal.SIGRTMAX) - 1
"""Makes a worker write the stack of its main thread to stderr. SIGUSR1 and 2 are left to scripts and to SLURM."""
ALL_STACKS_SIGNAL = STACK_SIGNAL - 1
"""Of all its threads."""

REPORT_TIMEOUT_S = 5.0
THREADS_END_S = 0.05
BEAT_EVERY_S = 0.25


@dataclass(frozen=True)
class Script:
    """A file, or a module's name, and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def command(self) -> list[str]:
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]


def run_worker(variables: Mapping[str, str], script: Script) -> NoReturn:
    """`variables` make a forked process a particular worker."""
    environment.enter(variables)
    messages.obey_environment()
    world = environment.read_world()
    if world.is_server:
        set_process_name(SERVER)
    faulthandler.register(STACK_SIGNAL, all_threads=False)
    faulthandler.register(ALL_STACKS_SIGNAL)
    _differ_from_siblings()
    heartbeat: Heartbeat | None = None
    try:
        heartbeat = Heartbeat.start(world) if world.is_elastic else None
        names = run_script(script)
    except SystemExit:
        _let_threads_finish(heartbeat)
        raise  # the script's own choice; the supervisor reads the code
    except BaseException as error:
        sys.stdout.flush()
        _report(error, world)
        sys.last_value = error  # as Python does with what it shows: engines that close at exit see how the script ended
        sys.exit(1)
    _let_threads_finish(heartbeat)
    del names
    sys.exit(0)


class Heartbeat:
    """Reports that this process is alive, from a thread and a connection of its own, whatever the script is doing."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="paceline-heartbeat", daemon=True)

    @classmethod
    def start(cls, world: World) -> Heartbeat | None:
        try:
            heartbeat = cls(_connect(world))
        except WorldError:  # the job is ending already
            return None
        try:
            heartbeat._thread.start()
        except RuntimeError as error:
            raise no_thread(world.rank, error) from error
        return heartbeat

    def stop(self) -> None:
        """The script has ended. What the interpreter takes apart now may take long, and no thread runs any more."""
        self._stopped.set()
        self._thread.join(timeout=BEAT_EVERY_S)

    def _beat(self) -> None:
        while True:
            ending = self._stopped.is_set()
            # A supervisor that is stopped (SIGSTOP) takes nothing; it restarts its deadlines later.
            with contextlib.suppress(WorldError):
                self._client.tell("heartbeat", ending=ending)
            if ending:
                return
            self._stopped.wait(BEAT_EVERY_S)


def _connect(world: World) -> ControlClient:
    assert isinstance(world.rendezvous, ControlSocket), "a forked worker meets at its supervisor's socket"
    return ControlClient.connect(world.rendezvous.path, world.rank, timeout_s=REPORT_TIMEOUT_S)


def _let_threads_finish(heartbeat: Heartbeat | None) -> None:
    """Give torch's threads the interpreter lock once more before the script's objects are taken apart.

    A gloo thread may still wait for the lock to drop the last collective, and the destructor of its process group holds
    the lock while it waits for the thread: seen here as a hang, under torchrun as "terminate called without an active
    exception".
    """
    if heartbeat is not None:
        heartbeat.stop()
    time.sleep(THREADS_END_S)


def run_script(script: Script) -> dict[str, Any]:
    """Run the script; its names, for as long as the caller wants its objects to live."""
    if script.is_module:
        sys.argv = [script.target, *script.arguments]  # run_module puts the file's path in [0]
        sys.path.insert(0, os.getcwd())
        return runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    sys.argv = [script.target, *script.arguments]
    if not os.path.isdir(script.target):  # a folder with a __main__.py puts itself on the path
        sys.path.insert(0, os.path.dirname(os.path.realpath(script.target)))
    return runpy.run_path(script.target, run_name="__main__")


def _differ_from_siblings() -> None:
    """numpy seeded itself in our common parent; unseeded draws must not be the same on every worker.

    Python's `random` does this by itself after a fork, and torch starts from a fixed seed in every process anyway.
    """
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _report(error: BaseException, world: World) -> None:
    out_of_memory.explain(error)
    text = "".join(traceback.format_exception(type(error), error, _script_frames(error.__traceback__)))
    try:
        client = _connect(world)
        client.ask(
            "failed",
            timeout_s=REPORT_TIMEOUT_S,
            type=type(error).__name__,
            text=str(error),
            traceback=text,
            place=place_of_error(_script_frames(error.__traceback__)),
            ours=isinstance(error, PacelineError),
            # Zeros in place of weights that were lost with another worker may fail in ways of their own.
            secondary=isinstance(error, PeerLostError | GenerationEnded) or WorkerAgent.others_changed(),
        )
        client.close()
    except PacelineError as lost:
        text = f"paceline: {error}\n" if isinstance(error, PacelineError) else text
        print(f"{text}paceline: rank {world.rank}: could not report this: {lost}", file=sys.stderr, flush=True)


def _script_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first line on; the launcher's own frames don't interest its author."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return frames
