"""The log of an asynchronous run: which weights every worker read, and in which order every server applied the pushes.

    RUN/parameter_server/attempt-0001-worker-00000.jsonl   {"paceline": "parameter server", …, "clock": "s=2", …}
                                                           {"kind": "read", "round": 0, "lanes": [0, 1], "versions": …}
                                                           {"kind": "loop", "rounds": 9, "weights": "sha256:…"}
                         attempt-0001-worker-00001.jsonl   …
                         attempt-0001-server-00000.jsonl   {"paceline": "parameter server", …}
                                                           {"kind": "settings", "groups": [{"lr": "0x1.9p-4"}]}
                                                           {"kind": "apply", "key": 0, "order": 0, "round": 0, …}
                                                           {"kind": "end", "records": 1}

A line is written, in one write, before its effect can be seen: a read before the first push of its round leaves, an
application before an answer has the new version. From then on the kernel has it, and killing the process loses none. So
whatever was read or applied is on file, and `replay_order.py` finds an order in which one process does it all again.

The first line has what a replay needs to start the script again, by worker 0's word: a server may have no accelerator,
say, and need not know what the workers compute on.

    script      target, arguments, module or not, the folder it ran in, a digest of the file
    engine      lanes, seed, threads, accumulate, the torch build, …
    keys        a digest of the key table: another model has another
    weights     a digest of those that training began with

Floats are written in hexadecimal: replay must have their bits. Settings (learning rates and other numbers of the
optimizer's groups) are written where they change; an application means those before it. A file without an end, or with
a last line that has none, is of a run that was cut, which can be replayed up to there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from paceline.errors import CheckpointError, ConfigError, LoopError
from paceline.input_file import append, cause_of, parse_json, read_input
from paceline.parameter_server.staleness_policy import Outcome

FOLDER = "parameter_server"
VERSION = 1
LARGEST_LOG = 2**36  # bytes
MOST = 2**24  # workers, keys and the like
FILE_NAME = re.compile(r"attempt-(\d{4,})-(server|worker)-(\d{5,})\.jsonl")

Role = Literal["server", "worker"]
Setting: TypeAlias = "float | int | bool | tuple[Setting, ...] | None"
Settings = tuple[Mapping[str, Setting], ...]  # one for each parameter group


@dataclass(frozen=True)
class JobFacts:
    """What all files of one start of the job agree on; `facts` is for replay: the command line, the seed, …"""

    workers: int
    servers: int
    lanes: int
    keys: int
    clock: str
    first_round: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Read:
    """A worker starts a round for its lanes with these versions of the keys: updates since this start of the job."""

    worker: int
    round: int
    lanes: tuple[int, ...]
    versions: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Applied:
    """A server updates a key; `order` counts all records of the key, also of pushes that were dropped."""

    server: int
    key: int
    order: int
    round: int
    lane: int
    worker: int  # whose push it was
    settings: Settings
    outcome: Outcome = field(default_factory=Outcome)
    check: int | None = None  # a sum over the bits of the key's new weights


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """All workers have ended a training loop: after so many rounds these are the weights."""

    rounds: int
    weights: str


@dataclass(frozen=True)
class RecordedRun:
    """One start of the job, from all of its files."""

    attempt: int
    job: JobFacts
    reads: tuple[Read, ...]
    applied: Mapping[int, tuple[Applied, ...]]  # by key, in their order
    cut: tuple[str, ...]  # files without an end
    loops: tuple[LoopEnd, ...] = ()


class UpdateLog:
    """One worker's or one server's file of one start of the job, begun with its first round. Threads may share it."""

    def __init__(self, folder: Path, attempt: int, role: Role, number: int, job: JobFacts) -> None:
        """`folder` is the run folder; all processes pass the same `attempt` and `job`."""
        self._path, self._who = folder / FOLDER / file_name(attempt, role, number), f"{role} {number}"
        self._header = {"paceline": "parameter server", "version": VERSION, "attempt": attempt}
        self._header |= {"role": role, "number": number, **vars(job)}
        self._attempt = attempt
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self._settings: list[dict[str, Any]] | None = None
        self._records = 0

    def begin(self, round: int) -> None:
        """Open the file with the first round of this start of the job; later rounds change nothing."""
        with self._lock:
            if self._descriptor is not None:
                return
            self._descriptor = self._open()
            try:
                self._write(self._header | {"first_round": round})
            except CheckpointError:
                self._close()
                self._path.unlink()
                raise

    def _open(self) -> int:
        if self._path.exists():
            raise ConfigError(
                f"{self._who}: {self._path} exists already, so attempt {self._attempt} was recorded before; another "
                "job writes to the same run folder, or the processes did not agree on the attempt's number"
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{self._who}: the order of updates can't be recorded in {self._path.parent}: {error.strerror}; "
                "choose a folder that can be written to, or don't record it"
            ) from error

    def read(self, record: Read) -> None:
        """Before the first push of the round leaves."""
        with self._lock:
            versions = dict(record.versions)
            self._write({"kind": "read", "round": record.round, "lanes": record.lanes, "versions": versions})
            self._records += 1

    def applied(self, record: Applied) -> None:
        """Before an answer with the new version leaves."""
        line = {
            "kind": "apply",
            "key": record.key,
            "order": record.order,
            "round": record.round,
            "lane": record.lane,
            "worker": record.worker,
            "delay": record.outcome.delay,
            "updates": record.outcome.updates,
            "lr_factor": _written(record.outcome.lr_factor),
            "momentum": _written(record.outcome.momentum),
            "dropped": record.outcome.dropped,
            "check": record.check,
        }
        settings = [{name: _written(value) for name, value in group.items()} for group in record.settings]
        with self._lock:
            news = [] if settings == self._settings else [{"kind": "settings", "groups": settings}]
            self._write(*news, line)
            self._settings = settings
            self._records += 1

    def loop_ended(self, rounds: int, weights: Callable[[], str]) -> None:
        """One worker says it for all; replay compares."""
        if self._descriptor is not None:
            line = {"kind": "loop", "rounds": rounds, "weights": weights()}
            with self._lock:
                self._write(line)

    def check_not_begun(self) -> None:
        if self._descriptor is not None:
            raise LoopError(
                "engine.load_state() after the first round of a run that is being recorded: what follows could not be "
                "replayed; load the state before the loop, or start a new run"
            )

    def end(self, *, well: bool) -> None:
        """A run that did not end well has a log without an end."""
        with self._lock:
            if self._descriptor is not None:
                if well:
                    self._write({"kind": "end", "records": self._records})
                self._close()

    def _close(self) -> None:
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor = None

    def _write(self, *lines: Mapping[str, Any]) -> None:
        assert self._descriptor is not None, "a round is opened before anything of it is recorded"
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        try:
            append(self._descriptor, text)
        except OSError as error:
            raise CheckpointError(
                f"{self._who}: the order of updates could not be recorded in {self._path}: {error.strerror}; "
                "make room, then resume from the last saved state"
            ) from error


class NoLog:
    """In place of an `UpdateLog` where the run is not recorded."""

    def begin(self, round: int) -> None: ...

    def read(self, record: Read) -> None: ...

    def loop_ended(self, rounds: int, weights: Callable[[], str]) -> None: ...

    def check_not_begun(self) -> None: ...

    def end(self, *, well: bool) -> None: ...


def file_name(attempt: int, role: Role, number: int) -> str:
    return f"attempt-{attempt:04d}-{role}-{number:05d}.jsonl"


def next_attempt(folder: Path) -> int:
    """The number of the next start recorded in the run folder. One process asks, before any file of it is made."""
    return max(recorded_attempts(folder), default=0) + 1


def recorded_attempts(folder: Path) -> list[int]:
    names = (FILE_NAME.fullmatch(path.name) for path in (folder / FOLDER).glob("attempt-*.jsonl"))
    return sorted({int(name[1]) for name in names if name})


# -- how the run was started -------------------------------------------------------------------------------------------


def started_script() -> dict[str, Any]:
    """How this process was started, so that it can be started again."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return {
        "target": sys.argv[0] if spec is None else spec.name.removesuffix(".__main__"),
        "arguments": sys.argv[1:],
        "is_module": spec is not None,
        "folder": os.getcwd(),
        "digest": script_digest(getattr(main, "__file__", None)),
    }


