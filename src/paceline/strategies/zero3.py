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

With offload="parameters" the second row holds for any number of workers, and shards lie in the host's memory: there the
update changes them, and a unit is copied from there when it is used. In fp32 a shard is its own master. With any
offload the sum of a bucket leaves for the host when its last lane has come, while backward goes on.

Weights are cut into shards in `prepare`, those of a parameter that an optimizer gets later when it gets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.errors import ConfigError
from paceline.optim.offload import HOST, PARAMETERS, Offload
from paceline.sharding.flat_layout import Piece
from paceline.sharding.shards import Shards
from paceline.sharding.slices import Slices
from paceline.sharding.unit import Classes
from paceline.strategies.compiled_model import check_not_compiled
from paceline.strategies.host_weights import HostWeights, Weights
from paceline.strategies.meta_weights import fill, module_names
from paceline.strategies.own_pieces import OwnPieces, check_apart, extent, in_logical_order
from paceline.strategies.registry import Job, Registered, register
from paceline.strategies.saved_weights import SavedWeights
from paceline.strategies.sharded_strategy import ShardedParts
from paceline.strategies.strategy import ItemPlace, Tally
from paceline.strategies.twins import Twin
from paceline.strategies.unit_weights import UnitWeights
from paceline.strategies.zero2 import Zero2, _Departed
from paceline.world.lanes import strided_lanes


