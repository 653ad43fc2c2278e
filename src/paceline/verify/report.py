"""What `paceline verify` says: a green table, or the first difference with its likely cause; the same as JSON."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.verify import comparison
from paceline.verify.causes import lane
from paceline.verify.comparison import Difference
from paceline.verify.jobs import Element, Outcome, Plan, Tell
from paceline.verify.record import Run

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_OF_A_FILE = 110
WIDEST = 120


@contextmanager
def progress(plan: Plan, *, shown: bool) -> Iterator[Tell]:
    """The table as it grows, with a line about the run that is under way; on a terminal, and gone when all are done."""
    if not shown:
        yield lambda outcome, text, step: None
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.spinner import Spinner

    spinner = Spinner("dots")
    with Live(spinner, console=Console(highlight=False), transient=True, refresh_per_second=8) as live:

        def tell(outcome: Outcome, text: str, step: int) -> None:
            spinner.update(text=f"{text} · step {step}/{plan.steps}")
            live.update(Group(_table(outcome), spinner) if outcome.states else spinner)

        yield tell


def show(plan: Plan, outcome: Outcome) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH_OF_A_FILE
    out = Console(width=width, highlight=False, markup=False, soft_wrap=False)
    if out.width > WIDEST:
        out = Console(width=WIDEST, highlight=False, markup=False)
    lanes = outcome.runs[0].about["lanes"]
    out.print(f"paceline verify {plan.script} · {_counted(len(outcome.runs), 'setting')} · {_counted(lanes, 'lane')}\n")
    out.print(_table(outcome))
    out.print()
    if outcome.same:
        _show_same(outcome, out)
    else:
        _show_difference(plan, outcome, out)


def _table(outcome: Outcome) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("workers", "strategy", "steps", "weights after them", "time", "", box=None, header_style="dim")
    for column in (0, 2, 4):
        table.columns[column].justify = "right"
    marks = {
        "reference": ("·", "dim"),
        "same": ("✓", "green"),
        "differs": ("✗", "bold red"),
        "failed": ("✗", "bold red"),
    }
    for run, state, against in zip(outcome.runs, outcome.states, outcome.against, strict=False):
        mark, style = marks[state]
        words = _verdict(outcome, run, state, against)
        table.add_row(
            str(run.workers),
            str(run.about.get("strategy") or run.setting.strategy or "–"),
            str(run.made),
            Text(digest(run), style=style if state != "reference" else ""),
            f"{run.seconds:.1f} s",
            Text(f"{mark} {words}", style=style),
        )
    return table


def _verdict(outcome: Outcome, run: Run, state: str, against: int | None) -> str:
    if state == "reference":
        is_first = run is outcome.runs[0]
        return (
            "what the others are compared with" if is_first else "trains other numbers, so it is compared with itself"
        )
    if against is None:
        step = f" from step {step_of(outcome, run)} on" if run is outcome.runs[outcome.other or 0] else ""
        return f"its own workers differ{step}"
    if state == "failed":
        return f"failed in step {run.made + 1}" if run.made else "failed before its first step"
    if state == "differs":
        return f"differs from step {step_of(outcome, run)} on" if run is outcome.runs[outcome.other or 0] else "differs"
    exact = run.in_bits and outcome.runs[against].in_bits
    return "the same bits in every step" if exact else "the same within the tolerance"


def step_of(outcome: Outcome, run: Run) -> int:
    return 0 if outcome.difference is None else outcome.difference.step


def digest(run: Run) -> str:
    """Of the weights and buffers after the last step, to be compared by eye."""
    whole = [step.after[0] for _, step in sorted(run.steps.items()) if 0 in step.after]
    if not whole:
        return "–"
    told = json.dumps([dict(whole[-1].weights), dict(whole[-1].buffers)], sort_keys=True)
    text = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
    return " ".join(text[at : at + 4] for at in range(0, 16, 4))


def _show_same(outcome: Outcome, out: Console) -> None:
    first = outcome.runs[0]
    after = next(iter(first.steps.values())).after[0]
    tensors = len(after.weights) + len(after.buffers)
    exact, noun = all(run.in_bits for run in outcome.runs), "update" if first.in_updates else "step"
    how = "every bit is the same" if exact else "all are the same within the tolerance"
    out.print(
        f"✓ {_counted(len(outcome.runs), 'setting')}, {_counted(first.made, noun)}, {_counted(tensors, 'tensor')}: "
        f"{how}.",
        style="bold green",
    )


def _show_difference(plan: Plan, outcome: Outcome, out: Console) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    reference, other = outcome.pair
    out.print(f"✗ {title(reference, other, outcome.difference)}\n", style="bold red")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True, min_width=8)
    rows.add_column(overflow="fold")
    for name, text in told(plan, outcome):
        rows.add_row(name, Text(text, style="bold" if name == "likely" else ""))
    out.print(Padding(rows, (0, 0, 0, 2)))


def title(reference: Run, other: Run, found: Difference | None) -> str:
    if found is None:
        return f"the script fails with {other.name()}, and not with {reference.name()}"
    who = f"{other.name()} differs from {reference.name()}"
    if found.of_reference:
        who = f"the workers of {reference.name()}, the reference, differ from each other"
    if found.step == 0:
        return f"{who} before the first step"
    number = f"update {found.step}, counting those of all optimizers" if other.in_updates else f"step {found.step}"
    return f"{who} in {number}"


def told(plan: Plan, outcome: Outcome) -> Iterator[tuple[str, str]]:
    """The lines about the difference."""
    found, element, cause = outcome.difference, outcome.element, outcome.cause
    reference, other = outcome.pair
    if other.error is not None:
        yield "error", other.error
    if found is not None:
        yield "first", first_words(found)
    if element is not None:
        yield "tensor", f"{element.name}{_in_brackets(element.index)} · {KINDS[element.kind]} · {_how_many(element)}"
        names = element.between or (reference.name(), other.name())
        wide = max(map(len, names))
        lines = zip(names, element.values, element.bits, strict=True)
        yield "values", "\n".join(f"{name:<{wide}}  {_number(value)}  {bits}" for name, value, bits in lines)
    elif found is not None and found.name and found.kind in (comparison.START, comparison.WEIGHT, comparison.BUFFER):
        yield "tensor", found.name
    if outcome.parted is not None:
        ours, theirs = outcome.parted.operators
        yield "operator", theirs if ours == theirs else f"{theirs}, where the reference has {ours}"
    if cause is not None:
        yield "likely", cause.name
        yield "", cause.text
        yield "do", cause.advice


KINDS = {"entry": "weights before the step", "gradient": "gradient", "buffers": "buffer", "weights": "weights after it"}


def first_words(found: Difference) -> str:
    """What differs, and what before it did not."""
    where = lane(found)
    match found.kind:
        case comparison.START:
            return f"{found.name}, before the first step"
        case comparison.WRITTEN:
            return f"{found.name} is not what step {found.step - 1} left"
        case comparison.DATA:
            return f"the batch of {where}{f', at {found.name}' if found.name else ''}"
        case comparison.RANDOM:
            return f"random state of {found.name} after the forward of {where}; its data are the same"
        case comparison.LOSS:
            ours, theirs = found.values or (None, None)
            return f"the loss of {where}: {theirs!r} instead of {ours!r}; its data and random state are the same"
        case comparison.SHARE:
            return f"the weight of {where} in engine.backward(); its data and loss are the same"
        case comparison.LANE_GRADIENT:
            return f"the gradient of {found.name} in {where}; its data, random state and loss are the same"
        case comparison.RATES:
            return "learning rates; every lane's gradient is the same"
        case comparison.GRADIENT:
            return f"the summed gradient of {found.name}; every lane's own is the same"
        case comparison.BUFFER | comparison.WEIGHT:
            return f"{found.name} after the update; every lane's loss and gradient is the same"
        case comparison.STEPS:
            ours, theirs = found.values or (None, None)
            return f"{theirs} steps instead of {ours}; those that both made are the same"
        case comparison.ITEMS:
            return f"{where} has an item in one run only"
        case _:
            return f"lanes: {found.values}"


def _finite(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else repr(value)


def _how_many(element: Element) -> str:
    if element.differing == element.elements:
        return "as all its elements do" if element.elements > 1 else "its only element"
    return f"{element.differing:,} of its {element.elements:,} elements differ"


def _in_brackets(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""


def _number(value: float) -> str:
    return f"{value: .9g}".ljust(16)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# -- JSON --------------------------------------------------------------------------------------------------------------


def as_json(plan: Plan, outcome: Outcome) -> str:
    settings = [
        {
            "workers": run.workers,
            "strategy": run.about.get("strategy") or run.setting.strategy,
            "state": state,
            "steps": run.made,
            "seconds": round(run.seconds, 3),
            "weights": digest(run).replace(" ", ""),
            "error": run.error,
        }
        for run, state in zip(outcome.runs, outcome.states, strict=True)
    ]
    result: dict[str, Any] = {"script": plan.script, "same": outcome.same, "settings": settings}
    result["lanes"] = outcome.runs[0].about["lanes"]
    if outcome.other is not None:
        result["finding"] = _finding(outcome, outcome.other)
    return json.dumps(result, indent=2)


def _finding(outcome: Outcome, at: int) -> dict[str, Any]:
    found, element, cause, parted = outcome.difference, outcome.element, outcome.cause, outcome.parted
    return {
        "setting": at,
        "reference": at if outcome.against[at] is None else outcome.against[at],
        "error": outcome.runs[at].error,
        "kind": None if found is None else found.kind,
        "step": None if found is None else found.step,
        "name": None if found is None else found.name,
        "item": None
        if found is None or found.place is None
        else dict(zip(("lane", "micro_batch", "update"), found.place, strict=True)),
        "workers": None if found is None else list(found.workers),
        "element": None if element is None else vars(element) | {"values": [_finite(one) for one in element.values]},
        "operators": None if parted is None else list(parted.operators),
        "repeats": outcome.repeats,
        "cause": None if cause is None else vars(cause),
    }
