"""What the user has handed over: the objects of `engine.prepare`, and what was made to go with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.engine.activation_checkpointing import Recomputed
from paceline.engine.evaluation import EvaluationCount, EvaluationLoader
from paceline.engine.prepared_loader import PreparedLoader
from paceline.engine.replicas import weights_hash
from paceline.engine.train_step import TrainStep
from paceline.errors import LoopError


@dataclass
class PreparedObjects:
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    step: TrainStep | None = None  # with the first optimizer
    loader: PreparedLoader | None = None  # that trains
    evaluations: list[EvaluationLoader] = field(default_factory=list)
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
