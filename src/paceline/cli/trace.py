"""`paceline trace RUN --steps 100:110 -o trace.json`: steps of a run for Perfetto, a process per worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigError, DataError


def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run", show_default=False)],
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="which steps, both ends included [default: the last 20]")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="the trace to write")] = Path("trace.json"),
) -> None:
    """Write some steps of a run as a Chrome trace, which Perfetto opens."""
    from paceline.monitor.chrome_trace import trace_of
    from paceline.monitor.run_events import read_run

    wanted = None if steps is None else _bounds(steps)
    events = read_run(run)
    last = events.last_step
    recorded = [int(one["step"][0]) for one in events.workers.values() if len(one)]
    if not recorded:
        raise DataError(f"{run} has no step yet: nothing to draw")
    first, end = wanted or (max(last - 19, min(recorded)), last)
    if end < min(recorded) or first > last:
        raise DataError(f"--steps {steps}: the run has recorded steps {min(recorded)} to {last}")
    found = trace_of(events, first, end)
    out.write_text(json.dumps(found))
    shown = f"{max(first, min(recorded))} to {min(end, last)}"
    print(f"{out}: steps {shown} of {len(events.workers)} workers; open it at https://ui.perfetto.dev")


def _bounds(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    last = last or first
    if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()) or len(text) > 40:
        raise ConfigError(f"--steps {text[:40]!r}: expected two numbers, as in 100:110")
    if int(last) < int(first):
        raise ConfigError(f"--steps {text}: the first step comes after the last")
    return int(first), int(last)
