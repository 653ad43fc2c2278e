"""Waiting is charged to the worker that arrived last, and to the part of the step that made it late.

    worker 0   data ▓ forward ▓▓▓ backward ▓▓▓▓▓ │ arrived ░░░░░░░░░░░░ voted │ exchange  optimizer
    worker 1   data ▓▓▓▓▓▓▓▓▓▓▓▓▓ forward ▓▓▓ backward ▓▓▓▓▓ │ arrived  voted │ exchange  optimizer
                                                             └ late: from the last of the others to here

A worker is a straggler if it is last in so many of the recent steps that chance does not explain it (a sign test), and
its median lateness is worth a line. The part is the one that takes it longest over the others' median, whose time is
charged where it is spent between two votes: update and the script's own time of the step before, then data, forward
and backward of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.monitor.events import Part
from paceline.monitor.run_events import Records, RunEvents

RECENT = 50
FEWEST = 14
"""Steps: with fewer of them not even a worker that is always last is told from chance."""
SIGNIFICANCE = 3.5
"""Standard deviations of a fair coin, which is what the lateness of one of two equal workers is."""
LEAST_SHARE = 0.03
LEAST_S = 1e-3
"""Of a step: less is not worth a line."""

BEFORE_VOTE = (Part.DATA, Part.FORWARD, Part.BACKWARD)
AFTER_VOTE = (Part.EXCHANGE, Part.OPTIMIZER, Part.CHECKPOINT, Part.RECOVERY, Part.OTHER)
IN_WORDS = {
    Part.DATA: "data",
    Part.FORWARD: "forward",
    Part.BACKWARD: "backward",
    Part.EXCHANGE: "communication",
    Part.OPTIMIZER: "the optimizer",
    Part.CHECKPOINT: "saving checkpoints",
    Part.RECOVERY: "recovery",
    Part.OTHER: "the script's own code",
}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Joined:
    """Steps that all of these workers took together, in order. Arrays are (worker, step) or (worker, step, part)."""

    workers: tuple[int, ...]
    steps: npt.NDArray[Any]
    arrived: Floats
    parts: Floats

    @property
    def seconds(self) -> Floats:
        """Of each step, on each worker."""
        return np.asarray(self.parts.sum(axis=2))

    @property
    def waiting(self) -> Floats:
        """For the worker that arrived last; no longer than the vote took."""
        behind = self.arrived.max(axis=0, initial=0.0) - self.arrived
        return np.asarray(np.minimum(behind, self.parts[:, :, Part.VOTE]))

    def late_s(self, worker: int) -> Floats:
        """By how much the worker (an index) came after the last of the others; below 0: it did not."""
        others = np.delete(self.arrived, worker, axis=0)
        return np.asarray(self.arrived[worker] - others.max(axis=0))

    def excess(self, worker: int) -> Floats:
        """(part, step): how much longer than the others' median each part took, of the time between two votes."""
        own = self.parts.copy()
        for part in AFTER_VOTE:  # of a step delays the next one's vote
            own[:, 1:, part] = self.parts[:, :-1, part]
            own[:, 0, part] = np.nan
        others = np.delete(own, worker, axis=0)
        return np.asarray((own[worker] - np.median(others, axis=0)).T)


@dataclass(frozen=True)
class Straggler:
    """A worker that the others wait for."""

    worker: int
    part: Part
    late_s: float  # in a step, the median since
    share: float  # of the steps' time since
    cost_s: float  # since
    since: int  # step
    until: int

    def __str__(self) -> str:
        return (
            f"worker {self.worker} is late: {IN_WORDS[self.part]} takes it longer than the others, who wait for it "
            f"{_seconds(self.late_s)} a step since step {self.since:,} "
            f"({_seconds(self.cost_s)} in all, {self.share:.0%} of the time)"
        )


def join(run: RunEvents, recent: int | None = None) -> Joined:
    """The steps that all workers of the last generation took together, at most the last `recent`."""
    active = {worker: steps[steps["voted"] > 0] for worker, steps in run.workers.items() if len(steps)}
    generation = max((int(steps["generation"][-1]) for steps in active.values() if len(steps)), default=0)
    active = {worker: _of_generation(steps, generation, recent) for worker, steps in active.items()}
    active = {worker: steps for worker, steps in active.items() if len(steps)}
    newest = max((int(steps["step"][-1]) for steps in active.values()), default=0)
    if recent is not None:  # one that has been silent for so long is not one of them any more
        active = {worker: steps for worker, steps in active.items() if int(steps["step"][-1]) > newest - recent}
    numbers = np.asarray([], dtype=np.int64)
    for place, steps in enumerate(active.values()):
        own = steps["step"].astype(np.int64)
        numbers = np.unique(own) if place == 0 else np.intersect1d(numbers, own)
    rows = [steps[np.searchsorted(steps["step"], numbers.astype(np.uint64))] for steps in active.values()]
    if not rows:
        none = np.zeros((0, 0))
        return Joined((), numbers, none, np.zeros((0, 0, len(Part))))
    return Joined(
        tuple(active),
        numbers,
        np.stack([row["arrived"] for row in rows]),
        np.stack([row["parts"].astype(np.float64) for row in rows]),
    )


def _of_generation(steps: Records, generation: int, recent: int | None) -> Records:
    of_it: Records = steps[steps["generation"] == generation]
    return of_it if recent is None else of_it[-recent:]


def straggler(joined: Joined, recent: int = RECENT) -> Straggler | None:
    """Which worker the others wait for, as the last `recent` steps show it; None: none stands out."""
    count = min(len(joined.steps), recent)
    if len(joined.workers) < 2 or count < FEWEST:
        return None
    step_s = float(np.median(joined.seconds[:, -count:]))
    least = max(LEAST_SHARE * step_s, LEAST_S)
    last = np.argmax(joined.arrived[:, -count:], axis=0)
    worker = int(np.bincount(last).argmax())
    times_last = int((last == worker).sum())
    late = joined.late_s(worker)
    by_chance = (times_last - count / 2) / (count / 4) ** 0.5
    if by_chance < SIGNIFICANCE or float(np.median(late[-count:])) < least:
        return None
    part = Part(int(np.nanargmax(np.nan_to_num(np.nanmedian(_own(joined, worker, count), axis=1), nan=-np.inf))))
    begin = _since(late >= least)
    cost = float(np.clip(late[begin:], 0, None).sum())
    total = float(np.median(joined.seconds[:, begin:], axis=0).sum())
    since = joined.steps[begin:]
    return Straggler(
        joined.workers[worker], part, float(np.median(late[begin:])), cost / total, cost, int(since[0]), int(since[-1])
    )


def _own(joined: Joined, worker: int, count: int) -> Floats:
    """What of a part's excess could make the worker late: not its own waiting for others."""
    excess = joined.excess(worker)[:, -count:].copy()
    excess[Part.VOTE] = -np.inf
    return excess


def _since(is_late: npt.NDArray[np.bool_]) -> int:
    """The beginning of the last stretch in which most steps are late: where the sum from there on is largest."""
    score = np.where(is_late, 1.0, -1.5)[::-1].cumsum()[::-1]
    return int(np.argmax(score))


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"
