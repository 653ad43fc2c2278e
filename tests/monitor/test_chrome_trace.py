"""A trace has a process for each worker, and slices that fill its steps without overlapping."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.monitor.chrome_trace import COMMUNICATION, COMPUTE, trace_of
from paceline.monitor.events import Part
from paceline.monitor.run_events import read_run
from tests.monitor.simulated import Simulated


def slices(trace: dict[str, Any], worker: int, row: int) -> list[dict[str, Any]]:
    return [one for one in trace["traceEvents"] if one["ph"] == "X" and (one["pid"], one["tid"]) == (worker, row)]


def test_the_parts_of_a_step_fill_it_one_after_another(tmp_path: Path) -> None:
    simulated = Simulated(3, 20, delays={(1, Part.DATA): 0.02})
    trace = json.loads(json.dumps(trace_of(read_run(simulated.write(tmp_path)), 5, 8)))
    for worker in range(3):
        drawn = slices(trace, worker, COMPUTE)
        steps = [one for one in drawn if one["name"].startswith("step ")]
        assert [one["name"] for one in steps] == [f"step {number}" for number in range(5, 9)]
        parts = [one for one in drawn if one not in steps]
        for step in steps:
            end = step["ts"] + step["dur"]
            inside = [one for one in parts if step["ts"] - 1 <= one["ts"] < end - 1]
            assert abs(sum(one["dur"] for one in inside) - step["dur"]) < 5
            for one, following in pairwise(inside):
                assert abs(one["ts"] + one["dur"] - following["ts"]) < 5
        hidden = [one for one in slices(trace, worker, COMMUNICATION) if one["name"] == "under backward"]
        assert len(hidden) == 4


def test_votes_end_at_the_same_moment_in_all_rows(tmp_path: Path) -> None:
    clocks = {0: 0.0, 1: 1234.5, 2: 77.0}
    run = read_run(Simulated(3, 30, delays={(2, Part.FORWARD): 0.05}, clocks=clocks).write(tmp_path))
    trace = trace_of(run, 10, 12)
    ends = [
        [one["ts"] + one["dur"] for one in slices(trace, worker, COMMUNICATION) if one["name"] == "vote"]
        for worker in range(3)
    ]
    for same in zip(*ends, strict=True):
        assert max(same) - min(same) < 500  # microseconds


def test_buckets_are_marked_where_they_leave_with_whom_they_wait_for(tmp_path: Path) -> None:
    delays = {(2, Part.BACKWARD): 0.03}
    run = read_run(Simulated(3, 20, jitter=0.01, delays=delays, buckets=5, slow_bucket=3).write(tmp_path))
    trace = trace_of(run, 10, 11)
    for worker in range(3):
        marks = [one for one in trace["traceEvents"] if one["ph"] == "i" and one["pid"] == worker]
        assert [one["name"] for one in marks] == [f"bucket {number}" for number in range(5)] * 2
        assert {one["tid"] for one in marks} == {COMMUNICATION}
        late = [one for one in marks if one["name"] in ("bucket 3", "bucket 4")]
        if worker == 2:
            assert not any("args" in one for one in late)
        else:
            assert all(one["args"]["waits_for_worker"] == 2 for one in late)
            assert all(15 < one["args"]["ms"] < 45 for one in late)
