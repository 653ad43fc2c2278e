"""Results as tables for the terminal; the JSON has every number."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench.race import ONE_PROCESS

WIDTH_OF_A_FILE = 120


def console() -> Console:
    """Tables written to a file or a pipe keep their shape."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE, highlight=False)


def show_race(result: dict[str, Any], out: Console) -> None:
    workload, race = result["workload"], result["race"]
    out.print(
        f"{workload['name']}: {workload['parameters']:,} parameters, batch {workload['batch_size']} per worker · "
        f"{race['workers']} workers × {result['threads_per_worker']} thread, {race['backend']} · "
        f"{len(result['rounds'])} rounds × {result['steps_per_round']} steps"
    )
    if alone := result["contestants"].get(ONE_PROCESS):
        out.print(
            f"{ONE_PROCESS}: 1 process × {alone['threads']} threads, batch {alone['batch_size']}, "
            "while the other workers wait"
        )
    out.print(_speeds(result))
    out.print(_ratios(result, "throughput", "throughput, ours / peer"))
    if any(ratio["exposed"] for ratio in result["ratios"]):
        out.print(_ratios(result, "exposed", "exposed communication, ours / peer"))
    out.print(disturbance(result["disturbed_rounds"], len(result["rounds"]), "rounds", result["disturbed_above"]))
    out.print(machine_line(result["machine"]))


def show_startup(result: dict[str, Any], out: Console) -> None:
    table = table_of("launcher", "first step, s", "quartiles", "least – most", "exit, s")
    for name, times in result["launchers"].items():
        first = times["first_step_s"]
        table.add_row(
            name,
            f"{first['median']:.2f}",
            quartiles(first, 2),
            extremes(first, 2),
            f"{times['exit_s']['median']:.2f}",
        )
    out.print(f"From the command to the first finished step, {result['workers']} workers")
    out.print(table)
    ratio = result["ratio"]
    out.print(
        f"paceline run / torchrun: {ratio['median']:.3f}, quartiles {quartiles(ratio, 3)}, "
        f"least – most {extremes(ratio, 3)}"
    )
    starts = sum(len(turns) for turns in result["starts"].values())
    out.print(disturbance(result["disturbed_starts"], starts, "starts", result["disturbed_above"]))
    out.print(machine_line(result["machine"]))


def _speeds(result: dict[str, Any]) -> Table:
    table = table_of("contestant", result["workload"]["unit"], "quartiles", "step, ms", "backward, ms", "exposed, ms")
    for name, facts in result["contestants"].items():
        speed = facts["throughput"]
        table.add_row(
            name,
            f"{speed['median']:,.0f}",
            quartiles(speed, 0),
            f"{1e3 * facts['step_s']['median']:.1f}",
            *(f"{1e3 * facts[what]['median']:.1f}" if what in facts else "" for what in ("backward_s", "exposed_s")),
        )
    return table


def _ratios(result: dict[str, Any], what: str, title: str) -> Table:
    table = table_of(title, "median", "quartiles", "least – most", "median of quiet rounds")
    for ratio in result["ratios"]:
        spread, quiet = ratio[what], ratio[f"{what}_in_quiet_rounds"]
        if spread is not None:
            table.add_row(
                f"{ratio['ours']} / {ratio['peer']}",
                f"{spread['median']:.3f}",
                quartiles(spread, 3),
                extremes(spread, 3),
                "none" if quiet is None else f"{quiet['median']:.3f}",
            )
    return table


def table_of(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def quartiles(spread: dict[str, float], digits: int) -> str:
    return f"{spread['lower_quartile']:,.{digits}f} – {spread['upper_quartile']:,.{digits}f}"


def extremes(spread: dict[str, float], digits: int) -> str:
    return f"{spread['least']:,.{digits}f} – {spread['most']:,.{digits}f}"


def disturbance(disturbed: int, total: int, noun: str, above: float) -> str:
    return f"{disturbed} of {total} {noun} disturbed: other work had more than {above:.0%} of the cores"


def machine_line(machine: dict[str, Any]) -> str:
    return f"torch {machine['torch']} · {machine['cpu']}, {machine['cores']} cores, {machine['cpu_capability']}"
