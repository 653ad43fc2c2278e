"""What the user has handed to `engine.prepare`, what was made to go with it, and what all workers do with it together.

Whoever calls `BetweenSteps` has seen to it that no step is under way (`check_boundary`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.engine.activation_checkpointing import Recomputed
from paceline.engine.boundary import Boundary, Operation
from paceline.engine.config import EngineConfig
from paceline.engine.evaluation import EvaluationCount, EvaluationLoader, no_rows
from paceline.engine.facts import job_facts
from paceline.engine.group import Group
from paceline.engine.loop import PreparedLoader
from paceline.engine.replicas import named_state, weights_hash
from paceline.engine.saver import Surroundings
from paceline.engine.state import JobState
from paceline.engine.step import TrainStep
from paceline.errors import LoopError, ReplicaError


@dataclass
class PreparedObjects:
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    step: TrainStep | None = None  # with the first optimizer
    loader: PreparedLoader | None = None  # that trains
    evaluation_count: EvaluationCount = field(default_factory=EvaluationCount)
    recomputed: Recomputed | None = None
    shared: list[tuple[Callable[[], Any], Callable[[Any], None]]] = field(default_factory=list)  # with joiners

    def training(self) -> TrainStep:
        if self.step is None:
            raise LoopError("nothing to train yet: give a model and an optimizer to engine.prepare() first")
        return self.step

    def whole(self, weights: Tensor) -> Tensor:
        """Of a parameter or buffer, whatever part of it this worker has."""
        return weights.detach() if self.step is None else self.step.strategies.whole(weights)

    def hash(self) -> str:
        return weights_hash(self.models) if self.step is None else weights_hash(self.models, self.whole)

    def close(self) -> None:
        for part in (self.loader, self.step, self.recomputed):
            if part is not None:
                part.close()


class BetweenSteps:
    def __init__(self, config: EngineConfig, group: Group, objects: PreparedObjects) -> None:
        self._config, self._group, self._objects = config, group, objects
        self.boundary = Boundary(group)

    def settle(self) -> None:
        """Updates that are under way end, and the model holds the newest weights."""
        self.boundary.settle(self._objects.step)

    def reduce(self, tensor: Tensor, operation: Operation) -> Tensor:
        evaluation = self._evaluation_round()
        if evaluation is None:
            return self.boundary.reduced(tensor, operation)
        return self.boundary.in_round(
            lambda: tensor.detach() if evaluation.void else self.boundary.reduced(tensor, operation), tensor.detach
        )

    def gather_rows(self, values: Any) -> Any:
        evaluation = self._evaluation_round()
        if evaluation is None:
            return self.boundary.gathered_rows(values, None)

        def gather() -> Any:
            if evaluation.void:
                return no_rows(values)
            rows = self.boundary.gathered_rows(values, evaluation.real_rows)
            evaluation.confirmed()
            return rows

        return self.boundary.in_round(gather, lambda: no_rows(values))

    def _evaluation_round(self) -> EvaluationLoader | None:
        return next((loader for loader in self._group.evaluations if loader.real_rows is not None), None)

    def end_evaluation(self) -> None:
        """None leaves an evaluation that another has to run a round of again."""
        if self._group.elastic is not None:
            self.boundary.barrier()

    def agreed_hash(self) -> str:
        self.settle()
        mine = self.boundary.alike(self._objects.hash)
        hashes = self.boundary.told(mine)
        if len(set(hashes)) > 1:
            raise ReplicaError(f"the workers' weights differ: {dict(enumerate(hashes))}")
        return mine

    def whole_state(self) -> dict[str, Tensor]:
        self.settle()
        objects = self._objects

        def everything() -> dict[str, Tensor]:
            named = named_state(objects.models)
            return {name: objects.whole(value).to("cpu", copy=True) for name, value in named.items()}

        return self.boundary.alike(everything)

    # -- for those who save ------------------------------------------------------------------------------------------

    def surroundings(self) -> Surroundings:
        return Surroundings(self._group.among, self.boundary.told, self._group.client)

    def job_state(self) -> JobState:
        objects, step = self._objects, self._objects.training()
        trained = (objects.models, objects.optimizers, objects.schedulers)
        return JobState(*trained, step, objects.loader, objects.shared, self.job_facts, self._config.seed)

    def job_facts(self) -> dict[str, Any]:
        loader = self._objects.loader
        return job_facts(self._config, {} if loader is None else loader.source.facts(), self._group.device)
