"""JSON lines: `metrics.jsonl` in the run's folder, one object per line, there as soon as it is logged.

    {"event": "start", "time": …, "run": "mnist", "world": {…}, "config": {…}}
    {"step": 10, "time": …, "loss": 2.31, "learning_rate": 0.0003}
    {"step": 20, "time": …, "loss": "NaN", "nonfinite": ["loss"]}            JSON has no NaN; the line says so itself
    {"event": "resume", "time": …, "step": 10, "superseded": "lines above of steps after 10"}
    {"step": 20, "time": …, "loss": 2.17}                                    the one that counts
    {"event": "takeover", "time": …, "step": 20, "world": {…}}               the writer was lost, another takes over
    {"event": "end", "time": …, "ok": true}
    {"step": 20, "time": …, "eval_loss": 2.05}                               measured after the end of training

Nothing is ever taken out: what a killed run wrote beyond the checkpoint it is resumed from stays, and the resume line
says that it no longer counts. `rows()` reads the lines that do.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from paceline.input_file import open_input, open_output, parse_json
from paceline.tracking.reporter import Logged, RunInfo

FILE_NAME = "metrics.jsonl"


class JsonLines:
    name = "json lines"

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file: TextIO | None = None

    def start(self, run: RunInfo) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        path = run.folder / FILE_NAME
        cut = _take_cut_line(path)
        self._file = _appending(path)
        if cut:
            self._write({"event": "cut", "text": cut})
        if run.taken_over is not None:
            self._write({"event": "takeover", "step": run.resumed_at, "world": dict(run.world)})
        elif run.resumed_at is None:
            self._write({"event": "start", "run": run.name, "world": dict(run.world), "config": dict(run.config)})
        else:
            superseded = f"lines above of steps after {run.resumed_at}"
            world = dict(run.world)
            self._write({"event": "resume", "step": run.resumed_at, "superseded": superseded, "world": world})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        bad = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        self._write({"step": step, **values, **({"nonfinite": bad} if bad else {})})

    def close(self, *, ok: bool = True) -> None:
        if self._file is not None:
            self._write({"event": "end", "ok": ok})
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        first = next(iter(line))
        whole = {first: line[first], "time": round(self._clock(), 3), **line}
        self._file.write(json.dumps(_as_json(whole), allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()


def append(folder: Path, step: int, values: Mapping[str, float]) -> None:
    """One line more of a run that has ended: its model is measured again."""
    lines = JsonLines()
    with _appending(folder / FILE_NAME) as lines._file:
        lines.log(step, values)


def rows(path: Path) -> list[dict[str, Any]]:
    """The logged lines that count, numbers as numbers again; a line that was cut is left out."""
    counting: list[dict[str, Any]] = []
    for line in _lines(path):
        if line.get("event") == "resume" and type(line.get("step")) is int:
            counting = [row for row in counting if row["step"] <= line["step"]]
        elif line.get("event") == "start":
            counting = []  # another run, in the same folder
        elif "event" not in line:
            try:
                for name in line.pop("nonfinite", []):
                    line[name] = float(line[name])
            except (TypeError, ValueError, KeyError, OverflowError):  # damaged
                continue
            counting.append(line)
    return counting


def events(path: Path) -> list[dict[str, Any]]:
    """The lines that are no values, of the run that began last: its start with its config, resumes, takeovers, ends."""
    found: list[dict[str, Any]] = []
    for line in _lines(path):
        if line.get("event") == "start":
            found = []
        if "event" in line:
            found.append(line)
    return found


class WrittenByAnother:
    """The worker that reports is lost, and this one takes over: what the file lacks, and what it has already.

        the lost one wrote       step 10    step 20                              or    10   20   20 eval
        this one has logged      step 10    step 20    20 eval    step 30              10   20
        so it writes                                   20 eval    step 30              nothing, and leaves out `20 eval`

    Every worker logs the same lines in the same order, so the file and a worker's own history differ at their ends
    alone. A line is known by its step and its first name.
    """

    def __init__(self, folder: Path, history: Iterable[Mapping[str, Any]]) -> None:
        path = folder / FILE_NAME
        there = [_logged(row) for row in rows(path)] if path.exists() else []
        ours = [_logged(row) for row in history]
        self.last_step: int = there[-1][0] if there else 0
        self.last_lines = [line for line in there if line[0] == self.last_step]
        self._ahead = Counter(map(_key, there))
        self.missing: list[Logged] = []
        """In the order they were logged; they are at the end of the history."""
        for line in ours:
            if not self.has(*line) and line[0] >= self.last_step:
                self.missing.append(line)

    def has(self, step: int, values: Mapping[str, float]) -> bool:
        """Whether the lost worker wrote this line; each is asked for once."""
        key = _key((step, values))
        found = self._ahead[key] > 0
        self._ahead[key] -= found
        return found


def _logged(row: Mapping[str, Any]) -> Logged:
    values = {name: value for name, value in row.items() if isinstance(value, int | float)}
    step = int(values.pop("step"))
    values.pop("time", None)
    return step, values


def _key(line: Logged) -> tuple[int, str]:
    return line[0], next(iter(line[1]), "")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with open_input(path) as file:
        for text in file:
            try:
                line = parse_json(text)
            except ValueError:
                continue
            if isinstance(line, dict) and ("event" in line or _is_step(line.get("step"))):
                yield line


def _is_step(value: Any) -> bool:
    """A whole number that floats have as well, which curves are made of."""
    return type(value) is int and abs(value) < 2**53


def _appending(path: Path) -> TextIO:
    return open(open_output(path), "a", encoding="utf-8")


def _take_cut_line(path: Path) -> str:
    """Remove what a killed run had begun to write after its last whole line; what that was."""
    if not path.exists():
        return ""
    with open_input(path) as file:
        data = file.read()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return data[whole:].decode(errors="replace")


def _as_json(value: Any) -> Any:
    """Non-finite numbers by their names, paths, enums and tensors as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else ("NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_json(item) for item in value]
    return str(value)
