"""Progress: one live line for the whole job.

Under `paceline run` the line is drawn by the supervisor, below the workers' output; otherwise by this process: rich on
a terminal, a plain line every few seconds elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from paceline.world.control import ControlClient
from paceline.world.progress_line import ProgressLine

PLAIN_EVERY_S = 5.0
SEND_EVERY_S = 0.1


class Progress:
    """Wraps a loader: `bar = engine.progress(loader, total=steps)`, then `bar.show(loss=2.3)` when a step is done."""

    def __init__(
        self, loader: Any, *, total: int | None, main: bool, client: ControlClient | None, engine: Any
    ) -> None:
        self._loader = loader
        self._total = total
        self._main = main
        self._client = client
        self._engine = engine
        self._fields: dict[str, Any] = {}
        self._last = 0.0
        self._printed = ""
        self._live: Any = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch in self._loader:
                yield batch
                if self._engine.stepped:
                    self._draw(final=False)
        finally:
            self._draw(final=True)
            if self._live is not None:
                self._live.stop()
                self._live = None

    def show(self, **fields: float | str | int) -> None:
        """Values to show beside the step; the latest of each name stays."""
        self._fields.update(fields)

    def _draw(self, *, final: bool) -> None:
        if not self._main:
            return
        now = time.monotonic()
        line = ProgressLine(self._engine.step, self._total, dict(self._fields), final)
        if self._client is not None:
            if final or now - self._last >= SEND_EVERY_S:
                self._last = now
                self._client.tell("progress", **asdict(line))
        elif sys.stdout.isatty():
            self._draw_live(line)
        elif (final and line.text() != self._printed) or now - self._last >= PLAIN_EVERY_S:
            self._last = now
            self._printed = line.text()
            print(self._printed, flush=True)

    def _draw_live(self, line: ProgressLine) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        if self._live is None:
            self._live = Progress(BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn())
            self._task = self._live.add_task("", total=self._total)
            self._live.start()
        self._live.update(self._task, completed=line.step, description=line.text())
