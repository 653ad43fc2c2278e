"""A table of two columns, what and how much: rounded corners on a terminal, aligned lines elsewhere.

A worker tells its supervisor the rows, which draws them where the progress line was; without one it prints itself.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

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

    def print(self) -> None:
        if sys.stdout.isatty():
            sys.stdout.write(self.drawn(os.get_terminal_size(sys.stdout.fileno()).columns or 80))
        else:
            sys.stdout.write(self.plain())
        sys.stdout.flush()
