"""The ledger of samples: what went into every committed step, one file per start of the job and worker.

    RUN/samples/attempt-0001-worker-00000.jsonl    {"paceline": "samples", …, "epoch": 0, "position": 0}  began there
                                                   {"step": 1, …, "lane": 0, …, "position": 0, "ids": [5, 9]}
                                                   {"step": 1, …, "lane": 1, …, "position": 2, "ids": [0, 3]}
                attempt-0001-worker-00001.jsonl    …
                attempt-0002-worker-00000.jsonl    the job stopped or was killed, and was started again

A line is one micro-batch; its samples stand at consecutive positions of the epoch's order. In a stream there are no
ids, and positions count inside each lane's own stream. Where an epoch is longer or shorter than the header says (the
dataset grew, a batch sampler gave other batches) a line {"epoch": 3, "samples": …, "samples_per_epoch": …} precedes it.

The lines of a step are appended in one write once the step is committed: from then on the kernel has them, and killing
the process loses none. `data/audit.py` proves from these files that every sample was used exactly once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, ConfigError

FOLDER = "samples"
VERSION = 1
FILE_NAME = re.compile(r"attempt-(\d{4,})-worker-(\d{5,})\.jsonl")


def file_name(attempt: int, worker: int) -> str:
    return f"attempt-{attempt:04d}-worker-{worker:05d}.jsonl"


@dataclass(frozen=True)
class RecordHeader:
    """What a start of the job was dealt, and the place in the data where it began."""

    worker: int
    workers: int
    lanes: int
    epoch: int
    samples: int | None = None  # None: a stream, which need not have a length
    samples_per_epoch: int | None = None  # less than `samples` under drop_last
    each_id_once: bool = False  # the order is a permutation of [0, samples)
    position: int = 0  # samples of `epoch` used before
    stream: bool = False
    lane_positions: Mapping[int, int] | None = None  # a stream's place instead: samples used before by each own lane

    def __post_init__(self) -> None:
        def check(ok: bool, text: str) -> None:
            if not ok:
                raise ConfigError(f"record of samples: {text}")

        check(0 <= self.worker < self.workers, f"worker {self.worker} of {self.workers} workers does not exist")
        check(self.lanes >= 1, f"lanes={self.lanes}: a job has at least one lane")
        check(self.epoch >= 0, f"epoch={self.epoch} is before the first")
        check(self.stream == (self.lane_positions is not None), "a stream, and nothing else, has lane_positions")
        if self.stream:
            check(not self.each_id_once, "a stream has no ids, so each_id_once can't be promised")
            for lane, position in (self.lane_positions or {}).items():
                check(0 <= lane < self.lanes, f"there is no lane {lane} among {self.lanes}")
                check(position >= 0, f"lane {lane} can't begin at position {position}")
        else:
            _check_epoch(self.samples, self.samples_per_epoch)
            check(
                0 <= self.position <= (self.samples_per_epoch or 0),
                f"position {self.position} is not in an epoch of {self.samples_per_epoch} samples",
            )

    def line(self, attempt: int) -> dict[str, Any]:
        return {
            "paceline": "samples",
            "version": VERSION,
            "attempt": attempt,
            "worker": self.worker,
            "workers": self.workers,
            "lanes": self.lanes,
            "epoch": self.epoch,
            **({"lane_positions": dict(self.lane_positions or {})} if self.stream else {"position": self.position}),
            "samples": self.samples,
            "samples_per_epoch": self.samples_per_epoch,
            "each_id_once": self.each_id_once,
            "stream": self.stream,
        }

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> RecordHeader:
        """The header back from its line."""
        names = ("worker", "workers", "lanes", "epoch", "samples", "samples_per_epoch", "each_id_once", "stream")
        if line["stream"]:
            place: dict[str, Any] = {"lane_positions": {int(lane): at for lane, at in line["lane_positions"].items()}}
        else:
            place = {"position": line["position"]}
        return cls(**{name: line[name] for name in names}, **place)


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a committed step. A stream gives `count`, everything else `ids`."""

    step: int  # committed steps of the job, from 1
    epoch: int
    epoch_step: int  # within the epoch, from 0
    lane: int
    micro_batch: int
    position: int  # where its first sample stands in the epoch's order, or in the lane's stream
    ids: Sequence[int] | None = None
    count: int | None = None
    used: bool = True  # False: the loop left it out, by a `continue` before backward

    def line(self) -> str:
        fields: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "lane": self.lane,
            "micro_batch": self.micro_batch,
            "position": self.position,
        }
        if self.ids is None:
            fields["count"] = self.count
        else:
            fields["ids"] = list(self.ids)
        if not self.used:
            fields["used"] = False
        return json.dumps(fields, separators=(",", ":")) + "\n"


