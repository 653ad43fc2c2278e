"""`paceline top RUN`: where the time of each worker's steps goes, and which worker the others wait for.

    worker  at step  steps/s  step  data  forward  backward  exposed comm.  of it waiting  optimizer  …  memory
         0       63     13.6  73.5   0.7      1.6       6.8           40.6           32.5        6.3
         1       63     13.6  73.4  38.6      1.0       3.3            6.5            0.4        6.4
    worker 1 is late: data takes it longer than the others, who wait for it 33.3 ms a step since step 21 …

Live until Ctrl-C, or until the run has ended; `--once` shows it once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from paceline.monitor.run_events import Note, RunEvents

WIDTH_OF_A_FILE = 140
NOTES = 5
KEPT = 10_000
"""Records of each worker that are read again for every drawing."""
LEAST_SHOWN_S = 5e-5
HIDDEN, WAITING, OPTIMIZER = "hidden\ncomm.", "of it\nwaiting", "opti-\nmizer"
CHECKPOINT, RECOVERY, CPU, GPU, MEMORY = "check-\npoint", "re-\ncovery", "CPU", "GPU", "memory"
FIRST_TO_GO = (HIDDEN, RECOVERY, MEMORY, CPU, CHECKPOINT, "other", OPTIMIZER, GPU, WAITING)
"""Columns, in a narrow terminal."""


def top(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run", show_default=False)],
    once: Annotated[bool, typer.Option("--once", help="show it once, and end")] = False,
    last: Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="steps to average over")] = 50,
    every_s: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, max=3600, help="how often it is drawn anew")
    ] = 1.0,
) -> None:
    """Show where the time of each worker's steps goes, live, and which worker the others wait for."""
    from rich.console import Console
    from rich.live import Live

    from paceline.monitor.run_events import read_run

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_OF_A_FILE)
    events = read_run(run, max(last, KEPT))
    if once or events.has_ended or not console.is_terminal:
        console.print(view(events, last, console))
        return
    try:
        with Live(view(events, last, console), console=console, auto_refresh=False) as live:
            while not events.has_ended:
                time.sleep(every_s)
                events = read_run(run, max(last, KEPT))
                live.update(view(events, last, console), refresh=True)
    except KeyboardInterrupt:
        return


def view(run: RunEvents, last: int, console: Console) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from paceline.monitor.attribution import join, straggler

    found = straggler(join(run))
    if found is not None:
        told = Text(str(found), style="yellow")
    else:
        told = Text("no worker stands out" if len(run.workers) > 1 else "")
    notes = [Text(_note(note), style="dim") for note in run.notes[-NOTES:]]
    problems = [Text(line, style="red") for line in run.problems]
    return Group(Text(_title(run)), _fitting(run, last, console), told, *notes, *problems)


def _title(run: RunEvents) -> str:
    newest = max(
        (float(steps["began"][-1] + steps["parts"][-1].sum()) for steps in run.workers.values() if len(steps)),
        default=0.0,
    )
    about: dict[str, Any] = next(iter(run.headers.values()))
    kind = ", ".join(str(about[key]) for key in ("strategy", "device") if key in about)
    state = "has ended" if run.has_ended else f"last step {max(0.0, time.time() - newest):.0f} s ago" if newest else ""
    return f"{run.folder}: {kind}; step {run.last_step:,}; {state}"


def _note(note: Note) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(note.time))
    who = "" if note.worker is None else f", worker {note.worker}"
    return f"{at}  step {note.step:,}{who}: {note.text}"


def _fitting(run: RunEvents, last: int, console: Console) -> Table:
    """The table with as many columns as the terminal has room for."""
    for count in range(len(FIRST_TO_GO) + 1):
        table = _table(run, last, FIRST_TO_GO[:count])
        if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
            break
    return table


def _table(run: RunEvents, last: int, without: Sequence[str] = ()) -> Table:
    """Means, so that the columns add up; what no worker spends time in has none."""
    import numpy as np
    from rich import box
    from rich.table import Table

    from paceline.monitor.attribution import join
    from paceline.monitor.events import Part
    from paceline.monitor.run_events import mean_share

    joined = join(run, last)
    waiting = dict(zip(joined.workers, joined.waiting.mean(axis=1), strict=True)) if len(joined.steps) else {}
    begun = {worker: steps for worker, steps in run.workers.items() if len(steps)}
    means = {worker: steps[-last:]["parts"].astype(float).mean(axis=0) for worker, steps in begun.items()}
    hidden = {worker: float(steps[-last:]["hidden_s"].mean()) for worker, steps in begun.items()}
    columns: dict[str, Callable[[int], float]] = {
        "step": lambda worker: means[worker].sum(),
        "data": lambda worker: means[worker][Part.DATA],
        "forward": lambda worker: means[worker][Part.FORWARD],
        "backward": lambda worker: means[worker][Part.BACKWARD],
        HIDDEN: lambda worker: hidden[worker],
        "exposed\ncomm.": lambda worker: means[worker][Part.EXCHANGE] + means[worker][Part.VOTE],
        WAITING: lambda worker: waiting.get(worker, 0.0),
        OPTIMIZER: lambda worker: means[worker][Part.OPTIMIZER],
        CHECKPOINT: lambda worker: means[worker][Part.CHECKPOINT],
        RECOVERY: lambda worker: means[worker][Part.RECOVERY],
        "other": lambda worker: means[worker][Part.OTHER],
    }
    shown = {name: value for name, value in columns.items() if any(value(worker) > LEAST_SHOWN_S for worker in begun)}
    shown = {name: value for name, value in shown.items() if name not in without}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), title_justify="left")
    table.title = f"milliseconds of a step, mean of the last {min(last, max(map(len, begun.values()), default=0))}"
    of_host: dict[str, Callable[[int], str]] = {
        CPU: lambda worker: _percent(mean_share(begun[worker][-last:], "cpu")),
        GPU: lambda worker: _percent(mean_share(begun[worker][-last:], "gpu")),
        MEMORY: lambda worker: _memory(begun[worker][-1]),
    }
    of_host = {name: text for name, text in of_host.items() if name not in without and any(map(text, begun))}
    for name in ("worker", "at step", "steps/s", *shown, *of_host):
        table.add_column(name, justify="right", no_wrap=True)
    for worker, steps in run.workers.items():
        if worker not in begun:
            table.add_row(str(worker), "none")
            continue
        rate = f"{1 / np.maximum(means[worker].sum(), 1e-9):,.3g}"
        cells = [f"{1e3 * value(worker):,.1f}" for value in shown.values()]
        texts = [text(worker) for text in of_host.values()]
        table.add_row(str(worker), f"{int(steps['step'][-1]):,}", rate, *cells, *texts)
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"


def _memory(record: Any) -> str:
    on_host, on_device = (float(record[name]) / 2**30 for name in ("memory", "device_memory"))
    return f"{on_host:.2f} GiB" + (f"\n+ {on_device:.2f} on GPU" if on_device else "")