@dataclass(frozen=True)
class Zero3Config:
    """`weights`: one copy for all workers of a host, the default where they share memory, or each worker has its shard.

    `units`: classes of modules (or their names) that are gathered whole; by default modules of at most a bucket.
    """

    weights: Literal["per host", "in shards"] | None = None
    units: Classes | type[nn.Module] | str | None = None

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
        self._leaving: int | None = None
        parameters = [parameter for _, parameter in named]
        self._shards = Shards(parts.workers, tuple(b for some in unit_weights for b in some.buckets_of(parameters)))
        buckets = tuple(shards.bucket for shards in self._shards.buckets)
        super().__init__(named, optimizers, parts, cut=lambda specs, order: buckets)
        trained = {id(parameter) for parameter in parameters}
        self.frozen = [p for some in unit_weights for p in some.parameters if id(p) not in trained]
        self._trained = frozenset(trained)

    @property
    def replicas(self) -> Sequence[Parameter]:
        return ()

    def _deal(self) -> OwnPieces:
        return OwnPieces(self._named, self._shards, self._parts.rank, keep=self._keep)

    def _keep(self, parameter: Parameter, piece: Piece) -> Tensor:
        masters = self._parts.masters if self._has_master(parameter) else None
        return self._part(parameter, piece) if masters is None else masters.keep(parameter, piece)

    def _has_master(self, parameter: Parameter) -> bool:
        """Besides its shard: one in full precision that lies on the host needs none."""
        masters = self._parts.masters
        if masters is None or not masters.has(parameter):
            return False
        return not self._of(parameter).on_host or masters.dtype_of(parameter) != parameter.dtype

    def _part(self, parameter: Parameter, piece: Piece) -> Tensor:
        return self._of(parameter).mine.keep(parameter, piece)

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

    # -- sums on their way to the host -------------------------------------------------------------------------------

    def _settle_in(self, pieces: OwnPieces) -> None:
        if self._parts.offload is None:
            super()._settle_in(pieces)
        else:
            self._sums = [torch.empty(0)] * len(pieces.shards.buckets)  # on the device as long as lanes come

    def _leave(self, number: int, nodes: dict[int, Tensor]) -> None:
        if self._parts.offload is not None and not self._shipped[number]:
            shards = self._shards.buckets[number]
            dtype, device = shards.bucket.dtype, shards.bucket.device
            self._sums[number] = torch.empty(shards.width(self._parts.rank), dtype=dtype, device=device)
        self._leaving = number  # what it sends now is not under way before those ahead of it have arrived
        try:
            super()._leave(number, nodes)
        finally:
            self._leaving = None

    def _arrived(self, departed: _Departed) -> None:
        super()._arrived(departed)
        number, offload = departed.bucket, self._parts.offload
        others = (self._leaving, *(other.bucket for other in self._under_way))
        is_last = self._shipped[number] == len(self._shipments) and number not in others
        if offload is not None and is_last:
            self._held[number] = {node: offload.land(number, total) for node, total in self._held[number].items()}
            self._sums[number] = torch.empty(0)

    def collect(self, tally: Tally) -> None:
        if self._parts.offload is not None:
            self._totals()
            if tally.scale != 1.0:
                self._parts.offload.wait()  # they are multiplied where they are
        super().collect(tally)

    # -- the update --------------------------------------------------------------------------------------------------

    def _update(self, optimizer: Optimizer) -> Any:
        if self._parts.comm is not None:
            self._parts.comm.barrier()  # until now somebody may look at weights, and gets those before the update
        for some in self._unit_weights:
            some.make_way()
        twin, offload = self._parts.twins.of(optimizer), self._parts.offload
        if offload is None:
            result = twin.step(self._used)
            self._round(twin, twin.own)
        else:
            result = twin.step(self._used, self._turns(twin, offload))
            offload.finish()
        for some in self._unit_weights:
            some.updated()
        return result

    def _turns(self, twin: Twin, offload: Offload) -> Iterator[list[Piece]]:
        own = set(twin.own)
        for number, shards in enumerate(twin.pieces.shards.buckets):
            pieces = [owned.piece for owned in shards.pieces(self._parts.rank) if owned.piece in own]
            if pieces:
                offload.wait(number)
                yield pieces
                self._round(twin, pieces)

    def _round(self, twin: Twin, pieces: Sequence[Piece]) -> None:
        """Into the shards, wherever they are."""
        if self._parts.masters is not None:
            changed = [piece for piece in pieces if self._has_master(twin.pieces.parameters[piece.parameter])]
            self._parts.masters.round(twin.pieces, changed)

    # -- between steps -----------------------------------------------------------------------------------------------

    def whole(self, parameter: Parameter) -> Tensor:
        self._of(parameter).check(parameter)
        whole = super().whole(parameter) if self._is_trained(parameter) else parameter.detach()
        self._of(parameter).check_here(parameter)
        return whole

    def kept(self, parameter: Parameter) -> Tensor | Slices:
        weights, twins, masters = self._of(parameter), self._parts.twins, self._parts.masters
        weights.check(parameter)
        if masters is None or not self._has_master(parameter) or not self._is_trained(parameter):
            return weights.mine.of(parameter)
        if twins.has_dealt(parameter):
            return twins.own_master(parameter) or weights.mine.of(parameter)
        mine = [(piece.start, masters.keep(parameter, piece)) for piece in weights.mine.pieces_of(parameter)]
        return Slices.of(parameter.shape, masters.dtype_of(parameter), mine)

    def put(self, parameter: Parameter, whole: Tensor) -> None:
        self._of(parameter).put(parameter, whole)
        if self._has_master(parameter) and self._is_trained(parameter):
            self._parts.twins.put_master(parameter, whole)

    def _is_trained(self, parameter: Parameter) -> bool:
        """Or was, by another set of optimizers; what never was has no master."""
        return id(parameter) in self._trained or self._parts.twins.has_dealt(parameter)


def _kept(config: Zero3Config) -> Weights | None:
    if config.weights not in (None, "per host", "in shards"):
        raise ConfigError(f"weights={config.weights!r} is not known; choose 'per host' or 'in shards'")
    return "per worker" if config.weights == "in shards" else config.weights


