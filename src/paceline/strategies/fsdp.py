"""FSDP: weights, gradients and optimizer state in shards, placed and gathered by torch's `fully_shard`.

    weights shard · gradients shard · optimizer state shard
    before a unit runs, forward and backward: all-gather of its rows       after it: released
    during backward: reduce-scatter per unit                               at step: update the own rows, nothing to send

    worker 0   forward, backward of lane 0 ──┐ a unit's gradient, row by row      owner of row 0: lane 0 + lane 1 …
    worker 1   forward, backward of lane 1 ──┴─► ────────────────────────────►    owner of row 1: lane 0 + lane 1 …

torch never adds gradients: what a unit's backward leaves goes to the owners of rows as a lane of the canonical sum, as
under zero2, and so the bits are those of one process. All workers run equally many items (data/rounds.py), since each
takes part in every gather. What can't be cut into rows is whole on every worker and goes zero2's way all the time, as
everything does where nobody shares: on one worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.collectives.shipments import Shipment, shipments_by_lane
from paceline.errors import LoopError
from paceline.optim.gradient_norm import clip_coefficient, norm_of_blocks
from paceline.sharding.bucket import plan_buckets
from paceline.sharding.flat_layout import Piece
from paceline.sharding.shards import Shards, cut_buckets
from paceline.sharding.slices import Slices
from paceline.strategies.distant_gradient import DistantGradient
from paceline.strategies.fsdp_gradients import UnitGradients
from paceline.strategies.fsdp_models import ShardedModels
from paceline.strategies.fsdp_norms import BlockNorms
from paceline.strategies.fsdp_rows import RowShards
from paceline.strategies.fsdp_units import Units
from paceline.strategies.gradient_buckets import GradientBuckets
from paceline.strategies.meta_weights import fill, module_names
from paceline.strategies.own_pieces import OwnPieces, check_apart, in_logical_order, piece_of
from paceline.strategies.owner_sums import OwnerSums
from paceline.strategies.registry import Job, Registered, register
from paceline.strategies.sharded_strategy import ShardedParts
from paceline.strategies.strategy import Agreement, ItemPlace, Tally, WeightsInTheModel
from paceline.strategies.weight_gather import WeightGather
from paceline.world.lanes import strided_lanes

BUCKETS_UNDER_WAY = 2  # as many full ones, in bytes; then backward waits for the first to arrive


class Fsdp(WeightsInTheModel):
    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        optimizers: Sequence[Optimizer],
        parts: ShardedParts,
        models: ShardedModels | None,
    ) -> None:
        job = parts.job
        self._optimizers, self._parts, self._models = optimizers, parts, models
        whole = [(name, p) for name, p in named if models is None or not models.holds(p)]
        check_apart(whole)
        self._named = whole + [(name, p) for name, p in named if models is not None and models.holds(p)]
        self.parameters: Sequence[Parameter] = [parameter for _, parameter in self._named]
        self.replicas: Sequence[Parameter] = [parameter for _, parameter in whole]
        held = [] if models is None else [parameter for unit in models.units for parameter in unit.parameters]
        self._index = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.frozen: Sequence[Parameter] = [parameter for parameter in held if id(parameter) not in self._index]
        unit_rows = self._trained_rows()
        self._trained_units = len(unit_rows)
        here = proxy(self)  # so that nothing here outlives it
        # They leave after the units: in between, every worker's backward would have to finish both in the same order.
        self._rest = GradientBuckets(
            whole,
            parts.rank,
            cut=lambda specs, order: plan_buckets(specs, order, job.bucket_bytes),
            leave=lambda number, nodes: here._ship_rest(number, nodes),
            overlap=False,
            by_lane=True,
            learns=False,
            lanes_rounded_to=job.precision.lanes_rounded_to,
        )
        uncut = {number for number, (_, p) in enumerate(whole) if not in_logical_order(p)}
        rest = cut_buckets([sums.bucket for sums in self._rest.sums], parts.workers, uncut)
        shards = Shards(parts.workers, (*unit_rows.values(), *rest.buckets))
        self._pieces = OwnPieces(self._named, shards, parts.rank, keep=self._keep)
        self._sums = OwnerSums(parts.exchange, parts.rank, shards.buckets, BUCKETS_UNDER_WAY * job.bucket_bytes)
        self._units: UnitGradients | None = None
        if models is not None:
            rounded = job.precision.lanes_rounded_to
            self._units = UnitGradients(
                models, unit_rows, self._index, self._sums, overlap=job.overlap, rounded_to=rounded
            )
        self._norms = BlockNorms(shards.owners, parts.comm)
        self._distant = [DistantGradient.of(parameter, name, parts.name) for name, parameter in self._named]
        self._gathers: dict[int, WeightGather] = {}
        self._used: Sequence[bool] = [False] * len(self.parameters)  # in the step, by any worker

    @property
    def left_during_backward(self) -> int:
        return 0 if self._units is None else self._units.left_during_backward

    def _trained_rows(self) -> dict[int, RowShards]:
        """By the units' numbers, of those with a parameter that is updated here."""
        units = [] if self._models is None else self._models.units
        rows = {unit.number: unit.rows(self._index) for unit in units}
        return {number: found for number, found in rows.items() if found is not None}

    def _keep(self, parameter: Parameter, piece: Piece) -> Tensor:
        if self._models is None or not self._models.holds(parameter):
            masters = self._parts.masters
            return piece_of(parameter, piece) if masters is None else masters.keep(parameter, piece)
        return self._models.own_rows(parameter)[: piece.elements]

    def agreement(self, round: int) -> Agreement:
        return Agreement.NOW

    # -- one step ----------------------------------------------------------------------------------------------------

    def start_step(self, round: int, plan: SumPlan) -> None:
        for optimizer in self._optimizers:
            self._parts.twins.deal(optimizer, self._pieces)
        if self._parts.masters is not None:
            self._parts.masters.dealt(self.replicas)
            self._parts.masters.look(self._pieces)
        self._rest.start_step(plan)
        self._sums.start(*self._shipments(plan))
        if self._models is not None and self._units is not None:
            self._models.check_untouched()
            self._models.drop_gradients()
            self._models.round_frozen()
            self._units.start_step()
            for piece, rows in self._pieces.tensors.items():
                name, parameter = self._named[piece.parameter]
                if self._models.holds(parameter):
                    self._models.check_in_place(parameter, rows, name)

    def _shipments(self, plan: SumPlan) -> tuple[Sequence[Shipment], int]:
        """What is sent in this step to the owners of rows, and the lowest lane among it."""
        return shipments_by_lane(plan), plan.present[0]

    def start_backward(self, place: ItemPlace, *, last: bool) -> None:
        self._rest.start_backward(place, last=last)
        if self._units is not None:
            self._units.start_backward(place, last=last)

    def finish_backward(self, place: ItemPlace) -> None:
        if self._units is not None:
            self._units.finish_backward(place)
        self._rest.finish_backward(place)
        if place.last_of_lane and place.shadow:
            for number in range(len(self._rest.sums)):
                self._ship_rest(number, {})

    def skip(self, place: ItemPlace) -> None:
        if self._units is not None:
            how = "in the middle of its" if self._units.armed else "without"
            raise LoopError(
                f"lane {place.lane} was left {how} engine.backward(): under strategy={self._parts.name!r} every "
                "worker runs forward and backward of every item, since all gather weights there, and others would wait "
                "for this one. To leave an item out, call engine.backward(loss, weight=0)"
            )
        self._rest.skip(place)

    def _ship_rest(self, number: int, nodes: dict[int, Tensor]) -> None:
        sums = self._rest.sums[number]

        def give_back() -> None:
            for node in nodes.values():
                sums.give_back(node)

        self._sums.ship(self._trained_units + number, nodes, give_back if sums.takes_at_once else lambda: None)

    def used(self) -> Sequence[bool]:
        return [*self._rest.used, *(() if self._units is None else self._units.used[len(self._rest.used) :])]

    # -- the update --------------------------------------------------------------------------------------------------

    def collect(self, tally: Tally) -> None:
        """The own pieces have their gradients; `.grad` of the parameters says that it has none."""
        self._used = tally.used
        for number, total in enumerate(self._totals()):
            if total is None:
                continue
            if tally.scale != 1.0:
                total.mul_(tally.scale)
            self._pieces.take_gradients(number, total, tally.used)
        if not tally.empty:
            for parameter, distant, used in zip(self.parameters, self._distant, tally.used, strict=True):
                parameter.grad = distant if used else None

    def _totals(self) -> list[Tensor | None]:
        """The step's sum of this worker's range of every bucket; None where it owns nothing of one."""
        return [next(iter(held.values()), None) for held in self._sums.roots()]

    def keeps_finite(self) -> bool:
        return self._parts.finite_everywhere(self._pieces.gradients)

    def clip(self, max_norm: float) -> float:
        norm = norm_of_blocks(self._norms.norms({piece: t.grad for piece, t in self._pieces.tensors.items()}))
        gradients = self._pieces.gradients
        if gradients and (norm > max_norm or not math.isfinite(norm)):
            torch._foreach_mul_(gradients, clip_coefficient(norm, max_norm))
        return norm

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        return self._parts.between_hooks(optimizer, self.parameters, lambda: self._update(optimizer))

    def _update(self, optimizer: Optimizer) -> Any:
        twin, masters = self._parts.twins.of(optimizer), self._parts.masters
        result = twin.step(self._used)
        if masters is not None:
            masters.round(twin.pieces, twin.own)
        self._tell_weights(optimizer)
        if masters is not None:
            masters.take_as_right(self.parameters[n] for n in twin.parameters if n < len(self.replicas))
        return result

    def _tell_weights(self, optimizer: Optimizer) -> None:
        """Whole parameters get the others' pieces; rows wait to be gathered, and what was gathered is old."""
        twin, comm = self._parts.twins.of(optimizer), self._parts.comm
        if self._models is not None:
            self._models.release()
        whole = [number for number in twin.parameters if number < len(self.replicas)]
        if comm is not None and whole:
            if id(optimizer) not in self._gathers:
                self._gathers[id(optimizer)] = WeightGather(comm, self.parameters, self._pieces.shards, whole)
            self._gathers[id(optimizer)].run()

    def end_step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self._pieces.drop_gradients()

    # -- between steps -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Nothing is under way between two steps."""
        if self._models is not None:
            self._models.check_untouched()

    def kept_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._parts.twins.kept_state(optimizer)

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        self._parts.twins.load(optimizer, state)

    def whole(self, parameter: Parameter) -> Tensor:
        if self._models is None or not self._models.holds(parameter):
            master = self._parts.twins.master_of(parameter)
            return super().whole(parameter) if master is None else master
        return self._models.whole(parameter)

    def kept(self, parameter: Parameter) -> Tensor | Slices:
        if self._models is None or not self._models.holds(parameter):
            master = self._parts.twins.own_master(parameter)
            return super().kept(parameter) if master is None else master
        return self._models.own(parameter)

    def put(self, parameter: Parameter, whole: Tensor) -> None:
        if self._models is None or not self._models.holds(parameter):
            super().put(parameter, whole)
            self._parts.twins.put_master(parameter, whole)
            self._put_pieces(parameter, whole)
        else:
            self._models.put(parameter, whole)

    def _put_pieces(self, parameter: Parameter, whole: Tensor) -> None:
        """Pieces are there before their optimizers' twins, which know of masters from the first step on."""
        masters = self._parts.masters
        if masters is not None and masters.has(parameter):
            for piece in self._pieces.tensors:
                if self.parameters[piece.parameter] is parameter:
                    masters.take(self._pieces, piece, whole)

    def close(self) -> None:
        self._rest.close()


