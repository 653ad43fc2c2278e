"""Which gradients an update needs: one strategy for each set of optimizers that act together.

    open the registered strategy ─► assign lanes ─► `of(optimizers)`: their strategy, made anew when parameters change

What concerns all strategies of a job goes through the table: the sum plan of a step's lanes (`plan`), drain, saving and
loading of their state, a parameter's full tensor, close, and teardown when the workers change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import SumPlan
from paceline.engine.replicas import parameter_names
from paceline.errors import ConfigError
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.registry import Chosen, Job, LaneAssignment
from paceline.strategies.strategy import Strategy
from paceline.world.lanes import lanes_of_parts, neighbouring_lanes


class LanePlan(NamedTuple):
    """Who has which of a step's lanes, of those that have samples."""

    sums: SumPlan
    lowest: int  # lane
    owner: int  # the worker that has it
    in_step: bool
    """A worker's last item comes at the same place among the exchanges of all: not where every lane's gradients leave
    by themselves and workers have different numbers of lanes and items."""


class StrategyTable:
    """A loop with one update has one strategy; a GAN's has one more for each of its optimizers."""

    def __init__(self, chosen: Chosen, job: Job) -> None:
        self._all = list(job.optimizers)
        self.loop_end_listeners, self.lost = job.at_loop_end, job.lost
        self._leave_once_a_step = chosen.entry.assign_lanes is neighbouring_lanes
        self._maker = chosen.entry.open(chosen.config, job)
        whole = chosen.assign_lanes(job.lanes // job.parts, job.world.size // job.parts)
        self.assignment: LaneAssignment = self._maker.assignment or lanes_of_parts(whole, job.parts)
        self._own_lanes = () if job.world.is_server else self.assignment[job.comm.rank]
        self._compresses = job.compression is not None
        self._names = parameter_names(job.models)  # it may have put others in their place
        self._known: dict[tuple[int, ...], Strategy] = {}
        try:
            self.of(self._all)
        except BaseException:  # a worker died while it opened, or it refused: leave the models as they were
            self.teardown()
            raise

    def of(self, optimizers: Sequence[Optimizer]) -> tuple[Strategy, bool]:
        """Their strategy, and whether it was made just now: they have none yet, or hold other parameters (unfrozen, a
        new group)."""
        unique = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
        key = tuple(id(optimizer) for optimizer in optimizers)
        known = self._known.get(key)
        if self._compresses and len(optimizers) < len(self._all):
            raise ConfigError(
                "engine.update() with Engine(compression=…): residuals are kept for one update of all parameters in a "
                "step; let one optimizer.step() follow engine.backward(), or leave compression out"
            )
        if known is not None:
            if len(known.parameters) == len(unique) and all(id(p) in unique for p in known.parameters):
                return known, False
            known.close()
        named = [(self.name_of(p, f"unnamed {place}"), p) for place, p in enumerate(unique.values())]
        self._known[key] = self._maker.make(named, optimizers)
        return self._known[key], True

    def plan(self, present: tuple[int, ...]) -> LanePlan:
        plan = _plan(self.assignment, present)
        in_step = self._leave_once_a_step or len({len(lanes) for lanes in plan.holders}) == 1
        owner = next(worker for worker, lanes in enumerate(plan.holders) if present[0] in lanes)
        return LanePlan(plan, present[0], owner, in_step)

    @property
    def lanes_apart(self) -> bool:
        return any(strategy.lanes_apart for strategy in self._known.values())

    @property
    def parameters(self) -> list[Parameter]:
        """That are trained."""
        return list(self.of(self._all)[0].parameters)

    @property
    def replicas(self) -> list[Parameter]:
        """That all workers hold whole and alike, whichever optimizers train them."""
        return list({id(p): p for strategy in self._known.values() for p in strategy.replicas}.values())

    def drain(self) -> None:
        for strategy in self._known.values():
            strategy.drain()

    def local_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._strategy_that_updates(optimizer).local_state(optimizer)

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        self._strategy_that_updates(optimizer).load(optimizer, state, round=round)

    def compression_state(self) -> dict[str, Any]:
        """Of the one strategy that there is where gradients are compressed."""
        return self.of(self._all)[0].compression_state(self._own_lanes) if self._compresses else {}

    def load_compression(self, saved: Mapping[str, Any]) -> None:
        if self._compresses:
            self.of(self._all)[0].load_compression(saved, self._own_lanes)

    def full_tensor(self, weights: Tensor) -> Tensor:
        """A parameter's newest weights; anything else of a model's state is what it is."""
        strategy = self._strategy_of(weights)
        return weights.detach() if strategy is None else strategy.full_tensor(weights)  # type: ignore[arg-type]

    def local_shard(self, weights: Tensor) -> Tensor | LocalShard:
        """What this worker can save of a parameter; anything else of a model's state all workers have."""
        strategy = self._strategy_of(weights)
        return weights.detach() if strategy is None else strategy.local_shard(weights)  # type: ignore[arg-type]

    def load_full(self, weights: Tensor, full: Tensor) -> None:
        strategy = self._strategy_of(weights)
        if strategy is not None:
            strategy.load_full(weights, full)  # type: ignore[arg-type]
        else:
            weights.detach().copy_(full)

    def _strategy_of(self, weights: Tensor) -> Strategy | None:
        return next((s for s in self._known.values() if any(weights is p for p in (*s.parameters, *s.frozen))), None)

    def name_of(self, parameter: Parameter, otherwise: str = "a parameter") -> str:
        return self._names.get(id(parameter), otherwise)

    def close(self) -> None:
        for strategy in self._known.values():
            strategy.close()
        self._maker.close()

    def teardown(self) -> None:
        """The workers have changed: leave models and optimizers as they were found, for another table to begin with."""
        for strategy in self._known.values():
            strategy.close()
        self._maker.teardown()

    def _strategy_that_updates(self, optimizer: Optimizer) -> Strategy:
        return self._known.get((id(optimizer),)) or self.of(self._all)[0]


@lru_cache(maxsize=256)
def _plan(assignment: LaneAssignment, present: tuple[int, ...]) -> SumPlan:
    there = set(present)
    holders = tuple(tuple(lane for lane in lanes if lane in there) for lanes in assignment)
    return SumPlan(present=tuple(sorted(present)), holders=holders)
