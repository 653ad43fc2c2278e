"""A run as its page shows it: one value of JSON, of a bounded size however long the run and however many its workers.

    RUN/events/         ─► history     at most 300 points: mean parts of a step over all workers, memory from the least
                                       to the most that one of them has, mean shares of CPU and GPU
                        ─► timeline    the last steps of every worker, part by part
                        ─► workers     means of its last 50 steps, a row each
                        ─► verdict     which worker the others wait for, in words
                        ─► notes       generations, faults, dropped records
    RUN/metrics.jsonl   ─► logged      loss and whatever else was logged, at most 500 points each; config, resumes, end
    RUN/residuals.json  ─► predicted   memory, if somebody made a plan (before the run ends: from RUN/plan.json)

Times are seconds since 1970, sizes bytes. NaN and infinity become null: JSON has no name for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import input_file
from paceline.errors import ConfigError
from paceline.input_file import cause_of, one_line
from paceline.monitor.attribution import Joined, Straggler, join, straggler
from paceline.monitor.events import FOLDER, LONGEST_HEADER, RECORD_BYTES, Part
from paceline.monitor.run_events import SHARES, Records, RunEvents, Share, mean_share, read_run, shares
from paceline.planner import residuals
from paceline.tracking import json_lines

POINTS = 300
LOGGED_POINTS = 500
MOST_LOGGED = 40
"""Names of logged values."""
TIMELINE_STEPS = 20
LAST = 50
"""Steps that a worker's row is the mean of, as in `paceline top`."""
JUDGED = 1000
"""Steps that the verdict is found in; all of them where it began before."""
MOST_NOTES = 200
MOST_RECORDS = 2_000_000
"""Of all workers, 200 MB: of a longer run its last steps are read."""
LONGEST_VALUE = 2000
OWN_KEYS = ("format", "version", "worker", "host", "boot", "process", "clock", "time", "step", "joins")
"""Of an event file's header; the others are the engine's configuration."""


def view_of(folder: Path) -> dict[str, Any]:
    """DataError: it is no run, or none that this version can read."""
    files = list(folder.glob(f"{FOLDER}/worker-*"))
    recent = MOST_RECORDS // max(1, len(files))
    run = read_run(folder, recent)
    begun = {worker: steps for worker, steps in run.workers.items() if len(steps)}
    logged, happened, problems = _metrics(folder)
    about = _about(run)
    predicted, wrong = _predicted(folder, about)
    newest = max((float(steps["began"][-1] + steps["parts"][-1].sum()) for steps in begun.values()), default=None)
    recently = join(run, JUDGED)
    found = _verdict(run, recently)
    return {
        "name": folder.resolve().name,
        "folder": str(folder),
        "now": time.time(),
        "newest": newest,
        "has_ended": run.has_ended,
        "last_step": run.last_step,
        "first_step": min((int(steps["step"][0]) for steps in begun.values()), default=0),
        "is_cut": any(file.stat().st_size > recent * RECORD_BYTES + LONGEST_HEADER for file in files),
        "generation": max((int(steps["generation"][-1]) for steps in begun.values()), default=0),
        "about": about,
        "config": _shown(next((line.get("config", {}) for line in happened if line["event"] == "start"), {})),
        "parts": [part.name.lower() for part in Part],
        "history": _history(begun),
        "timeline": _timeline(run, begun),
        "workers": _workers(run, begun, recently),
        "verdict": None if found is None else _told(found),
        "comparable": len(recently.workers),
        "notes": _notes(run, happened),
        "logged": logged,
        "predicted": predicted,
        "problems": [*run.problems, *problems, *wrong],
    }


# -- what the events say -----------------------------------------------------------------------------------------------


