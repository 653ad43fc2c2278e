"""A sharded update, which zero1, zero2 and weights in shards have in common: owners of ranges sum, clip and update.

    backward ─► buckets leave ─► the owner of a range adds it up ─► its pieces' gradients       .grad is nowhere whole
    clip        norms of blocks are sent to all: the norm of the whole, and its bits
    apply       each worker updates its pieces ─► every worker gets all weights, or they lie where all can read

How gradients leave (a worker's roots once a step, or lane by lane) is what zero1 and zero2 differ in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.collectives.gradient_exchange import GradientExchange
from paceline.errors import ConfigError
from paceline.optim.gradient_norm import all_finite, clip_, counted_norms, norm_of_blocks
from paceline.optim.offload import HOST, Offload
from paceline.optim.range_optimizer import check_elementwise, check_thread_cuts
from paceline.sharding.bucket import Shards, cut_buckets, plan_buckets
from paceline.sharding.flat_layout import Piece, in_logical_order
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.buckets import BufferPool, Cut, GradientBuckets, GradientPlaceholder, InBuckets, drop_gradients
from paceline.strategies.compressed.gradients import compressed_gradients
from paceline.strategies.master_weights import MasterShards
from paceline.strategies.registry import Job, Maker
from paceline.strategies.strategy import Strategy, Tally
from paceline.strategies.zero.sharded_optimizer import (
    LocalPieces,
    OptimizerShard,
    ShardedOptimizers,
    check_apart,
    remember_first_states,
)
from paceline.strategies.zero.weights import ModelWeights, Weights, where_weights_go
from paceline.torch_compat import STEP_WAS_CALLED, step_post_hooks, step_pre_hooks

_FOUND_FIT: WeakSet[Optimizer] = WeakSet()  # trying one takes 20 ms, which a job whose workers change has spent


class _NoOffload:
    """Gradients are updated where they are: the `Offload` of a job without one."""

    def land(self, number: int, total: Tensor) -> Tensor:
        return total

    def wait(self, number: int | None = None) -> None: ...
    def finish(self) -> None: ...
    def forget(self) -> None: ...


class ShardedParts:
    """What the sharded strategies of one job share."""

    def __init__(
        self,
        job: Job,
        name: str,
        weights: Callable[[ShardedParts], ModelWeights],
        everyone: Communicator | None = None,
    ) -> None:
        """`everyone`: all workers of the job, where `job.comm` are those of a group that shares the state.

        `weights` says where they go; it is called when the rest is made, and models are in their precision.
        """
        self.job, self.name = job, name
        if job.algorithm is not None:
            raise ConfigError(
                f"strategy={name!r} with algorithm={job.algorithm!r}: its sums stay with the owners of ranges, for "
                "which there is one way; leave algorithm out, or choose strategy='ddp' to train over it"
            )
        for optimizer in job.optimizers:
            remember_first_states(optimizer)
            if not job.world.is_elastic or optimizer not in _FOUND_FIT:
                check_elementwise(optimizer, HOST if job.offload else job.device)
                check_thread_cuts(optimizer)
                _FOUND_FIT.add(optimizer)
        self.comm = job.comm
        self.everyone = everyone or job.comm
        self.rank, self.workers = job.comm.rank, job.comm.size
        self.exchange = GradientExchange(job.comm, "exact")
        offload = Offload(job.device) if job.offload else None
        self.offloads = offload is not None
        self.offload: Offload | _NoOffload = offload or _NoOffload()
        self.masters = MasterShards(job, offload)
        self.optimizers = ShardedOptimizers(job.comm, name, self.masters)
        self.weights = ModelWeights()  # until they are somewhere
        self.weights = weights(self)

    def finite_everywhere(self, gradients: Sequence[Tensor]) -> bool:
        """Of all workers, each of which has its own."""
        flags, handle = self.comm.all_gather(torch.tensor([all_finite(gradients)], dtype=torch.uint8))
        handle.wait()
        return self.job.peers.all_true(bool(flags.all()))

    def close(self) -> None:
        self.weights.close()
        self.optimizers.close()
        self.masters.close()
        self.exchange.close()

    def teardown(self) -> None:
        """In place of `close`, when the group is over: no worker has all of the state, so it comes from elsewhere."""
        drop_gradients(self.job.optimizers)
        self.offload.finish()
        self.offload.forget()
        self.optimizers.teardown()
        self.weights.teardown()
        self.masters.teardown()
        self.exchange.close()


def full_weights(wanted: Weights | None) -> Callable[[ShardedParts], ModelWeights]:
    """In every worker's model, or once for all workers of the host."""
    return lambda parts: where_weights_go(wanted, parts.comm, parts.name)


