"""What strategies with a sharded update have in common: owners of ranges, who sum, clip, update and give weights back.

    backward ─► buckets leave ─► the owner of a range adds it up ─► its pieces' gradients       .grad is nowhere whole
    clip        norms of blocks are told to all: the norm of the whole, and its bits
    apply       each worker's twins update its pieces ─► everybody gets all weights, or they lie where all can read

How gradients leave (a worker's roots once a step, or lane by lane) is what zero1 and zero2 differ in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
from paceline.optim.gradient_norm import all_block_norms, all_finite, clip_coefficient, norm_of_blocks
from paceline.optim.offload import HOST, Offload
from paceline.optim.range_optimizer import check_elementwise
from paceline.optim.thread_cuts import check_thread_cuts
from paceline.sharding.bucket import plan_buckets
from paceline.sharding.flat_layout import Piece
from paceline.sharding.rooms import Rooms
from paceline.sharding.shards import cut_buckets
from paceline.sharding.slices import Slices
from paceline.strategies.distant_gradient import DistantGradient
from paceline.strategies.gradient_buckets import Cut, GradientBuckets, drop_gradients
from paceline.strategies.host_weights import Weights, where_weights_go
from paceline.strategies.masters import PieceMasters
from paceline.strategies.own_pieces import OwnPieces, check_apart, in_logical_order
from paceline.strategies.registry import Job
from paceline.strategies.strategy import Agreement, ItemPlace, Tally, WeightsInTheModel
from paceline.strategies.twins import Twin, Twins, remember_first_states
from paceline.strategies.weight_gather import WeightGather

_FOUND_FIT: WeakSet[Optimizer] = WeakSet()  # trying one takes 20 ms, which a job whose workers change has spent


class ShardedParts:
    """What the sharded strategies of one job share."""

    def __init__(self, job: Job, name: str, weights: Weights | None, everyone: Communicator | None = None) -> None:
        """`everyone`: all workers of the job, where `job.comm` are those of a group that shares the state."""
        self.job, self.name = job, name
        if job.algorithm is not None:
            raise ConfigError(
                f"strategy={name!r} with algorithm={job.algorithm!r}: its sums stay with the owners of ranges, for "
                "which there is one way; leave algorithm out, or choose strategy='ddp' to train over it"
            )
        for optimizer in job.optimizers:
            remember_first_states(optimizer)
            if job.world.elastic is None or optimizer not in _FOUND_FIT:
                check_elementwise(optimizer, HOST if job.offload else job.device)
                check_thread_cuts(optimizer)
                _FOUND_FIT.add(optimizer)
        self.comm: Communicator | None = job.comm
        self.everyone = everyone or job.comm
        self.rank, self.workers = (0, 1) if job.comm is None else (job.comm.rank, job.comm.size)
        self.exchange = GradientExchange(job.comm, "exact")
        self.offload = Offload(job.device) if job.offload else None
        self.masters = PieceMasters.of(job, self.offload)
        self.twins = Twins(job.comm, name, self.masters)
        self.weights = where_weights_go(weights, job.comm, name)

    def finite_everywhere(self, gradients: Sequence[Tensor]) -> bool:
        """Of all workers, each of which has its own."""
        finite = all_finite(gradients)
        if self.comm is not None:
            told, handle = self.comm.all_gather(torch.tensor([finite], dtype=torch.uint8))
            handle.wait()
            finite = bool(told.all())
        return finite

    def between_hooks(self, optimizer: Optimizer, parameters: Sequence[Parameter], update: Callable[[], Any]) -> Any:
        """An update that the user's optimizer does not run itself, as its own step() would look from outside."""
        for number in self.twins.of(optimizer).parameters:
            parameters[number].grad = None
        for before in optimizer._optimizer_step_pre_hooks.values():
            before(optimizer, (optimizer,), {})
        optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler looks for it
        result = update()
        for after in optimizer._optimizer_step_post_hooks.values():
            after(optimizer, (optimizer,), {})
        return result

    def close(self) -> None:
        self.twins.close()
        if self.masters is not None:
            self.masters.close()
        self.exchange.close()

    def dismantle(self) -> None:
        """In place of `close`, when the group is over: nobody has all of the state, so it comes from elsewhere."""
        drop_gradients(self.job.optimizers)
        if self.offload is not None:
            self.offload.finish()
            self.offload.forget()
        self.twins.dismantle()
        if self.weights is not None:
            self.weights.dismantle()
        if self.masters is not None:
            self.masters.dismantle()
        self.exchange.close()


