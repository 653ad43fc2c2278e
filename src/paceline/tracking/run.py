"""The reports of a run: its main worker writes them, and where that one is lost the next takes over.

Every worker logs the same lines in the same order. The main one passes them to the reporters; another that becomes the
main one starts them anew, with what the lost one had not written yet (`WrittenByAnother`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.tracking import choose
from paceline.tracking.json_lines import WrittenByAnother
from paceline.tracking.reporter import RunInfo


class RunReports:
    """`world` tells workers, lanes and the like as they are now; `say` prints once, not once per worker."""

    def __init__(
        self,
        report_to: str | Sequence[str] | None,
        run: RunInfo,
        *,
        is_main: Callable[[], bool],
        world: Callable[[], Mapping[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        self._report_to, self._run, self._is_main, self._world, self._say = report_to, run, is_main, world, say
        self.is_reporting = is_main()
        self._reporters = choose(report_to, main=self.is_reporting)
        self._written: WrittenByAnother | None = None  # where this worker has taken over
        self._reporters.start(run)

    @property
    def names(self) -> list[str]:
        return self._reporters.names

    def log(self, step: int, values: Mapping[str, float], history: Iterable[Mapping[str, Any]]) -> None:
        """`history`: all that this worker has logged, this line included."""
        if self.take_over(history) or (self._written is not None and self._written.has(step, values)):
            return
        self._reporters.log(step, values)

    def take_over(self, history: Iterable[Mapping[str, Any]]) -> bool:
        """Whether this worker has just become the main one of a run under way; its history is written by then."""
        if self.is_reporting or not self._is_main():
            return False
        written = WrittenByAnother(self._run.folder, history)
        self.is_reporting, self._written = True, written
        self._reporters = choose(self._report_to)
        lines, at = written.last_lines, written.last_step
        self._reporters.start(replace(self._run, world=dict(self._world()), resumed_at=at, taken_over=lines))
        for step, values in written.missing:
            self._reporters.log(step, values)
        self._say(f"paceline: this worker takes over the reports: {', '.join(self.names)}")
        return True

    def close(self, *, ok: bool) -> None:
        self._reporters.close(ok=ok)
