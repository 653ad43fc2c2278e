"""Waiting is charged to the worker that arrived last, and to the part of the step that made it late.

    worker 0   data ▓ forward ▓▓▓ backward ▓▓▓▓▓ │ arrived ░░░░░░░░░░░░ voted │ exchange  optimizer
    worker 1   data ▓▓▓▓▓▓▓▓▓▓▓▓▓ forward ▓▓▓ backward ▓▓▓▓▓ │ arrived  voted │ exchange  optimizer
                                                             └ late: from the last of the others to here

A worker is a straggler if it is last in so many of the recent steps that chance does not explain it (a sign test), and
its median lateness is worth a line. The part is the one that takes it longest over the others' median, whose time is
charged where it is spent between two votes: update and the script's own time of the step before, then data, forward
and backward of this one. The looks, of which the first that finds something counts:

| look         | a worker is named if                                              | as where                          |
|--------------|-------------------------------------------------------------------|-----------------------------------|
| link         | most of the others wait longest for its messages, though it       | its network is slow               |
|              | computes no longer than they do                                   |                                   |
| arrival      | it comes last to the vote                                         | a part takes long under ddp       |
| computing    | it computes longest between two votes, however long it waits      | the update of zero and fsdp, at   |
|              |                                                                   | whose end all wait for each other |
| now and then | most of the steps that are long because of one worker are so      | every tenth step is long          |
|              | because of this one                                               |                                   |
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.monitor.events import Part
from paceline.monitor.run_events import Records, RunEvents, left_at

RECENT = 50
FEWEST = 14
"""Steps: with fewer of them not even a worker that is always last is told from chance."""
SIGNIFICANCE = 3.5
"""Standard deviations of a fair coin, which is what the lateness of one of two equal workers is."""
RARE, RARE_SHARES, RARE_S = 400, (0.25, 1.0, 3.0), 5e-3
"""For lateness now and then: so many steps are looked at, for those that are longer by so much of a step; by more where
others are late as well, but not by so much."""
RARE_CHANCE = 1e-6
"""At most, that equal workers would be late so unequally: it is asked again and again while a job runs."""
EXPLAINED = 0.5
"""Of what is waited for a worker's messages: if it computes so much longer than the others, that is the cause."""
STILL, STILL_TIMES = 60, 6
"""Steps: what has not happened for so long, and for so many times its usual distance, is over."""
LEAST_SHARE = 0.03
LEAST_S = 1e-3
"""Of a step: less is not worth a line."""

