"""Residuals: what was predicted of a run and what was measured, side by side, in the run's own folder.

    runs/mnist/plan.json             what `paceline plan … --json runs/mnist/plan.json` predicted, if somebody asked
    runs/mnist/residuals.json        written at the end of the run: its numbers, and the prediction of its own setting
    paceline plan --residuals runs   all of them, and how wrong they were

A prediction without a plan is what formulas say alone: bytes that a step sends.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import input_file
from paceline.errors import ConfigError
from paceline.world import messages

if TYPE_CHECKING:
    from rich.console import Console

SETTING = ("strategy", "precision", "accumulate", "micro_batch", "activation_checkpointing", "compile")
"""Of a row of a plan, besides the workers and lanes of all rows."""
FILE_NAME = "residuals.json"
PLAN = "plan.json"
QUANTITIES = {
    "model_state": "model state",
    "peak": "peak memory",
    "sent_bytes": "bytes sent",
    "step_s": "step time",
}


@dataclass(frozen=True)
class Residual:
    run: str
    setting: str
    quantity: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the measurement; positive: it was less than predicted."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1


def setting_of(about: Mapping[str, Any]) -> str:
    return f"{about['strategy']} on {about['workers']}, {about['precision']}"


def write_residuals(
    folder: Path, about: Mapping[str, Any], measured: Mapping[str, float], formula: Mapping[str, float]
) -> None:
    """`about`: workers, lanes and SETTING; `formula`: what is predicted without a plan, or with one that is damaged."""
    predicted = dict(formula)
    try:
        predicted |= of_plan(folder / PLAN, about)
    except ConfigError as error:
        messages.logger("engine").warning(f"paceline: {error}; what the run measured is stored without a prediction")
    told = {"kind": "paceline residuals", "about": dict(about), "predicted": predicted, "measured": dict(measured)}
    partial = folder / f"{FILE_NAME}.partial"  # half a file of one run would hide those of all others
    partial.write_text(json.dumps(told, indent=2) + "\n")
    os.replace(partial, folder / FILE_NAME)


def of_plan(path: Path, about: Mapping[str, Any]) -> dict[str, float]:
    """Of the row of a plan that is how the run was set. Nothing where no row is, or several are, or `about` does not
    tell all of it: the numbers of another setting would say nothing about this one."""
    if not path.exists():
        return {}
    about = {"compile": False, **about}  # runs and plans of before know of none: it was unplanned
    if about.get("unplanned") or any(about.get(name) is None for name in ("workers", "lanes", *SETTING)):
        return {}
    try:
        plan = input_file.read_json(path)
        rows = [{"compile": False} | row for row in (*plan["fitting"], *plan["too_large"])]
        if (plan["workers"], plan["lanes"]) != (about["workers"], about["lanes"]):
            return {}
        found = [row for row in rows if all(row[name] == about[name] for name in SETTING)]
        if len(found) != 1:
            return {}
        row, memory = found[0], found[0]["memory"]
        told = {"model_state": memory["model_state"], "peak": memory["peak"], "step_s": row["step_s"]}
        return told | ({"sent_bytes": max(row["sent_bytes"])} if row["sent_is_counted"] else {})
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = input_file.cause_of(error)
        raise ConfigError(f"{path} is no plan ({why}); make it with paceline plan --json {path}") from error


def read_residuals(folder: Path) -> list[Residual]:
    """Of every run in the folder."""
    if not folder.is_dir():
        raise ConfigError(f"--residuals {folder}: there is no such folder")
    found = []
    for path in sorted(folder.rglob(FILE_NAME)):
        try:
            told = input_file.read_json(path)
            setting, predicted, measured = setting_of(told["about"]), told["predicted"], told["measured"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
        name = str(path.parent.relative_to(folder))
        found += [
            Residual("" if name == "." else name, setting, quantity, predicted[quantity], measured[quantity])
            for quantity in QUANTITIES
            if quantity in predicted and quantity in measured
        ]
    if not found:
        raise ConfigError(
            f"--residuals {folder}: no run in it has a prediction beside a measurement ({FILE_NAME}); runs with a run "
            f"folder write one, with step time and memory if {PLAN} of `paceline plan --json` is there"
        )
    return found


def show_residuals(found: Sequence[Residual], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(("run", "setting", "", "predicted", "measured", "error")):
        table.add_column(column, justify="right" if number > 2 else "left", no_wrap=True)
    for one in found:
        numbers = [amount_text(one.quantity, value) for value in (one.predicted, one.measured)]
        table.add_row(one.run, one.setting, QUANTITIES[one.quantity], *numbers, f"{one.error:+.1%}")
    console.print(table)
    for quantity, name in QUANTITIES.items():
        errors = [abs(one.error) for one in found if one.quantity == quantity]
        if errors:
            console.print(f"{name}: median {statistics.median(errors):.1%}, worst {max(errors):.1%} of {len(errors)}")


def amount_text(quantity: str, value: float) -> str:
    if quantity == "step_s":
        return f"{1e3 * value:,.2f} ms"
    return f"{value:,.0f}" if quantity == "sent_bytes" else f"{value / 2**20:,.1f} MiB"