class SampleRecord:
    """One worker's file of one start of the job."""

    def __init__(self, path: Path, descriptor: int, header: RecordHeader) -> None:
        self._path, self._descriptor, self._header = path, descriptor, header
        self._pending: list[MicroBatch] = []
        self._length = (header.samples, header.samples_per_epoch)
        self._new_length: str | None = None

    @classmethod
    def start(cls, folder: Path, attempt: int, header: RecordHeader) -> SampleRecord:
        """Open this worker's file in the run folder `folder`; all workers pass the same `attempt`."""
        path = folder / FOLDER / file_name(attempt, header.worker)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        if path.exists():
            raise ConfigError(
                f"worker {header.worker}: {path} exists already, so attempt {attempt} was recorded before; "
                "another job writes to the same run folder, or the workers did not agree on the attempt's number"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o644)
            try:
                _write_all(descriptor, (json.dumps(header.line(attempt)) + "\n").encode())
            except OSError:
                os.close(descriptor)
                path.unlink()
                raise
        except OSError as error:
            raise ConfigError(
                f"worker {header.worker}: samples can't be recorded in {path.parent}: {error.strerror}; "
                "choose a folder that can be written to, or don't record them"
            ) from error
        return cls(path, descriptor, header)

    def begin_epoch(self, epoch: int, samples: int | None, samples_per_epoch: int | None) -> None:
        """Say how long the epoch is, before anything of it is added; written only where it is news."""
        if not self._header.stream:
            _check_epoch(samples, samples_per_epoch)
        if (samples, samples_per_epoch) != self._length:
            self._length = (samples, samples_per_epoch)
            line = {"epoch": epoch, "samples": samples, "samples_per_epoch": samples_per_epoch}
            self._new_length = json.dumps(line, separators=(",", ":")) + "\n"

    def add(self, entry: MicroBatch) -> None:
        """A micro-batch of the step in progress; nothing is written before the step commits."""
        assert (entry.ids is None) == self._header.stream, "a stream records counts, everything else ids"
        self._pending.append(entry)

    def commit(self) -> None:
        """The step in progress is part of the weights now: write down what was in it."""
        if not self._pending:
            return
        try:
            lines = (self._new_length or "") + "".join(entry.line() for entry in self._pending)
            _write_all(self._descriptor, lines.encode())
        except OSError as error:
            raise CheckpointError(
                f"worker {self._header.worker}: the samples of step {self._pending[-1].step} could not be recorded in "
                f"{self._path}: {error.strerror}; make room, then resume from the last saved state"
            ) from error
        self._pending.clear()
        self._new_length = None

    def close(self) -> None:
        """What was added and not committed is not written: no step had it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._pending.clear()


def next_attempt(folder: Path) -> int:
    """The number of the next start recorded in the run folder. One worker asks, before any file of it is made."""
    names = (FILE_NAME.fullmatch(path.name) for path in (folder / FOLDER).glob("attempt-*.jsonl"))
    return max((int(name[1]) for name in names if name), default=0) + 1


def _check_epoch(samples: int | None, samples_per_epoch: int | None) -> None:
    if samples is None or samples_per_epoch is None:
        raise ConfigError("record of samples: only a stream may have no number of samples")
    if not 1 <= samples_per_epoch <= samples:
        raise ConfigError(f"record of samples: {samples_per_epoch} samples per epoch of {samples} samples")


def _write_all(descriptor: int, text: bytes) -> None:
    """All of it or nothing: a disk that fills up in the middle must not leave half a line between whole ones."""
    before = os.fstat(descriptor).st_size
    written = 0
    try:
        while written < len(text):
            written += os.write(descriptor, text[written:])
    except OSError:
        os.ftruncate(descriptor, before)
        raise
