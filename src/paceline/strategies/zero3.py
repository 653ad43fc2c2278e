"""ZeRO 3: weights, gradients and optimizer state in shards.

    weights shard · gradients shard · optimizer state shard
    before a unit runs, forward and backward: its weights are gathered, and released after it
    during backward: reduce-scatter per unit       at step: update the own shard, nothing to send

Gradients go as in zero2, lane by lane to the owners of ranges. How weights come depends on where the workers are:

    workers                      weights
    all on one host, which can   once, in shared memory: every worker reads them where they lie, and updates its pieces.
    share memory                 There is nothing to gather; a worker's share is 1/N all the same
    others                       each has its range of every bucket; a unit is gathered from the owners when it is used
    one                          in the model

Weights are cut into shards in `prepare`, those of a parameter that an optimizer gets later when it gets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import SumPlan
from paceline.errors import ConfigError
from paceline.sharding.flat_layout import Piece
from paceline.sharding.shards import Shards
from paceline.sharding.slices import Slices
from paceline.sharding.unit import Classes
from paceline.strategies.host_weights import HostWeights, Weights
from paceline.strategies.meta_weights import fill, module_names
from paceline.strategies.own_pieces import OwnPieces, check_apart, extent, in_logical_order
from paceline.strategies.registry import Job, Registered, register
from paceline.strategies.saved_weights import SavedWeights
from paceline.strategies.sharded_strategy import ShardedParts
from paceline.strategies.strategy import ItemPlace
from paceline.strategies.unit_weights import UnitWeights
from paceline.strategies.zero2 import Zero2
from paceline.world.lanes import strided_lanes


@dataclass(frozen=True)
class Zero3Config:
    """`weights`: one copy for all workers of a host, the default where they share memory, or each worker has its shard.

    `units`: classes of modules (or their names) that are gathered whole; by default modules of at most a bucket.
    """

    weights: Literal["per host", "in shards"] | None = None
    units: Classes | type | str | None = None

    @property
    def classes(self) -> Classes | None:
        return self.units if isinstance(self.units, tuple) or self.units is None else (self.units,)


class Zero3(Zero2):
    """With weights in shards."""

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        optimizers: Sequence[Optimizer],
        parts: ShardedParts,
        unit_weights: Sequence[UnitWeights],
    ) -> None:
        self._unit_weights = unit_weights
        parameters = [parameter for _, parameter in named]
        self._shards = Shards(parts.workers, tuple(b for some in unit_weights for b in some.buckets_of(parameters)))
        buckets = tuple(shards.bucket for shards in self._shards.buckets)
        super().__init__(named, optimizers, parts, cut=lambda specs, order: buckets)

    @property
    def replicas(self) -> Sequence[Parameter]:
        return ()

    def _deal(self) -> OwnPieces:
        return OwnPieces(self._named, self._shards, self._parts.rank, keep=self._keep)

    def _keep(self, parameter: Parameter, piece: Piece) -> Tensor:
        masters = self._parts.masters
        has_master = masters is not None and masters.has(parameter)
        return masters.keep(parameter, piece) if masters and has_master else self._part(parameter, piece)

    def _part(self, parameter: Parameter, piece: Piece) -> Tensor:
        return self._of(parameter).keep(parameter, piece)

    def _of(self, parameter: Parameter) -> UnitWeights:
        return next(some for some in self._unit_weights if some.knows(parameter))

    def start_step(self, round: int, plan: SumPlan) -> None:
        super().start_step(round, plan)
        for some in self._unit_weights:
            some.rest(at_rest=False)

    def end_step(self) -> None:
        super().end_step()
        for some in self._unit_weights:
            some.rest(at_rest=True)

    def finish_backward(self, place: ItemPlace) -> None:
        super().finish_backward(place)
        self._item_ended()

    def skip(self, place: ItemPlace) -> None:
        super().skip(place)
        self._item_ended()

    def _item_ended(self) -> None:
        for some in self._unit_weights:
            some.item_ended()

    def _update(self, optimizer: Optimizer) -> Any:
        if self._parts.comm is not None:
            self._parts.comm.barrier()  # until now somebody may look at weights, and gets those before the update
        for some in self._unit_weights:
            some.let_all_go()
        twin = self._parts.twins.of(optimizer)
        result = twin.step(self._used)
        if self._parts.masters is not None:
            self._parts.masters.round(twin.pieces, twin.own, into=self._part)
        for some in self._unit_weights:
            some.updated()
        return result

    def whole(self, parameter: Parameter) -> Tensor:
        self._of(parameter).check(parameter)
        return super().whole(parameter)

    def kept(self, parameter: Parameter) -> Tensor | Slices:
        self._of(parameter).check(parameter)
        master = self._parts.twins.own_master(parameter)
        return self._of(parameter).own(parameter) if master is None else master

    def put(self, parameter: Parameter, whole: Tensor) -> None:
        self._of(parameter).put(parameter, whole)
        self._parts.twins.put_master(parameter, whole)


def _kept(config: Zero3Config) -> Weights | None:
    if config.weights not in (None, "per host", "in shards"):
        raise ConfigError(f"weights={config.weights!r} is not known; choose 'per host' or 'in shards'")
    return "per worker" if config.weights == "in shards" else config.weights


class Zero3Maker:
    def __init__(self, config: Zero3Config, job: Job) -> None:
        kept = _kept(config)
        if (kept != "per worker" and HostWeights.possible(job.comm)) or job.comm is None or job.precision.is_low:
            names = module_names(job.models)  # else unit by unit
            for model in job.models:
                fill(model, names, seed=job.seed, device=job.device)
        self._parts = ShardedParts(job, "zero3", kept)
        self._classes = config.classes
        self._unit_weights: list[UnitWeights] = []
        self._saved: SavedWeights | None = None
        if job.comm is not None and self._parts.weights is None:
            self._saved = SavedWeights(self._unit_weights)
            everything = [
                p for optimizer in job.optimizers for group in optimizer.param_groups for p in group["params"]
            ]
            self._shard(everything)

    def _shard(self, parameters: Sequence[Parameter]) -> None:
        """All workers call it, with the same: also parameters that are frozen now, or that an optimizer got later."""
        unique = list({id(parameter): parameter for parameter in parameters}.values())
        job, number = self._parts.job, len(self._unit_weights)
        check_shardable(job, unique)
        self._unit_weights.append(UnitWeights(job, unique, self._classes if number == 0 else None, number))

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Zero2:
        if not self._unit_weights:
            return Zero2(named, optimizers, self._parts)
        new = [parameter for _, parameter in named if not any(some.knows(parameter) for some in self._unit_weights)]
        if new:
            self._shard(new)
        return Zero3(named, optimizers, self._parts, self._unit_weights)

    def close(self) -> None:
        if self._saved is not None:
            self._saved.close()
        for some in self._unit_weights:
            some.close()
        self._parts.close()


def check_shardable(job: Job, parameters: Sequence[Parameter]) -> None:
    check_apart([(job.names.get(id(parameter), "unnamed"), parameter) for parameter in parameters])
    for parameter in parameters:
        if not in_logical_order(parameter) and extent(parameter) != parameter.numel():
            raise ConfigError(
                f"strategy='zero3': parameter {job.names.get(id(parameter))!r} has gaps between its elements in memory "
                "and can't be gathered; make it contiguous(), or use strategy='zero2'"
            )
    if any(type(module).__name__ == "OptimizedModule" for model in job.models for module in model.modules()):
        raise ConfigError(
            "strategy='zero3' gathers weights in the modules' hooks, which torch.compile does not see; give "
            "engine.prepare() the model as it was before torch.compile, or use strategy='zero2'"
        )


register(
    Registered(
        "zero3",
        Zero3Config,
        Zero3Maker,
        examples=(Zero3Config(weights="in shards"),),
        rides=strided_lanes,
        takes_low_precision=True,
        fills_meta=True,
    )
)