def script_digest(file: str | None) -> str | None:
    try:
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


# -- reading it back ---------------------------------------------------------------------------------------------------


def read_log(folder: Path) -> RecordedRun:
    """The log of the last start of the job, in a run folder or in its `parameter_server` folder."""
    folder = folder.parent if folder.name == FOLDER else folder
    attempts = recorded_attempts(folder)
    if not attempts:
        raise CheckpointError(
            f"{folder / FOLDER}: no log of a parameter server is here; an asynchronous run writes it when recording "
            "is on"
        )
    attempt = attempts[-1]
    paths = sorted((folder / FOLDER).glob(f"attempt-{attempt:04d}-*.jsonl"))
    files = [_LogFile.read(path) for path in paths if FILE_NAME.fullmatch(path.name)]
    job = files[0].job
    _check_files(folder / FOLDER, attempt, files)
    applied: dict[int, tuple[Applied, ...]] = dict.fromkeys(range(job.keys), ())
    for file in files:
        for key, records in file.applied.items():
            if applied[key]:
                raise CheckpointError(
                    f"{file.path}: {file.who} updated key {key}, and so did server {applied[key][0].server}; "
                    "a key lives on one server: these files are of different runs"
                )
            applied[key] = tuple(records)
    return RecordedRun(
        attempt,
        job,
        tuple(read for file in files for read in file.reads),
        applied,
        tuple(file.path.name for file in files if not file.ended),
        tuple(loop for file in files for loop in file.loops),
    )


