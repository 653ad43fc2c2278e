"""What is known of a loader process that died or hangs: the sample it was at, and where in the code it crashed.

loader process    slot in shared memory ◄── the sample, before it is fetched         crash text ◄── faulthandler
worker            "loader process 1 (pid 4711) died at sample 1234: killed by SIGSEGV", and the stack

torch itself raises when a loader process dies, in the middle of whatever the main thread does: while it takes a lock,
say, which is then never given back. Here a death is noticed at the next batch, and torch does not raise.

The crash text goes to anonymous memory of the worker, which the loader process opens by its descriptor: no file can be
left behind, whichever process is killed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import re
import select
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray
from typing import Any

from paceline.errors import DataError
from paceline.input_file import cause_of
from paceline.torch_compat import loader_worker as torch_worker
from paceline.torch_compat import watch_for_dead_loaders

COLLATING, HANDING_OVER = -1, -2

_PR_SET_PDEATHSIG = 1
_HINTS = {
    "SIGKILL": "; the system kills so when memory runs out",
    "SIGBUS": "; shared memory (/dev/shm) that is full ends so",
}


class Slot(ctypes.Structure):
    """Where a loader process is: at `sample`, or in a batch of `state` samples that begins with it, or see above."""

    _fields_ = (("sample", ctypes.c_int64), ("state", ctypes.c_int64))
    sample: int
    state: int

    def __str__(self) -> str:
        if self.state == 0:
            return "before its first sample"
        if self.state == COLLATING:
            return f"in collate_fn, after sample {self.sample}"
        if self.state == HANDING_OVER:
            return f"between batches, after sample {self.sample}"
        return f"at sample {self.sample}" + (f" or one of the {self.state - 1} with it" if self.state > 1 else "")


Slots = ctypes.Array[Slot]


class LoaderWatch:
    """Watches the loader processes of one torch DataLoader, which may have none."""

    def __init__(self, processes: int) -> None:
        with startup_explained():
            self.slots: Slots = RawArray(Slot, processes) if processes else (Slot * 0)()  # no shared memory for none
            self._crashes = [os.memfd_create("paceline-crash", os.MFD_CLOEXEC) for _ in range(processes)]
        self.close = weakref.finalize(self, _close_all, self._crashes)
        self.processes: Sequence[Any] = ()
        self._starting = False
        _watches.add(self)

    def started(self, then: Callable[[int], None] | None) -> _ProcessStart:
        paths = [f"/proc/{os.getpid()}/fd/{crash}" for crash in self._crashes]
        return _ProcessStart(self.slots, os.getpid(), paths, then)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While torch starts the processes that become `processes`; from then on it does not raise when they die."""
        _keep_torch_from_raising()
        self._starting = True
        try:
            with startup_explained():
                yield
        finally:
            self._starting = False

    @property
    def reports_it(self) -> bool:
        """Of a death: that of a process of ours, as far as one can know."""
        return self._starting or any(process.exitcode is not None for process in self.processes)

    def explain(self, error: RuntimeError, processes: Sequence[Any]) -> None:
        """What torch's DataLoader raised, explained by which process died at which sample and how, or is slow."""
        if dead := self.deaths(processes):
            raise DataError(dead) from error
        if timed_out(error):
            raise DataError(self.delayed(str(error))) from error

    def delayed(self, what: str) -> str:
        places = ", ".join(f"process {number} is {slot}" for number, slot in enumerate(self.slots))
        return f"{what}: {places}; where that is no error, give the DataLoader a longer timeout="

    def deaths(self, processes: Sequence[Any]) -> str:
        """A paragraph for each process that has died; empty while all live."""
        return "\n".join(self._death_of(n, p) for n, p in enumerate(processes) if p.exitcode is not None)

    def _death_of(self, number: int, process: Any) -> str:
        text = f"loader process {number} (pid {process.pid}) died {self.slots[number]}: {_death(process.exitcode)}"
        crash = self._crashes[number]
        stack = os.pread(crash, os.fstat(crash).st_size, 0).decode(errors="replace").rstrip()
        return f"{text}\n{stack}" if stack else text


@contextmanager
def startup_explained() -> Iterator[None]:
    """While it is taken from the system: shared memory, semaphores, processes, open files. And while data go there."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if not isinstance(error, pickle.PicklingError) and not re.search("pickle|local object", str(error)):
            raise
        raise DataError(
            "the DataLoader's processes could not be started: by spawn and forkserver they get its dataset as a "
            f"pickle, and that fails ({cause_of(error)}). Define functions and classes at the top of a module, or use "
            "multiprocessing_context='fork' or num_workers=0"
        ) from error
    except OSError as error:
        where = "" if error.filename is None else f" ({error.filename})"
        raise DataError(
            f"the DataLoader's processes could not be started: {error.strerror or error}{where}. They need "
            "shared memory (/dev/shm, which can be written and has room: a container's --shm-size), processes "
            "(ulimit -u) and open files (ulimit -n); or use num_workers=0"
        ) from error


class _ProcessStart:
    """Runs first in each loader process, which must not outlive its trainer, even by torch's five-second check."""

    def __init__(self, slots: Slots, trainer: int, crashes: list[str], then: Callable[[int], None] | None) -> None:
        self._slots, self._trainer, self._crashes, self._then = slots, trainer, crashes, then

    def __call__(self, number: int) -> None:
        self._die_with_the_trainer()
        self._slots[number].state = 0  # the place of the process that had this number before
        crash = open(self._crashes[number], "w")  # noqa: SIM115 (for the life of the process)
        faulthandler.disable()  # inherited from the trainer, it would take the new file but not the signals from torch
        faulthandler.enable(crash)
        _open_for_life.append(crash)
        _show_the_user_s_dataset()
        if self._then is not None:
            self._then(number)

    def _die_with_the_trainer(self) -> None:
        if os.getppid() == self._trainer:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            return
        # Under forkserver the parent is another process, which lives on.
        trainer = os.pidfd_open(self._trainer)
        threading.Thread(target=_end_after, args=(trainer,), name="paceline-trainer-watch", daemon=True).start()


_watches: weakref.WeakSet[LoaderWatch] = weakref.WeakSet()


def _keep_torch_from_raising() -> None:
    """torch's handler of SIGCHLD stays, for the processes of other DataLoaders; like torch's, ours is set for good."""
    if threading.current_thread() is not threading.main_thread():
        return  # where torch sets none either
    watch_for_dead_loaders()
    before = signal.getsignal(signal.SIGCHLD)
    if not callable(before) or getattr(before, "calls_torch", False):
        return

    def handler(number: int, frame: Any) -> None:
        try:
            before(number, frame)
        except RuntimeError:
            if not any(watch.reports_it for watch in _watches):
                raise

    handler.calls_torch = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, handler)


def _end_after(trainer: int) -> None:
    poll = select.poll()
    poll.register(trainer, select.POLLIN)
    poll.poll()
    os._exit(1)


def _show_the_user_s_dataset() -> None:
    """`get_worker_info().dataset` is what the user gave to the DataLoader, not what we wrapped around it."""
    info = torch_worker._worker_info
    dataset = getattr(info.dataset, "dataset", None) if info is not None else None
    if info is not None and dataset is not None:
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=dataset
        )


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_open_for_life: list[Any] = []  # faulthandler keeps the descriptor only, so the file object has to live


def timed_out(error: RuntimeError) -> bool:
    return str(error).startswith("DataLoader timed out")


def _death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"it exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"killed by {name}{_HINTS.get(name, '')}"
