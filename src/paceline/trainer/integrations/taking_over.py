"""The worker that reports is lost, and another goes on: what metrics.jsonl lacks, and what it has already.

    the dead one wrote       step 10    step 20                              or    10   20   20 eval
    this one has logged      step 10    step 20    20 eval    step 30              10   20
    so it writes                                   20 eval    step 30              nothing, and leaves out `20 eval`

Every worker logs the same lines in the same order, so the file and a worker's own history differ at their ends alone.
A line is known by its step and its first name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.trainer.integrations import json_lines
from paceline.trainer.integrations.reporter import Logged


class Written:
    """The lines of a run that another worker has begun, and that `history` is this worker's view of."""

    def __init__(self, folder: Path, history: Iterable[Mapping[str, Any]]) -> None:
        path = folder / json_lines.FILE_NAME
        there = [_logged(row) for row in json_lines.rows(path)] if path.exists() else []
        ours = [_logged(row) for row in history]
        self.last_step: int = there[-1][0] if there else 0
        self.last_lines = [line for line in there if line[0] == self.last_step]
        self._ahead = Counter(map(_name, there))
        self.missing: list[Logged] = []
        """In the order they were logged; they are at the end of the history."""
        for line in ours:
            if not self.has(*line) and line[0] >= self.last_step:
                self.missing.append(line)

    def has(self, step: int, values: Mapping[str, float]) -> bool:
        """Whether the lost worker wrote this line; each is asked for once."""
        name = _name((step, values))
        found = self._ahead[name] > 0
        self._ahead[name] -= found
        return found


def _logged(row: Mapping[str, Any]) -> Logged:
    values = {name: value for name, value in row.items() if isinstance(value, int | float)}
    step = int(values.pop("step"))
    values.pop("time", None)
    return step, values


def _name(line: Logged) -> tuple[int, str]:
    return line[0], next(iter(line[1]), "")
