"""Some steps of a run as a Chrome trace, which Perfetto and chrome://tracing open: a process per worker, two rows each.

    worker 1   │ step 100                                        │ step 101 …
               │ data │ forward │ backward   │ exchange │ optimizer │
               │                     under backward │ vote │ exchange       (communication)
               │                      ╷  ╷    ╷  each bucket as it leaves, with the worker that it then waits for

A record has sums, so where a step has several items their forwards are drawn as one, and so on. The vote, and what
comes before and after it, stand where they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.monitor.events import Part
from paceline.monitor.run_events import SHARES, Records, RunEvents, left_at, mean_share

COMPUTE, COMMUNICATION = 0, 1
_BEFORE = (Part.RECOVERY, Part.DATA, Part.FORWARD, Part.BACKWARD)
_AFTER = (Part.OPTIMIZER, Part.CHECKPOINT, Part.OTHER)


def trace_of(run: RunEvents, first: int, last: int) -> dict[str, Any]:
    """Steps `first` to `last`; times in microseconds since the first of them began."""
    chosen = {
        worker: steps[(steps["step"] >= first) & (steps["step"] <= last)] for worker, steps in run.workers.items()
    }
    chosen = {worker: steps for worker, steps in chosen.items() if len(steps)}
    zero = min((float(steps["began"].min()) for steps in chosen.values()), default=0.0)
    end = max((float(steps["began"][-1] + steps["parts"][-1].sum()) for steps in chosen.values()), default=0.0)
    events: list[dict[str, Any]] = []
    for worker, steps in chosen.items():
        host = run.headers[worker].get("host", "")
        events += _named(worker, f"worker {worker} on {host}")
        for record in steps:
            events += _step(worker, record, zero)
    events += _buckets(run, chosen, zero)
    for note in run.notes:
        if zero <= note.time <= end:
            where = {"s": "g", "pid": min(chosen)} if note.worker is None else {"s": "p", "pid": note.worker}
            about = {"name": note.text, "ph": "i", **where, "tid": COMPUTE}
            events.append({**about, "ts": _micro(note.time - zero)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": str(run.folder)}}


def _named(worker: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": worker, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": worker, "args": {"sort_index": worker}}
    for row, what in ((COMPUTE, "step"), (COMMUNICATION, "communication")):
        yield {"name": "thread_name", "ph": "M", "pid": worker, "tid": row, "args": {"name": what}}


def _step(worker: int, record: Any, zero: float) -> Iterator[dict[str, Any]]:
    parts = [float(seconds) for seconds in record["parts"]]
    began, wall = float(record["began"]) - zero, sum(parts)
    hidden = float(record["hidden_s"])

    def slice_of(name: str, start: float, seconds: float, row: int = COMPUTE, **about: Any) -> dict[str, Any]:
        place = {"ph": "X", "pid": worker, "tid": row, "ts": _micro(start), "dur": _micro(seconds)}
        return {"name": name, **place, **({"args": about} if about else {})}

    told = {part.name.lower(): round(1e3 * parts[part], 3) for part in Part} | {"memory_mib": _mib(record["memory"])}
    told |= {f"{of}_percent": round(100 * busy) for of in SHARES if (busy := mean_share(record, of)) is not None}
    yield slice_of(f"step {int(record['step'])}", began, wall, generation=int(record["generation"]), ms=told)
    at = began
    for part in _BEFORE:
        if parts[part]:
            yield slice_of(part.name.lower(), at, parts[part])
        at += parts[part]
    if hidden:
        yield slice_of("under backward", at - hidden, hidden, COMMUNICATION)
    voted = float(record["voted"])
    before_vote = 0.0 if not voted else min(max(float(record["arrived"]) - zero - at, 0.0), parts[Part.EXCHANGE])
    for name, seconds in (
        ("exchange", before_vote),
        ("vote", parts[Part.VOTE]),
        ("exchange", parts[Part.EXCHANGE] - before_vote),
    ):
        if seconds > 0:
            yield slice_of(name, at, seconds)
            yield slice_of(name, at, seconds, COMMUNICATION)
        at += seconds
    for part in _AFTER:
        if parts[part]:
            yield slice_of(part.name.lower(), at, parts[part])
        at += parts[part]


def _buckets(run: RunEvents, chosen: dict[int, Records], zero: float) -> Iterator[dict[str, Any]]:
    """A bucket is summed when it has left its last worker."""
    left = {worker: left_at(run, worker, steps) for worker, steps in chosen.items()}
    last: dict[tuple[int, int], tuple[float, int]] = {}  # by step and bucket: when, and whom
    for worker, steps in chosen.items():
        for row, bucket in zip(*np.nonzero(~np.isnan(left[worker])), strict=True):
            key, at = (int(steps["step"][row]), int(bucket)), float(left[worker][row, bucket])
            last[key] = max(last.get(key, (at, worker)), (at, worker))
    for worker, steps in chosen.items():
        for row, bucket in zip(*np.nonzero(~np.isnan(left[worker])), strict=True):
            at, (end, whom) = float(left[worker][row, bucket]), last[int(steps["step"][row]), int(bucket)]
            about = {} if whom == worker else {"args": {"waits_for_worker": whom, "ms": round(1e3 * (end - at), 3)}}
            place = {"ph": "i", "s": "t", "pid": worker, "tid": COMMUNICATION, "ts": _micro(at - zero)}
            yield {"name": f"bucket {int(bucket)}", **place, **about}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def _mib(count: float) -> float:
    return round(float(count) / 2**20, 1)
