"""`paceline data audit RUN`: was every sample used exactly once? The last line answers, the tables say where.

    attempt  workers  from                   steps  samples          rolled back
    1              4  epoch 0, position 0       12      384  2 steps, 64 samples
    2              2  epoch 0, position 320     30      936

    epoch  steps    samples used  lost  repeated  dropped  left out
    0         32  1,000 of 1,000     0         0        0         0
    1          8    256 of 1,000     0         0        0         0

    0 lost, 0 repeated

Exits with 0 when that is proved, with 1 when it is not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline.data.ledger.report import AttemptReport, EpochReport, Report, Where

WIDTH_OF_A_FILE = 120
ROWS = 20


def audit(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="the run folder, or its samples folder", show_default=False)
    ],
    listed: Annotated[int, typer.Option("--list", min=0, help="lost and repeated samples to name, of each")] = 10,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="write every number there", show_default=False)
    ] = None,
) -> None:
    """Prove from a run's record of samples that each was used exactly once; 1 when it was not, or can't be proved."""
    from rich.console import Console

    from paceline.data.audit import audit as audit_record

    report = audit_record(run, listed)
    if json_file is not None:
        _write(report, json_file)
    show(report, Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE, highlight=False, markup=False))
    if not report.clean:
        raise typer.Exit(1)


def show(report: Report, out: Console) -> None:
    def say(text: str, style: str | None = None) -> None:
        out.print(text, style=style, soft_wrap=True)  # for grep and for logs: one finding is one line, however long

    say(f"{report.folder}: {_number(len(report.attempts), 'attempt')}, {_number(report.lanes, 'lane')}\n")
    out.print(_attempts(report.attempts), "", _epochs(report.epochs), "", sep="\n")
    if not report.ids_proved:
        say(f"note     {'a stream has no' if report.stream else 'the order may repeat'} ids: only positions are proved")
    for text in report.notes:
        say(f"note     {text}")
    for text in report.problems:
        say(f"problem  {text}", style="red")
    for line in _named(report):
        say(line)
    if report.problems and not (report.lost or report.repeated):
        say(f"not proved: {_number(len(report.problems), 'problem')}", style="bold red")
    say(report.verdict, style="bold green" if report.clean else "bold red")


def _attempts(attempts: tuple[AttemptReport, ...]) -> Table:
    table = _table("attempt", "workers", "from", "steps", "samples", "rolled back")
    for attempt in attempts[:ROWS]:
        table.add_row(
            str(attempt.attempt),
            str(attempt.workers),
            f"epoch {attempt.epoch}, position {attempt.position:,}",
            f"{attempt.steps:,}",
            f"{attempt.samples:,}",
            f"{_number(attempt.rolled_back_steps, 'step')}, {_number(attempt.rolled_back_samples, 'sample')}"
            if attempt.rolled_back_samples
            else "",
        )
    if len(attempts) > ROWS:
        table.add_row(f"and {len(attempts) - ROWS:,} more")
    return table


def _epochs(epochs: tuple[EpochReport, ...]) -> Table:
    table = _table("epoch", "steps", "samples used", "lost", "repeated", "dropped", "left out")
    shown = list(_together(epochs)) if len(epochs) > ROWS else list(epochs)
    for epoch in shown[:ROWS]:
        numbers = (epoch.lost, epoch.repeated, epoch.dropped, epoch.left_out)
        table.add_row(
            str(epoch.first) if epoch.first == epoch.last else f"{epoch.first} – {epoch.last}",
            f"{epoch.steps:,}",
            f"{epoch.samples:,}" if epoch.of is None else f"{epoch.samples:,} of {epoch.of:,}",
            *(f"{number:,}" for number in numbers),
        )
    if len(shown) > ROWS:
        table.add_row(f"and {len(shown) - ROWS:,} more")
    return table


def _together(epochs: Iterable[EpochReport]) -> Iterator[EpochReport]:
    """Epochs that differ in nothing but their number, as one."""
    for _, alike in groupby(epochs, key=lambda epoch: replace(epoch, first=0, last=0)):
        first, *others = alike
        yield replace(first, last=others[-1].last if others else first.last)


def _named(report: Report) -> Iterator[str]:
    for lost in report.first_lost:
        sample = "" if lost.id is None else f" (id {lost.id})"
        yield f"lost     epoch {lost.where.epoch}, position {lost.position:,}{sample}: belongs in {_place(lost.where)}"
    for epoch in report.epochs:
        if epoch.unused_ids:
            more = " …" if len(epoch.unused_ids) < epoch.lost + epoch.dropped else ""
            dropped = f"; drop_last may drop {epoch.dropped:,} of them" if epoch.dropped else ""
            yield f"lost     epoch {epoch.first} never used id {', '.join(map(str, epoch.unused_ids))}{more}{dropped}"
    for again in report.first_repeated:
        sample = "" if again.id is None else f" (id {again.id})"
        places = "; and in ".join(_place(where) for where in again.where)
        yield f"repeated epoch {again.where[0].epoch}, position {again.position:,}{sample}: in {places}"


def _place(where: Where) -> str:
    known = {"step": where.step, "lane": where.lane, "attempt": where.attempt, "worker": where.worker}
    return ", ".join(f"{name} {number}" for name, number in known.items() if number is not None)


def _write(report: Report, file: Path) -> None:
    try:
        file.write_text(
            json.dumps({**asdict(report), "clean": report.clean, "verdict": report.verdict}, indent=2) + "\n"
        )
    except OSError as error:
        raise ConfigError(f"--json {file} can't be written: {error.strerror}") from error


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("attempt", "epoch", "from") else "right", no_wrap=True)
    return table


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
