"""The shared-memory barrier: every rank says what it is about to do, and goes on when all have said the same.

    a rank's line    count of barriers (a futex word) · sleepers · pid and its birth · how it is
                     what it calls now (two places, taken in turn)

A rank that waits spins briefly and then sleeps in the kernel, so more ranks than cores don't burn the cores. A rank
that waits long looks whether the others are alive: a peer that died is named within a second, one that is stopped when
the timeout ends.

What the ranks call is compared at every barrier. If it differs, each of them says both calls, and the group goes on:
all have come to the same barrier, and nothing has been read. A rank that gives up on a peer is a barrier ahead of it,
so its group is broken: it says so at every later call, and so do the others when they come.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from paceline.collectives.shared_memory.kernels import compiled_library
from paceline.errors import CollectiveError

LINE = 256  # this and the places in a line: as in kernels.c
_CALL_BYTES = 96
_CALLS_AT = (64, 160)
_PID_AT, _STATE_AT, _BORN_AT = 8, 12, 16
_HERE, _LEFT, _GAVE_UP = 0, 1, 2
LOOK_EVERY_S = 0.1
_SPIN_S = 50e-6
DONE, AGAIN = -1, -2  # what a program in C says, unless it names a rank that is late (or size + one that differs)


@dataclass(frozen=True)
class Call:
    """What a rank calls, in the words of torch.distributed."""

    operation: str
    dtype: str = ""
    elements: int = -1
    detail: str = ""  # the reduction, the root

    @lru_cache(maxsize=1024)  # noqa: B019 (calls are small, frozen and repeat)
    def packed(self) -> bytes:
        text = f"{self.operation}|{self.dtype.removeprefix('torch.')}|{self.elements}|{self.detail}".encode()
        return text[:_CALL_BYTES].ljust(_CALL_BYTES, b"\0")

    @classmethod
    def unpacked(cls, line: bytes) -> Call:
        operation, dtype, elements, detail = line.rstrip(b"\0").decode(errors="replace").split("|")
        return cls(operation, dtype, int(elements), detail)

    def __str__(self) -> str:
        what = f" of {self.elements:,} {self.dtype}" if self.elements >= 0 else ""
        return f"{self.operation}{what}{f' ({self.detail})' if self.detail else ''}"


_GIVEN_UP = b"nothing any more|"

DIFFERENT_CALLS = "the ranks call different things"


class State(ctypes.Structure):
    """`struct meeting` of kernels.c."""

    _fields_ = (
        ("lines", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("spin_ns", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("slow_reads", ctypes.c_int32),
    )


class Barrier:
    def __init__(self, lines: Tensor, rank: int, size: int, *, use_c: bool, crowded: bool | None = None) -> None:
        """`lines`: size × LINE bytes of shared memory, zeros at first. `crowded`: there are more ranks than cores."""
        self._lines = memoryview(lines.numpy())  # type: ignore[arg-type]
        self._words = self._lines.cast("I")
        self._rank, self._size = rank, size
        self._pidfds: dict[int, int] = {}
        if crowded is None:
            crowded = size > len(os.sched_getaffinity(0))
        # With fewer cores than ranks, a rank that spins takes time from the one it waits for.
        self._spin_s = 0.0 if crowded else _SPIN_S
        self.state = State(lines.data_ptr(), 0, int(self._spin_s * 1e9), rank, size)
        library = compiled_library() if use_c else None
        self._await = self._await_in_c(library) if library is not None else self._await_in_python
        self._arrive = self._arrive_in_c(library) if library is not None else self._arrive_in_python
        self._broken: str | None = None
        self._stopped = False
        struct.pack_into("Q", self._lines, rank * LINE + _BORN_AT, _birth_of(os.getpid()))
        struct.pack_into("I", self._lines, rank * LINE + _PID_AT, os.getpid())

    @property
    def count(self) -> int:
        """Barriers passed so far."""
        return self.state.count  # type: ignore[no-any-return]

    def wait(self, call: bytes, timeout_s: float) -> None:
        """Come to the next barrier about `call` and go on when all ranks have come about the same."""
        self._check_whole()
        other = self._arrive(call, min(LOOK_EVERY_S, timeout_s))
        if other >= 0:
            self._settle(other, call, timeout_s)

    def run(self, program: Callable[[int], int], call: bytes, timeout_s: float) -> int:
        """Run a program in C that comes to barriers about `call` itself, given how many ns it may wait for one of them.

        It is called again until it is done, each time after the barrier that it could not end. What else it says is
        handed back.
        """
        self._check_whole()
        patience_ns = int(min(LOOK_EVERY_S, timeout_s) * 1e9)
        while (said := program(patience_ns)) >= 0 or said == AGAIN:
            if said >= 0:
                self._settle(said, call, timeout_s)
        return said

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise CollectiveError(f"the group is broken since an earlier operation failed: {self._broken}")

    def _settle(self, other: int, call: bytes, timeout_s: float) -> None:
        """End a wait that could not end at once: rank `other` is late, or `other - size` calls something else."""
        if other < self._size:
            self._wait_longer(other, timeout_s, call)
        place = _CALLS_AT[self.count - 1 & 1]
        for rank in range(self._size):
            there = rank * LINE + place
            if self._lines[there : there + _CALL_BYTES] != call:
                self._tell_difference(call, rank, bytes(self._lines[there : there + _CALL_BYTES]))

    def give_up(self, text: str, cause: str) -> None:
        """The ranks are not in step any more: this one comes to no other barrier, and tells the others the cause."""
        if self._broken is not None:
            return
        self._broken = text
        told = Call(_GIVEN_UP[:-1].decode(), detail=f"it gave up: {cause}").packed()
        for place in _CALLS_AT:
            here = self._rank * LINE + place
            self._lines[here : here + _CALL_BYTES] = told
        struct.pack_into("I", self._lines, self._rank * LINE + _STATE_AT, _GAVE_UP)

    def stop(self) -> None:
        """End the wait that another thread is in, if any."""
        self._stopped = True

    def leave(self) -> None:
        """Say goodbye: who waits for this rank from now on waits in vain."""
        struct.pack_into("I", self._lines, self._rank * LINE + _STATE_AT, _LEFT)
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()

    def check_alive(self, rank: int) -> None:
        trouble = self._trouble_with(rank)
        if trouble is not None:
            raise CollectiveError(trouble[0])

    def _trouble_with(self, rank: int) -> tuple[str, str] | None:
        """Why it makes no sense to wait for `rank`, and whom or what to blame."""
        pid, state = struct.unpack_from("II", self._lines, rank * LINE + _PID_AT)
        whom = f"rank {rank} (pid {pid})"
        if state == _GAVE_UP:
            there = rank * LINE + _CALLS_AT[0]
            why = Call.unpacked(bytes(self._lines[there : there + _CALL_BYTES])).detail
            return f"rank {self._rank} waits for {whom}, but {why}", why.removeprefix("it gave up: ")
        if state == _LEFT:
            how = "has left the group"
        elif pid and not self._is_alive(rank, pid):
            how = "has died"
        else:
            return None
        return f"rank {self._rank} waits for {whom}, which {how}", f"{whom} {how}"

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait_longer(self, late: int, timeout_s: float, call: bytes) -> None:
        deadline = time.monotonic() + timeout_s - min(LOOK_EVERY_S, timeout_s)
        target = self.count & 0xFFFF_FFFF
        while late >= 0:
            trouble = None
            for rank in range(self._size):
                if trouble is None and rank != self._rank and not self._has_arrived(rank, target):
                    trouble = self._trouble_with(rank)
            left = deadline - time.monotonic()
            if self._stopped:
                how = f"was shut down in {Call.unpacked(call)}"
                trouble = f"rank {self._rank}: the group {how}", f"the group {how}"
            if trouble is None and left <= 0:
                whom = f"rank {late} (pid {struct.unpack_from('I', self._lines, late * LINE + _PID_AT)[0]})"
                text = f"rank {self._rank}: the timeout of {timeout_s:g} s ended in {Call.unpacked(call)}; {whom}"
                trouble = f"{text} is alive but has not come", f"{whom} has not come"
            if trouble is not None:
                self.give_up(*trouble)
                raise CollectiveError(trouble[0])
            late = self._await(target, min(LOOK_EVERY_S, left))

    def _tell_difference(self, call: bytes, rank: int, other: bytes) -> None:
        mine, theirs = Call.unpacked(call), Call.unpacked(other)
        text = f"{DIFFERENT_CALLS}: rank {self._rank} calls {mine}, rank {rank} calls {theirs}"
        if other.startswith(_GIVEN_UP):
            self.give_up(text, theirs.detail.removeprefix("it gave up: "))
        raise CollectiveError(text)

    def _has_arrived(self, rank: int, target: int) -> bool:
        return (self._words[rank * LINE // 4] - target) & 0x8000_0000 == 0

    def _is_alive(self, rank: int, pid: int) -> bool:
        """A pidfd, unlike a signal of 0, knows a zombie from the living, and a new process of the same number."""
        pidfd = self._pidfds.get(rank)
        if pidfd is None:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                return False
            if _birth_of(pid) != struct.unpack_from("Q", self._lines, rank * LINE + _BORN_AT)[0]:
                os.close(pidfd)
                return False  # another process with its number
            self._pidfds[rank] = pidfd
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(0)

    def _arrive_in_python(self, call: bytes, patience_s: float) -> int:
        """As `paceline_meet`."""
        place = _CALLS_AT[self.count & 1]
        here = self._rank * LINE + place
        self._lines[here : here + _CALL_BYTES] = call
        self.state.count += 1
        target = self.count & 0xFFFF_FFFF
        self._words[self._rank * LINE // 4] = target
        late = self._await(target, patience_s)
        if late >= 0:
            return late
        for rank in range(self._size):
            there = rank * LINE + place
            if self._lines[there : there + _CALL_BYTES] != call:
                return self._size + rank
        return DONE

    def _await_in_python(self, target: int, patience_s: float) -> int:
        """-1 when all have come, or a rank that has not. Without C no rank can sleep on a word: naps get longer."""
        began, nap = time.perf_counter(), 0.0
        for step in range(1, self._size):
            rank = (self._rank + step) % self._size
            while not self._has_arrived(rank, target):
                waited = time.perf_counter() - began
                if waited > patience_s:
                    return rank
                if waited > self._spin_s:
                    time.sleep(nap)
                    nap = min(1e-3, nap + 10e-6)
        return -1

    def _arrive_in_c(self, library: ctypes.CDLL) -> Callable[[bytes, float], int]:
        meet = library.paceline_meet
        meet.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64]
        state = ctypes.addressof(self.state)
        return lambda call, patience_s: meet(state, call, int(patience_s * 1e9))

    def _await_in_c(self, library: ctypes.CDLL) -> Callable[[int, float], int]:
        wait = library.paceline_await
        wait.argtypes = [
            ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint32, ctypes.c_int64, ctypes.c_int64,
        ]  # fmt: skip
        spin_ns, first, lines = self.state.spin_ns, (self._rank + 1) % self._size, self.state.lines
        return lambda target, patience_s: wait(lines, self._size, first, target, spin_ns, int(patience_s * 1e9))


def _birth_of(pid: int) -> int:
    """When a process began, in the kernel's ticks: with its number, it is that process and no other."""
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(about.rpartition(")")[2].split()[19])