class ShardedStrategy(WeightsInTheModel):
    """Subclasses say how buckets leave (`_leave`) and hand the finished sums of the own ranges over (`_totals`)."""

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        optimizers: Sequence[Optimizer],
        parts: ShardedParts,
        *,
        by_lane: bool = False,
        rooms: Rooms | None = None,
        cut: Cut | None = None,
    ) -> None:
        """`cut` makes the buckets, for good; by default they are cut anew in the order in which gradients come."""
        check_apart(named)
        if parts.weights is not None:
            parts.weights.hold(named)
        job = parts.job
        self._named, self._optimizers, self._parts = list(named), optimizers, parts
        self._buckets = GradientBuckets(
            named,
            parts.rank,
            cut=cut or (lambda specs, order: plan_buckets(specs, order, job.bucket_bytes)),
            leave=self._leave,
            overlap=job.overlap,
            by_lane=by_lane,
            learns=cut is None,
            rooms=rooms,
            lanes_rounded_to=job.precision.lanes_rounded_to,
        )
        self.parameters: Sequence[Parameter] = self._buckets.parameters
        self._distant = [DistantGradient.of(parameter, name, parts.name) for name, parameter in named]
        self._pieces: OwnPieces | None = None
        self._kept_before: dict[Piece, Tensor] = {}
        self._used: Sequence[bool] = ()
        self._gathers: dict[int, WeightGather] = {}

    @property
    def replicas(self) -> Sequence[Parameter]:
        return self.parameters if self._parts.weights is None else ()

    @property
    def left_during_backward(self) -> int:
        return self._buckets.left_during_backward

    def agreement(self, round: int) -> Agreement:
        return Agreement.NOW

    # -- how gradients leave -----------------------------------------------------------------------------------------

    def _leave(self, number: int, nodes: dict[int, Tensor]) -> None:
        raise NotImplementedError

    def _settle_in(self, pieces: OwnPieces) -> None:
        """Buckets have been cut: make what is needed for as long as they are."""

    def _totals(self) -> list[Tensor | None]:
        """The sums of this worker's ranges, bucket by bucket; None where it owns nothing of one."""
        raise NotImplementedError

    # -- one step ----------------------------------------------------------------------------------------------------

    def start_step(self, round: int, plan: SumPlan) -> None:
        self._plan = plan
        if self._parts.weights is not None:
            self._parts.weights.check()
        if self._pieces is None:
            if self._parts.offload is not None:
                self._parts.offload.forget()
            self._pieces = self._deal()
            self._kept_before = {}
            self._settle_in(self._pieces)
            self._gathers = {}
        for optimizer in self._optimizers:
            self._parts.twins.deal(optimizer, self._pieces)
        if self._parts.masters is not None:
            self._parts.masters.dealt(self.parameters)
            self._parts.masters.look(self._pieces)
        self._buckets.start_step(plan)

    def _deal(self) -> OwnPieces:
        uncut = {number for number, p in enumerate(self.parameters) if not in_logical_order(p)}
        buckets = [sums.bucket for sums in self._buckets.sums]
        shards, masters = cut_buckets(buckets, self._parts.workers, uncut), self._parts.masters
        if masters is None:
            return OwnPieces(self._named, shards, self._parts.rank)
        before = self._kept_before

        def keep(parameter: Parameter, piece: Piece) -> Tensor:
            return before.pop(piece) if piece in before else masters.keep(parameter, piece)

        return OwnPieces(self._named, shards, self._parts.rank, keep=keep)

    def start_backward(self, place: ItemPlace, *, last: bool) -> None:
        self._buckets.start_backward(place, last=last)

    def finish_backward(self, place: ItemPlace) -> None:
        self._buckets.finish_backward(place)

    def skip(self, place: ItemPlace) -> None:
        self._buckets.skip(place)

    def watch_lanes(self, wanted: bool) -> None:
        """Hash the gradient of every lane of the step that comes, for a second opinion."""
        self._buckets.lane_checks = {} if wanted else None

    @property
    def lane_checks(self) -> dict[int, int] | None:
        return self._buckets.lane_checks

    def used(self) -> Sequence[bool]:
        return self._buckets.used

    def collect(self, tally: Tally) -> None:
        """The own pieces have their gradients; `.grad` of the parameters says that it has none."""
        assert self._pieces is not None
        self._used = tally.used
        for number, total in enumerate(self._totals()):
            if total is None:
                continue
            if tally.scale != 1.0:
                total.mul_(tally.scale)
            if self._parts.offload is not None:
                total = self._parts.offload.land(number, total)
            self._pieces.take_gradients(number, total, tally.used)
        if not tally.empty:
            for parameter, distant, used in zip(self.parameters, self._distant, tally.used, strict=True):
                parameter.grad = distant if used else None
        self._buckets.learn(tally.used, self._parts.everyone)

    def _gradients(self) -> list[Tensor]:
        assert self._pieces is not None
        if self._parts.offload is not None:
            self._parts.offload.wait()
        return self._pieces.gradients

    def keeps_finite(self) -> bool:
        return self._parts.finite_everywhere(self._gradients())

    def clip(self, max_norm: float) -> float:
        assert self._pieces is not None
        gradients = self._gradients()
        norms = all_block_norms(gradients)
        if self._parts.comm is not None:
            padded = norms.new_zeros(self._pieces.most_blocks)
            padded[: norms.numel()] = norms
            norms, handle = self._parts.comm.all_gather(padded)
            handle.wait()
        norm = norm_of_blocks(norms.view(-1))
        if gradients and (norm > max_norm or not math.isfinite(norm)):
            torch._foreach_mul_(gradients, clip_coefficient(norm, max_norm))
        return norm

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        return self._parts.between_hooks(optimizer, self.parameters, lambda: self._update(optimizer))

    def _update(self, optimizer: Optimizer) -> Any:
        twin, comm, weights = self._parts.twins.of(optimizer), self._parts.comm, self._parts.weights
        if weights is not None:
            with weights.being_written(self.parameters[number] for number in twin.parameters):
                result = self._step(twin)
        else:
            result = self._step(twin)
        if comm is not None and weights is None:
            gather = self._gathers.get(id(optimizer))
            if gather is None:
                gather = WeightGather(comm, self.parameters, twin.pieces.shards, twin.parameters)
                self._gathers[id(optimizer)] = gather
            gather.run()
        if self._parts.masters is not None:
            self._parts.masters.take_as_right(self.parameters[number] for number in twin.parameters)
        return result

    def _step(self, twin: Twin) -> Any:
        masters, offload = self._parts.masters, self._parts.offload
        if offload is not None:
            result = twin.step(self._used, self._turns(twin, offload))
            offload.finish()
            return result
        result = twin.step(self._used)
        if masters is not None:
            masters.round(twin.pieces, twin.own)
        return result

    def _turns(self, twin: Twin, offload: Offload) -> Iterator[list[Piece]]:
        """A bucket is updated when its gradients are on the host, and goes back while the next one is updated."""
        assert self._parts.masters is not None
        own = set(twin.own)
        for number, shards in enumerate(twin.pieces.shards.buckets):
            pieces = [owned.piece for owned in shards.pieces(self._parts.rank) if owned.piece in own]
            if pieces:
                offload.wait(number)
                yield pieces
                self._parts.masters.round(twin.pieces, pieces)

    def end_step(self) -> None:
        assert self._pieces is not None
        for parameter in self.parameters:
            parameter.grad = None
        self._pieces.drop_gradients()
        if self._parts.offload is not None:
            self._parts.offload.wait()
        if self._buckets.cut_anew():
            self._kept_before = dict(self._pieces.tensors)  # a piece of the new cut that was one before stays in place
            self._pieces = None

    # -- between steps -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Nothing is under way between two steps."""
        if self._parts.weights is not None:
            self._parts.weights.check()

    def kept_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._parts.twins.kept_state(optimizer)

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        self._parts.twins.load(optimizer, state)
        if self._parts.weights is not None:
            self._parts.weights.take_as_right()

    def whole(self, parameter: Parameter) -> Tensor:
        master = self._parts.twins.master_of(parameter)
        return super().whole(parameter) if master is None else master

    def kept(self, parameter: Parameter) -> Tensor | Slices:
        master = self._parts.twins.own_master(parameter)
        return super().kept(parameter) if master is None else master

    def put(self, parameter: Parameter, whole: Tensor) -> None:
        super().put(parameter, whole)
        self._parts.twins.put_master(parameter, whole)

    def close(self) -> None:
        self._buckets.close()
        self._pieces, self._kept_before, self._gathers = None, {}, {}
