"""Reads the ledger of samples back: the lines of every file as columns of numbers, and what can't be read by name.

    attempt-0001-worker-00000.jsonl  ─┐      step  epoch  epoch_step  lane  micro_batch  position  count  used   rows
    attempt-0001-worker-00001.jsonl  ─┼──►      1      0           0     0            0         0      2     1
    attempt-0002-worker-00000.jsonl  ─┘      …                         ids: 5 9 | 0 3 | …

Ten million samples as Python objects would fill gigabytes, so lines are parsed a block at a time and only the columns
are kept: 41 bytes a micro-batch and 8 a sample. A last line without its end was cut by a kill and is left out, with a
note; any other line that is not what the writer writes is a problem with its file and number.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.sample_record import FILE_NAME, FOLDER, VERSION, RecordHeader, file_name
from paceline.errors import ConfigError
from paceline.input_file import cause_of, open_input, parse_json

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
    header: RecordHeader  # its first worker's
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
class Record:
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


def read_record(folder: Path) -> Record:
    """The record of a run folder, or of its `samples` folder."""
    where = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    names = (FILE_NAME.fullmatch(path.name) for path in where.glob("attempt-*.jsonl"))
    found = sorted((int(name[1]), int(name[2]), name[0]) for name in names if name)
    if not found:
        raise ConfigError(
            f"there is no record of samples in {folder}: a run writes one when it is started with --record-samples "
            "or Engine(record_samples=…)"
        )
    reader = _Reader(where)
    for attempt, worker, name in found:
        reader.read(attempt, worker, name)
    if not reader.attempts:
        raise ConfigError(f"no file in {where} has a readable first line: the record of samples is damaged or empty")
    if len({attempt.header.stream for attempt in reader.attempts}) > 1:
        reader.problems.append("some attempts trained on a stream and some did not; their places can't be compared")
    return Record(folder, reader.attempts, reader.columns.entries(), reader.problems, reader.notes)


class _Columns:
    def __init__(self) -> None:
        self._numbers = {name: array(code) for name, code in CODES.items()}
        self._count, self._used, self._ids = array("i"), array("b"), array("q")

    def __len__(self) -> int:
        return len(self._count)

    def add(self, rows: Sequence[dict[str, Any]], header: RecordHeader) -> None:
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

    def _header(self, line: bytes, name: str, attempt: int, worker: int) -> RecordHeader | None:
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
                f"{name} is version {version} of the record of samples; this paceline reads version {VERSION}: "
                "use the paceline that wrote it, or a newer one"
            )
        try:
            header = RecordHeader.of_line(fields) if version is not None else None
        except (ConfigError, *NOT_A_LINE):
            header = None
        if header is None:
            self.problems.append(f"{name}, line 1 is damaged, so nothing of the file can be read")
        elif said != name:
            self.problems.append(f"{name} says in its first line that it is {said}: it was copied or renamed")
        return header

    def _attempt_of(self, number: int, name: str, header: RecordHeader) -> Attempt:
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
