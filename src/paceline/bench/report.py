"""Results: every number as JSON, tables of races, collectives, memory and networks for the terminal; one plot."""

from __future__ import annotations

import errno
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench.collectives import ALGORITHMS, BACKENDS, BASELINE, OPERATIONS, OURS
from paceline.bench.memory import PARTS
from paceline.bench.network import advice, estimates
from paceline.bench.race import ONE_PROCESS
from paceline.errors import ConfigError
from paceline.input_file import cause_of

WIDTH_OF_A_FILE = 120


def console() -> Console:
    """Tables written to a file or a pipe keep their shape."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE, highlight=False)


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


def check_writable(file: Path | None, option: str = "--json") -> None:
    """Before minutes of measuring, not after."""
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir():
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise ConfigError(f"{option} {file} can't be written: {why}")
    try:
        if not file.exists():
            file.open("x").close()
            file.unlink()
        elif not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"{option} {file} can't be written: {cause_of(error)}") from error


def write_json(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        try:
            file.write_text(json.dumps(result, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--json {file} could not be written: {cause_of(error)}") from error


# -- a race ------------------------------------------------------------------------------------------------------------


def show_race(result: dict[str, Any], out: Console) -> None:
    workload, race = result["workload"], result["race"]
    out.print(
        f"{workload['name']}: {workload['parameters']:,} parameters, batch {workload['batch_size']} per worker · "
        f"{race['workers']} workers × {result['threads_per_worker']} thread, {race['backend']} · "
        f"{len(result['rounds'])} rounds × {result['steps_per_round']} steps"
        f"{', memory kept' if race['keep_memory'] else ''}"
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


# -- collectives -------------------------------------------------------------------------------------------------------

PANEL_WIDTH, PANEL_HEIGHT = 6.4, 4.8
MOST_COLUMNS = 3
_MARKERS = "osD^vP*X"
_COLOURS = (
    "tab:blue", "tab:cyan", "tab:green", "black", "tab:red", "tab:orange", "tab:purple",  # backends
    "royalblue", "teal", "olive", "goldenrod", "firebrick", "hotpink", "grey", "saddlebrown",  # schedules
)  # fmt: skip
_STYLES = dict(zip((*BACKENDS, *ALGORITHMS), zip(_COLOURS, itertools.cycle(_MARKERS)), strict=True))


def show_collectives(result: dict[str, Any], out: Console) -> None:
    asked = result["comparison"]
    for name in asked["operations"]:
        cases = [case for case in result["cases"] if case["operation"] == name]
        out.print(
            f"{name}, fp32, {asked['workers']} workers × 1 thread, {asked['rounds']} rounds · bus bandwidth = "
            f"algorithm bandwidth × {OPERATIONS[name].formula} = × {cases[0]['bus_factor']:.3g}"
        )
        out.print(_times(cases))
        counted = _bytes(cases)
        if counted.row_count:
            out.print(counted)
    rounds = [each for case in result["cases"] for each in case["rounds"]]
    disturbed = sum(each["disturbed"] for each in rounds)
    out.print(disturbance(disturbed, len(rounds), "rounds", result["disturbed_above"]))
    out.print(machine_line(result["machine"]))


def _times(cases: list[dict[str, Any]]) -> Table:
    table = table_of(
        "size", "contestant", "time, µs", "quartiles", "mean, µs", "alg GB/s", "bus GB/s", f"× {BASELINE}", "quartiles",
    )  # fmt: skip
    table.columns[1].justify = "left"
    for case in cases:
        for number, (name, facts) in enumerate(case["contestants"].items()):
            micro = {what: 1e6 * value for what, value in facts["time_s"].items()}
            digits = 0 if micro["median"] >= 100 else 1
            ratio = facts["times_baseline"]
            table.add_row(
                case["size"] if number == 0 else "",
                name,
                f"{micro['median']:,.{digits}f}",
                quartiles(micro, digits),
                f"{1e6 * facts['mean_s']['median']:,.{digits}f}",
                f"{facts['algorithm_bandwidth'] / 1e9:.2f}",
                f"{facts['bus_bandwidth'] / 1e9:.2f}",
                "" if ratio is None else f"{ratio['median']:.2f}",
                "" if ratio is None else quartiles(ratio, 2),
            )
    return table


def _bytes(cases: list[dict[str, Any]]) -> Table:
    """Of those that count what they send."""
    table = table_of("size", "algorithm", "sent by the busiest rank, bytes", "by its schedule")
    table.columns[1].justify = "left"
    for case in cases:
        for name, facts in case["contestants"].items():
            if facts["sent_bytes"] is not None:
                sent, formula = f"{facts['sent_bytes']:,.0f}", f"{facts['formula_bytes']:,.0f}"
                table.add_row(case["size"], name, sent, formula)
    return table


def plot_collectives(result: dict[str, Any], file: Path) -> None:
    """Time by size, one panel per operation, one line per contestant; the band holds the middle half of the rounds."""
    from matplotlib.figure import Figure

    operations = result["comparison"]["operations"]
    columns = min(MOST_COLUMNS, len(operations))
    rows = -(-len(operations) // columns)
    figure = Figure(figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * rows), layout="constrained")
    panels: Any = figure.subplots(rows, columns, squeeze=False).flat
    for name, panel in itertools.zip_longest(operations, panels):
        if name is None:
            panel.set_axis_off()
        else:
            _draw(panel, name, [case for case in result["cases"] if case["operation"] == name])
    figure.suptitle(f"{result['comparison']['workers']} workers of one host, fp32")
    figure.savefig(file, dpi=150)


def _draw(panel: Any, operation: str, cases: list[dict[str, Any]]) -> None:
    sizes = [case["bytes"] for case in cases]
    for name in cases[0]["contestants"]:
        times = [case["contestants"][name]["time_s"] for case in cases]
        # Ours are full lines, peers dashed, schedules over gloo dotted.
        style = ":" if name in ALGORITHMS else "-" if name in OURS else "--"
        colour, marker = _STYLES[name]
        panel.plot(
            sizes, [1e6 * time["median"] for time in times], style, color=colour, marker=marker, ms=5, label=name
        )
        low, high = ([1e6 * time[what] for time in times] for what in ("lower_quartile", "upper_quartile"))
        panel.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.set(xscale="log", yscale="log", xlabel="size", ylabel="time of one call, µs", title=operation)
    panel.set_xticks(sizes, [case["size"] for case in cases], rotation=30)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9)


# -- memory: megabytes of the worker that holds most, and how near the formula is --------------------------------------

MEMORY_COLUMNS = (
    "contestant", "N", "weights", "gradients", "state", "sum", "formula", "PSS", "activ.", "buffers", "other", "peak",
    "highest",
)  # fmt: skip


def show_memory(result: dict[str, Any], out: Console) -> None:
    out.print(
        f"MB of one worker of N · {result['parameters']:,} parameters in fp32, AdamW, one lane per worker · "
        f"ours over {result['backend']}, theirs over gloo"
    )
    table = table_of(*MEMORY_COLUMNS)
    for row in result["rows"]:
        table.add_row(*_cells(row))
    out.print(table)
    out.print("sum: of weights, gradients and optimizer state · PSS: of the process, when they are all there")
    out.print("peak: of a step, which is activations, buffers and other too · highest: since the start")
    out.print(machine_line(result["machine"]))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    weights, gradients, state, activations, buffers, other = (_mb(row[part]) for part in PARTS)
    formula = row["formula"]
    near = "–" if formula is None else f"{_mb(formula)} ({100 * (row['held'] / formula - 1):+.1f} %)"
    pss, *peaks = (_mb(row[measured]) for measured in ("pss_before_step", "step_peak", "highest_peak"))
    return (
        row["contestant"], str(row["workers"]), weights, gradients, state, _mb(row["held"]), near, pss, activations,
        buffers, other, *peaks,
    )  # fmt: skip


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f}"


# -- the network -------------------------------------------------------------------------------------------------------


def show_network(result: dict[str, Any], out: Console) -> None:
    out.print(f"{result['workers']} workers over gloo · messages of {result['asked']['message_bytes']:,} bytes")
    pairs = table_of("workers", "latency, µs", "bandwidth, Mbit/s")
    for pair in result["pairs"]:
        first, second = pair["pair"]
        pairs.add_row(f"{first} – {second}", f"{1e6 * pair['latency_s']:,.0f}", _mbit(pair["bandwidth"]))
    pairs.add_row("all at once", "", _mbit(result["together"]["bandwidth"]))
    out.print(pairs)
    rows = estimates(result)
    table = table_of(
        f"{result['asked']['parameters']:,} parameters", "sent per step, MB", "waits per step, ms", "share of a step"
    )
    for row in rows:
        share = "" if row["share"] is None else f"{row['share']:.0%}"
        table.add_row(row["way"], f"{row['sent_bytes'] / 1e6:,.2f}", f"{1e3 * row['waits_s']:,.1f}", share)
    out.print(table)
    out.print("waits: by each worker with one lane, where nothing is hidden behind backward, in the mean over steps")
    out.print(advice(rows))
    out.print(machine_line(result["machine"]))


def _mbit(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:,.0f}"


def show_hardware(profile: dict[str, Any], console: Console) -> None:
    """Rates by the number of workers that are busy at once, and what exchanges cost."""
    dtypes = list(next(iter(profile["rates"].values()))["flops"])
    table = table_of("busy at once", *(f"{dtype} GFLOP/s" for dtype in dtypes), "memory GB/s", "update GB/s")
    for count, rates in profile["rates"].items():
        numbers = [*(rates["flops"][dtype] for dtype in dtypes), rates["memory_bandwidth"], rates["update_bandwidth"]]
        table.add_row(f"{count} workers", *(f"{number / 1e9:,.1f}" for number in numbers))
    console.print(table)
    if profile["exchanges"]:
        costs_in = ("fixed, ms", "per MB of gradients, ms", "per tensor, µs", "least, ms")
        exchanges = table_of("exchange", "workers", *costs_in)
        for backend, by_workers in profile["exchanges"].items():
            for count, costs in by_workers.items():
                for strategy, cost in costs.items():
                    numbers = [1e3 * cost["fixed_s"], 1e9 * cost["per_byte_s"], 1e6 * cost["per_tensor_s"]]
                    cells = [f"{number:,.3g}" for number in (*numbers, 1e3 * cost["least_s"])]
                    exchanges.add_row(f"{strategy} over {backend}", count, *cells)
        console.print(exchanges)
    reduced = table_of("all-reduce", "workers", "bytes", "µs", "bus bandwidth, GB/s")
    for backend, by_workers in profile["collectives"].items():
        for count, rows in by_workers.items():
            for row in rows:
                cells = [f"{row['bytes']:,}", f"{1e6 * row['seconds']:,.0f}", f"{row['bus_bandwidth'] / 1e9:.2f}"]
                reduced.add_row(backend, count, *cells)
    if profile["collectives"]:
        console.print(reduced)
