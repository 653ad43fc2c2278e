"""The sample log: which samples went into every committed step, one file per start of the job and worker.

    RUN/samples/attempt-0001-worker-00000.jsonl    {"paceline": "samples", …, "epoch": 0, "position": 0}  began there
                                                   {"step": 1, …, "lane": 0, …, "position": 0, "ids": [5, 9]}
                                                   {"step": 1, …, "lane": 1, …, "position": 2, "ids": [0, 3]}
                attempt-0001-worker-00001.jsonl    …
                attempt-0002-worker-00000.jsonl    the job stopped or was killed, and was started again

A line is one micro-batch; its samples stand at consecutive positions of the epoch's order. In a stream there are no
ids, and positions count inside each lane's own stream. Where an epoch is longer or shorter than the header says (the
dataset grew, a batch sampler gave other batches) a line {"epoch": 3, "samples": …, "samples_per_epoch": …} precedes it.

The lines of a step are appended in one write once the step is committed: from then on the kernel has them, and killing
the process loses none. Read back, the lines of all files are columns of numbers:

    attempt-0001-worker-00000.jsonl  ─┐      step  epoch  epoch_step  lane  micro_batch  position  count  used   rows
    attempt-0001-worker-00001.jsonl  ─┼──►      1      0           0     0            0         0      2     1
    attempt-0002-worker-00000.jsonl  ─┘      …                         ids: 5 9 | 0 3 | …

Ten million samples as Python objects would fill gigabytes, so lines are parsed a block at a time and only the columns
are kept: 41 bytes a micro-batch and 8 a sample. A last line without its end was cut by a kill and is left out, with a
note; any other line that is not what the writer writes is a problem with its file and number. `data/audit.py` proves
from them that every sample was used exactly once.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError, ConfigError
from paceline.input_file import append, cause_of, open_input, parse_json

FOLDER = "samples"
VERSION = 1
FILE_NAME = re.compile(r"attempt-(\d{4,})-worker-(\d{5,})\.jsonl")

# -- writing -----------------------------------------------------------------------------------------------------------


def file_name(attempt: int, worker: int) -> str:
    return f"attempt-{attempt:04d}-worker-{worker:05d}.jsonl"


@dataclass(frozen=True)
class LogHeader:
    """The lanes and lengths of a start of the job, and the place in the data where it began."""

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
                raise ConfigError(f"sample log: {text}")

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
        fields = asdict(self)
        del fields["position" if self.stream else "lane_positions"]
        return {"paceline": "samples", "version": VERSION, "attempt": attempt, **fields}

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> LogHeader:
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


class SampleLog:
    """One worker's file of one start of the job."""

    def __init__(self, path: Path, descriptor: int, header: LogHeader) -> None:
        self._path, self._descriptor, self._header = path, descriptor, header
        self._pending: list[MicroBatch] = []
        self._length = (header.samples, header.samples_per_epoch)
        self._new_length: str | None = None

    @classmethod
    def start(cls, folder: Path, attempt: int, header: LogHeader) -> SampleLog:
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
                append(descriptor, (json.dumps(header.line(attempt)) + "\n").encode())
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
        """The step in progress counts, unless the workers that say so now are lost before all have: write it down."""
        if not self._pending:
            return
        try:
            lines = (self._new_length or "") + "".join(entry.line() for entry in self._pending)
            append(self._descriptor, lines.encode())
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
        raise ConfigError("sample log: only a stream may have no number of samples")
    if not 1 <= samples_per_epoch <= samples:
        raise ConfigError(f"sample log: {samples_per_epoch} samples per epoch of {samples} samples")


# -- reading -----------------------------------------------------------------------------------------------------------

BLOCK_BYTES = 1 << 21
CODES = {"step": "i", "epoch": "i", "epoch_step": "i", "lane": "i", "micro_batch": "i", "position": "q"}
LONGEST_LINE = 2**26  # bytes; a micro-batch of a million samples has some ten million
FURTHEST = 1 << 62  # so that position + count never overflows
TORN_STEP = re.compile(rb'\{"step": ?(\d+),')
NOT_A_LINE = (ValueError, KeyError, TypeError, OverflowError, AttributeError)  # of json, of array, of `row["step"]`

Ints = npt.NDArray[Any]


