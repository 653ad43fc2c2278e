"""The fork server (zygote): one process per host that imports torch once and forks every worker from it.

    supervisor (no torch) ──starts──▶ fork server (torch loaded, one thread) ──forks──▶ worker 0, worker 1, …
    `ForkServerProcess`  ◀─channel─▶  `ForkServer`

`import torch` costs about a second and the first optimizer another (it imports `torch._dynamo`); a fork costs ten
milliseconds and shares the pages. The fork server runs no tensor code and starts no thread, so what it forks is clean.

Nothing outlives the supervisor. The fork server learns of its death twice (the channel ends, and SIGTERM by
PR_SET_PDEATHSIG), kills every worker's process group, and as their *subreaper* also what they left behind; workers in
turn die with the fork server. When a worker ends, its group is killed *before* it is reaped, while its number can't
have been given to another process: by SIGTERM, so that helpers that clean up after it (multiprocessing's resource
tracker unlinks shared memory) still can, and after `LINGER_S` by SIGKILL.

Schedulers signal every process that they find in a job (SLURM's container). What that means is the supervisor's to say:
the fork server takes SIGTERM for the supervisor's death only where its parent has changed, and ignores SIGUSR1.

A request to start comes with the worker's stdout and stderr as open descriptors:

    supervisor ──▶ {"kind": "start", "rank": 0, "variables": {…}}
               ──▶ {"kind": "signal", "signal": 15}                       to the process group of every worker
               ──▶ {"kind": "signal", "signal": 63, "rank": 0}            to one worker, without its children
               ◀── {"kind": "ready"}, {"kind": "started", "rank", "pid"}, {"kind": "exited", "rank", "status"}
               ◀── {"kind": "failed", "rank", "text"}                     there are no more processes to be had
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from paceline.launch.folders import open_run_folder, remove_folders
from paceline.launch.worker_main import Script, run_worker
from paceline.world import environment

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_LIMIT = 128 * 2**10
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)
STANDARD = (1, 2)
"""Descriptors of a worker's stdout and stderr, in the order in which they are sent."""
LINGER_S = 0.25
LAST_REAPING_S = 1.0
LAST_MOMENT_S = 1.0
"""Between SIGTERM and SIGKILL, when the job is over."""
CHANNEL_TIMEOUT_S = 30.0