def _history(begun: Mapping[int, Records]) -> dict[str, Any]:
    """Points at equal distances of steps; each is of all records that fall into it."""
    if not begun:
        names = "step", "time", "parts", "hidden", "memory", "memory_least", "on_device", "cpu", "gpu"
        return {name: [] for name in names}
    first = min(int(steps["step"][0]) for steps in begun.values())
    last = max(int(steps["step"][-1]) for steps in begun.values())
    width = -(-(last - first + 1) // POINTS)
    edges = np.arange(first, last + 1, width, dtype=np.uint64)
    count, at = np.zeros(len(edges)), np.full(len(edges), np.inf)
    parts, hidden = np.zeros((len(edges), len(Part))), np.zeros(len(edges))
    most, least, on_device = np.zeros(len(edges)), np.full(len(edges), np.inf), np.zeros(len(edges))
    for steps in begun.values():
        begin = np.searchsorted(steps["step"], edges)
        own = np.diff(np.append(begin, len(steps)))
        some = own > 0
        begin = begin[some]
        count[some] += own[some]
        at[some] = np.minimum(at[some], steps["began"][begin])
        parts[some] += np.add.reduceat(steps["parts"], begin, axis=0, dtype=np.float64)
        hidden[some] += np.add.reduceat(steps["hidden_s"], begin, dtype=np.float64)
        most[some] = np.maximum(most[some], np.maximum.reduceat(steps["memory"], begin))
        least[some] = np.minimum(least[some], np.minimum.reduceat(steps["memory"], begin))
        on_device[some] = np.maximum(on_device[some], np.maximum.reduceat(steps["device_memory"], begin))
    there = count > 0
    middle = np.minimum(edges[there] + np.uint64(width // 2), np.uint64(last))
    return {
        "step": middle.tolist(),
        "time": _rounded(at[there], 3),
        "parts": [_rounded(parts[there, part] / count[there], 6) for part in Part],
        "hidden": _rounded(hidden[there] / count[there], 6),
        "memory": most[there].tolist(),
        "memory_least": least[there].tolist(),
        "on_device": on_device[there].tolist() if on_device.any() else [],
        **{of: _share_history(begun, of, first, width, there) for of in SHARES},
    }


def _share_history(
    begun: Mapping[int, Records], of: Share, first: int, width: int, there: npt.NDArray[np.bool_]
) -> list[float | None]:
    """Means of all workers; nothing at all where no record has it, as of the GPU of those that train on the CPU."""
    total, known = np.zeros(len(there)), np.zeros(len(there))
    for steps in begun.values():
        found = shares(steps, of)
        has = ~np.isnan(found)
        place = (steps["step"][has].astype(np.int64) - first) // width
        total += np.bincount(place, found[has], len(there))
        known += np.bincount(place, minlength=len(there))
    if not known.any():
        return []
    pairs = zip(total[there].tolist(), known[there].tolist(), strict=True)
    return [round(own / count, 4) if count else None for own, count in pairs]


def _timeline(run: RunEvents, begun: Mapping[int, Records]) -> dict[str, Any]:
    """`rows`: of each worker and step its number, begin and arrival (since `zero`; -1: no vote), parts, hidden."""
    from_step = run.last_step - TIMELINE_STEPS
    chosen = {worker: steps[-2 * TIMELINE_STEPS :] for worker, steps in begun.items()}
    chosen = {worker: steps[steps["step"].astype(np.int64) > from_step] for worker, steps in chosen.items()}
    zero = min((float(steps["began"][0]) for steps in chosen.values() if len(steps)), default=0.0)

    def row(record: Any) -> list[float]:
        arrived = float(record["arrived"])
        times = [float(record["began"]) - zero, arrived - zero if arrived > 0 else -1.0]
        return [int(record["step"]), *(round(float(one), 6) for one in (*times, *record["parts"], record["hidden_s"]))]

    rows = {str(worker): [row(record) for record in chosen.get(worker, ())] for worker in run.workers}
    return {"zero": zero, "rows": rows}


def _workers(run: RunEvents, begun: Mapping[int, Records], joined: Joined) -> list[dict[str, Any]]:
    waiting = joined.waiting[:, -LAST:].mean(axis=1) if len(joined.steps) else np.zeros(0)
    waits = dict(zip(joined.workers, waiting.tolist(), strict=True)) if len(joined.steps) else {}
    found: list[dict[str, Any]] = []
    for worker in run.workers:
        row: dict[str, Any] = {"worker": worker, "host": one_line(str(run.headers[worker].get("host", "")), 60)}
        if (steps := begun.get(worker)) is not None:
            last = steps[-LAST:]
            row |= {
                "step": int(steps["step"][-1]),
                "ended": float(steps["began"][-1] + steps["parts"][-1].sum()),
                "parts": _rounded(last["parts"].astype(float).mean(axis=0), 6),
                "hidden": round(float(last["hidden_s"].mean()), 6),
                "waiting": round(float(waits.get(worker, 0.0)), 6),
                "memory": float(steps["memory"][-1]),
                "on_device": float(steps["device_memory"][-1]),
            }
            row |= {of: mean_share(last, of) for of in SHARES}
        found.append(row)
    return found


def _verdict(run: RunEvents, recently: Joined) -> Straggler | None:
    found = straggler(recently)
    if found is not None and found.since <= int(recently.steps[0]) + 1:  # it began before these steps
        return straggler(join(run))
    return found


def _told(found: Straggler) -> dict[str, Any]:
    return {
        "text": str(found),
        "worker": found.worker,
        "part": found.part.name.lower(),
        "late": found.late_s,
        "cost": found.cost_s,
        "share": found.share,
        "since": found.since,
    }


def _notes(run: RunEvents, happened: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"time": note.time, "step": note.step, "worker": note.worker, "text": note.text, "kind": "note"}
        for note in run.notes
    ]
    for line in happened:
        if (text := _event_text(line)) and math.isfinite(at := _float(line.get("time"))):
            step = line["step"] if type(line.get("step")) is int else None
            found.append({"time": at, "step": step, "worker": None, "text": text, "kind": "job"})
    return sorted(found, key=lambda note: note["time"])[-MOST_NOTES:]


def _event_text(line: Mapping[str, Any]) -> str:
    match line["event"]:
        case "resume":
            return f"resumed from step {line.get('step')}"
        case "takeover":
            return "another worker takes over the reports"
        case "end" if not line.get("ok", True):
            return "the run ended by an error"
        case "end":
            return "the run ended"
    return ""


# -- what was logged and predicted -------------------------------------------------------------------------------------


def _metrics(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Curves by name, the events among the lines, and what could not be read."""
    path = folder / json_lines.FILE_NAME
    if not path.exists():
        return {}, [], []
    try:
        rows, happened = json_lines.rows(path), json_lines.events(path)
    except (OSError, ValueError) as error:
        return {}, [], [f"{one_line(str(path), 200)} can't be read: {cause_of(error)}"]
    curves: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        at = _float(row.get("time"))
        for name, value in row.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in ("step", "time") and is_number and (name in curves or len(curves) < MOST_LOGGED):
                curves.setdefault(name, []).append((row["step"], at, _float(value)))
    return {name: _curve(points) for name, points in curves.items()}, happened, []


def _curve(points: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
    """Means of neighbours where there are too many; one that is not finite makes its mean so, and is seen."""
    table = np.asarray(points, dtype=np.float64)
    last = table[-1, 2]
    if len(table) > LOGGED_POINTS:
        begins = np.arange(0, len(table), -(-len(table) // LOGGED_POINTS))
        counts = np.diff(np.append(begins, len(table)))
        with np.errstate(invalid="ignore", over="ignore"):
            table = np.add.reduceat(table, begins, axis=0) / counts[:, None]
    return {
        "step": [round(one) for one in table[:, 0].tolist()],
        "time": _finite(np.round(table[:, 1], 3).tolist()),
        "value": _short(table[:, 2].tolist()),
        "last": _finite([float(last)])[0],
    }


def _about(run: RunEvents) -> dict[str, Any]:
    """How the engine is set, as the newest of the workers tells it."""
    header = next(iter(run.headers.values()))
    hosts = sorted({str(one.get("host", "")) for one in run.headers.values()})
    told = {key: value for key, value in header.items() if key not in OWN_KEYS}
    return {**_shown(told), "hosts": one_line(", ".join(hosts), LONGEST_VALUE)}


def _predicted(folder: Path, about: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Bytes of the peak and of the model's state, where a plan was made for this setting."""
    stored, plan = folder / residuals.FILE_NAME, folder / residuals.PLAN
    try:
        if stored.exists():
            found = input_file.read_json(stored)["predicted"]
        else:
            found = residuals.of_plan(plan, about)
        kept = {name: found[name] for name in ("peak", "model_state") if isinstance(found.get(name), int | float)}
        return {name: float(value) for name, value in kept.items() if math.isfinite(value)}, []
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        wrong = stored if stored.exists() else plan
        return {}, [f"{one_line(str(wrong), 200)} can't be read: {cause_of(error)}"]


# -- values of JSON ----------------------------------------------------------------------------------------------------


def _shown(values: Any) -> dict[str, Any]:
    """Of a configuration that a file names: values of JSON, cut where they are endless."""
    if not isinstance(values, Mapping):
        return {}
    found: dict[str, Any] = {}
    for key, value in values.items():
        if value is None or isinstance(value, bool | int):
            found[str(key)] = value
        elif isinstance(value, float):
            found[str(key)] = value if math.isfinite(value) else str(value)
        else:
            found[str(key)] = one_line(str(value), LONGEST_VALUE)
    return found


def _rounded(values: npt.NDArray[Any], digits: int) -> list[float]:
    return [float(one) for one in np.round(values.astype(np.float64), digits).tolist()]


def _float(value: Any) -> float:
    """NaN: it is no number, or one that no float can be."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _finite(values: Sequence[float]) -> list[float | None]:
    return [one if math.isfinite(one) else None for one in values]


def _short(values: Sequence[float]) -> list[float | None]:
    """Seven digits, which no curve shows more of."""
    return _finite([float(f"{one:.7g}") for one in values])
