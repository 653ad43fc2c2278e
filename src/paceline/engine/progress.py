"""Progress: one live line for the whole job.

Under `paceline run` the line is drawn by the supervisor, below the workers' output; otherwise by this process: rich on
a terminal, a plain line every few seconds elsewhere. A `Bar` shows what it is told; `Progress` tells one how a loader
gets on. Speed and the time that is left are those of the last half minute.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from paceline.world import messages
from paceline.world.control import Supervisor
from paceline.world.terminal import ProgressLine, duration

PLAIN_EVERY_S = 5.0
SEND_EVERY_S = 0.1
MARK_EVERY_S = 0.5
MARKS = 60


class Pace:
    """Steps and samples in a second, lately."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=MARKS)
        self._now = (clock(), 0, 0)

    def begin(self, step: int) -> None:
        self._now = (self._clock(), step, 0)
        self._marks.append(self._now)

    def mark(self, step: int, samples: int) -> None:
        self._now = (self._clock(), step, self._now[2] + samples)
        if self._now[0] - self._marks[-1][0] >= MARK_EVERY_S:
            self._marks.append(self._now)

    def _rate(self, of: int) -> float:
        first = self._marks[0]
        seconds = self._now[0] - first[0]
        return (self._now[of] - first[of]) / seconds if seconds > 0 else 0.0

    @property
    def steps_per_s(self) -> float:
        return self._rate(1)

    @property
    def samples_per_s(self) -> float:
        return self._rate(2)


class Bar:
    """`bar.step_done(step, samples)` when a step is done, after `bar.show(loss=2.3)`; `bar.close()` leaves it standing.

    Only the main worker's is seen; the others' are ready to take over, in an elastic job that loses that worker.
    """

    def __init__(
        self,
        *,
        step: int,
        total: int | None,
        main: Callable[[], bool],
        supervisor: Supervisor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step, self._total, self._main, self._supervisor, self._clock = step, total, main, supervisor, clock
        self._fields: dict[str, float | int | str] = {}
        self._is_first = True
        self._begun = clock()
        self._pace = Pace(clock)
        self._pace.begin(step)
        self._last = float("-inf")
        self._printed = ""
        self._live: Any = None

    def show(self, **fields: float | str | int) -> None:
        """Values to show beside the step; the latest of each name stays."""
        self._fields.update(fields)

    def step_done(self, step: int, samples: int = 0) -> None:
        if self._is_first and step > self._step + 1:  # this worker has joined others, who made the steps before
            self._pace = Pace(self._clock)
            self._pace.begin(step)
        else:
            self._pace.mark(step, samples)
        self._step, self._is_first = step, False
        self._draw(final=False)

    def close(self) -> None:
        self._draw(final=True)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, *, final: bool) -> ProgressLine:
        fields = dict(self._fields)
        if self._pace.samples_per_s and not any(name.endswith("/s") for name in fields):
            fields["samples/s"] = float(f"{self._pace.samples_per_s:.3g}")
        if final:
            fields["in"] = duration(self._clock() - self._begun)
        elif self._total and self._pace.steps_per_s:
            fields["eta"] = duration((self._total - self._step) / self._pace.steps_per_s)
        return ProgressLine(self._step, self._total, fields, final)

    def _draw(self, *, final: bool) -> None:
        now, main = self._clock(), self._main() and messages.shows_notes()
        live = self._supervisor.is_there or (main and sys.stdout.isatty())
        if not main or (not final and now - self._last < (SEND_EVERY_S if live else PLAIN_EVERY_S)):
            return
        self._last = now
        line = self.line(final=final)
        if self._supervisor.is_there:
            self._supervisor.tell("progress", **asdict(line))
        elif live:
            self._draw_live(line)
        elif line.text() != self._printed:
            self._printed = line.text()
            messages.logger("engine").info(self._printed)

    def _draw_live(self, line: ProgressLine) -> None:
        from rich.live import Live  # what the script prints meanwhile appears above the line
        from rich.text import Text

        if self._live is None:
            self._live = Live(auto_refresh=False)
            self._live.start()
        width = shutil.get_terminal_size().columns
        self._live.update(Text.from_ansi(line.drawn(width), no_wrap=True), refresh=True)


class Progress:
    """Wraps a loader: `bar = engine.progress(loader, total=steps)`, then `bar.show(loss=2.3)` when a step is done."""

    def __init__(self, loader: Any, *, bar: Callable[[], Bar], total: int | None, engine: Any) -> None:
        self._loader = loader
        self._make_bar = bar
        self._bar: Bar | None = None
        self._total = total
        self._engine = engine
        self._fields: dict[str, float | int | str] = {}

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._bar = self._make_bar()
        try:
            for batch in self._loader:
                yield batch
                if self._engine.stepped:
                    self._bar.show(**self._where(), **self._fields)
                    self._bar.step_done(self._engine.step, self._engine.step_samples)
        finally:
            self._bar.close()

    def show(self, **fields: float | str | int) -> None:
        """Values to show beside the step; the latest of each name stays."""
        self._fields.update(fields)

    def _where(self) -> dict[str, str]:
        source = getattr(self._loader, "source", None)
        steps, left = getattr(source, "steps", None), getattr(source, "steps_left", None)
        if source is None or not steps or left is None or "epoch" in self._fields:
            return {}
        # The step that has just acted is committed when the loop asks for the next item.
        return {"epoch": f"{source.epoch + (steps - left + 1) / steps:.2f}"}
