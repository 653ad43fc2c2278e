"""Progress of work that is counted in bytes.

on a terminal    train.tokens ━━━━━━━━━━━━━━━╸━━━━━━ 1.2/2.0 GB 85.3 MB/s 0:00:09     gone when the work is done
elsewhere        paceline: train.tokens · 1.2 of 2.0 GB · 85 MB/s · 9 s left          every few seconds
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PLAIN_EVERY_S = 5.0


@contextmanager
def byte_progress(name: str, total: int, *, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the number of bytes that were done since the last call."""
    if not show:
        yield _nothing
    elif sys.stderr.isatty():
        yield from _bar(name, total)
    else:
        yield _PlainLines(name, total)


def in_units(count: float) -> str:
    """A number of bytes as people write it: 16.0 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _nothing(count: int) -> None:
    pass


def _bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(name), total=total)
        yield lambda count: bar.advance(task, count)


class _PlainLines:
    """For logs: nothing about work of a few seconds, then a line now and then."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._began = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last < PLAIN_EVERY_S:
            return
        self._last = now
        speed = self._done / (now - self._began)
        left = (self._total - self._done) / max(speed, 1)
        print(
            f"paceline: {self._name} · {in_units(self._done)} of {in_units(self._total)} · {in_units(speed)}/s · "
            f"{left:,.0f} s left",
            file=sys.stderr,
            flush=True,
        )
