"""The reports of a run: its main worker writes them, and where that one is lost the next takes over.

Every worker logs the same lines in the same order. The main one passes them to the reporters; another that becomes the
main one starts them anew, with what the lost one had not written yet (`WrittenByAnother`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import ConfigError, LoopError
from paceline.input_file import cause_of
from paceline.tracking import choose
from paceline.tracking.json_lines import WrittenByAnother
from paceline.tracking.reporter import RunInfo
from paceline.world import messages

MOST_KEPT = 4096
"""Lines that a worker remembers of its own, the last ones, however long it logs. Who takes over looks for what the lost
one had not written yet, which is of the last steps; and this many tell how long a step takes."""

AtEnd = Callable[[Path, Sequence[tuple[int, float]]], None]  # of the run's folder, and (step, second) of each line


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
        at_end: AtEnd | None = None,
    ) -> None:
        self._report_to, self._run, self._is_main, self._world, self._say = report_to, run, is_main, world, say
        self.is_reporting = is_main()
        self._reporters = choose(report_to, main=self.is_reporting)
        self._written: WrittenByAnother | None = None  # where this worker has taken over
        self._at_end, self._times = at_end, deque[tuple[int, float]](maxlen=MOST_KEPT)
        self._reporters.start(run)

    @property
    def names(self) -> list[str]:
        return self._reporters.names

    def log(self, step: int, values: Mapping[str, float], history: Iterable[Mapping[str, Any]]) -> None:
        """`history`: what this worker has logged, at least its last lines, this one included."""
        self._times.append((step, time.monotonic()))
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
        if ok and self.is_reporting and self._at_end is not None:
            try:
                self._at_end(self._run.folder, self._times)
            except Exception as error:  # the disk is full, or whatever: the training is done, and others wait for us
                messages.logger("engine").warning(
                    f"paceline: {self._run.folder}: what the run measured can't be stored ({cause_of(error)}); its "
                    "other reports are whole"
                )
        self._reporters.close(ok=ok)


class MetricsLog:
    """`engine.log`: the values of a loop of one's own go where the Trainer's go.

        engine = paceline.Engine(log_with=["tensorboard"], project_dir="runs")
        engine.init_trackers("mnist", config={"lr": 1e-3})        runs/mnist: metrics.jsonl, and what log_with names
        engine.log({"loss": engine.means["loss"]})                every worker calls it, the main one writes

    In an elastic job the next main worker goes on where a lost one stopped, so all of them keep what they logged last.
    """

    def __init__(
        self,
        log_with: str | Sequence[str] | None,
        project_dir: Path,
        *,
        is_main: Callable[[], bool],
        world: Callable[[], Mapping[str, Any]],
        say: Callable[[str], None],
        at_end: AtEnd | None = None,
    ) -> None:
        self._at_end = at_end
        self._log_with, self._folder = _names("log_with", log_with), project_dir
        choose(self._log_with, main=False, argument="log_with")  # an error now, not after the data are loaded
        self._is_main, self._world, self._say = is_main, world, say
        self._reports: RunReports | None = None
        self._history = deque[Mapping[str, Any]](maxlen=MOST_KEPT)

    def start(self, name: str, config: Mapping[str, Any], step: int) -> None:
        """`step`: that the job has reached; lines of later ones in the folder no longer count."""
        if self._reports is not None:
            raise LoopError("engine.init_trackers() was called twice; an engine reports one run")
        if not name or Path(name).name != name:
            raise ConfigError(f"engine.init_trackers({name!r}): a run's name is that of a folder in project_dir")
        run = RunInfo(name, self._folder / name, config, dict(self._world()), resumed_at=step or None)
        self._reports = RunReports(
            self._log_with, run, is_main=self._is_main, world=self._world, say=self._say, at_end=self._at_end
        )

    def log(self, values: Mapping[str, Any], step: int) -> None:
        if self._reports is None:
            raise LoopError("engine.log() has nowhere to write; call engine.init_trackers(name) before the loop")
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._history.append({"step": step, **numbers})
        self._reports.log(step, numbers, self._history)

    def close(self, *, ok: bool) -> None:
        """Not ok: the script's loop was ended by an error."""
        if self._reports is not None:
            self._reports.close(ok=ok)
            self._reports = None


def _names(argument: str, value: Any) -> list[str]:
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{argument}: expected the name of a tracker, or several, not a {type(value).__name__}")
    if value is not None and not names:
        raise ConfigError(f"{argument} is empty; leave it out, or name trackers")
    return list(names)


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"engine.log(): {name!r} is a {type(value).__name__}, not a number")
    return value
