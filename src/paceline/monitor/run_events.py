"""The events of a run are read: the files of its workers, on one time axis.

    worker-0.0   ▓▓▓▓▓▓▓▓▓▓░░░░        a job that was resumed from a checkpoint: what it had done beyond that no longer
    worker-0.1             ▓▓▓▓▓▓▓     counts
    worker-1.0   ▓▓▓▓▓▓▓
    worker-1.1         ▓▓▓▓▓▓▓▓▓▓▓     an elastic job's replacement of worker 1 joins: what both wrote counts

Clocks of one boot are one clock. Those of two hosts are aligned by the votes of their common steps: a vote is an
all-gather, so it ends everywhere when its last worker has come. The median over steps of the difference of these ends
is the difference of the clocks, up to the network's latency, however late any worker was. Workers that never vote
together (asynchronous strategies) are aligned by the calendar time of their hosts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.input_file import cause_of, one_line, open_input, parse_json
from paceline.monitor.events import (
    BUCKETS_DTYPE,
    DTYPE,
    FOLDER,
    FORMAT,
    LONGEST_HEADER,
    RECORD_BYTES,
    VERSION,
    Kind,
    text_of,
    told_of,
)

_NAME = re.compile(r"worker-(\d+)\.(\d+)")
_RECORD, _OF_BUCKETS = np.dtype(DTYPE), np.dtype(BUCKETS_DTYPE)
assert _RECORD.itemsize == _OF_BUCKETS.itemsize == RECORD_BYTES
MOST_S = 1e10
"""No clock shows more, and no step lasts longer: 300 years."""
MOST_BYTES = 2.0**60
MOST_STEPS = 2**53
"""The whole numbers that JSON's readers, and floats, have."""
HOSTS_APART_S = 600.0
"""At most, by their calendars: further apart are two runs in one folder, which both have a step 1."""

Records = npt.NDArray[Any]
Share = Literal["cpu", "gpu"]
SHARES: tuple[Share, ...] = ("cpu", "gpu")


@dataclass(frozen=True)
class Note:
    """Something that happened: a generation began, records were dropped."""

    worker: int | None  # None: to the job
    time: float
    step: int
    text: str


@dataclass
class WorkerFile:
    """What one process wrote. Times are its own clock's; `offset` makes them the run's."""

    path: Path
    header: dict[str, Any]
    steps: Records
    buckets: Records
    notes: list[tuple[float, int, str, bool]]  # time, step, text, whether it is about the job
    has_ended: bool
    cut_bytes: int  # of a record that was being written
    offset: float = 0.0

    @property
    def worker(self) -> int:
        return int(self.header["worker"])

    @property
    def began(self) -> float:
        return float(self.header["clock"]) + self.offset


@dataclass
class RunEvents:
    """`workers` has each worker's steps in order, each step once, with times in seconds since 1970."""

    folder: Path
    workers: dict[int, Records]
    buckets: dict[int, list[Records]]
    """When buckets left each worker, by the files of its processes: of all steps, those that don't count too."""
    notes: list[Note]
    headers: dict[int, dict[str, Any]]
    has_ended: bool
    problems: list[str] = field(default_factory=list)
    """Files that were left out, a line each."""

    @property
    def last_step(self) -> int:
        return max((int(steps["step"][-1]) for steps in self.workers.values() if len(steps)), default=0)


def read_run(folder: Path, recent: int | None = None) -> RunEvents:
    """`recent`: at most so many records of each file, its last ones; for whoever reads again and again."""
    files, problems = _files_of(folder, recent)
    _align(files)
    workers: dict[int, Records] = {}
    buckets: dict[int, list[Records]] = {}
    for file in sorted(files, key=lambda one: one.began):
        steps = file.steps.copy()
        for name in ("began", "arrived", "voted"):
            steps[name] += np.where(steps[name] > 0, file.offset, 0.0)
        _supersede(workers, file)
        before = workers.get(file.worker)
        workers[file.worker] = steps if before is None else _joined(before, steps)
        left = file.buckets.copy()
        left["began"] += file.offset
        buckets.setdefault(file.worker, []).append(left)
    newest = {file.worker: file for file in sorted(files, key=lambda one: one.began)}
    return RunEvents(
        folder,
        dict(sorted(workers.items())),
        buckets,
        _notes_of(files),
        {worker: file.header for worker, file in sorted(newest.items())},
        has_ended=all(file.has_ended for file in newest.values()),
        problems=problems,
    )


