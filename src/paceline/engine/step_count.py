"""Which step it is, and when it counts.

    round   step + left_out_steps + 1          of the job's data: a step that is left out has used its samples, too
    update  0, 1, …                            inside a step, where the body calls `engine.update` for each optimizer

A step counts when its update is one of the job's: at once, or in an elastic job when the coordinator has committed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from paceline.elastic.faults import fault_point
from paceline.engine.step_so_far import StepSoFar
from paceline.errors import GenerationEnded
from paceline.world.determinism import mix, seed_everything


class Commitment(Protocol):
    """Who decides whether a step counts, where workers may be lost."""

    @property
    def before_update(self) -> bool:
        """Every worker can make the update alone: it is made when the step counts. Otherwise it can be undone."""
        ...

    def commits(self, step: int, update: int, *, check: int) -> bool:
        """False: the workers have changed, and the step is to be done again."""
        ...

    def check_part(self, step: int) -> None:
        """That this worker's part of the state is what the last update left."""
        ...

    @property
    def part(self) -> Sequence[Tensor]:
        """Those of it that are watched."""
        ...


class StepCount:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.step = 0
        self.left_out_steps = 0
        self.update = 0
        self.rounds_before = 0  # the step that is under way
        self.commitment: Commitment | None = None  # without one a step counts when it has acted

    @property
    def rounds(self) -> int:
        return self.step + self.left_out_steps

    @property
    def round(self) -> int:
        """Of the step that is under way, from 1."""
        return self.rounds_before + 1

    @property
    def waits_for_update(self) -> bool:
        """A step is committed with its last update made, which can be undone until then."""
        return self.commitment is not None and not self.commitment.before_update

    def begin_step(self) -> None:
        if self.update == 0:
            self.rounds_before = self.rounds

    def commit(self, now: StepSoFar) -> None:
        assert self.commitment is not None
        fault_point("ready", self.round)
        if not self.commitment.commits(self.round, self.update, check=now.check):
            raise GenerationEnded(f"the workers changed before step {self.round} was committed")
        now.committed = True
        fault_point("after_commit", self.round)

    def add(self, now: StepSoFar) -> None:
        """The step's update is one of the job's."""
        now.counted = True
        if now.empty:
            self.left_out_steps += self.update == 0
            return
        self.step += self.update == 0

    def seed_between_steps(self) -> None:
        """What the user draws between steps must not depend on how many items this worker ran."""
        seed_everything(mix(self._seed, "between", self.step, self.update))