BEFORE_VOTE = (Part.DATA, Part.FORWARD, Part.BACKWARD)
COMPUTING = (Part.DATA, Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER, Part.CHECKPOINT, Part.OTHER)
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
    peers: npt.NDArray[np.int64] | None = None  # whose messages each waited for longest: an index of `workers`, or -1
    peer_s: Floats | None = None  # and how much longer than for the others'
    left_at: Floats | None = None  # (worker, step, bucket) of the last steps, as many as are looked at: when each left

    @property
    def seconds(self) -> Floats:
        """Of each step, on each worker."""
        return np.asarray(self.parts.sum(axis=2))

    @property
    def waiting(self) -> Floats:
        """For the worker that arrived last; no longer than the vote took."""
        behind = self.arrived.max(axis=0, initial=0.0) - self.arrived
        return np.asarray(np.minimum(behind, self.parts[:, :, Part.VOTE]))

    @cached_property
    def late_s(self) -> Floats:
        """By how much a worker came after the last of the others; below 0: it did not."""
        return _behind(self.arrived)

    @cached_property
    def between_votes(self) -> Floats:
        """`parts` of the time from the vote of the step before to this one's."""
        own = self.parts.copy()
        for part in AFTER_VOTE:  # of a step delays the next one's vote
            own[:, 1:, part] = self.parts[:, :-1, part]
            own[:, 0, part] = np.nan
        return own

    @cached_property
    def computing(self) -> Floats:
        """Seconds between two votes that a worker did not wait for others."""
        return np.asarray(np.nan_to_num(self.between_votes[:, :, COMPUTING]).sum(axis=2))

    @cached_property
    def longer_s(self) -> Floats:
        """By how much a worker computed longer than the longest of the others; below 0: it did not."""
        return _behind(self.computing)

    def excess(self, worker: int) -> Floats:
        """(part, step): how much longer each part took the worker (an index) than the others' median, between votes."""
        own = self.between_votes
        others = np.delete(own, worker, axis=0)
        return np.asarray((own[worker] - np.median(others, axis=0)).T)

    def last(self, count: int) -> Joined:
        """Without whom they waited for."""
        return Joined(self.workers, self.steps[-count:], self.arrived[:, -count:], self.parts[:, -count:])


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
    by_link: bool = False
    bucket: tuple[int, int] | None = None  # of gradients: the first that it is late with, and how many there are
    times: int | None = None  # it is late now and then: in so many steps since, by `late_s` in each

    def __str__(self) -> str:
        if self.by_link:
            return (
                f"the link of worker {self.worker} is slow: the others wait {_seconds(self.late_s)} a step longer for "
                f"its messages than for those of the rest since step {self.since:,} "
                f"({_seconds(self.cost_s)} in all, {self.share:.0%} of the time)"
            )
        if self.times is not None:
            return (
                f"worker {self.worker} is late now and then: in {self.times} of the {self.until - self.since + 1} "
                f"steps since step {self.since:,} {IN_WORDS[self.part]} takes it {_seconds(self.late_s)} longer than "
                f"the others, who wait for it ({_seconds(self.cost_s)} in all, {self.share:.0%} of the time)"
            )
        where = "" if self.bucket is None else f" from bucket {self.bucket[0]} of {self.bucket[1]} on"
        return (
            f"worker {self.worker} is late: {IN_WORDS[self.part]} takes it longer{where} than the others, who wait for "
            f"it {_seconds(self.late_s)} a step since step {self.since:,} "
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
    place_of = np.full(1 << 16, -1, dtype=np.int64)  # a rank is a u2, and for a generation the same
    for place, row in enumerate(rows):
        place_of[row["rank"]] = place
    return Joined(
        tuple(active),
        numbers,
        np.stack([row["arrived"] for row in rows]),
        np.stack([row["parts"].astype(np.float64) for row in rows]),
        np.stack([place_of[row["peer"]] for row in rows]),
        np.stack([row["peer_s"].astype(np.float64) for row in rows]),
        _left_at(run, active, numbers[-RECENT:]),
    )


def _left_at(run: RunEvents, active: dict[int, Records], numbers: npt.NDArray[Any]) -> Floats | None:
    """Of these steps; None where not all workers have told of the same buckets."""
    wanted = {worker: steps[np.isin(steps["step"], numbers)] for worker, steps in active.items()}
    tables = [left_at(run, worker, steps) for worker, steps in wanted.items()]
    shapes = {table.shape for table in tables}
    return np.stack(tables) if len(shapes) == 1 and tables[0].size else None


def _of_generation(steps: Records, generation: int, recent: int | None) -> Records:
    of_it: Records = steps[steps["generation"] == generation]
    return of_it if recent is None else of_it[-recent:]


def straggler(joined: Joined, recent: int = RECENT) -> Straggler | None:
    """Which worker the others wait for, as the last `recent` steps show it; None: none stands out."""
    if len(joined.workers) < 2 or min(len(joined.steps), recent) < FEWEST:
        return None
    return (
        _slow_link(joined, recent)
        or _steady(joined, recent, joined.late_s)
        or _steady(joined, recent, joined.longer_s)
        or next(filter(None, (_now_and_then(joined.last(RARE), share) for share in RARE_SHARES)), None)
    )


def _steady(joined: Joined, recent: int, late: Floats) -> Straggler | None:
    """One that is behind the others in most steps; `late` by (worker, step)."""
    count = min(len(joined.steps), recent)
    least = _least(joined, count)
    worker = _most_often(late[:, -count:] > 0)
    if worker is None or float(np.median(late[worker, -count:])) < least:
        return None
    part = _part(joined, worker, slice(-count, None))
    found = _told(joined, worker, part, late[worker], _since(late[worker] >= least))
    return replace(found, bucket=_late_bucket(joined, worker, found.late_s)) if part is Part.BACKWARD else found


def _late_bucket(joined: Joined, worker: int, late_s: float) -> tuple[int, int] | None:
    """The first bucket that leaves the worker so late that most of its lateness is there; None: it is not known."""
    if joined.left_at is None or joined.left_at.shape[2] < 2:
        return None
    each = _behind(joined.left_at.reshape(len(joined.workers), -1))[worker].reshape(joined.left_at.shape[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a bucket of which no record tells
        late = np.nanmedian(each, axis=0)
    found = np.flatnonzero(late >= late_s / 2)
    return (int(found[0]), len(late)) if len(found) else None


def _slow_link(joined: Joined, recent: int) -> Straggler | None:
    """One whose messages the others wait for, though it computes no longer than they do."""
    if joined.peers is None or joined.peer_s is None or len(joined.workers) < 3:
        return None
    count = min(len(joined.steps), recent)
    least = _least(joined, count)
    others = len(joined.workers) - 1
    named_by = np.where(joined.peer_s >= least, joined.peers, -1)
    is_named = np.stack([(named_by == place).sum(axis=0) > others / 2 for place in range(others + 1)])
    worker = _most_often(is_named[:, -count:])
    if worker is None:
        return None
    waits = np.where(is_named[worker], np.median(np.delete(joined.peer_s, worker, axis=0), axis=0), 0.0)
    typical = float(np.median(waits[-count:]))
    if typical < least or float(np.median(joined.longer_s[worker, -count:])) > EXPLAINED * typical:
        return None
    found = _told(joined, worker, Part.EXCHANGE, waits, _since(is_named[worker]))
    return replace(found, by_link=True)


def _now_and_then(joined: Joined, share: float) -> Straggler | None:
    """One of whose making most of the steps are that are long because of one worker."""
    least = max(share * float(np.median(joined.seconds)), RARE_S)
    late = np.maximum(joined.late_s, joined.longer_s)
    is_late = late >= least
    times = is_late.sum(axis=1)
    worker = int(times.argmax())
    workers = len(joined.workers)
    chance = workers * _at_least(int(times[worker]), int(times.sum()), 1 / workers)
    where = np.flatnonzero(is_late[worker])
    if chance > RARE_CHANCE or not len(where):
        return None
    still = max(STILL, STILL_TIMES * len(joined.steps) / len(where))
    if len(joined.steps) - 1 - where[-1] > still:
        return None
    begin = int(where[0])
    found = _told(joined, worker, _part(joined, worker, where), np.where(is_late[worker], late[worker], 0.0), begin)
    if found.share < LEAST_SHARE:
        return None
    return replace(found, late_s=float(np.median(late[worker][where])), times=len(where))


def _told(joined: Joined, worker: int, part: Part, late: Floats, begin: int) -> Straggler:
    cost = float(np.clip(late[begin:], 0, None).sum())
    total = float(np.median(joined.seconds[:, begin:], axis=0).sum())
    since = joined.steps[begin:]
    late_s = float(np.median(late[begin:]))
    share = cost / total if total else 0.0  # of records that are damaged: no step takes no time
    return Straggler(joined.workers[worker], part, late_s, share, cost, int(since[0]), int(since[-1]))


def _behind(times: Floats) -> Floats:
    """Of (worker, step): each less the largest of the others."""
    largest, second = times.argmax(axis=0), np.partition(times, -2, axis=0)[-2]
    of_others = np.broadcast_to(times.max(axis=0), times.shape).copy()
    of_others[largest, np.arange(times.shape[1])] = second
    return np.asarray(times - of_others)


def _least(joined: Joined, count: int) -> float:
    return max(LEAST_SHARE * float(np.median(joined.seconds[:, -count:])), LEAST_S)


def _most_often(is_it: npt.NDArray[np.bool_]) -> int | None:
    """Of (worker, step): who it is more often than a fair coin explains."""
    times, count = is_it.sum(axis=1), is_it.shape[1]
    worker = int(times.argmax())
    by_chance = (int(times[worker]) - count / 2) / (count / 4) ** 0.5
    return worker if by_chance >= SIGNIFICANCE else None


def _at_least(times: int, of: int, chance: float) -> float:
    """The chance of so many hits or more in so many draws."""
    return math.fsum(math.comb(of, hits) * chance**hits * (1 - chance) ** (of - hits) for hits in range(times, of + 1))


def _part(joined: Joined, worker: int, steps: slice | npt.NDArray[np.int64]) -> Part:
    """What takes the worker longer than the others in these steps, but its own waiting for them."""
    excess = joined.excess(worker)[:, steps].copy()
    excess[Part.VOTE] = -np.inf
    return Part(int(np.nanargmax(np.nan_to_num(np.nanmedian(excess, axis=1), nan=-np.inf))))


def _since(is_late: npt.NDArray[np.bool_]) -> int:
    """The beginning of the last stretch in which most steps are late: where the sum from there on is largest."""
    score = np.where(is_late, 1.0, -1.5)[::-1].cumsum()[::-1]
    return int(np.argmax(score))


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"