@dataclass(frozen=True)
class Entries:
    """One row per micro-batch, in the order of the files; `ids` has the samples of all rows, one after the other."""

    step: Ints
    epoch: Ints
    epoch_step: Ints
    lane: Ints
    micro_batch: Ints
    position: Ints
    count: Ints
    used: Ints
    ids: Ints  # empty in a stream
    first_id: Ints  # where a row's ids begin

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class WorkerFile:
    attempt: int
    worker: int
    name: str
    rows: slice
    torn: bool  # its last line has no end
    torn_step: int | None  # which that line was of, if it got so far


@dataclass
class Attempt:
    """One start of the job."""

    number: int
    header: LogHeader  # its first worker's
    files: list[WorkerFile] = field(default_factory=list)
    lengths: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)  # from an epoch on

    @property
    def rows(self) -> slice:
        return slice(self.files[0].rows.start, self.files[-1].rows.stop)

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """Where it began, as (epoch, position) by track: one for all lanes, or in a stream one for each lane."""
        header = self.header
        if header.lane_positions is None:
            return {0: (header.epoch, header.position)}
        return {lane: (header.epoch, position) for lane, position in header.lane_positions.items()}

    @property
    def without_file(self) -> list[int]:
        there = {file.worker for file in self.files}
        return [worker for worker in range(self.header.workers) if worker not in there]

    def length(self, epoch: int) -> tuple[int | None, int | None]:
        """(samples, samples used per epoch) of an epoch that this attempt trained on."""
        known = sorted(self.lengths)
        return self.lengths[known[max(0, bisect_right(known, epoch) - 1)]]


@dataclass(frozen=True)
class LoggedRun:
    folder: Path
    attempts: list[Attempt]
    entries: Entries
    problems: list[str]
    notes: list[str]

    @property
    def stream(self) -> bool:
        return self.attempts[0].header.stream

    @property
    def lanes(self) -> int:
        return max(attempt.header.lanes for attempt in self.attempts)

    @property
    def track(self) -> Ints:
        """What a row's position counts in: 0 is the epoch's order; in a stream, the lane."""
        return self.entries.lane if self.stream else np.broadcast_to(np.int32(0), len(self.entries))

    def file_of(self, row: int) -> WorkerFile:
        files = [file for attempt in self.attempts for file in attempt.files]
        return files[bisect_right(files, row, key=lambda file: file.rows.start) - 1]


def read_log(folder: Path) -> LoggedRun:
    """The sample log of a run folder, or of its `samples` folder."""
    where = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    names = (FILE_NAME.fullmatch(path.name) for path in where.glob("attempt-*.jsonl"))
    found = sorted((int(name[1]), int(name[2]), name[0]) for name in names if name)
    if not found:
        raise ConfigError(
            f"there is no sample log in {folder}: a run writes one when it is started with --record-samples "
            "or Engine(record_samples=…)"
        )
    reader = _Reader(where)
    for attempt, worker, name in found:
        reader.read(attempt, worker, name)
    if not reader.attempts:
        raise ConfigError(f"no file in {where} has a readable first line: the sample log is damaged or empty")
    if len({attempt.header.stream for attempt in reader.attempts}) > 1:
        reader.problems.append("some attempts trained on a stream and some did not; their places can't be compared")
    return LoggedRun(folder, reader.attempts, reader.columns.entries(), reader.problems, reader.notes)


class _Columns:
    def __init__(self) -> None:
        self._numbers = {name: array(code) for name, code in CODES.items()}
        self._count, self._used, self._ids = array("i"), array("b"), array("q")

    def __len__(self) -> int:
        return len(self._count)

    def add(self, rows: Sequence[dict[str, Any]], header: LogHeader) -> None:
        """All of the rows, or none and an error of `NOT_A_LINE`."""
        numbers = {name: array(code, [row[name] for row in rows]) for name, code in CODES.items()}
        ids = array("q", () if header.stream else chain.from_iterable(row["ids"] for row in rows))
        count = array("i", [row["count"] if header.stream else len(row["ids"]) for row in rows])
        used = array("b", [row.get("used", True) for row in rows])
        for name, values in numbers.items():
            if min(values) < 0:
                raise ValueError(f"{name} is negative")
        if min(count) < 1:
            raise ValueError("it has no samples")
        if max(numbers["lane"]) >= header.lanes:
            raise ValueError(f"lane {max(numbers['lane'])} of {header.lanes} lanes")
        if max(numbers["position"]) >= FURTHEST:
            raise ValueError(f"position {max(numbers['position'])}")
        for name, values in numbers.items():
            self._numbers[name].extend(values)
        self._count.extend(count)
        self._used.extend(used)
        self._ids.extend(ids)

    def entries(self) -> Entries:
        count = np.asarray(self._count)
        first_id = np.cumsum(count, dtype=np.int64) - count
        numbers = {name: np.asarray(values) for name, values in self._numbers.items()}
        return Entries(
            **numbers, count=count, used=np.asarray(self._used), ids=np.asarray(self._ids), first_id=first_id
        )


