"""What the terminal shows: one scenario in a few lines with a bar, several as a table."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.simulate.job import best_interval
from paceline.simulate.network import presets
from paceline.simulate.result import Result
from paceline.simulate.scenario import Scenario, counted
from paceline.world.terminal import duration

PARTS = {"compute": ("█", "green"), "slowest": ("▓", "yellow"), "exposed": ("▒", "red"), "lost": ("░", "magenta")}
"""Of a step's time, and of a job's: a letter and a colour, since not every terminal has both."""
SHOWN = 5e-5  # shares below are nothing to look at
LOSSES = ("recovery", "redone", "degraded", "checkpoints", "commits")
BAR = 48


def console(width: int | None = None) -> Console:
    wide = width or (None if sys.stdout.isatty() else max(100, shutil.get_terminal_size((120, 24)).columns))
    return Console(width=wide, highlight=False, soft_wrap=False)


def show(results: Sequence[Result], out: Console) -> None:
    if len(results) == 1:
        _show_one(results[0], out)
    else:
        _show_several(results, out)


# -- one ---------------------------------------------------------------------------------------------------------------


def _show_one(result: Result, out: Console) -> None:
    scenario, job = result.scenario, result.job
    hosts = counted(result.hosts, "host")
    out.print(Text(f"{scenario.title}", style="bold"), f"· {hosts} · {_network(scenario)}", soft_wrap=True)
    gradients = scenario.parameters * scenario.gradient_bytes
    out.print(
        f"{_count(scenario.parameters)} parameters, {_bytes(gradients)} of gradients in {result.buckets} buckets · "
        f"{_way(scenario)} · {len(result.steps)} steps simulated",
        style="dim", soft_wrap=True,
    )  # fmt: skip
    out.print()
    parts = {"compute": result.compute_s, "slowest": result.straggling_s, "exposed": result.exposed_s}
    _line(out, "a step", _ms(result.step_s), _bar(parts, result.step_s))
    names = {"compute": "compute", "slowest": "waiting for the slowest worker", "exposed": "waiting for the network"}
    for key, seconds in parts.items():
        letter, colour = PARTS[key]
        note = Text(f"{letter} ", style=colour).append(f"{names[key]} {_ms(seconds)}", style="default")
        if key == "exposed" and result.wire_s:
            note.append(f"  ({_ms(result.wire_s)} on the wire, {result.hidden:.0%} of it hidden)", style="dim")
        _line(out, "", "", note)
    if result.slowest_steps_s > 1.01 * result.step_s:
        _line(out, "", "", Text(f"1 step in 20 takes more than {_ms(result.slowest_steps_s)}", style="dim"))
    worth = result.scaling * scenario.workers
    note = Text(f"as {worth:,.1f} single workers · {3600 / result.step_s:,.0f} steps an hour")
    _line(out, "scaling", f"{result.scaling:.1%}", note)
    _line(out, "goodput", f"{job.goodput:.1%}", _goodput(result))
    for note in _losses(result):
        _line(out, "", "", note)


def _goodput(result: Result) -> Text:
    scenario, job = result.scenario, result.job
    if scenario.mtbf_hours is None and not scenario.checkpoint_every:
        return Text("nothing fails; --mtbf-hours for what happens when something does", style="dim")
    if scenario.mtbf_hours is None:
        return Text(f"over {scenario.hours:g} h without failures, with checkpoints")
    between = duration(scenario.mtbf_hours * 3600 / scenario.workers)
    lives = f"mean of {job.lives} such jobs, " if job.lives > 1 else ""
    fails = f"{job.failures / job.lives:,.1f} failures in {scenario.hours:g} h"
    return Text(f"{fails}, one in {between} ({lives}{scenario.recovery} recovery)")


def _losses(result: Result) -> list[Text]:
    scenario, job = result.scenario, result.job
    notes = []
    lost = {name: getattr(job, name) / job.seconds for name in LOSSES if getattr(job, name) > SHOWN * job.seconds}
    if lost:
        told = ", ".join(f"{name} {share:.2%}" for name, share in lost.items())
        notes.append(Text(f"lost to {told}"))
    if (median := job.recovery_median) is not None:
        until = "the next step" if scenario.recovery == "elastic" else "the step that was reached"
        notes.append(Text(f"a failure costs {_seconds(median)} until {until} (median)"))
    best = best_interval(scenario, result.step_s)
    if best is not None and scenario.recovery == "restart":
        notes.append(Text(f"by Young's formula a checkpoint every {best:,} steps costs least", style="dim"))
    return notes


def _line(out: Console, name: str, value: str, note: Text) -> None:
    row = Table.grid(padding=(0, 2))
    row.add_column(width=8, style="bold")
    row.add_column(width=10, justify="right")
    row.add_column()
    row.add_row(name, value, note)
    out.print(row)


def _bar(parts: dict[str, float], whole: float, width: int = BAR) -> Text:
    bar = Text()
    filled, total = 0, 0.0
    for name, seconds in parts.items():
        total += seconds
        until = round(width * min(1.0, total / whole)) if whole else 0
        letter, colour = PARTS[name]
        bar.append(letter * (until - filled), style=colour)
        filled = until
    return bar


# -- several -----------------------------------------------------------------------------------------------------------


def _show_several(results: Sequence[Result], out: Console) -> None:
    titles, common = _titles([result.scenario for result in results])
    out.print(Text(common, style="bold"), soft_wrap=True)
    out.print(Text(_legend(results), style="dim"), soft_wrap=True)
    out.print()
    fails = any(result.scenario.mtbf_hours or result.scenario.checkpoint_every for result in results)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("step", "scaling", *(("goodput", "a failure costs", "useful") if fails else ()), "work"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where the time goes", no_wrap=True)
    most = max(result.useful * result.scenario.workers for result in results)
    for title, result in zip(titles, results, strict=True):
        share = result.job.goodput / result.step_s
        parts = {
            "compute": result.compute_s * share,
            "slowest": result.straggling_s * share,
            "exposed": result.exposed_s * share,
            "lost": 1 - result.job.goodput,
        }
        median = result.job.recovery_median
        failing = (
            (f"{result.job.goodput:.1%}", _seconds(median) if median is not None else "–", f"{result.useful:.1%}")
            if fails
            else ()
        )
        work = result.useful * result.scenario.workers
        first = results[0].useful * results[0].scenario.workers
        style = "bold" if work == most else ""
        cells = [_ms(result.step_s), f"{result.scaling:.1%}", *failing, f"{work / first:.2f} ×"]
        table.add_row(Text(title, style=style), *(Text(cell, style=style) for cell in cells), _bar(parts, 1.0, 30))
    out.print(table)
    out.print()
    best = max(zip(titles, results, strict=True), key=lambda pair: pair[1].useful * pair[1].scenario.workers)
    out.print(Text(_verdict(best[0], best[1], results, titles)), soft_wrap=True)


def _legend(results: Sequence[Result]) -> str:
    names = {"compute": "compute", "slowest": "slowest worker", "exposed": "network"}
    if any(result.job.goodput < 1 for result in results):
        names["lost"] = "failures, checkpoints"
    bars = " ".join(f"{PARTS[key][0]} {name}" for key, name in names.items())
    return f"scaling: of as many single workers · work: against the first row · {bars}"


def _verdict(title: str, best: Result, results: Sequence[Result], titles: Sequence[str]) -> str:
    first = results[0]
    ratio = best.useful * best.scenario.workers / (first.useful * first.scenario.workers)
    if best is first or ratio < 1.005:
        return f"{titles[0]} does most: none of the others gains half a percent."
    return f"{title} does most: {ratio:.2f} times the work of {titles[0]}."


def _titles(scenarios: Sequence[Scenario]) -> tuple[list[str], str]:
    """What differs names the rows; what all share is said once."""
    if all(scenario.name for scenario in scenarios) and len({s.name for s in scenarios}) == len(scenarios):
        names = [scenario.name for scenario in scenarios]
    else:
        names = []
    said: dict[str, Callable[[Scenario], str]] = {
        "workers": lambda s: counted(s.workers, "worker"),
        "strategy": lambda s: s.strategy,
        "algorithm": lambda s: s.algorithm or "exact",
        "network": lambda s: s.net.name,
    }
    others = [
        key for key in vars(scenarios[0])
        if key not in ("name", *said) and len({getattr(s, key) for s in scenarios}) > 1
    ]  # fmt: skip
    differ = [key for key in said if len({said[key](s) for s in scenarios}) > 1]
    shared = [said[key](scenarios[0]) for key in said if key not in differ]
    shared.append(f"{_count(scenarios[0].parameters)} parameters" if "parameters" not in others else "")
    if not names:
        names = [
            " · ".join([*(said[key](s) for key in differ), *(f"{key}={_plain(getattr(s, key))}" for key in others)])
            for s in scenarios
        ]
    return names, " · ".join(filter(None, shared))


# -- words -------------------------------------------------------------------------------------------------------------


def show_networks(out: Console) -> None:
    for network in presets().values():
        out.print(Text(network.name, style="bold"), network.about, soft_wrap=True)
        links = ", ".join(
            f"{level.name}: {level.bandwidth * 8 / 1e9:g} Gbit/s, {level.latency_s * 1e6:g} µs"
            + (f", {level.units} to a {level.name}" if level.units else "")
            for level in network.levels
        )
        out.print(f"    {links}; {network.payload:.0%} payload", soft_wrap=True)
        out.print(Text(f"    from: {network.source}", style="dim"), soft_wrap=True)


def _network(scenario: Scenario) -> str:
    return scenario.net.about or scenario.net.name


def _way(scenario: Scenario) -> str:
    return f"all-reduce by {scenario.algorithm}" if scenario.algorithm else "exact, as the engine exchanges it"


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _ms(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 120 else duration(seconds)


def _count(number: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,.0f}"


def _bytes(number: float) -> str:
    for size, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,.0f} bytes"
