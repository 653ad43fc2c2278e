"""A plan for people: a table in the terminal, and one HTML file that needs no network.

Both show the same rows, the fastest first: what a step is made of, what a worker holds, what it sends.
"""

from __future__ import annotations

import html
import importlib.resources
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.planner.memory_model import PARTS
from paceline.planner.search import Candidate, Plan, gib

ROWS = 12
TIMES = (("compute_s", "compute", "#3b6fb6"), ("update_s", "update", "#7a5ea8"), ("exposed_s", "exposed", "#d1495b"))
MEMORY_COLOURS = ("#3b6fb6", "#5b8fd0", "#7a5ea8", "#a88fce", "#2a9d8f", "#8fcfc6", "#e9a23b", "#c9c9c9")


def shown(plan: Plan, *, everything: bool = False) -> list[Candidate]:
    """The best of each strategy, and then as many more as fit on a screen, by speed."""
    if everything:
        return list(plan.fitting)
    first: dict[str, Candidate] = {}
    for one in plan.fitting:
        first.setdefault(one.strategy, one)
    chosen = list(first.values())
    for one in plan.fitting:
        if len(chosen) >= ROWS:
            break
        if one not in chosen:
            chosen.append(one)
    return sorted(chosen, key=plan.fitting.index)


# -- terminal ----------------------------------------------------------------------------------------------------------