class _Reader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.columns = _Columns()
        self.attempts: list[Attempt] = []
        self.problems: list[str] = []
        self.notes: list[str] = []

    def read(self, number: int, worker: int, name: str) -> None:
        try:
            with open_input(self._folder / name) as file:
                header = self._header(file.readline(LONGEST_LINE), name, number, worker)
                if header is None:
                    return
                attempt = self._attempt_of(number, name, header)
                start, left, line_number = len(self.columns), b"", 2
                while block := file.read(BLOCK_BYTES):
                    *lines, left = (left + block).split(b"\n")
                    self._add(attempt, name, lines, line_number)
                    line_number += len(lines)
                    if len(left) > LONGEST_LINE:
                        self.problems.append(
                            f"{name}, line {line_number} does not end: the rest of the file is unknown"
                        )
                        left = b""
                        break
        except OSError as error:
            self.problems.append(f"{name} can't be read: {cause_of(error)}")
            return
        if left:
            self.notes.append(f"{name} ends inside a line (killed while writing); line {line_number} is left out")
        step = TORN_STEP.match(left)
        rows = slice(start, len(self.columns))
        attempt.files.append(WorkerFile(number, worker, name, rows, bool(left), int(step[1]) if step else None))

    def _header(self, line: bytes, name: str, attempt: int, worker: int) -> LogHeader | None:
        if not line.endswith(b"\n"):
            self.notes.append(f"{name} ends inside its first line (killed while it was made)")
            return None
        try:
            fields = parse_json(line)
            version = fields["version"] if fields["paceline"] == "samples" else None
            said = file_name(fields["attempt"], fields["worker"])
        except NOT_A_LINE:
            version = None
        if version not in (None, VERSION):
            raise ConfigError(
                f"{name} is version {version} of the sample log; this paceline reads version {VERSION}: "
                "use the paceline that wrote it, or a newer one"
            )
        try:
            header = LogHeader.of_line(fields) if version is not None else None
        except (ConfigError, *NOT_A_LINE):
            header = None
        if header is None:
            self.problems.append(f"{name}, line 1 is damaged, so nothing of the file can be read")
        elif said != name:
            self.problems.append(f"{name} says in its first line that it is {said}: it was copied or renamed")
        return header

    def _attempt_of(self, number: int, name: str, header: LogHeader) -> Attempt:
        if not self.attempts or self.attempts[-1].number != number:
            length = (header.samples, header.samples_per_epoch)
            self.attempts.append(Attempt(number, header, lengths={header.epoch: length}))
            return self.attempts[-1]
        attempt = self.attempts[-1]
        first = attempt.header.line(number)
        for key, value in header.line(number).items():
            if key not in ("worker", "lane_positions") and value != first[key]:
                self.problems.append(f"{name} says {key}: {value}, worker {first['worker']} says {first[key]}")
        if header.lane_positions is not None and attempt.header.lane_positions is not None:
            places = {**header.lane_positions, **attempt.header.lane_positions}  # each worker knows its own lanes'
            attempt.header = replace(attempt.header, lane_positions=places)
        return attempt

    def _add(self, attempt: Attempt, name: str, lines: list[bytes], first_number: int) -> None:
        if not lines:
            return
        try:
            rows = parse_json(b"[" + b",".join(lines) + b"]")
            if len(rows) != len(lines):
                raise ValueError("a line is not one object")
            self.columns.add(rows, attempt.header)
        except NOT_A_LINE:
            for number, line in enumerate(lines, first_number):
                self._add_one(attempt, f"{name}, line {number}", line)

    def _add_one(self, attempt: Attempt, where: str, line: bytes) -> None:
        try:
            row = parse_json(line)
            if "step" not in row and "samples_per_epoch" in row:
                length = (row["samples"], row["samples_per_epoch"])
                if attempt.lengths.setdefault(int(row["epoch"]), length) != length:
                    self.problems.append(f"{where} gives epoch {row['epoch']} another length than an earlier line")
            else:
                self.columns.add([row], attempt.header)
        except NOT_A_LINE as error:
            why = f"no {error}" if isinstance(error, KeyError) else cause_of(error)
            self.problems.append(f"{where} is damaged ({why}): its micro-batch is unknown")
