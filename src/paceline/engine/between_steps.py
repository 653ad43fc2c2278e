"""What all workers do together between two steps: settle, tell, combine, compare, hand over the state.

Whoever calls it has seen to it that no step is under way (`check_boundary`). In an elastic job each of these is done
again by those who are left, if a worker is lost in it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.engine.boundary import Boundary, Operation
from paceline.engine.config import EngineConfig
from paceline.engine.evaluation import EvaluationLoader, no_rows
from paceline.engine.group import Group
from paceline.engine.job_state import JobState
from paceline.engine.prepared_objects import PreparedObjects
from paceline.engine.replicas import named_state
from paceline.engine.saved_state import job_facts
from paceline.engine.saver import Surroundings
from paceline.errors import ReplicaError


class BetweenSteps:
    def __init__(self, config: EngineConfig, group: Group, objects: PreparedObjects) -> None:
        self._config, self._group, self._objects = config, group, objects
        self.boundary = Boundary(group, start_over=self._start_over)

    def settle(self) -> None:
        """Updates that are under way end, and the model holds the newest weights."""
        step = self._objects.step
        if step is not None and not step.inside_step:
            self.boundary.alike(step.settle)

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
        return next((loader for loader in self._objects.evaluations if loader.real_rows is not None), None)

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
        return JobState(*trained, step, objects.loader, self.job_facts(), self._config.seed)

    def job_facts(self) -> dict[str, Any]:
        loader = self._objects.loader
        return job_facts(self._config, {} if loader is None else loader.source.facts(), self._group.device)

    # -- fewer workers -----------------------------------------------------------------------------------------------

    def _start_over(self) -> None:
        """Workers were lost in something that all do together between two steps."""
        loader = self._objects.loader
        if loader is not None and loader.in_loop:
            loader.start_over()
        else:
            self._group.elastic_parts().recover()

    def go_on_without_the_lost(self) -> None:
        """Those that an asynchronous strategy has lost, in what workers do together."""
        lost = self._group.lost
        if not (named := self._group.go_on_without(lost)):
            return
        for loader in self._objects.evaluations:
            loader.deal_to(self._group.among)
        plural, whose = ("s", "their") if len(lost) > 1 else ("", "its")
        self._group.print(
            f"paceline: going on without worker{plural} {named}; samples left in {whose} lanes are not seen"
        )