def show_plan(plan: Plan, console: Console, *, everything: bool = False) -> None:
    model, best, request = plan.model, plan.best, plan.request
    hosts = -(-request.workers // request.on_host)
    where = f"{request.workers} workers" if request.workers > 1 else "1 worker"
    where += f" on {hosts} hosts" if hosts > 1 else ""
    console.print(f"[bold]{model.name}[/bold] · {count(model.parameters)} parameters · {where} · {plan.hardware.name}")
    console.print(f"[dim]model: {model.how} · hardware: {_told_of_hardware(plan)}[/dim]")
    console.print()
    console.print(_table(plan, shown(plan, everything=everything)))
    hidden = len(plan.fitting) - len(shown(plan, everything=everything))
    rest = [f"{hidden} more fit (--all)"] if hidden else []
    rest += [f"{len(plan.too_large)} don't fit"] if plan.too_large else []
    if rest:
        console.print(f"[dim]{' · '.join(rest)}[/dim]")
    console.print()
    console.print(Text.assemble(("first choice  ", "bold green"), best.settings))
    console.print(Text.assemble(("why           ", "bold"), plan.why()))
    console.print(Text.assemble(("on a worker   ", "bold"), told_of_memory(best)))
    console.print(Text.assemble(("start         ", "bold"), plan.flags()))


def _told_of_hardware(plan: Plan) -> str:
    hardware = plan.hardware
    if hardware.is_measured:
        return "measured, with paceline's own exchanges"
    if hardware.device == "cpu":
        return "measured in a second, exchanges by formula; paceline bench hardware measures them"
    return f"by data sheet ({hardware.source})"


def _table(plan: Plan, rows: Sequence[Candidate]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    compiled = ["compile"] if any(one.compiled for one in rows) else []  # a column where some are
    settings = "", "strategy", "micro-batch", "prec.", "ckpt", *compiled
    for column in (*settings, plan.model.unit, "step ms", "step", "peak", "sent"):
        table.add_column(column, justify="left" if column in ("strategy", "step") else "right", no_wrap=True)
    longest = max(one.time.step_s / one.global_batch for one in rows)
    for one in rows:
        place = plan.fitting.index(one) + 1
        speed = one.samples_per_s * plan.model.units_per_sample
        style = "bold" if place == 1 else ""
        table.add_row(
            str(place),
            one.strategy,
            f"{one.samples}" + (f" × {one.accumulate}" if one.accumulate > 1 else ""),
            one.precision,
            "yes" if one.recomputed else "–",
            *("yes" if one.compiled else "–" for _ in compiled),
            number_text(speed),
            f"{1e3 * one.time.step_s:,.1f}",
            bar(one, longest),
            gib(one.memory.peak),
            gib(one.traffic.most) if one.traffic.most else "–",
            style=style,
        )
    table.caption = Text.assemble(("█", "blue"), " compute  ", ("█", "magenta"), " update  ", ("█", "red"), " exposed")
    table.caption_justify = "left"
    return table


def bar(one: Candidate, longest: float, width: int = 24) -> Text:
    """A step's time for a sample, as long as that of the slowest row at most."""
    text = Text()
    whole = one.time.step_s / one.global_batch
    cells = max(1, round(width * whole / longest))
    drawn = 0
    done = 0.0
    for (name, _, _), colour in zip(TIMES, ("blue", "magenta", "red"), strict=True):
        done += getattr(one.time, name)
        upto = round(cells * done / one.time.step_s)
        text.append("█" * (upto - drawn), style=colour)
        drawn = upto
    return text


def told_of_memory(one: Candidate) -> str:
    """The parts that matter, largest first."""
    parts = {PARTS[name]: size for name, size in one.memory.parts().items() if size}
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    shown_parts = [f"{name} {gib(size)}" for name, size in ordered if size >= 0.01 * one.memory.peak]
    return f"{gib(one.memory.peak)} of {gib(one.room)}: {', '.join(shown_parts)}"


def count(number: int) -> str:
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,}"


def number_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# -- HTML --------------------------------------------------------------------------------------------------------------


def page(plan: Plan) -> str:
    """One file: no script, no network."""
    model, request, best = plan.model, plan.request, plan.best
    rows = shown(plan)
    style = importlib.resources.files("paceline.planner").joinpath("data/plan.css").read_text()
    steps = _key([(name, colour) for _, name, colour in TIMES]) + _step_plot(plan, rows)
    memory = _key(list(zip(PARTS.values(), MEMORY_COLOURS, strict=True))) + _memory_plot(rows)
    title = f"{model.name} on {request.workers} × {plan.hardware.name}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body>
<h1>{html.escape(model.name)}</h1>
<div class="soft">{count(model.parameters)} parameters · {request.workers} workers, {request.on_host} on a host ·
{html.escape(plan.hardware.name)} · global batch {best.global_batch}</div>
<div class="soft">model: {html.escape(model.how)} · hardware: {html.escape(_told_of_hardware(plan))}</div>
<div class="card best"><b>{html.escape(best.settings)}</b>
<div>{number_text(best.samples_per_s * model.units_per_sample)} {model.unit} · {html.escape(plan.why())}</div>
<code>{html.escape(plan.flags())}</code></div>
<h2>A step, per sample</h2><div class="card">{steps}</div>
<h2>Memory of a worker</h2><div class="card">{memory}</div>
<h2>{len(plan.fitting)} ways that fit{f", {len(plan.too_large)} that don't" if plan.too_large else ""}</h2>
<div class="card scroll">{_html_table(plan)}</div>
<p class="soft">{html.escape(_assumptions(plan))}</p>
</body></html>
"""


def _key(entries: Sequence[tuple[str, str]]) -> str:
    return f'<div class="key">{"".join(f"<span><i style=background:{c}></i>{n}</span>" for n, c in entries)}</div>'


def _label(one: Candidate) -> str:
    times = f"×{one.accumulate}" if one.accumulate > 1 else ""
    more = (" · ckpt" if one.recomputed else "") + (" · compiled" if one.compiled else "")
    return f"{one.strategy} · {one.precision} · {one.samples}{times}{more}"


def _bars(rows: Sequence[tuple[str, Sequence[tuple[float, str, str]], str]], limit: float | None = None) -> str:
    """Stacked bars: (label, [(value, colour, title)], what is told at the end)."""
    left, wide, high = 240, 640, 26
    longest = max([sum(value for value, _, _ in parts) for _, parts, _ in rows] + ([limit] if limit else []))
    out = []
    for place, (label, parts, told) in enumerate(rows):
        y, x = 8 + place * high, float(left)
        out.append(f'<text x="{left - 10}" y="{y + 13}" text-anchor="end">{html.escape(label)}</text>')
        for value, colour, title in parts:
            width = wide * value / longest
            if width > 0:
                out.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="17" fill="{colour}">'
                    f"<title>{html.escape(title)}</title></rect>"
                )
            x += width
        out.append(f'<text x="{x + 8:.1f}" y="{y + 13}" class="soft">{html.escape(told)}</text>')
    height = 16 + len(rows) * high
    if limit:
        x = left + wide * limit / longest
        out.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{height - 4}" stroke="#d1495b" stroke-dasharray="4 3"/>'
        )
    return f'<svg viewBox="0 0 1060 {height}" width="100%" role="img">{"".join(out)}</svg>'


def _step_plot(plan: Plan, rows: Sequence[Candidate]) -> str:
    def parts(one: Candidate) -> list[tuple[float, str, str]]:
        found = [(getattr(one.time, name) / one.global_batch, colour, label) for name, label, colour in TIMES]
        return [(value, colour, f"{label}: {1e3 * value:.3g} ms a sample") for value, colour, label in found]

    unit, each = plan.model.unit, plan.model.units_per_sample
    told = [(_label(one), parts(one), f"{number_text(one.samples_per_s * each)} {unit}") for one in rows]
    return _bars(told)


def _memory_plot(rows: Sequence[Candidate]) -> str:
    told: list[tuple[str, Sequence[tuple[float, str, str]], str]] = []
    for one in rows:
        sizes: list[tuple[float, str, str]] = [
            (float(getattr(one.memory, name)), colour, f"{label}: {gib(getattr(one.memory, name))}")
            for (name, label), colour in zip(PARTS.items(), MEMORY_COLOURS, strict=True)
        ]
        told.append((_label(one), sizes, gib(one.memory.peak)))
    room = rows[0].room
    near = room <= 1.6 * max(one.memory.peak for one in rows)
    return _bars(told, limit=float(room) if near else None)


def _html_table(plan: Plan) -> str:
    heads = ("", "strategy", "micro-batch", "precision", "ckpt", "compile", plan.model.unit, "step, ms", "compute",
             "update", "exposed", "hidden", "peak", "model state", "sent")  # fmt: skip
    out = ["<table><tr>", *(f"<th>{head}</th>" for head in heads), "</tr>"]
    for place, one in enumerate(plan.fitting, start=1):
        time = one.time
        cells: list[Any] = [
            place, one.strategy, f"{one.samples} × {one.accumulate}", one.precision, "yes" if one.recomputed else "no",
            "yes" if one.compiled else "no",
            number_text(one.samples_per_s * plan.model.units_per_sample),
            *(f"{1e3 * each:,.2f}" for each in
              (time.step_s, time.compute_s, time.update_s, time.exposed_s, time.hidden_s)),
            gib(one.memory.peak), gib(one.memory.model_state), gib(one.traffic.most) if one.traffic.most else "–",
        ]  # fmt: skip
        out.append(f"<tr{' class=first' if place == 1 else ''}>")
        out += [f"<td>{html.escape(str(cell))}</td>" for cell in cells]
        out.append("</tr>")
    return "".join([*out, "</table>"])


def _assumptions(plan: Plan) -> str:
    told = ["Predicted, not measured."]
    if not plan.hardware.is_measured:
        told.append("Exchanges are by formula: bytes over the slowest link's bandwidth, messages times its latency.")
    if any(not one.traffic.counted for one in plan.fitting):
        told.append("Bytes of a backend's own collectives are the ring's.")
    told.append("Sent: bytes of the busiest worker in a step; – where workers read each other's memory.")
    return " ".join(told)
