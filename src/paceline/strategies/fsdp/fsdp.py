"""FSDP: weights, gradients and optimizer state in shards; zero2 whose weights are gathered when a unit uses them.

    weights shard · gradients shard · optimizer state shard
    before a unit runs, forward and backward: its weights are gathered, and released after it
    during backward: reduce-scatter per unit       at step: update the own shard, nothing to send

This is the one mechanism for weights in shards (`fsdp/weights.py`): fsdp has it wherever the workers are, zero3 where
they share no memory, hybrid inside each host. Weights are cut into shards in `prepare`, those of a parameter that an
optimizer gets later when it gets it. With offload="parameters" shards lie in the host's memory: there the update
changes them, and a unit is copied from there when it is used. In fp32 a shard is its own master. With any offload the
sum of a bucket leaves for the host when its last lane has come, while backward goes on.

Why not torch's `fully_shard`: it places and gathers weights by hooks on what modules return, and loses them where a
module returns a view or its output is changed in place; every worker has to run the same units in the same order, so
experts that a micro-batch skips can't be units; and its shards are rows, whose ends fused optimizers round otherwise.
Here a saved weight is gathered when autograd asks for it, and a worker asks for a unit whenever it needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.optim.offload import HOST, PARAMETERS
from paceline.sharding.bucket import Shards
from paceline.sharding.flat_layout import Piece
from paceline.sharding.local_shard import LocalShard
from paceline.sharding.unit import Classes
from paceline.strategies.fsdp.weights import WeightsInShards, frozen_parameters, held_parameters
from paceline.strategies.meta_device import fill, fill_modules, module_names
from paceline.strategies.registry import Job, Maker, Registered, register
from paceline.strategies.strategy import ItemPlace, Strategy, Tally
from paceline.strategies.zero.sharded import ShardedMaker, ShardedParts, full_weights
from paceline.strategies.zero.sharded_optimizer import LocalPieces
from paceline.strategies.zero.weights import ModelWeights, Weights, WeightsPerHost
from paceline.strategies.zero.zero2 import Departed, Zero2
from paceline.torch_compat import eval_frame_callback, plain_torch_function, require, without_modes
from paceline.world.lanes import strided_lanes

Units = Classes | type[nn.Module] | str | None
_PARTS = 32  # into which a model is cut that is filled into shared memory: each is a piece of that
NEEDED = plain_torch_function, without_modes, eval_frame_callback  # of torch


class Fsdp(Zero2):
    def __init__(
        self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer], parts: ShardedParts
    ) -> None:
        assert isinstance(parts.weights, WeightsInShards)
        parts.weights.hold(named)
        self._weights = weights = parts.weights.all
        self._weights_of = parts.weights.of
        self._leaving: int | None = None
        parameters = [parameter for _, parameter in named]
        self._shards = Shards(parts.workers, tuple(b for some in weights for b in some.buckets_of(parameters)))
        buckets = tuple(shards.bucket for shards in self._shards.buckets)
        super().__init__(named, optimizers, parts, cut=lambda specs, order: buckets)
        self._trained = frozenset(id(parameter) for parameter in parameters)
        self.frozen = [p for some in weights for p in some.parameters if id(p) not in self._trained]

    def _assigned_pieces(self) -> LocalPieces:
        return LocalPieces(self._named, self._shards, self._parts.rank, self._values)

    def _values(self, parameter: Parameter, piece: Piece) -> Tensor:
        if self._has_master(parameter):
            return self._parts.masters.of_piece(parameter, piece)
        return self._weights_of(parameter).mine.of_piece(parameter, piece)

    def _has_master(self, parameter: Parameter) -> bool:
        """Besides its shard: one in full precision that lies on the host needs none."""
        masters = self._parts.masters
        if not masters.has(parameter):
            return False
        return not self._weights_of(parameter).on_host or masters.dtype_of(parameter) != parameter.dtype

    def start_step(self, round: int, plan: SumPlan) -> None:
        super().start_step(round, plan)
        for some in self._weights:
            some.rest(at_rest=False)

    def end_step(self) -> None:
        super().end_step()
        for some in self._weights:
            some.rest(at_rest=True)

    def finish_backward(self, place: ItemPlace) -> None:
        super().finish_backward(place)
        for some in self._weights:
            some.item_ended()

    def skip(self, place: ItemPlace) -> None:
        super().skip(place)
        for some in self._weights:
            some.item_ended()

    # -- sums on their way to the host -------------------------------------------------------------------------------

    def _prepare_sums(self, pieces: LocalPieces) -> None:
        if self._parts.offloads:
            self._sums = [torch.empty(0)] * len(pieces.shards.buckets)  # on the device as long as lanes come
        else:
            super()._prepare_sums(pieces)

    def _leave(self, number: int, nodes: dict[int, Tensor]) -> None:
        if self._parts.offloads and not self._sent[number]:
            shards = self._shards.buckets[number]
            dtype, device = shards.bucket.dtype, shards.bucket.device
            self._sums[number] = torch.empty(shards.width(self._parts.rank), dtype=dtype, device=device)
        self._leaving = number  # what it sends now is not under way before those ahead of it have arrived
        try:
            super()._leave(number, nodes)
        finally:
            self._leaving = None

    def _arrived(self, departed: Departed) -> None:
        super()._arrived(departed)
        if not self._parts.offloads:
            return
        number, offload = departed.bucket, self._parts.offload
        others = (self._leaving, *(other.bucket for other in self._under_way))
        if self._sent[number] == len(self._scatter_plans) and number not in others:
            self._held[number] = {node: offload.land(number, total) for node, total in self._held[number].items()}
            self._sums[number] = torch.empty(0)

    def collect(self, tally: Tally) -> None:
        if self._parts.offloads:
            self._totals()
            if tally.scale != 1.0:
                self._parts.offload.wait()  # they are multiplied where they are
        super().collect(tally)

    def _round(self, pieces: Sequence[Piece]) -> None:
        """Into the shards, wherever they are."""
        super()._round([piece for piece in pieces if self._has_master(self.parameters[piece.parameter])])

    # -- between steps -----------------------------------------------------------------------------------------------

    def full_tensor(self, parameter: Parameter) -> Tensor:
        weights = self._weights_of(parameter)
        weights.check(parameter)
        full = super().full_tensor(parameter) if self._is_trained(parameter) else parameter.detach()
        weights.check_here(parameter)
        return full

    def local_shard(self, parameter: Parameter) -> Tensor | LocalShard:
        weights, optimizers, masters = self._weights_of(parameter), self._parts.optimizers, self._parts.masters
        weights.check(parameter)
        if not self._has_master(parameter) or not self._is_trained(parameter):
            return weights.mine.shard_of(parameter)
        if optimizers.has_owners(parameter):
            return optimizers.local_master(parameter) or weights.mine.shard_of(parameter)
        mine = [(piece.start, masters.of_piece(parameter, piece)) for piece in weights.mine.pieces_of(parameter)]
        return LocalShard.of(parameter.shape, masters.dtype_of(parameter), mine)

    def load_full(self, parameter: Parameter, full: Tensor) -> None:
        self._weights_of(parameter).load_full(parameter, full)
        if self._has_master(parameter) and self._is_trained(parameter):
            self._parts.optimizers.load_master(parameter, full)

    def _is_trained(self, parameter: Parameter) -> bool:
        """Or was, by another set of optimizers; what never was has no master."""
        return id(parameter) in self._trained or self._parts.optimizers.has_owners(parameter)


# -- how it is chosen --------------------------------------------------------------------------------------------------


def open_weights(
    job: Job,
    name: str,
    wanted: Weights | None,
    units: Units,
    *,
    shard_frozen: bool = True,
    everyone: Communicator | None = None,
    whole: Callable[..., Strategy] = Zero2,
    sharded: Callable[..., Strategy] = Fsdp,
) -> Maker:
    """Weights in shards where there are several workers and each wants its own part, or the shards are on the host.

    Otherwise they are in the model, or once for all workers of the host: that is zero2. `whole` and `sharded` make the
    strategies of the two cases; `everyone` are all workers of the job, where `job.comm` are those that share weights.
    """
    on_host = job.facts.get("offload") == PARAMETERS
    wanted = "per worker" if on_host else wanted
    in_shards = on_host or (job.comm.size > 1 and (wanted == "per worker" or not WeightsPerHost.possible(job.comm)))
    per_host = not in_shards and wanted != "per worker" and WeightsPerHost.possible(job.comm)
    if job.precision.is_low or not (in_shards or per_host):
        names = module_names(job.models, job.given)  # else unit by unit
        for model in job.models:
            fill(model, names, seed=job.seed, device=HOST if on_host else job.device)
        if on_host:
            _hold_on_host(job, shard_frozen)
    if not in_shards:
        filled = partial(_filled_in_parts, job) if per_host else full_weights
        return ShardedMaker(ShardedParts(job, name, filled(wanted), everyone), whole)
    require(*NEEDED)
    classes = units if isinstance(units, tuple) or units is None else (units,)
    classes = (*(classes or ()), *job.whole) or None

    def weights(parts: ShardedParts) -> WeightsInShards:
        try:
            return WeightsInShards(job, name, classes, parts.masters, on_host=on_host, frozen=shard_frozen)
        except BaseException:  # as when a worker dies while all of them begin
            parts.teardown()
            raise

    return ShardedMaker(ShardedParts(job, name, weights, everyone), sharded)


def _filled_in_parts(job: Job, wanted: Weights | None) -> Callable[[ShardedParts], ModelWeights]:
    """Of a model on the meta device some modules at a time: what a worker fills goes to the host's one copy."""

    def weights(parts: ShardedParts) -> ModelWeights:
        there = full_weights(wanted)(parts)
        try:
            names, trained = module_names(job.models, job.given), _trained(job)
            for modules in _in_parts(job):
                fill_modules(modules, names, seed=job.seed, device=job.device)
                there.hold([(name, parameter) for name, parameter in trained if not parameter.is_meta])
        except BaseException:  # as when a worker dies while all of them begin
            there.teardown()
            raise
        return there

    return weights


