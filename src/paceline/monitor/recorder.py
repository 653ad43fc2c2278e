"""A worker writes its events: a step costs it one record in a queue, and a thread of its own does the rest.

    training thread     step counts ─► record ─► queue (bounded; full: dropped and counted)
    this thread         every half second: memory, CPU and GPU of the worker, records ─► RUN/events/worker-SLOT.N

Nothing that goes wrong here stops a training. Where the disk is full or slow records are dropped; the file then says
how many, as soon as it can be written again.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline import input_file
from paceline.monitor.events import (
    FOLDER,
    FORMAT,
    VERSION,
    BucketsRecord,
    Kind,
    StepRecord,
    Use,
    pack_buckets,
    pack_note,
    pack_step,
)
from paceline.monitor.resource_use import ResourceUse
from paceline.world import messages
from paceline.world.world import World

EVERY_S = 0.5
MOST_WAITING = 4096
"""Records in the queue, a megabyte: some minutes of steps while a disk hangs."""
LEAVES_WITHIN_S = 2.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Meter(Protocol):
    """Of what this worker uses of its host."""

    def sample(self) -> None:
        """Every half second."""
        ...

    def read(self) -> Use:
        """Since it was read last; for the records that are written now."""
        ...

    def close(self) -> None: ...


class Membership(Protocol):
    @property
    def about_generation(self) -> Sequence[str]:
        """About the generation, in words."""
        ...


class Messages(Protocol):
    @property
    def waits(self) -> dict[int, float]:
        """By rank: the seconds that messages from it were waited for, so far."""
        ...


class Workers(Protocol):
    """Those that this one is with, as far as a record names them."""

    world: World
    after_step: list[Callable[[], None]]

    @property
    def comm(self) -> Messages: ...

    @property
    def generation(self) -> int | None: ...

    @property
    def recovery(self) -> Membership: ...


class EventFile:
    """The thread and its file. `add` and `note` return at once."""

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        meter: Callable[[], Meter],
        *,
        every_s: float = EVERY_S,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        """`meter` is called by the thread: to open NVML takes its time, which no step should wait for."""
        self._meter, self._every_s, self._most = meter, every_s, most_waiting
        self._queue: collections.deque[StepRecord | BucketsRecord | bytes] = collections.deque()
        self.dropped = 0
        self._told_dropped = 0
        self._last: tuple[int, int, int] = (0, 0, 0)
        self._has_warned = False
        self._ends = threading.Event()
        self.path, self._descriptor = _created(folder / FOLDER, int(about["worker"]))
        try:
            input_file.append(self._descriptor, _header(about))
        except OSError:
            os.close(self._descriptor)
            raise
        self._thread = threading.Thread(target=self._run, name="paceline events", daemon=True)
        self._thread.start()

    def add(self, record: StepRecord | BucketsRecord | bytes) -> None:
        if len(self._queue) < self._most:
            self._queue.append(record)
        else:
            self.dropped += 1

    def close(self) -> None:
        """What is queued is written, unless the disk hangs: no training waits for that."""
        self._ends.set()
        self._thread.join(LEAVES_WITHIN_S)

    def _run(self) -> None:
        try:
            with contextlib.closing(self._meter()) as meter:
                while not self._ends.wait(self._every_s):
                    meter.sample()
                    self._write(meter)
                self._write(meter)
        finally:
            os.close(self._descriptor)

    def _write(self, meter: Meter) -> None:
        taken = [self._queue.popleft() for _ in range(len(self._queue))]
        if not taken:
            return
        use = meter.read()
        packed = [_packed(one, use) for one in taken]
        steps = [one for one in taken if isinstance(one, StepRecord)]
        if steps:
            self._last = steps[-1].rank, steps[-1].generation, steps[-1].step
        dropped = self.dropped
        if dropped > self._told_dropped:
            text = f"{dropped - self._told_dropped} records were dropped: the disk was full or slow"
            packed.append(pack_note(Kind.NOTE, *self._last, time.perf_counter(), text))
        try:
            input_file.append(self._descriptor, b"".join(packed))
            self._told_dropped = dropped
        except OSError as error:
            self.dropped += len(taken)
            if not self._has_warned:
                self._has_warned = True
                why = input_file.cause_of(error)
                messages.logger("engine").warning(
                    f"paceline: {self.path} can't be written ({why}); training goes on, and its events are dropped"
                )


class Recorder:
    """Listens to the steps of a worker, from its birth until it is closed."""

    def __init__(self, file: EventFile, workers: Workers, training: Callable[[], Any]) -> None:
        """`training` gives the `TrainStep`, whose `step` and `timing` are read."""
        self._file, self._workers, self._training = file, workers, training
        self._generation: int | None = workers.generation
        self._waits: Mapping[int, float] = workers.comm.waits
        workers.after_step.append(self._step_counts)

    def _step_counts(self) -> None:
        training, workers = self._training(), self._workers
        timing, generation = training.timing, workers.generation
        if generation != self._generation:
            self._generation = generation
            for text in workers.recovery.about_generation:
                self._note(Kind.JOB, training.step, text)
        self._file.add(
            StepRecord(
                workers.world.rank,
                generation or 0,
                training.step,
                timing.began,
                timing.arrived,
                timing.voted,
                tuple(timing.parts),
                timing.hidden_s,
                *self._slow_peer(),
            )
        )
        if timing.left_at:
            rank = workers.world.rank
            self._file.add(BucketsRecord(rank, generation or 0, training.step, timing.began, timing.left_at))

    def _slow_peer(self) -> tuple[int, float]:
        """Whose messages this worker has waited for longest in the step, and how much longer than for the others'."""
        before, self._waits = self._waits, self._workers.comm.waits
        spent = {rank: seconds - before.get(rank, 0.0) for rank, seconds in self._waits.items()}
        if len(spent) < 2:  # of two workers none can be told from the link between them
            return 0, 0.0
        peer = max(spent, key=lambda rank: spent[rank])
        others = statistics.median(seconds for rank, seconds in spent.items() if rank != peer)
        return peer, max(0.0, spent[peer] - others)

    def _note(self, kind: Kind, step: int, text: str) -> None:
        rank = self._workers.world.rank
        self._file.add(pack_note(kind, rank, self._generation or 0, step, time.perf_counter(), text))

    def close(self) -> None:
        self._workers.after_step.remove(self._step_counts)
        training = self._training()
        self._note(Kind.END, 0 if training is None else training.step, "")
        self._file.close()


