"""A job of many hours: steps, checkpoints, workers that die, and what each way to recover makes of that.

    elastic    step ─ step ─ st✗ detect, regroup ─ the same step, by those left ─ slower steps ─ a fresh one joins
    restart    step ─ step ─ st✗ detect ─ all processes anew, checkpoint read ─ the steps since then once more ─ step

Failures come at random, each worker by itself (exponential, `mtbf_hours`). A survivor is not interrupted while it
computes: it meets the end of its group when its own part of the step is done. Between two events the job makes the
steps that the simulation of steps has found, over and over.

Goodput is the share of the time that made steps which count, at full speed. What is missing from 1 was spent on

    recovery       from a failure until the job works again
    redone         work of steps that were lost
    degraded       steps that take longer, because survivors have the lost workers' lanes as well
    checkpoints    waits for their writing
    commits        waits for the coordinator, in elastic jobs
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.simulate.scenario import Scenario
from paceline.simulate.training import Step

FEWEST = 1
MOST_EVENTS = 2_000_000
ENOUGH_FAILURES, MOST_LIVES = 200, 100
MOST_SHOWN = 500
"""Events that are kept for a timeline."""
HOUR_S = 3600.0


@dataclass(frozen=True)
class Event:
    """Something that stood in the way."""

    kind: str
    start: float
    end: float


@dataclass
class Job:
    """What became of it, in seconds."""

    step_s: float
    lives: int = 1  # jobs of as many hours that these are the sums of
    seconds: float = 0.0
    steps: int = 0  # that count
    failures: int = 0
    recovery: float = 0.0
    redone: float = 0.0
    degraded: float = 0.0
    checkpoints: float = 0.0
    commits: float = 0.0
    recoveries: list[float] = field(default_factory=list)  # from each failure to the next step that counts
    events: list[Event] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        lost = self.recovery + self.redone + self.degraded + self.checkpoints + self.commits
        return 1 - lost / self.seconds if self.seconds else 0.0

    @property
    def recovery_median(self) -> float | None:
        return float(np.median(self.recoveries)) if self.recoveries else None


def best_interval(scenario: Scenario, step_s: float) -> int | None:
    """Steps between checkpoints that cost least under restart: √(2 · cost · time between failures) (Young, 1974)."""
    if scenario.mtbf_hours is None or not scenario.checkpoint_s:
        return None
    between = scenario.mtbf_hours * HOUR_S / scenario.workers
    return max(1, round(math.sqrt(2 * scenario.checkpoint_s * between) / step_s))


class _Life:
    """A job under way."""

    def __init__(self, scenario: Scenario, steps: Sequence[Step], seed: int) -> None:
        self.scenario = scenario
        self._rng = np.random.default_rng([scenario.seed, seed])
        elastic = scenario.recovery == "elastic" and scenario.mtbf_hours is not None
        commit = scenario.commit_ms / 1e3 if elastic else 0.0
        self._commit = commit
        self._plain = [step.takes for step in steps]
        self._sums = [0.0, *itertools.accumulate(takes + commit for takes in self._plain)]
        self.work = float(np.mean([step.compute for step in steps])) - scenario.other_ms / 1e3
        self.job = Job(step_s=float(np.mean(self._plain)))
        self.now, self.made = 0.0, 0  # `made` counts attempts that were committed, also those that a restart undoes
        self.alive = scenario.workers
        self.spares = scenario.spares
        self._joining: list[float] = []
        self.last_checkpoint = 0
        self.next_failure = self._draw()

    def _draw(self) -> float:
        if self.scenario.mtbf_hours is None:
            return math.inf
        rate = self.alive / (self.scenario.mtbf_hours * HOUR_S)
        return self.now + float(self._rng.exponential(1 / rate))

    # -- steps -----------------------------------------------------------------------------------------------------

    @property
    def extra(self) -> float:
        """What a step takes longer while lanes are dealt to fewer workers."""
        scenario = self.scenario
        most = -(-scenario.lanes * scenario.workers // self.alive)
        return (most / scenario.lanes - 1) * self.work

    def length(self, extra: float) -> float:
        """Of the next step."""
        place = self.made % len(self._plain)
        return self._sums[place + 1] - self._sums[place] + extra

    def make(self, count: int, extra: float) -> None:
        """So many steps, which count, and the checkpoints that are due after some of them."""
        job, every, cost = self.job, self.scenario.checkpoint_every, self.scenario.checkpoint_s
        due = self._due(count)
        first = every - job.steps % every if every else 0
        for number in range(min(due, MOST_SHOWN - len(job.events)) if cost else 0):
            ends = self.now + self._span(first + number * every, extra)
            job.events.append(Event("checkpoint", ends - cost, ends))
        self.now += self._span(count, extra)
        self.made += count
        job.steps += count
        job.commits += count * self._commit
        job.degraded += count * extra
        job.checkpoints += due * cost
        if due:
            self.last_checkpoint = job.steps - job.steps % every

    def _due(self, count: int) -> int:
        every = self.scenario.checkpoint_every
        return (self.job.steps % every + count) // every if every else 0

    def _span(self, count: int, extra: float) -> float:
        """How long the next `count` steps take, with their checkpoints."""
        return self._after(count) + count * extra + self._due(count) * self.scenario.checkpoint_s

    def _after(self, count: int) -> float:
        """How long the next `count` steps take."""
        size, place = len(self._plain), self.made % len(self._plain)
        laps, rest = divmod(place + count, size)
        return laps * self._sums[-1] + self._sums[rest] - self._sums[place]

    def whole_steps(self, seconds: float, extra: float) -> int:
        """Steps that end, and whose checkpoints are written, within `seconds` from here."""
        most = int(max(0.0, seconds) / (min(self._plain) + extra)) + 1
        return bisect.bisect_right(range(1, most + 1), seconds, key=lambda count: self._span(count, extra))

    # -- events ----------------------------------------------------------------------------------------------------

    def run(self, until: float) -> Job:
        for _ in range(MOST_EVENTS):
            if not self._stretch(until):
                break
        self.job.seconds = self.now
        return self.job

    def _stretch(self, until: float) -> bool:
        """Steps up to the next event, and that event. False: the time is up, or is in the next step."""
        self._take_in()
        extra = self.extra
        limit = min(until, self.next_failure, self._joining[0] if self._joining else math.inf)
        self.make(self.whole_steps(limit - self.now, extra), extra)
        ends = self.now + self.length(extra)
        if self.next_failure <= min(ends, until):
            self._fail(ends, extra)
            return self.now < until
        if ends > until:
            return False
        self.make(1, extra)  # a replacement joins after this step, or a checkpoint of it is what the time is up in
        return self.now < until

    def _take_in(self) -> None:
        """Replacements that are there join now, in one new generation."""
        here = [time for time in self._joining if time <= self.now]
        if not here:
            return
        self._joining = self._joining[len(here) :]
        fresh = min(len(here), self.scenario.workers - self.alive)
        self.spares += len(here) - fresh
        if fresh:
            self.alive += fresh
            self._pause("a worker joins", self.scenario.regroup_s)

    def _pause(self, kind: str, seconds: float) -> None:
        self.job.events.append(Event(kind, self.now, self.now + seconds))
        self.now += seconds
        self.job.recovery += seconds

    def _fail(self, ends: float, extra: float) -> None:
        """A worker dies in the step that would end at `ends`, or while a checkpoint was written before it."""
        job, scenario, died = self.job, self.scenario, max(self.next_failure, self.now)
        job.failures += 1
        begun = self.now
        if scenario.recovery == "restart":
            self._restart(died)
            return
        other = scenario.other_ms / 1e3
        if died >= ends - other:  # the step is committed; the body goes on to its end
            self.make(1, extra)
            noticed = max(died + scenario.detect_s, self.now)
            job.recovery -= self.now - died
        else:
            job.redone += died - begun  # this step is made once more
            noticed = died + scenario.detect_s
            noticed = max(noticed, min(begun + self.work + extra, ends - other))  # survivors compute to their end
        ready = noticed + scenario.regroup_s
        self._lose_one(died)
        while self.next_failure <= ready:  # another one, into the recovery
            again = self.next_failure
            job.failures += 1
            ready = max(ready, again + scenario.detect_s + scenario.regroup_s)
            self._lose_one(again)
        job.recovery += ready - died
        job.events.append(Event("recovery", died, ready))
        self.now = ready
        job.recoveries.append(ready - died + self.length(self.extra) - other)

    def _lose_one(self, when: float) -> None:
        if self.spares:
            self.spares -= 1
        else:
            self.alive = max(FEWEST, self.alive - 1)
        self._joining = sorted([*self._joining, when + self.scenario.replace_s])
        now, self.now = self.now, when
        self.next_failure = self._draw()
        self.now = now

    def _restart(self, died: float) -> None:
        job, scenario = self.job, self.scenario
        lost = job.steps - self.last_checkpoint
        partly = died - self.now
        self.now = died
        self._pause("restart", scenario.detect_s + scenario.restart_s)
        self.next_failure = self._draw()
        again = self._after(lost)
        job.steps -= lost
        job.redone += partly + again
        job.recoveries.append(self.now - died + again + self.length(0.0))


def simulate_job(scenario: Scenario, steps: Sequence[Step], lives: int | None = None) -> Job:
    """The sum of several lives: as many as it takes to see failures often enough for a mean."""
    if lives is None:
        expected = scenario.hours * scenario.workers / scenario.mtbf_hours if scenario.mtbf_hours else math.inf
        lives = min(MOST_LIVES, max(1, math.ceil(ENOUGH_FAILURES / expected)))
    jobs = [_Life(scenario, steps, seed).run(scenario.hours * HOUR_S) for seed in range(lives)]
    total = Job(jobs[0].step_s, lives)
    for name in ("seconds", "steps", "failures", "recovery", "redone", "degraded", "checkpoints", "commits"):
        setattr(total, name, sum(getattr(job, name) for job in jobs))
    total.recoveries = [seconds for job in jobs for seconds in job.recoveries]
    total.events = max(jobs, key=lambda job: (job.failures > 0, -jobs.index(job))).events  # the first that was hurt
    return total