def _in_parts(job: Job) -> Iterator[list[nn.Module]]:
    """All modules, in lists whose parameters take a bucket each, or a few hundredths of the model."""
    everything = [module for model in job.models for module in model.modules()]
    sizes = [sum(p.nbytes for p in module.parameters(recurse=False) if p.is_meta) for module in everything]
    if not any(tensor.is_meta for model in job.models for tensor in (*model.parameters(), *model.buffers())):
        return
    most, part, size = max(job.bucket_bytes, sum(sizes) // _PARTS), list[nn.Module](), 0
    for module, bytes_ in zip(everything, sizes, strict=True):
        part, size = [*part, module], size + bytes_
        if size >= most:
            yield part
            part, size = [], 0
    yield part


def _trained(job: Job) -> list[tuple[str, Parameter]]:
    held = {id(p): p for o in job.optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
    return [(job.names.get(number, "unnamed"), parameter) for number, parameter in held.items()]


def _hold_on_host(job: Job, shard_frozen: bool) -> None:
    """What is cut into shards, so that masters are made there when it is lowered; the rest is used on the device."""
    held = {id(p) for p in held_parameters(job) + (frozen_parameters(job) if shard_frozen else [])}
    for tensor in (t for model in job.models for t in (*model.parameters(), *model.buffers())):
        tensor.data = tensor.data.to(HOST if id(tensor) in held else job.device)


@dataclass(frozen=True)
class FsdpConfig:
    """`units`: classes of modules (or their names) that are gathered whole; by default modules of at most a bucket.

    `shard_frozen`: parameters of no optimizer are in shards too, and can't be changed in place.
    """

    units: Units = None
    shard_frozen: bool = True


def _open(config: FsdpConfig, job: Job) -> Maker:
    return open_weights(job, "fsdp", "per worker", config.units, shard_frozen=config.shard_frozen)


register(
    Registered(
        "fsdp",
        FsdpConfig,
        _open,
        assign_lanes=strided_lanes,
        takes_low_precision=True,
        takes_offload=True,
        passes_lanes_on=True,
        fills_meta=True,
    )
)