def _files_of(folder: Path, recent: int | None) -> tuple[list[WorkerFile], list[str]]:
    named = one_line(str(folder), 200)
    if not folder.is_dir():
        raise DataError(f"{named}: there is no such run; name the folder that holds its metrics.jsonl")
    paths = sorted(path for path in folder.glob(f"{FOLDER}/worker-*") if _NAME.fullmatch(path.name))
    if not paths:
        below = sorted(one.parent for one in folder.glob(f"*/{FOLDER}") if one.is_dir())
        those = (
            f"; {', '.join(one_line(str(one), 80) for one in below[:3])} {'has' if len(below) == 1 else 'have'} some"
        )
        raise DataError(
            f"{named} has no events{those if below else ''}: runs write them to {FOLDER}/ from the Trainer, or after "
            "engine.init_trackers() or engine.record_events(folder)"
        )
    files, problems = [], []
    for path in paths:
        try:
            files.append(read_file(path, recent))
        except (OSError, ValueError) as error:
            problems.append(f"{one_line(str(path), 200)} can't be read: {cause_of(error)}")
    if not files:
        raise DataError(problems[0])
    return files, problems


def read_file(path: Path, recent: int | None = None) -> WorkerFile:
    """ValueError: it is not what a worker writes, or what a newer version does."""
    with open_input(path) as file:
        line = file.readline(LONGEST_HEADER)
        if recent is not None:
            there = (os.fstat(file.fileno()).st_size - len(line)) // RECORD_BYTES
            file.seek(max(0, there - recent) * RECORD_BYTES, os.SEEK_CUR)
        data = file.read()
    if not line:
        raise ValueError("it is empty: its worker ended before it wrote anything")
    if not line.endswith(b"\n"):
        raise ValueError("its header is cut")
    header = parse_json(line)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("it has no header of paceline's events")
    version = header.get("version")
    if type(version) is not int or version > VERSION:
        raise ValueError(
            f"it has version {version!r} of the format, and this paceline reads up to {VERSION}; update it"
        )
    clocks = [header.get(key) for key in ("clock", "time")]
    known = all(type(clock) is float and 0 <= clock < MOST_S for clock in clocks)
    if type(header.get("worker")) is not int or not known:
        raise ValueError("its header lacks the worker or its clock")
    whole = len(data) - len(data) % RECORD_BYTES
    records = np.frombuffer(data[:whole], dtype=_RECORD)
    records = records[_between(records["began"], MOST_S) & (records["step"] < MOST_STEPS)]
    steps = records[records["kind"] == Kind.STEP]
    steps = _in_order(steps[_sane(steps)])
    buckets = records[records["kind"] == Kind.BUCKETS].view(_OF_BUCKETS)
    notes = [
        (float(one["began"]), int(one["step"]), one_line(text_of(one.tobytes())), bool(one["kind"] == Kind.JOB))
        for one in records[np.isin(records["kind"], (Kind.NOTE, Kind.JOB))]
    ]
    ended = bool((records["kind"] == Kind.END).any())
    return WorkerFile(path, header, steps, buckets, notes, ended, len(data) - whole)


def _sane(steps: Records) -> npt.NDArray[np.bool_]:
    """Those that a worker can have written: one flipped bit, or a disk's garbage, makes whatever is added up from them
    infinite, or no number at all."""
    found = _between(steps["parts"], MOST_S).all(axis=1)
    for name in ("arrived", "voted", "hidden_s", "peer_s"):
        found &= _between(steps[name], MOST_S)
    for name in ("memory", "device_memory"):
        found &= _between(steps[name], MOST_BYTES)
    return np.asarray(found)


def _between(values: npt.NDArray[Any], most: float) -> npt.NDArray[np.bool_]:
    """Not for NaN."""
    with np.errstate(invalid="ignore"):
        return np.asarray((values >= 0) & (values < most))


def _in_order(steps: Records) -> Records:
    """Ascending: where a script went back to a checkpoint, what it had done beyond that no longer counts."""
    if len(steps) < 2:
        return steps
    least_after = np.minimum.accumulate(steps["step"][::-1])[::-1][1:]
    in_order: Records = steps[np.append(steps["step"][:-1] <= least_after, True)]
    return in_order


def _notes_of(files: Sequence[WorkerFile]) -> list[Note]:
    """In the order of time; what every worker tells is there once, as the first one told it."""
    all_of_them = sorted(
        (at + file.offset, step, text, of_job, file.worker) for file in files for at, step, text, of_job in file.notes
    )
    found: dict[Any, Note] = {}
    for at, step, text, of_job, worker in all_of_them:
        found.setdefault((step, text) if of_job else (at, worker), Note(None if of_job else worker, at, step, text))
    return list(found.values())


