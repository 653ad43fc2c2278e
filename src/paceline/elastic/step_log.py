"""The step log: which steps were committed, in which generation, by whom. One line of JSON each, written as it happens.

    {"step":7,"update":0,"generation":1,"members":[0,1,2,3]}
    {"step":8,"update":0,"generation":2,"members":[0,1,3]}       worker 2 was lost, and the step redone
    {"step":9,"update":0,"generation":2,"members":[0,1,3],"servers":[4]}        where there are server processes
    {"rewound_to":5}                                             all began anew after step 5; 6… are void

No step stands in it twice, ever: a second row raises before it is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from paceline.elastic.decisions import Commit
from paceline.errors import WorldError
from paceline.input_file import cause_of, open_output, parse_json, read_input

LARGEST = 2**36  # bytes


class StepLog:
    """The rows of this job; in a file too where one was asked for, which an earlier run of the job may have begun."""

    def __init__(self, path: Path | None = None, complain: Callable[[str], None] = lambda line: None) -> None:
        self._path, self._complain = path, complain
        self._rows: dict[tuple[int, int], Commit] = {}
        self._file: FileIO | None = None
        if path is not None:
            try:
                begun = read_input(path, LARGEST) if path.is_file() else b""
                if begun:
                    self._rows = {row.place: row for row in read_step_log(path)}
                self._file = FileIO(open_output(path), "ab")
                if begun and not begun.endswith(b"\n"):  # its writer was killed in the middle of a line
                    self._write("\n")
            except OSError as error:
                raise WorldError(f"--ledger {path} can't be written: {error.strerror or error}") from error

    @property
    def rows(self) -> tuple[Commit, ...]:
        return tuple(self._rows.values())

    def commit(self, row: Commit) -> None:
        if row.place in self._rows:
            raise WorldError(f"step {row.step} (update {row.update}) was committed already: {self._rows[row.place]}")
        self._rows[row.place] = row
        self._write(line_of(row))

    def rewind(self, step: int) -> None:
        """The job begins anew at the end of `step`; what came after it is void."""
        if self._rows:
            self._rows = {place: row for place, row in self._rows.items() if row.step <= step}
            self._write(json.dumps({"rewound_to": step}) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: str) -> None:
        """A disk that is full ends no training: what can't be written is said once, and the job goes on."""
        if self._file is None:
            return
        try:
            self._file.write(line.encode())
        except OSError as error:
            self.close()
            self._complain(f"paceline: --ledger {self._path} is written no further: {error.strerror or error}")


def row_of(fields: Mapping[str, Any]) -> Commit:
    numbers = [fields[name] for name in ("step", "update", "generation")]
    members, servers = tuple(fields["members"]), tuple(fields.get("servers", ()))
    if any(type(number) is not int for number in (*numbers, *members, *servers)):
        raise ValueError("it has something else than whole numbers")
    return Commit(numbers[0], numbers[1], numbers[2], members, servers)


def line_of(row: Commit) -> str:
    fields = {"step": row.step, "update": row.update, "generation": row.generation, "members": list(row.members)}
    fields |= {"servers": list(row.servers)} if row.servers else {}
    return json.dumps(fields, separators=(",", ":")) + "\n"


def read_step_log(path: Path) -> list[Commit]:
    """The rows that hold; a line that its writer did not live to finish is none."""
    rows: dict[tuple[int, int], Commit] = {}
    for number, fields in _lines(path):
        try:
            if "rewound_to" in fields:
                rows = {place: row for place, row in rows.items() if row.step <= int(fields["rewound_to"])}
                continue
            row = row_of(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise WorldError(f"{path}, line {number}: not a row of a step log: {cause_of(error)}") from error
        if row.place in rows:
            raise WorldError(f"{path}, line {number}: step {row.step} (update {row.update}) is committed a second time")
        rows[row.place] = row
    return list(rows.values())


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_input(path, LARGEST).decode(errors="replace").split("\n"), start=1):
        try:
            fields = parse_json(line)
            if not isinstance(fields, dict):
                raise WorldError(f"{path}, line {number}: not a row of a step log: {line[:80]!r}")
            yield number, fields
        except ValueError:
            if line.strip() and not line.startswith("{"):
                raise WorldError(f"{path}, line {number}: not a row of a step log: {line[:80]!r}") from None