@dataclass(frozen=True)
class FsdpConfig:
    """`units`: what is gathered together, by class, class name or size; by default modules that repeat in a list."""

    units: Units = None


class FsdpMaker:
    name = "fsdp"

    def __init__(self, config: Any, job: Job) -> None:
        names = module_names(job.models)
        self._gather = gathering(job)
        self._models: ShardedModels | None = None

        def first_weights(part: nn.Module) -> None:
            fill(part, names, seed=job.seed, device=job.device)

        if self._gather is None:
            for model in job.models:
                first_weights(model)
        else:
            self._models = ShardedModels(
                job.models, job.optimizers, self._gather, job.device, config.units, first_weights, job.precision
            )
        held = self._models.holds if self._models is not None else lambda _: False
        self._uncut = [(p, p.dtype) for model in job.models for p in model.parameters() if not held(p)]
        try:
            self._parts = ShardedParts(job, self.name, "per worker", leave=held)
        except BaseException:
            self._take_apart(job)
            raise

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Fsdp:
        return Fsdp(named, optimizers, self._parts, self._models)

    def close(self) -> None:
        self._parts.close()
        if self._models is not None:
            self._models.close()
        if self._gather is not None:
            self._gather.close()

    def dismantle(self) -> None:
        self._parts.dismantle()
        for parameter, dtype in self._uncut:  # which parameters can be cut depends on it
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
        self._take_apart(self._parts.job)

    def _take_apart(self, job: Job) -> None:
        if self._models is not None:
            self._models.dismantle(job.optimizers)
            self._models = None
        if self._gather is not None:
            self._gather.close()


def gathering(job: Job) -> Communicator | None:
    """A group for the gathers alone: they are not to wait in line behind gradients that are under way."""
    if job.comm is None or job.store is None:
        return None
    gathers = Communicator.connect(
        job.comm.world, PrefixStore("fsdp gathers", job.store),
        backend=job.backend, device=job.device, timeout_s=job.timeout_s,
    )  # fmt: skip
    gathers.counts_with(job.comm)
    return gathers


register(
    Registered(
        "fsdp",
        FsdpConfig,
        FsdpMaker,
        rides=strided_lanes,
        in_rounds=True,
        fills_meta=True,
        takes_low_precision=True,
    )
)