class ForkServer:
    """The main loop of the process; it owns the workers' process ids, and no other process signals or reaps them."""

    def __init__(self, channel: socket.socket, run_folder: Path, supervisor: int) -> None:
        self._channel = channel
        self._supervisor = supervisor
        self._run_folder = open_run_folder(run_folder)
        self._serving = False
        self._ranks: dict[int, int] = {}
        self._lingering: dict[int, float] = {}
        self._ending = False
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def serve(self) -> dict[str, str] | None:
        """Fork workers until the supervisor ends: None in the fork server itself, its variables in each new worker."""
        self._serving = True
        self._report({"kind": "ready"})
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._ending:
                ready = [key.fileobj for key, _ in selector.select(LINGER_S / 5 if self._lingering else None)]
                if self._woken in ready:
                    self._woken.recv(4096)
                self._reap()
                if self._channel in ready:
                    variables = self._handle_request()
                    if variables is not None:
                        return variables
        return None

    def end(self) -> None:
        """Leave nothing: no worker, no grandchild, and no run folder where the supervisor was killed before it."""
        self._end_workers()
        remove_folders(self._run_folder)  # the rule: a supervisor that lives has removed its own

    def _end_workers(self) -> None:
        """Kill the workers, then what they left behind, adopted grandchildren in groups of their own included."""
        deadline = time.monotonic() + LAST_REAPING_S
        for pid in self._ranks:
            os.kill(pid, signal.SIGKILL)
        while (self._ranks or self._lingering) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)
        while (left := list(_children())) and time.monotonic() < deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)  # ours to reap, so the number is still its own
                os.waitpid(pid, 0)

    def _handle_request(self) -> dict[str, str] | None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE_LIMIT, len(STANDARD))
        except ConnectionResetError:  # the supervisor was killed before it had read all reports
            data = b""
        if not data:
            self._ending = True
            return None
        message = json.loads(data)
        if message["kind"] == "signal":
            for pid, rank in self._ranks.items():
                if "rank" not in message:
                    _kill_group(pid, message["signal"])
                elif rank == message["rank"]:
                    os.kill(pid, message["signal"])
            return None
        rank, variables = int(message["rank"]), dict(message["variables"])
        try:
            if len(descriptors) < len(STANDARD):  # the kernel has dropped what there was no room for
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if self._fork(rank, descriptors):
                return variables
        except OSError as error:
            self._report({"kind": "failed", "rank": rank, "text": error.strerror})
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _fork(self, rank: int, outputs: list[int]) -> bool:
        """True in the child."""
        own_pid = os.getpid()
        # A signal to a child that still has our handlers would be lost: it waits until they are its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._ranks[pid] = rank
            self._report({"kind": "started", "rank": rank, "pid": pid})
            return False
        os.setsid()  # Ctrl-C at the terminal reaches only the supervisor, and killpg reaches the worker's children
        die_with_parent(own_pid, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for own in (self._channel, self._woken, self._waker, self._run_folder):
            own.close()
        for descriptor, standard in zip(outputs, STANDARD, strict=True):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        return True

    def _reap(self) -> None:
        """Report workers that ended, and end their groups."""
        for pid, rank in list(self._ranks.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                del self._ranks[pid]
                self._lingering[pid] = time.monotonic() + LINGER_S
                _kill_group(pid, signal.SIGTERM)
                status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                self._report({"kind": "exited", "rank": rank, "status": status})
        if self._lingering:
            self._reap_groups(list(_children()))

    def _reap_groups(self, children: list[int]) -> None:
        """Reap the ended worker last of its group; its orphans have become our own children by then."""
        groups: dict[int, int] = {}
        for pid in children:
            if pid not in self._ranks and pid not in self._lingering and os.waitpid(pid, os.WNOHANG)[0] == 0:
                groups[pid] = os.getpgid(pid)
        for pid, deadline in list(self._lingering.items()):
            if pid not in groups.values() or time.monotonic() >= deadline:
                _kill_group(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del self._lingering[pid]

    def _report(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            self._ending = True

    def _sigterm(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() == self._supervisor:
            return
        self._ending = True
        if not self._serving:  # importing torch goes on for a second or two, and raising inside an import may be caught
            self.end()
            os._exit(128 + number)


def die_with_parent(parent: int, by: signal.Signals) -> None:
    """Have the kernel send `by` when the parent dies; leave at once where it has died already."""
    _prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # It has just been forked and has no group of its own yet, or no process of the group is left.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _children() -> Iterator[int]:
    """Every child of this process, adopted ones included."""
    for task in Path("/proc/self/task").glob("*/children"):
        yield from map(int, task.read_text().split())


def preload(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    # Collected garbage would dirty pages that all workers share; what exists now lives as long as they do.
    gc.collect()
    gc.freeze()


class Process(Protocol):
    """What is asked of the fork server's process; a `Popen` has it."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


def new_interpreter(arguments: list[str], channel: int, variables: dict[str, str]) -> Process:
    """Start the fork server in an interpreter of its own, which keeps the descriptor `channel`."""
    return subprocess.Popen(
        # -P: the current folder must not shadow what torch imports; the worker puts the script's own in front.
        [sys.executable, "-P", "-m", "paceline.launch.fork_server", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[channel],
        env=variables,
        start_new_session=True,
    )


start_process: Callable[[list[str], int, dict[str, str]], Process] = new_interpreter
"""How the fork server is started; tests fork it from a process that has imported torch already."""


class ForkServerProcess:
    """The supervisor's handle on the fork server: one process and one channel, both closed together."""

    def __init__(
        self,
        script: Script,
        folder: Path,
        threads: int | None,
        preloaded: Sequence[str],
        *,
        keep_memory: bool = False,
        quiet: bool = False,
    ) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            form = "module" if script.is_module else "file"
            arguments = [str(theirs.fileno()), str(os.getpid()), str(folder), " ".join(preloaded)]
            self._process = start_process(
                [*arguments, form, script.target, *script.arguments],
                theirs.fileno(),
                environment.parent_environment(threads, keep_memory=keep_memory, quiet=quiet),
            )
        self._channel.setblocking(False)

    def start_worker(self, rank: int, variables: dict[str, str], outputs: list[int]) -> None:
        self._send({"kind": "start", "rank": rank, "variables": variables}, outputs)

    def signal_worker(self, rank: int, number: int) -> None:
        """The process alone, and not what it started."""
        self._send({"kind": "signal", "signal": number, "rank": rank}, [])

    def signal_workers(self, number: signal.Signals) -> None:
        self._send({"kind": "signal", "signal": int(number)}, [])

    async def receive(self) -> dict[str, Any] | None:
        """The next report; None when the fork server has gone."""
        try:
            data = await asyncio.get_running_loop().sock_recv(self._channel, MESSAGE_LIMIT)
        except ConnectionError:
            return None
        if not data:
            return None
        message: dict[str, Any] = json.loads(data)
        return message

    async def wait(self, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while (status := self._process.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        return status

    async def close(self) -> None:
        """End of the channel: the fork server kills what is left of its workers and leaves."""
        self._channel.close()
        if await self.wait(LAST_MOMENT_S + LAST_REAPING_S) is None:
            self._process.kill()
            self._process.wait()

    def _send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        self._channel.settimeout(CHANNEL_TIMEOUT_S)  # it reads between forks of 10 ms each: never long
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has died; `receive` returns None in a moment, and its exit code says more
        finally:
            self._channel.setblocking(False)


def main() -> None:
    channel, supervisor, run_folder, modules, form, target, *arguments = sys.argv[1:]
    fork_server = ForkServer(socket.socket(fileno=int(channel)), Path(run_folder), int(supervisor))
    die_with_parent(int(supervisor), signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    preload(modules.split())
    variables = fork_server.serve()
    if variables is None:
        fork_server.end()
        os._exit(0)  # nothing is left to flush, and taking torch apart politely costs a third of a second
    run_worker(variables, Script(target, tuple(arguments), is_module=form == "module"))


if __name__ == "__main__":
    main()