class Zero3Maker:
    """`everyone`: all workers of the job, where `job.comm` are those of a group that shares the state."""

    def __init__(
        self, config: Zero3Config, job: Job, name: str = "zero3", everyone: Communicator | None = None
    ) -> None:
        kept, self._on_host = _kept(config), job.facts.get("offload") == PARAMETERS
        if self._on_host and kept == "per host":
            raise ConfigError(
                "offload='parameters' with weights='per host': each worker has a shard of its own on "
                "its host; choose weights='in shards'"
            )
        kept = "per worker" if self._on_host else kept
        in_shards = self._on_host or (
            job.comm is not None and (kept == "per worker" or not HostWeights.possible(job.comm))
        )
        if job.precision.is_low or not in_shards:
            names = module_names(job.models)  # else unit by unit
            for model in job.models:
                fill(model, names, seed=job.seed, device=HOST if self._on_host else job.device)
            if self._on_host:
                _hold_on_host(job)
        self._parts = ShardedParts(job, name, kept, everyone)
        self._classes = config.classes
        self._unit_weights: list[UnitWeights] = []
        self._saved: SavedWeights | None = None
        if in_shards:
            if self._parts.masters is not None:
                self._parts.masters.rounded = self._own_piece
            self._saved = SavedWeights(self._unit_weights)
            everything = [
                p for optimizer in job.optimizers for group in optimizer.param_groups for p in group["params"]
            ]
            try:
                self._shard(everything)
            except BaseException:  # as when a worker dies while all of them begin
                self.dismantle()
                raise

    def _own_piece(self, parameter: Parameter, piece: Piece) -> Tensor:
        return next(some for some in self._unit_weights if some.knows(parameter)).mine.keep(parameter, piece)

    def _shard(self, parameters: Sequence[Parameter]) -> None:
        """All workers call it, with the same: also parameters that are frozen now, or that an optimizer got later."""
        unique = list({id(parameter): parameter for parameter in parameters}.values())
        job, number = self._parts.job, len(self._unit_weights)
        check_shardable(job, unique, self._parts.name)
        classes = self._classes if number == 0 else None
        self._unit_weights.append(UnitWeights(job, unique, classes, number, on_host=self._on_host))

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Zero2:
        if not self._unit_weights:
            return self._in_the_model(named, optimizers)
        new = [parameter for _, parameter in named if not any(some.knows(parameter) for some in self._unit_weights)]
        if new:
            self._shard(new)
        return self._in_shards(named, optimizers)

    def _in_the_model(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Zero2:
        return Zero2(named, optimizers, self._parts)

    def _in_shards(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Zero3:
        return Zero3(named, optimizers, self._parts, self._unit_weights)

    def close(self) -> None:
        if self._saved is not None:
            self._saved.close()
        for some in self._unit_weights:
            some.close()
        self._parts.close()

    def dismantle(self) -> None:
        if self._saved is not None:
            self._saved.close()
        for some in self._unit_weights:
            some.dismantle()
        self._parts.dismantle()


def _hold_on_host(job: Job) -> None:
    """What optimizers hold, so that masters are made there when it is lowered; all the rest is used on the device."""
    held = {id(p) for optimizer in job.optimizers for group in optimizer.param_groups for p in group["params"]}
    for tensor in (t for model in job.models for t in (*model.parameters(), *model.buffers())):
        tensor.data = tensor.data.to(HOST if id(tensor) in held else job.device)


def check_shardable(job: Job, parameters: Sequence[Parameter], strategy: str) -> None:
    check_apart([(job.names.get(id(parameter), "unnamed"), parameter) for parameter in parameters])
    for parameter in parameters:
        if not in_logical_order(parameter) and extent(parameter) != parameter.numel():
            raise ConfigError(
                f"strategy={strategy!r}: parameter {job.names.get(id(parameter))!r} has gaps between its elements in "
                "memory and can't be gathered; make it contiguous(), or use strategy='zero2'"
            )
    check_not_compiled(job.models)


register(
    Registered(
        "zero3",
        Zero3Config,
        Zero3Maker,
        examples=(Zero3Config(weights="in shards"),),
        rides=strided_lanes,
        takes_low_precision=True,
        takes_offload=True,
        fills_meta=True,
    )
)
