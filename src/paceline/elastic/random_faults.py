"""Faults from outside, drawn by a seed: a running job's workers are killed, stopped, slowed and cut off at random.

    supervisor ── fork server ─┬─ worker    its children that lead a session of their own: the victims
                               ├─ server
                               └─ (what workers left)

    kind   what happens                                                        after it
    kill   SIGKILL                                                             a generation without it
    stop   SIGSTOP, for good: it must be fenced                                the same, once its heartbeat is late
    slow   SIGSTOP, and SIGCONT in a moment                                    nothing but time
    cut    one of its TCP connections is shut down (jobs over gloo)            the same workers in a new generation

A third of the faults follow the one before within a moment, so that they fall into its recovery. A worker is *admitted*
once a commit has shown as many members as there are unharmed workers; of those one is always spared, because one
must know the state. Servers need not be. What is drawn depends on the seed alone, when it happens on the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil  # type: ignore[import-untyped]

from paceline.elastic.decisions import Commit
from paceline.elastic.step_log import row_of
from paceline.world.process import SERVER, process_name

KINDS = {"kill": 45, "stop": 15, "slow": 25, "cut": 15}
"""How often each is drawn, of a hundred."""
CLOSE_BEHIND = 1 / 3
MOMENT_S = (0.01, 0.4)
PIDFD_GETFD = 438  # the number of the system call, the same on every architecture


Era: TypeAlias = tuple[int, int]
"""How often all workers had started anew, and the number of their generation since."""


@dataclass(frozen=True)
class Draw:
    """One fault to come: `whom` is a place among the victims, from 0 to 1."""

    kind: str
    whom: float
    gap_s: float
    moment_s: float


@dataclass
class Happened:
    """One fault that was done, and how long it took until a step was committed that could know of it."""

    kind: str
    at: float
    generation: Era
    commit_s: float | None = None
    all_anew: bool = False
    """By then all workers had started anew."""
    slots: frozenset[int] = frozenset()
    """Whose workers were killed, where that is known: a step that all of them took part in does not know of it."""


def draws(seed: int, gap_s: float) -> Iterator[Draw]:
    """Faults without end, `gap_s` apart in the mean, but for those that follow the one before at once."""
    chance = random.Random(seed)
    kinds, weights = list(KINDS), list(KINDS.values())
    while True:
        kind = chance.choices(kinds, weights)[0]
        close = chance.random() < CLOSE_BEHIND
        gap = chance.uniform(*MOMENT_S) if close else chance.uniform(0.5, 1.5) * gap_s
        yield Draw(kind, chance.random(), gap, chance.uniform(*MOMENT_S))


class HurtJob:
    """A running job as seen from outside: its processes, its step log, and what has been done to it."""

    def __init__(self, supervisor: int, ledger: Path) -> None:
        self._supervisor, self._ledger = supervisor, ledger
        self._read = 0
        self._starts = 0
        self._harmed: dict[int, Era] = {}  # pid to the generation in which it was harmed
        self._admitted: set[int] = set()
        self._to_continue: dict[int, float] = {}
        self.rows: list[Commit] = []
        self.happened: list[Happened] = []
        self.seen: dict[int, float] = {}  # every process ever, and when it was born

    def look(self) -> None:
        """Take in what has happened since, and wake those whose moment is over."""
        now = time.monotonic()
        for pid in [pid for pid, until in self._to_continue.items() if until <= now]:
            del self._to_continue[pid]
            _signal(pid, signal.SIGCONT)
        processes = self.processes()
        for row in self._new_rows():
            self.rows.append(row)
            for fault in self.happened:
                if fault.commit_s is None and self._knows(row, fault):
                    fault.commit_s, fault.all_anew = now - fault.at, self._starts > fault.generation[0]
            self._settle(row, processes)

    def hurt(self, draw: Draw) -> bool:
        """Do it, if there is anybody to whom it may be done now."""
        whole = [pid for pid in self.processes() if pid not in self._harmed]
        known = [pid for pid in whole if pid in self._admitted]
        have_state = [pid for pid in known if not is_server(pid)]
        may = whole if len(have_state) > 1 or draw.kind == "slow" else [pid for pid in whole if pid not in have_state]
        if not may or not self.rows:
            return False
        victim = may[int(draw.whom * len(may))]
        if draw.kind == "cut":
            return cut_connection(victim) and self._note("cut")
        if draw.kind == "slow":
            if victim in self._to_continue:
                return False
            self._to_continue[victim] = time.monotonic() + draw.moment_s
            return _signal(victim, signal.SIGSTOP) and self._note("slow")
        self._harmed[victim] = self.generation
        number = signal.SIGKILL if draw.kind == "kill" else signal.SIGSTOP
        self._to_continue.pop(victim, None)
        return _signal(victim, number) and self._note(draw.kind if victim in known else "joiner")

    def _knows(self, row: Commit, fault: Happened) -> bool:
        """Whether those who made this step can have known of the fault."""
        if fault.kind in ("slow", "joiner") or self._starts > fault.generation[0]:
            return True
        later = row.generation - fault.generation[1]
        # In the next one the killed may still be: it had begun before, and no step of it had been seen outside.
        all_there = bool(fault.slots) and fault.slots <= set(row.members)
        return later > 1 or (later == 1 and not all_there)

    def kill_together(self, victims: Sequence[int], slots: Iterable[int] = ()) -> None:
        """SIGKILL for all of these at one moment, whatever they know: where none is left all have to start anew."""
        knows = any(pid in self._admitted for pid in victims)
        for pid in victims:
            self._harmed[pid] = self.generation
            self._to_continue.pop(pid, None)
            _signal(pid, signal.SIGKILL)
        self._note("kill" if knows else "joiner", slots)

    @property
    def generation(self) -> Era:
        return self._starts, self.rows[-1].generation if self.rows else 0

    def processes(self) -> list[int]:
        """Workers and servers, oldest first."""
        found = []
        for fork_server in _children(self._supervisor):
            self._remember(fork_server)
            for pid in _children(fork_server):
                self._remember(pid)
                with suppress(ProcessLookupError):
                    if os.getsid(pid) == pid and _alive(pid):
                        found.append(pid)
        return found

    def left(self) -> list[int]:
        """Processes of the job that still run."""
        running = []
        for pid, born in self.seen.items():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == born and process.status() != psutil.STATUS_ZOMBIE:
                    running.append(pid)
        return running

    def calm(self) -> None:
        """No more faults: a worker that only dawdles goes on."""
        for pid in self._to_continue:
            _signal(pid, signal.SIGCONT)
        self._to_continue.clear()

    def _note(self, kind: str, slots: Iterable[int] = ()) -> bool:
        self.happened.append(Happened(kind, time.monotonic(), self.generation, slots=frozenset(slots)))
        return True

    def _settle(self, row: Commit, processes: list[int]) -> None:
        """A generation after a harm knows of it, and where all that are whole are members, all are admitted."""
        for pid, generation in list(self._harmed.items()):
            if self.generation > generation and pid not in processes:
                del self._harmed[pid]
        whole = [pid for pid in processes if pid not in self._harmed]
        servers = [pid for pid in whole if is_server(pid)]
        knows_all = all(self.generation > generation for generation in self._harmed.values())
        if knows_all and len(whole) - len(servers) == len(row.members):
            self._admitted.update(pid for pid in whole if pid not in servers)
        if knows_all and len(servers) == len(row.servers):
            self._admitted.update(servers)

    def _new_rows(self) -> Iterator[Commit]:
        """Of the whole lines that were added since the last look."""
        if not self._ledger.exists():
            return
        with self._ledger.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            fields = json.loads(line or b"{}")
            if "step" in fields:
                yield row_of(fields)
            self._starts += "rewound_to" in fields

    def _remember(self, pid: int) -> None:
        if pid not in self.seen:
            with suppress(psutil.Error):
                self.seen[pid] = psutil.Process(pid).create_time()


def is_server(pid: int) -> bool:
    return process_name(pid) == SERVER


def cut_connection(pid: int) -> bool:
    """Shut down one TCP connection of a process of ours, as if the network had; False where it has none."""
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return False
    for connection in connections:
        if connection.status == psutil.CONN_ESTABLISHED and connection.fd >= 0:
            with suppress(OSError), _socket_of(pid, connection.fd) as theirs:
                theirs.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _socket_of(pid: int, descriptor: int) -> socket.socket:
    """Another handle on a socket of that process; the kernel gives it to who may debug the process."""
    process = os.pidfd_open(pid)
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, descriptor, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return socket.socket(fileno=copy)
    finally:
        os.close(process)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return sorted(found)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
