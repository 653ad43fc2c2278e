"""A comparison of collectives as a table for the terminal and as a plot; the JSON has every number."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench.collectives import ALGORITHMS, BACKENDS, BASELINE, OPERATIONS, OURS
from paceline.bench.report import disturbance, machine_line, quartiles, table_of

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
    table = table_of("size", "algorithm", "sent by the busiest rank, bytes", "by formula")
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
