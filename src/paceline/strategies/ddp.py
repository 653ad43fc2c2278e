"""Distributed data parallel: weights, gradients and optimizer state full on every worker; one all-reduce per bucket.

    weights full · gradients full · optimizer state full      during backward: all-reduce per bucket      at step: local

Buckets leave in their fixed order while backward still runs, from the hooks of the worker's last item. How a bucket's
roots become their sum is the exchange's affair; the star is this strategy with another exchange. Where the model
computes in low precision (`LowPrecisionDdp`) its parameters are their fp32 master weights from `collect` to `apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.checkpoint.load import full_tree
from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.collectives.gradient_exchange import GradientExchange
from paceline.optim.gradient_norm import all_finite, clip_, counted_norms, norm_of_blocks
from paceline.sharding.bucket import Shards, cut_buckets, plan_buckets
from paceline.strategies.buckets import GradientBuckets, InBuckets, NotCompressed, drop_gradients
from paceline.strategies.compressed.gradients import compressed_gradients
from paceline.strategies.master_weights import FullMasters, load_exactly
from paceline.strategies.registry import Job, Maker, Registered, register
from paceline.strategies.strategy import Tally, TensorPeers


class Pending(Protocol):
    def wait(self) -> Tensor: ...


class Exchange(Protocol):
    """How one bucket's roots become the sum over all workers."""

    def new_set(self, old: int | None = None) -> int: ...

    def slot(self, of: int, bucket: int, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Shared memory from which a root of this bucket travels best, if there is any."""
        ...

    def start(
        self, of: int, bucket: int, plan: SumPlan, roots: Mapping[int, Tensor], spare: Callable[[], Tensor]
    ) -> Pending: ...

    def close(self) -> None: ...


class Ddp(InBuckets):
    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        comm: Communicator,
        exchange: Exchange,
        *,
        bucket_bytes: int,
        overlap: bool = True,
        lanes_rounded_to: torch.dtype | None = None,
        compressed: NotCompressed | None = None,
        peers: TensorPeers | None = None,
    ) -> None:
        self._comm = comm
        self._peers = peers or TensorPeers()
        self._exchange = exchange
        self._compressed = compressed = compressed or NotCompressed()
        self._buckets = GradientBuckets(
            named,
            comm.rank,
            cut=lambda specs, order: plan_buckets(compressed.grouped(specs), order, bucket_bytes),
            leave=self._send,
            overlap=overlap,
            rebuilds=not compressed.any,
            lanes_rounded_to=lanes_rounded_to,
            compress=compressed.take,
        )
        self.parameters = self.replicas = self._buckets.parameters
        self._set = exchange.new_set()
        self._totals: list[Tensor] = []
        self._pending: list[Pending] = []
        self._roots: list[dict[int, Tensor]] = []
        self._used: Sequence[bool] = ()
        self._has_slots = False

    # -- one step --------------------------------------------------------------------------------------------------

    def start_step(self, round: int, plan: SumPlan) -> None:
        self._plan = plan
        self._compressed.begin(round, plan, self._buckets.sums, self._shards)
        if not self._has_slots:  # once for each set of buckets, when all workers are here
            self._buckets.use_slots(self._slot)
            self._has_slots = True
        self._pending, self._roots = [], []
        self._buckets.start_step(plan)

    def _slot(self, number: int, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Not for buckets whose lanes' memory stays with the compression."""
        return None if self._compressed.has(number) else self._exchange.slot(self._set, number, elements, dtype)

    def _shards(self) -> Shards:
        return cut_buckets([sums.bucket for sums in self._buckets.sums], self._comm.size)

    def _send(self, number: int, roots: dict[int, Tensor]) -> None:
        self._roots.append(roots)
        if number in self._compressed.now:
            self._pending.append(self._compressed.start(number))
            return
        spare = self._buckets.sums[number].buffer
        self._pending.append(self._exchange.start(self._set, number, self._plan, roots, spare))

    def collect(self, tally: Tally) -> None:
        """`.grad` becomes the gradient of the global batch."""
        scale, used = tally.scale, tally.used
        self._used = used
        self._totals = []
        self._compressed.advance(tally.loss_scale)
        for sums, pending, roots in zip(self._buckets.sums, self._pending, self._roots, strict=True):
            total = pending.wait()
            for root in roots.values():
                if root.data_ptr() != total.data_ptr():
                    sums.give_back(root)
            if scale != 1.0:
                total.mul_(scale)
            sums.hand_out(total, used)
            self._totals.append(total)
        self._pending, self._roots = [], []
        self._buckets.plan_rebuild(used, self._comm)

    def keeps_finite(self) -> bool:
        """Every worker has the whole sum of its parameters, so all of them see the same."""
        return self._peers.all_true(all_finite(self._totals))

    def clip(self, max_norm: float) -> float | Tensor:
        found = [(p.grad, self._peers.counts(p)) for p in self.parameters if p.grad is not None]
        norm = norm_of_blocks(self._peers.gathered(counted_norms(found)))
        return clip_([gradient for gradient, _ in found], norm, max_norm)

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        return original_step()

    def end_step(self) -> None:
        """Forget the gradients; the buffers they lived in serve the next step."""
        for parameter in self.parameters:
            parameter.grad = None
        for sums, total in zip(self._buckets.sums, self._totals, strict=True):
            sums.give_back(total)
        self._totals = []
        self._compressed.forget()
        if self._buckets.rebuild():
            self._set = self._exchange.new_set(old=self._set)
            self._has_slots = False

    # -- between steps -----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Nothing is under way between two steps."""

    def local_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        load_exactly(optimizer, full_tree(state))

    def keep_residuals(self) -> None:
        self._compressed.commit(self._used)

    def compression_state(self, lanes: Sequence[int]) -> dict[str, Any]:
        return self._compressed.state(lanes, self._buckets.sums, self._shards)

    def load_compression(self, saved: Mapping[str, Any], lanes: Sequence[int]) -> None:
        self._compressed.load(saved, lanes, self._buckets.sums, self._shards)

    def close(self) -> None:
        self._buckets.close()
        self._totals, self._pending, self._roots = [], [], []


class LowPrecisionDdp(Ddp):
    """Gradients are added, clipped and applied in fp32: a parameter is its master weights until these are rounded."""

    def __init__(self, *given: Any, masters: FullMasters, **options: Any) -> None:
        masters.drop_frozen()
        self._masters = masters
        super().__init__(*given, **options)

    def collect(self, tally: Tally) -> None:
        if not tally.empty:
            self._masters.step_in(self.parameters)
        super().collect(tally)

    def keeps_finite(self) -> bool:
        finite = super().keeps_finite()
        if not finite:
            self._masters.round(self.parameters)
        return finite

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        result = super().apply(optimizer, original_step)
        self._masters.round(p for group in optimizer.param_groups for p in group["params"])
        return result

    def end_step(self) -> None:
        self._masters.round(self.parameters)
        super().end_step()

    def full_tensor(self, parameter: Parameter) -> Tensor:
        return self._masters.full(parameter) if self._masters.has(parameter) else super().full_tensor(parameter)

    def load_full(self, parameter: Parameter, full: Tensor) -> None:
        if self._masters.has(parameter):
            self._masters.load_full(parameter, full)
        else:
            super().load_full(parameter, full)


# -- how it is chosen --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DdpConfig:
    """Nothing to choose: buckets, overlap and reduction are the Engine's own."""


class DdpMaker(Maker):
    """Strategies of one job share an exchange, and with it the order in which their buckets travel."""

    def __init__(self, job: Job, exchange: Exchange, *, overlap: bool) -> None:
        self._job, self._exchange, self._overlap = job, exchange, overlap
        self._masters = FullMasters(job)

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Ddp:
        job = self._job
        given = named, job.comm, self._exchange
        options: dict[str, Any] = {
            "bucket_bytes": job.bucket_bytes,
            "overlap": self._overlap,
            "lanes_rounded_to": job.precision.lanes_rounded_to,
            "peers": job.peers,
        }
        if isinstance(self._exchange, GradientExchange):
            options["compressed"] = compressed_gradients(job, named, self._exchange, whole=True)
        return (
            LowPrecisionDdp(*given, masters=self._masters, **options)
            if job.precision.is_low
            else Ddp(*given, **options)
        )

    def close(self) -> None:
        self._masters.close()
        self._exchange.close()

    def teardown(self) -> None:
        """Every worker has all there is, so it keeps it."""
        drop_gradients(self._job.optimizers)
        self._masters.teardown()
        self._exchange.close()


def _open(config: DdpConfig, job: Job) -> DdpMaker:
    return DdpMaker(job, GradientExchange(job.comm, job.reduction, job.algorithm), overlap=job.overlap)


register(
    Registered(
        "ddp",
        DdpConfig,
        _open,
        adds_fast=True,
        takes_compression=True,
        takes_low_precision=True,
        replicated=True,
        full_weights=True,
        passes_lanes_on=True,
    )
)