def _check_files(folder: Path, attempt: int, files: list[_LogFile]) -> None:
    job = files[0].job
    for file in files:
        for name, value in vars(file.job).items():
            if value != vars(job)[name]:
                raise CheckpointError(
                    f"{file.path}: {name} is {value!r}, but {vars(job)[name]!r} in {files[0].path.name}; "
                    "these files are of different runs"
                )
    names = [file_name(attempt, "server", number) for number in range(job.servers)]
    # A worker that was lost before its first round has left nothing behind, and replay does not need it.
    pushed = {record.worker for file in files for records in file.applied.values() for record in records}
    names += [file_name(attempt, "worker", number) for number in sorted(pushed)]
    missing = sorted(set(names) - {file.path.name for file in files})
    if missing:
        raise CheckpointError(
            f"{folder}: {', '.join(missing)} missing; a run of {job.workers} workers and {job.servers} servers has one "
            "file of each: copy those of all hosts here"
        )


class _LogFile:
    """One file, checked line by line."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.role, self.number = str(header["role"]), _whole(header, "number")
        self.who = f"{self.role} {self.number}"
        if path.name != f"attempt-{_whole(header, 'attempt'):04d}-{self.role}-{self.number:05d}.jsonl":
            raise ValueError(f"it is of {self.who}, attempt {header['attempt']}, which has another file name")
        numbers = {name: _whole(header, name, MOST) for name in ("workers", "servers", "lanes", "keys", "first_round")}
        self.job = JobFacts(**numbers, clock=str(header["clock"]), facts=dict(header["facts"]))
        self.reads: list[Read] = []
        self.loops: list[LoopEnd] = []
        self.applied: dict[int, list[Applied]] = {}
        self.ended = False
        self._settings: Settings | None = None
        self._records = 0

    @classmethod
    def read(cls, path: Path) -> _LogFile:
        try:
            data = read_input(path, LARGEST_LOG)
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {cause_of(error)}") from error
        *lines, _ = data.split(b"\n")  # what follows the last end of a line was cut by a kill, or is empty
        if not lines:
            raise CheckpointError(f"{path} has no first line: the run was cut before it began")
        place = 1
        try:
            header = parse_json(lines[0])
            if header["paceline"] != "parameter server" or header["version"] != VERSION:
                raise ValueError(f"its first line is not that of a log of version {VERSION}")
            file = cls(path, header)
            for line in lines[1:]:
                place += 1
                file._add(parse_json(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else cause_of(error)
            raise CheckpointError(
                f"{path}, line {place}: {why}; the log is damaged, and what was applied after it is unknown: "
                "restore the file, or resume from a saved state"
            ) from error
        return file

    def _add(self, row: Mapping[str, Any]) -> None:
        kind = row["kind"]
        if self.ended:
            raise ValueError(f"a line of kind {kind!r} after the end")
        if kind == "settings":
            self._settings = tuple({name: _bits(value) for name, value in group.items()} for group in row["groups"])
        elif kind == "read":
            self.reads.append(self._read(row))
        elif kind == "apply":
            record = self._applied(row)
            self.applied.setdefault(record.key, []).append(record)
        elif kind == "loop":
            self.loops.append(LoopEnd(_whole(row, "rounds"), str(row["weights"])))
        elif kind == "end":
            if row["records"] != self._records:
                raise ValueError(f"the end counts {row['records']} records, but {self._records} came before it")
            self.ended = True
        else:
            raise ValueError(f"a line of kind {kind!r} is not known")
        self._records += kind in ("read", "apply")

    def _read(self, row: Mapping[str, Any]) -> Read:
        versions = {int(key): _whole(row["versions"], key) for key in row["versions"]}
        if len(versions) != self.job.keys or sorted(versions) != list(range(self.job.keys)):
            raise ValueError(f"versions of keys {sorted(versions)}, expected all of the {self.job.keys} keys")
        lanes = tuple(_whole({"lane": lane}, "lane", self.job.lanes) for lane in row["lanes"])
        return Read(self.number, _whole(row, "round"), lanes, versions)

    def _applied(self, row: Mapping[str, Any]) -> Applied:
        key = _whole(row, "key", self.job.keys)
        expected = len(self.applied.get(key, ()))
        if row["order"] != expected:
            raise ValueError(f"key {key} goes on with order {row['order']}, expected {expected}")
        if self._settings is None:
            raise ValueError("an application before the first settings")
        if not isinstance(row["dropped"], bool):
            raise ValueError(f"dropped is {row['dropped']!r}, expected true or false")
        momentum = None if row["momentum"] is None else float.fromhex(row["momentum"])
        return Applied(
            self.number,
            key,
            expected,
            _whole(row, "round"),
            _whole(row, "lane", self.job.lanes),
            _whole(row, "worker", self.job.workers),
            self._settings,
            Outcome(_whole(row, "delay"), float.fromhex(row["lr_factor"]), momentum, row["dropped"], row["updates"]),
            None if row["check"] is None else int(row["check"]),
        )


def _whole(row: Mapping[str, Any], name: str, below: int | None = None) -> int:
    value = row[name]
    if type(value) is not int or value < 0 or (below is not None and value >= below):
        to = "" if below is None else f" to {below - 1}"
        raise ValueError(f"{name} is {value!r}, expected a whole number from 0{to}")
    return value


def _bits(value: Any) -> Setting:
    """The inverse of `_written`."""
    if isinstance(value, list):
        return tuple(_bits(part) for part in value)
    if value is None or isinstance(value, int):
        return value
    return float.fromhex(value)


def _written(value: Setting) -> Any:
    """As JSON, with the bits of floats; there is no text among settings, so a string is a float."""
    if isinstance(value, tuple):
        return [_written(part) for part in value]
    return value.hex() if isinstance(value, float) else value
