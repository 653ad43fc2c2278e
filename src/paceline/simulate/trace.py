"""A timeline in the format of Chrome's trace events, which ui.perfetto.dev opens: some workers' steps, and the job.

process "scenario: worker 3"     tracks compute and wire: forward, backward, update; buckets, gathers, votes
process "scenario: the job"      track events: recoveries, restarts, checkpoints, workers that join
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.simulate.result import Result
from paceline.simulate.training import Watch

TRACKS = {"compute": 0, "wire": 1}


def write_trace(path: Path, found: Sequence[tuple[Result, Watch]]) -> int:
    """The number of events in the file."""
    events: list[dict[str, Any]] = []
    for number, (result, watch) in enumerate(found):
        prefix = f"{result.scenario.title}: " if len(found) > 1 else ""
        events += _steps(watch, first=(number << 20) + 1, prefix=prefix)
        events += _job(result, process=(number + 1) << 20, prefix=prefix)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(events)


def _steps(watch: Watch, first: int, prefix: str) -> list[dict[str, Any]]:
    events = []
    for place, worker in enumerate(watch.workers.tolist()):
        process = first + place
        events.append(_name("process_name", process, 0, f"{prefix}worker {worker}"))
        events += [_name("thread_name", process, track, name) for name, track in TRACKS.items()]
        for span in watch.spans:
            start, end = float(span.start[place]), float(span.end[place])
            if end > start:
                events.append(_span(span.name, process, TRACKS[span.lane], start, end, {"step": span.step}))
    return events


def _job(result: Result, process: int, prefix: str) -> list[dict[str, Any]]:
    job = result.job
    named = f"{prefix}the job, {result.scenario.hours:g} h"
    events = [_name("process_name", process, 0, named), _name("thread_name", process, 0, "events")]
    events += [_span(each.kind, process, 0, each.start, each.end, {}) for each in job.events]
    return events


def _span(name: str, process: int, track: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    micro = {"ts": round(start * 1e6, 3), "dur": round((end - start) * 1e6, 3)}
    return {"name": name, "ph": "X", "pid": process, "tid": track, **micro, "args": args}


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