def _supersede(workers: dict[int, Records], file: WorkerFile) -> None:
    """A job begins again at some step: what workers did beyond it before that moment no longer counts."""
    if file.header.get("joins") or file.path.suffix == ".0":  # the first file of slot 0 is the first run's
        return
    first = one if type(one := file.header.get("step")) is int else 0
    for worker, steps in workers.items():
        early = steps[: int(np.searchsorted(steps["began"], file.began, side="right"))]
        # A step that goes on when the file is made is one of the same job, whose other workers were quicker to begin.
        counts = (early["step"] <= first) | (early["began"] + early["parts"].sum(axis=1) > file.began)
        if not counts.all():
            workers[worker] = np.concatenate([early[counts], steps[len(early) :]])


def _joined(before: Records, after: Records) -> Records:
    """Of a slot's processes, one after another; a step that both have counts as the later one did it."""
    if len(after):
        before = before[before["step"] < after["step"][0]]
    return np.concatenate([before, after])


def left_at(run: RunEvents, worker: int, steps: Records) -> npt.NDArray[np.float64]:
    """(step, bucket): when each bucket left in the worker's `steps`, of the run's time; NaN: not known."""
    files = run.buckets.get(worker, [])
    found = np.concatenate(files) if files else np.zeros(0, dtype=_OF_BUCKETS)
    found = found[(found["step"] >= steps["step"].min(initial=0)) & (found["step"] <= steps["step"].max(initial=0))]
    at = np.searchsorted(steps["step"], found["step"])
    same = np.zeros(len(found), dtype=bool)
    inside = at < len(steps)
    # What was done again has records of both attempts: the one counts that began when the step's own record says so.
    same[inside] = steps["began"][at[inside]] == found["began"][inside]
    found, at = found[same], at[same]
    table = np.full((len(steps), int(found["of"].max(initial=0))), np.nan)
    after = found["after_s"].astype(np.float64)
    after[~_between(after, MOST_S)] = np.nan
    for of in np.unique(found["of"]):
        rows, told = found["of"] == of, told_of(int(of))
        table[np.ix_(at[rows], told)] = found["began"][rows, None] + after[rows][:, : len(told)]
    return table


def shares(steps: Records, of: Share) -> npt.NDArray[np.float64]:
    """Between 0 and 1, as events.py has them in a byte; NaN: not known."""
    coded = steps[of].astype(np.float64)
    return np.where((coded > 0) & (coded <= 101), (coded - 1) / 100, np.nan)


def mean_share(steps: Records, of: Share) -> float | None:
    """Of the steps that have it; None: none has."""
    found = shares(steps, of)
    found = found[~np.isnan(found)]
    return float(found.mean()) if len(found) else None


# -- clocks ------------------------------------------------------------------------------------------------------------


def _align(files: Sequence[WorkerFile]) -> None:
    """Set the offsets: of one file per boot by its votes or the calendar, and of the others of that boot alike."""
    by_boot: dict[str, list[WorkerFile]] = {}
    for file in files:
        by_boot.setdefault(str(file.header.get("boot") or file.path), []).append(file)
    boots = list(by_boot.values())
    anchor = boots[0][0]
    calendar = float(anchor.header["time"]) - float(anchor.header["clock"])
    for boot in boots:
        difference = 0.0 if boot is boots[0] else _difference(boots[0], boot)
        for file in boot:
            file.offset = calendar + difference


def _difference(reference: Sequence[WorkerFile], others: Sequence[WorkerFile]) -> float:
    """What to add to the others' clock to get the reference's."""
    first, second = reference[0].header, others[0].header
    calendar = float(second["time"]) - float(second["clock"]) - (float(first["time"]) - float(first["clock"]))
    found = [vote_difference(one.steps, other.steps) for one in reference for other in others]
    known = [one for one in found if one is not None and abs(one - calendar) < HOSTS_APART_S]
    return float(np.median(known)) if known else calendar


def vote_difference(one: Records, other: Records) -> float | None:
    """Of two clocks, by the votes that both have ended; None: there is none."""
    one, other = (steps[steps["voted"] > 0] for steps in (one, other))
    _, at, also = np.intersect1d(_place(one), _place(other), return_indices=True)
    if not len(at):
        return None
    return float(np.median(one["voted"][at] - other["voted"][also]))


def _place(steps: Records) -> npt.NDArray[Any]:
    """A generation and a step: what both workers did in it they did together."""
    return steps["generation"].astype(np.int64) << 40 | steps["step"].astype(np.int64)