class ShardedMaker(Maker):
    """Strategies of one kind, made of (named parameters, optimizers, parts)."""

    def __init__(self, parts: ShardedParts, kind: Callable[..., Strategy]) -> None:
        self._parts, self._kind = parts, kind

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Strategy:
        return self._kind(named, optimizers, self._parts)

    def close(self) -> None:
        self._parts.close()

    def teardown(self) -> None:
        self._parts.teardown()


class ShardedStrategy(InBuckets):
    """Subclasses say how buckets leave (`_leave`) and hand the finished sums of the own ranges over (`_totals`)."""

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        optimizers: Sequence[Optimizer],
        parts: ShardedParts,
        *,
        by_lane: bool = False,
        pool: BufferPool | None = None,
        cut: Cut | None = None,
    ) -> None:
        """`cut` makes the buckets, for good; by default they are rebuilt in the order in which gradients come."""
        check_apart(named)
        parts.weights.hold(named)
        job = parts.job
        self._named, self._optimizers, self._parts = list(named), optimizers, parts
        self._compressed = compressed = compressed_gradients(job, named, parts.exchange, whole=False)
        self._buckets = GradientBuckets(
            named,
            parts.rank,
            cut=cut or (lambda specs, order: plan_buckets(compressed.grouped(specs), order, job.bucket_bytes)),
            leave=self._leave,
            overlap=job.overlap,
            by_lane=by_lane,
            rebuilds=cut is None and not compressed.any,
            pool=pool,
            lanes_rounded_to=job.precision.lanes_rounded_to,
            compress=compressed.take,
        )
        self.parameters: Sequence[Parameter] = self._buckets.parameters
        self._placeholders = [GradientPlaceholder.of(parameter, name, parts.name) for name, parameter in named]
        self._pieces: LocalPieces | None = None
        self._values_before: dict[Piece, Tensor] = {}  # of pieces, when buckets were rebuilt
        self._used: Sequence[bool] = ()

    @property
    def replicas(self) -> Sequence[Parameter]:
        return self.parameters if self._parts.weights.on_every_worker else ()

    # -- how gradients leave -----------------------------------------------------------------------------------------

    def _leave(self, number: int, nodes: dict[int, Tensor]) -> None:
        raise NotImplementedError

    def _prepare_sums(self, pieces: LocalPieces) -> None:
        """Buckets have been built: make what is needed for as long as they are."""

    def _totals(self) -> list[Tensor | None]:
        """The sums of this worker's ranges, bucket by bucket; None where it owns nothing of one."""
        raise NotImplementedError

    # -- one step ----------------------------------------------------------------------------------------------------

    def start_step(self, round: int, plan: SumPlan) -> None:
        parts = self._parts
        self._plan = plan
        parts.weights.check()
        self._compressed.begin(round, plan, self._buckets.sums, self._cut_shards)
        if self._pieces is None:
            parts.offload.forget()
            self._pieces = self._assigned_pieces()
            self._values_before = {}
            self._prepare_sums(self._pieces)
        for optimizer in self._optimizers:
            parts.optimizers.assign(optimizer, self._pieces)
        if parts.masters.any:
            parts.masters.assigned(self.parameters)
            parts.masters.take_over_writes(self._pieces)
        self._buckets.start_step(plan)

    def _cut_shards(self) -> Shards:
        uncut = {number for number, p in enumerate(self.parameters) if not in_logical_order(p)}
        return cut_buckets([sums.bucket for sums in self._buckets.sums], self._parts.workers, uncut)

    def _assigned_pieces(self) -> LocalPieces:
        before, masters = self._values_before, self._parts.masters

        def values(parameter: Parameter, piece: Piece) -> Tensor:
            kept = before.pop(piece, None) if masters.has(parameter) else None
            return masters.of_piece(parameter, piece) if kept is None else kept

        return LocalPieces(self._named, self._cut_shards(), self._parts.rank, values)

    def collect(self, tally: Tally) -> None:
        """The own pieces have their gradients; `.grad` of the parameters says that it has none."""
        assert self._pieces is not None
        self._used, scale = tally.used, tally.scale
        self._compressed.advance(tally.loss_scale)
        for number, total in enumerate(self._totals()):
            if total is None:
                continue
            if scale != 1.0:
                total.mul_(scale)
            self._pieces.take_gradients(number, self._parts.offload.land(number, total), tally.used)
        if not tally.empty:
            for parameter, placeholder, used in zip(self.parameters, self._placeholders, tally.used, strict=True):
                parameter.grad = placeholder if used else None
        self._buckets.plan_rebuild(tally.used, self._parts.everyone)

    def _gradients(self) -> list[Tensor]:
        assert self._pieces is not None
        self._parts.offload.wait()
        return self._pieces.gradients

    def keeps_finite(self) -> bool:
        return self._parts.finite_everywhere(self._gradients())

    def clip(self, max_norm: float) -> float | Tensor:
        assert self._pieces is not None
        gradients, peers = self._gradients(), self._parts.job.peers
        found = [(p.grad, peers.counts(self.parameters[piece.parameter])) for piece, p in self._pieces.tensors.items()]
        norms = counted_norms((gradient, counts) for gradient, counts in found if gradient is not None)
        if self._parts.workers > 1:
            padded = torch.zeros(self._pieces.most_blocks, dtype=torch.float64)
            padded[: norms.numel()] = norms.to("cpu")
            norms, handle = self._parts.comm.all_gather(padded)
            handle.wait()
        return clip_(gradients, norm_of_blocks(peers.gathered(norms.view(-1))), max_norm)

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        """The user's optimizer does not run its step() itself, but looks from outside as if it did."""
        shard = self._parts.optimizers.of(optimizer)
        for before in step_pre_hooks(optimizer).values():  # one that clips finds that the gradient is not here
            before(optimizer, (optimizer,), {})
        for parameter in shard.parameters:
            parameter.grad = None
        setattr(optimizer, STEP_WAS_CALLED, True)
        result = self._update(shard)
        for after in step_post_hooks(optimizer).values():
            after(optimizer, (optimizer,), {})
        return result

    def _update(self, shard: OptimizerShard) -> Any:
        result = self._parts.weights.update(shard, lambda: self._step(shard))
        if self._parts.masters.any:
            self._parts.masters.mark_clean(shard.parameters)
        return result

    def _step(self, shard: OptimizerShard) -> Any:
        """The update, with master weights rounded to where the weights are."""
        if not self._parts.offloads:
            result = shard.step(self._used)
            if self._parts.masters.any:
                self._round(shard.own)
            return result
        result = shard.step(self._used, self._bucket_by_bucket(shard))
        self._parts.offload.finish()
        return result

    def _bucket_by_bucket(self, shard: OptimizerShard) -> Iterator[list[Piece]]:
        """A bucket is updated when its gradients are on the host, and goes back while the next one is updated."""
        own = set(shard.own)
        for number, of_bucket in enumerate(shard.pieces.of_bucket):
            pieces = [piece for piece in of_bucket if piece in own]
            if pieces:
                self._parts.offload.wait(number)
                yield pieces
                self._round(pieces)

    def _round(self, pieces: Sequence[Piece]) -> None:
        assert self._pieces is not None
        self._parts.masters.round(self._pieces, pieces)

    def end_step(self) -> None:
        assert self._pieces is not None
        for parameter in self.parameters:
            parameter.grad = None
        self._pieces.drop_gradients()
        self._compressed.forget()
        self._parts.offload.wait()
        if self._buckets.rebuild():
            self._values_before = dict(
                self._pieces.tensors
            )  # a piece of the new cut that was one before stays where it is
            self._pieces = None

    # -- between steps -----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Nothing is under way between two steps."""
        self._parts.weights.check()

    def local_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._parts.optimizers.local_state(optimizer)

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        self._parts.optimizers.load(optimizer, state)
        self._parts.weights.mark_clean()

    def full_tensor(self, parameter: Parameter) -> Tensor:
        master = self._parts.optimizers.full_master(parameter)
        return super().full_tensor(parameter) if master is None else master

    def local_shard(self, parameter: Parameter) -> Tensor | LocalShard:
        master = self._parts.optimizers.local_master(parameter)
        return super().local_shard(parameter) if master is None else master

    def load_full(self, parameter: Parameter, full: Tensor) -> None:
        super().load_full(parameter, full)
        self._parts.weights.mark_clean([parameter])
        self._parts.optimizers.load_master(parameter, full)

    def keep_residuals(self) -> None:
        self._compressed.commit(self._used)

    def compression_state(self, lanes: Sequence[int]) -> dict[str, Any]:
        return self._compressed.state(lanes, self._buckets.sums, self._cut_shards)

    def load_compression(self, saved: Mapping[str, Any], lanes: Sequence[int]) -> None:
        self._compressed.load(saved, lanes, self._buckets.sums, self._cut_shards)

    def close(self) -> None:
        self._buckets.close()
        self._pieces, self._values_before = None, {}