def record_steps(
    folder: Path, about: Mapping[str, Any], workers: Workers, training: Callable[[], Any], device: Any
) -> Recorder | None:
    """Write this worker's events of the run in `folder`; None, with a warning, where that can't be."""
    try:
        file = EventFile(folder, about, lambda: ResourceUse(device))
    except OSError as error:
        why = input_file.cause_of(error)
        messages.logger("engine").warning(
            f"paceline: the events of this worker can't be written to {folder / FOLDER} ({why}); training goes on "
            "without them"
        )
        return None
    return Recorder(file, workers, training)


def _packed(record: StepRecord | BucketsRecord | bytes, use: Use) -> bytes:
    if isinstance(record, StepRecord):
        return pack_step(record, use)
    return pack_buckets(record) if isinstance(record, BucketsRecord) else record


def _header(about: Mapping[str, Any]) -> bytes:
    """`clock` and `time` are one moment, of the monotonic clock and of the calendar."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = BOOT_ID.read_text().strip()
    known = {
        "format": FORMAT,
        "version": VERSION,
        "host": socket.gethostname(),
        "boot": boot,  # processes of one boot read one clock
        "process": os.getpid(),
        "clock": time.perf_counter(),
        "time": time.time(),
    }
    return json.dumps({**known, **about}).encode() + b"\n"


def _created(folder: Path, worker: int) -> tuple[Path, int]:
    """A file that is not there yet: earlier runs in the same folder, and earlier processes of the slot, keep theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        path = folder / f"worker-{worker}.{number}"
        try:
            return path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            number += 1
