"""What a job shows on its terminal: one line of progress while it runs, and one table at its end.

    ━━━━━━━━━━╸━━━━━━━━━ step 512/1,000 · epoch 1.54 · loss 0.2931 · lr 0.0003 · samples/s 8,120 · eta 0:42

The worker sends the values to its supervisor, which draws them below the output of all workers; a worker without a
supervisor prints the table itself. Where the row is too short for every field, the least important are left out first:
learning rate, epoch, speed.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

IMPORTANCE = {"lr": 0, "learning_rate": 0, "epoch": 1, "samples/s": 2, "tokens/s": 3, "eta": 5, "loss": 6}
"""Of fields; others, which the script chose to show, have 4."""

LONG_BAR, SHORT_BAR = 20, 10
WIDE, NARROW = 107, 57
"""Columns from which a row has the long bar, and any."""


@dataclass(frozen=True)
class ProgressLine:
    """Where the job is, as rank 0 tells it; `final` when the loop is over and the line may be left to stand."""

    step: int
    total: int | None = None
    fields: Mapping[str, float | int | str] = field(default_factory=dict)
    final: bool = False

    @classmethod
    def from_message(cls, body: Mapping[str, Any]) -> ProgressLine:
        """By a worker; an error here, and not where it is drawn, if it can't be."""
        total, fields = body.get("total"), body.get("fields") or {}
        values = isinstance(fields, dict) and all(isinstance(value, float | int | str) for value in fields.values())
        if not values or not isinstance(total, int | None):
            raise TypeError("a total that is no number, or fields that are neither numbers nor texts")
        return cls(int(body["step"]), total, fields, bool(body.get("final")))

    def text(self) -> str:
        of = f"/{self.total:,}" if self.total else ""
        return " · ".join(
            [f"step {self.step:,}{of}", *(f"{name} {_short(value)}" for name, value in self.fields.items())]
        )

    def fitted(self, width: int) -> str:
        """As much as fits, by importance."""
        line = self
        while len(line.text()) > width and line.fields:
            least = min(reversed(list(line.fields)), key=lambda name: IMPORTANCE.get(name, 4))
            line = replace(line, fields={name: value for name, value in line.fields.items() if name != least})
        return line.text()

    def drawn(self, width: int) -> str:
        """In the terminal's own colours, at most one row."""
        from rich.console import Console  # imported late: most runs never draw one, and it costs 50 ms
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        out = io.StringIO()
        width = max(17, width - 3)  # room for the ^C that a terminal echoes: a row that wraps can't be erased
        console = Console(file=out, force_terminal=True, width=width, legacy_windows=False)
        row = Table.grid(padding=(0, 1))
        bar = 0 if not self.total or width < NARROW else SHORT_BAR if width < WIDE else LONG_BAR
        text = Text(self.fitted(width - bar - 1 if bar else width), no_wrap=True, overflow="ellipsis")
        if bar and self.total:
            row.add_column(width=bar, no_wrap=True)
            row.add_column(no_wrap=True)
            row.add_row(ProgressBar(total=self.total, completed=self.step, width=bar), text)
        else:
            row.add_row(text)
        console.print(row, end="", soft_wrap=False)
        return out.getvalue().splitlines()[0].rstrip()


def duration(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2d 03:10`."""
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _short(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


WIDEST = 100


@dataclass(frozen=True)
class SummaryTable:
    title: str
    rows: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, title: str, rows: Sequence[Sequence[str]]) -> SummaryTable:
        return cls(str(title), tuple((str(name), str(value)) for name, value in rows))

    def plain(self) -> str:
        wide = max((len(name) for name, _ in self.rows), default=0)
        return "".join(
            f"{line}\n" for line in [self.title, *(f"  {name:<{wide}}  {value}" for name, value in self.rows)]
        )

    def drawn(self, width: int) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=min(width, WIDEST), legacy_windows=False)
        table = Table(title=Text(self.title, style="bold"), box=box.ROUNDED, show_header=False, title_justify="left")
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self.rows:
            table.add_row(name, Text(value))
        console.print(table)
        return out.getvalue()
