"""What a simulation found, as one value: for the terminal, for JSON, for comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.simulate.job import Job, best_interval, simulate_job
from paceline.simulate.scenario import Scenario
from paceline.simulate.training import Step, Training, Watch


@dataclass(frozen=True)
class Result:
    """Seconds of a step, in the mean of all steps."""

    scenario: Scenario
    steps: tuple[Step, ...]
    buckets: int
    hosts: int
    step_s: float
    compute_s: float
    straggling_s: float
    exposed_s: float
    wire_s: float
    alone_s: float
    """A step of one worker that has nobody to wait for."""
    job: Job

    @property
    def scaling(self) -> float:
        """What N workers do in a time, over N times what one of them would."""
        return self.alone_s / self.step_s

    @property
    def hidden(self) -> float:
        """The share of what is on the wire that passes while workers compute."""
        return max(0.0, 1 - self.exposed_s / self.wire_s) if self.wire_s else 1.0

    @property
    def slowest_steps_s(self) -> float:
        """95 of 100 steps take less."""
        return float(np.quantile([step.takes for step in self.steps], 0.95))

    @property
    def useful(self) -> float:
        """Of N undisturbed single workers, what the job is worth: scaling × goodput."""
        return self.scaling * self.job.goodput

    def to_json(self) -> dict[str, Any]:
        scenario, job = self.scenario, self.job
        told = {key: value for key, value in vars(scenario).items() if key != "network"}
        return {
            "scenario": {**told, "network": scenario.net.name},
            "step": {
                "seconds": self.step_s,
                "seconds_95": self.slowest_steps_s,
                "compute": self.compute_s,
                "straggling": self.straggling_s,
                "exposed": self.exposed_s,
                "wire": self.wire_s,
                "all": [step.takes for step in self.steps],
            },
            "scaling_efficiency": self.scaling,
            "goodput": job.goodput,
            "useful": self.useful,
            "job": {
                "lives": job.lives,
                "seconds": job.seconds,
                "steps": job.steps,
                "failures": job.failures,
                "recovery": job.recovery,
                "redone": job.redone,
                "degraded": job.degraded,
                "checkpoints": job.checkpoints,
                "commits": job.commits,
                "recovery_median": job.recovery_median,
                "best_checkpoint_every": best_interval(scenario, self.step_s),
            },
        }


def simulate(scenario: Scenario, watch: Watch | None = None) -> Result:
    training = Training(scenario, watch)
    steps = training.run(-(-scenario.steps // scenario.window) * scenario.window)  # whole windows

    def mean(name: str) -> float:
        return float(np.mean([getattr(step, name) for step in steps]))

    alone = scenario.lanes * scenario.accumulate * scenario.compute_ms + scenario.update_ms + scenario.other_ms
    return Result(
        scenario=scenario,
        steps=tuple(steps),
        buckets=len(training.exchange.buckets),
        hosts=scenario.placed_hosts,
        step_s=mean("takes"),
        compute_s=mean("compute"),
        straggling_s=mean("straggling"),
        exposed_s=mean("exposed"),
        wire_s=mean("wire"),
        alone_s=alone / 1e3,
        job=simulate_job(scenario, steps),
    )


def watched(scenario: Scenario, workers: int, steps: int) -> Watch:
    """The first workers, the slow ones, and the last: of a timeline that a person looks at."""
    chosen = [*Training(scenario).slow[:2].tolist(), scenario.workers - 1]
    first = [worker for worker in range(min(workers, scenario.workers)) if worker not in chosen]
    chosen = chosen[:workers]
    return Watch(np.asarray(sorted({*first[: workers - len(chosen)], *chosen}), dtype=np.int64), steps)
