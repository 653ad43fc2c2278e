"""Runs as Prometheus reads them: gauges, per worker and part of a step, in its text format.

    paceline_worker_part_seconds{run="mnist",worker="2",part="forward"} 0.0312
    paceline_straggler_late_seconds{run="mnist",worker="2",part="forward"} 0.0291       while there is one
    paceline_train_loss{run="mnist"} 2.31                                               the latest of what was logged

Parts are means of a worker's last 50 steps. grafana.json draws them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.monitor.run_events import SHARES
from paceline.tracking.prometheus import metric_name
from paceline.tracking.reporter import in_section

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

HELP = {
    "paceline_run_last_step": "newest step of any worker",
    "paceline_run_last_step_timestamp_seconds": "when it ended",
    "paceline_run_ended": "1 once all workers have left in good order",
    "paceline_run_generation": "of an elastic job; 0 in others",
    "paceline_run_workers": "workers with events",
    "paceline_run_predicted_memory_bytes": "of a worker, by the plan in the run's folder",
    "paceline_run_notes": "generations, faults and the like that the run's folder tells of",
    "paceline_worker_step": "newest step of the worker",
    "paceline_worker_step_seconds": "wall time of a step",
    "paceline_worker_part_seconds": "of it in each part",
    "paceline_worker_waiting_seconds": "of the vote, waiting for the worker that came last",
    "paceline_worker_hidden_communication_seconds": "of backward, while gradients were on their way",
    "paceline_worker_memory_bytes": "of the process (host) and on its device",
    "paceline_worker_cpu_ratio": "of all CPUs that the worker may use, by its process and those below it",
    "paceline_worker_gpu_ratio": "of the time, in which the worker's device had anything to do (NVML)",
    "paceline_straggler_late_seconds": "what the others wait for this worker in a step, by the part that is late",
    "paceline_straggler_cost_seconds": "in all, since it began",
}

Sample = tuple[str, Mapping[str, str], float]


def metrics_text(views: Iterable[Mapping[str, Any]]) -> str:
    by_name: dict[str, list[str]] = {}
    for view in views:
        for name, labels, value in samples(view):
            shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            by_name.setdefault(name, []).append(f"{name}{{{shown}}} {_number(value)}")
    lines: list[str] = []
    for name, found in by_name.items():
        lines += [f"# HELP {name} {HELP.get(name, f'latest {name}')}", f"# TYPE {name} gauge", *found]
    return "\n".join(lines) + "\n" if lines else ""


def samples(view: Mapping[str, Any]) -> Iterator[Sample]:
    run = {"run": str(view["name"])}
    if "error" in view:
        return
    yield "paceline_run_last_step", run, view["last_step"]
    if view["newest"] is not None:
        yield "paceline_run_last_step_timestamp_seconds", run, view["newest"]
    yield "paceline_run_ended", run, float(view["has_ended"])
    yield "paceline_run_generation", run, view["generation"]
    yield "paceline_run_workers", run, len(view["workers"])
    yield "paceline_run_notes", run, len(view["notes"])
    for kind, size in view["predicted"].items():
        yield "paceline_run_predicted_memory_bytes", {**run, "kind": kind}, size
    for row in view["workers"]:
        if "parts" in row:
            yield from _of_worker(run, row, view["parts"])
    if (found := view["verdict"]) is not None:
        named = {**run, "worker": str(found["worker"]), "part": found["part"]}
        yield "paceline_straggler_late_seconds", named, found["late"]
        yield "paceline_straggler_cost_seconds", named, found["cost"]
    for name, curve in view["logged"].items():
        yield metric_name(in_section(name)), run, math.nan if curve["last"] is None else curve["last"]


def _of_worker(run: Mapping[str, str], row: Mapping[str, Any], parts: Iterable[str]) -> Iterator[Sample]:
    worker = {**run, "worker": str(row["worker"])}
    yield "paceline_worker_step", worker, row["step"]
    yield "paceline_worker_step_seconds", worker, sum(row["parts"])
    for part, seconds in zip(parts, row["parts"], strict=True):
        yield "paceline_worker_part_seconds", {**worker, "part": part}, seconds
    yield "paceline_worker_waiting_seconds", worker, row["waiting"]
    yield "paceline_worker_hidden_communication_seconds", worker, row["hidden"]
    yield "paceline_worker_memory_bytes", {**worker, "kind": "host"}, row["memory"]
    yield "paceline_worker_memory_bytes", {**worker, "kind": "device"}, row["on_device"]
    for of in SHARES:
        if row[of] is not None:
            yield f"paceline_worker_{of}_ratio", worker, row[of]


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.10g}" if abs(value) < 1e9 else f"{value:.17g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
