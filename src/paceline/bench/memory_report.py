"""The table of `paceline bench memory`: megabytes of the worker that holds most, and how near the formula is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from paceline.bench.memory import PARTS
from paceline.bench.report import machine_line, table_of

COLUMNS = (
    "contestant", "N", "weights", "gradients", "state", "sum", "formula", "PSS", "activ.", "buffers", "other", "peak",
    "highest",
)  # fmt: skip


def show_memory(result: dict[str, Any], out: Console) -> None:
    out.print(
        f"MB of one worker of N · {result['parameters']:,} parameters in fp32, AdamW, one lane per worker · "
        f"ours over {result['backend']}, theirs over gloo"
    )
    table = table_of(*COLUMNS)
    for row in result["rows"]:
        table.add_row(*cells(row))
    out.print(table)
    out.print("sum: of weights, gradients and optimizer state · PSS: of the process, when they are all there")
    out.print("peak: of a step, which is activations, buffers and other too · highest: since the start")
    out.print(machine_line(result["machine"]))


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The same table for the docs."""
    head = [f"| {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    return "\n".join([*head, *(f"| {' | '.join(cells(row))} |" for row in rows)])


def cells(row: dict[str, Any]) -> tuple[str, ...]:
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
