"""Residuals: what was predicted of a run and what was measured, side by side, in the run's own folder.

    runs/mnist/plan.json             what `paceline plan … --json runs/mnist/plan.json` predicted, if somebody asked
    runs/mnist/residuals.json        written at the end of the run: its numbers, and the prediction of its own setting
    paceline plan --residuals runs   all of them, and how wrong they were

A prediction without a plan is what formulas say alone: bytes that a step sends.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import input_file
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

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
    """`about`: strategy, workers, precision, accumulate; `formula`: what is predicted without a plan."""
    predicted = dict(formula) | of_plan(folder / PLAN, about)
    told = {"kind": "paceline residuals", "about": dict(about), "predicted": predicted, "measured": dict(measured)}
    (folder / FILE_NAME).write_text(json.dumps(told, indent=2) + "\n")


def of_plan(path: Path, about: Mapping[str, Any]) -> dict[str, float]:
    """Of the row of a plan that is how the run was set, as far as `about` tells; nothing where there is none."""
    if not path.exists():
        return {}
    try:
        plan = input_file.read_json(path)
        rows = [*plan["fitting"], *plan["too_large"]] if plan["workers"] == about["workers"] else []
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is no plan ({error}); make it with paceline plan --json {path}") from error
    wanted = {name: about[name] for name in ("strategy", "precision", "accumulate") if name in about}
    found = next((row for row in rows if wanted.items() <= row.items()), None)
    if found is None:
        return {}
    memory = found["memory"]
    told = {"model_state": memory["model_state"], "peak": memory["peak"], "step_s": found["step_s"]}
    return told | ({"sent_bytes": max(found["sent_bytes"])} if found["sent_is_counted"] else {})


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
