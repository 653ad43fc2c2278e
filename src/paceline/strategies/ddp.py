"""Distributed data parallel: weights, gradients and optimizer state full on every worker; one all-reduce per bucket.

    weights full · gradients full · optimizer state full      during backward: all-reduce per bucket      at step: local

Buckets leave in their fixed order while backward still runs, from the hooks of the worker's last item. How a bucket's
roots become their sum is the exchange's affair; the star is this strategy with another exchange. Where the model
computes in low precision its parameters are their fp32 masters from `collect` to `apply`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.checkpoint.load import whole_tree
from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.collectives.gradient_exchange import GradientExchange
from paceline.optim.gradient_norm import all_finite, clip_coefficient, global_norm
from paceline.sharding.bucket import plan_buckets
from paceline.strategies.gradient_buckets import GradientBuckets, drop_gradients
from paceline.strategies.masters import WholeMasters, load_exactly
from paceline.strategies.registry import Job, Registered, register
from paceline.strategies.strategy import Agreement, ItemPlace, Tally, WeightsInTheModel


class Pending(Protocol):
    def wait(self) -> Tensor: ...


class Exchange(Protocol):
    """How one bucket's roots become the sum over all workers."""

    def new_set(self, old: int | None = None) -> int: ...

    def home(self, of: int, bucket: int, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Memory from which a root of this bucket travels best, if there is any."""
        ...

    def start(
        self, of: int, bucket: int, plan: SumPlan, roots: Mapping[int, Tensor], spare: Callable[[], Tensor]
    ) -> Pending: ...

    def close(self) -> None: ...


class Ddp(WeightsInTheModel):
    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        comm: Communicator | None,
        exchange: Exchange,
        *,
        bucket_bytes: int,
        overlap: bool = True,
        masters: WholeMasters | None = None,
        lanes_rounded_to: torch.dtype | None = None,
    ) -> None:
        self._comm = comm
        self._exchange = exchange
        self._masters = masters
        if masters is not None:
            masters.drop_frozen()
        self._buckets = GradientBuckets(
            named,
            comm.rank if comm is not None else 0,
            cut=lambda specs, order: plan_buckets(specs, order, bucket_bytes),
            leave=self._send,
            overlap=overlap,
            lanes_rounded_to=lanes_rounded_to,
        )
        self.parameters = self.replicas = self._buckets.parameters
        self._set = exchange.new_set()
        self._totals: list[Tensor] = []
        self._pending: list[Pending] = []
        self._roots: list[dict[int, Tensor]] = []
        self._settled_in = False

    @property
    def left_during_backward(self) -> int:
        return self._buckets.left_during_backward

    def agreement(self, round: int) -> Agreement:
        return Agreement.NOW

    # -- one step --------------------------------------------------------------------------------------------------

    def start_step(self, round: int, plan: SumPlan) -> None:
        self._plan = plan
        self._find_homes()
        self._pending, self._roots = [], []
        self._buckets.start_step(plan)

    def _find_homes(self) -> None:
        """Once for each set of buckets, when all workers are here."""
        if self._settled_in:
            return
        self._settled_in = True
        for number, sums in enumerate(self._buckets.sums):
            home = self._exchange.home(self._set, number, sums.bucket.elements, sums.bucket.dtype)
            if home is not None:
                sums.live_in(home)

    def start_backward(self, place: ItemPlace, *, last: bool) -> None:
        self._buckets.start_backward(place, last=last)

    def finish_backward(self, place: ItemPlace) -> None:
        self._buckets.finish_backward(place)

    def skip(self, place: ItemPlace) -> None:
        self._buckets.skip(place)

    def _send(self, number: int, roots: dict[int, Tensor]) -> None:
        self._roots.append(roots)
        spare = self._buckets.sums[number].buffer
        self._pending.append(self._exchange.start(self._set, number, self._plan, roots, spare))

    def watch_lanes(self, wanted: bool) -> None:
        """Hash the gradient of every lane of the step that comes, for a second opinion."""
        self._buckets.lane_checks = {} if wanted else None

    @property
    def lane_checks(self) -> dict[int, int] | None:
        return self._buckets.lane_checks

    def used(self) -> Sequence[bool]:
        return self._buckets.used

    def collect(self, tally: Tally) -> None:
        """`.grad` becomes the gradient of the global batch."""
        scale, used = tally.scale, tally.used
        if self._masters is not None and not tally.empty:
            self._masters.step_in(self.parameters)
        self._totals = []
        for sums, pending, roots in zip(self._buckets.sums, self._pending, self._roots, strict=True):
            total = pending.wait()
            for root in roots.values():
                if root.data_ptr() != total.data_ptr():
                    sums.give_back(root)
            if scale != 1.0:
                total.mul_(scale)
            sums.hand_out(total, [used[member.parameter] for member in sums.bucket.members])
            self._totals.append(total)
        self._pending, self._roots = [], []
        self._buckets.learn(used, self._comm)

    def keeps_finite(self) -> bool:
        """Every worker has the whole sum, so all of them see the same."""
        finite = all_finite(self._totals)
        if not finite and self._masters is not None:
            self._masters.round(self.parameters)
        return finite

    def clip(self, max_norm: float) -> float:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = global_norm(gradients)
        if norm > max_norm or not math.isfinite(norm):
            torch._foreach_mul_(gradients, clip_coefficient(norm, max_norm))
        return norm

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        result = original_step()
        if self._masters is not None:
            self._masters.round(p for group in optimizer.param_groups for p in group["params"])
        return result

    def end_step(self) -> None:
        """Forget the gradients; the buffers they lived in serve the next step."""
        if self._masters is not None:
            self._masters.round(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None
        for sums, total in zip(self._buckets.sums, self._totals, strict=True):
            sums.give_back(total)
        self._totals = []
        if self._buckets.cut_anew():
            self._set = self._exchange.new_set(old=self._set)
            self._settled_in = False

    # -- between steps -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Nothing is under way between two steps."""

    def kept_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        load_exactly(optimizer, whole_tree(state))

    def whole(self, parameter: Parameter) -> Tensor:
        if self._masters is None or not self._masters.has(parameter):
            return super().whole(parameter)
        return self._masters.of_parameter(parameter)

    def put(self, parameter: Parameter, whole: Tensor) -> None:
        if self._masters is None or not self._masters.has(parameter):
            super().put(parameter, whole)
        else:
            self._masters.put(parameter, whole)

    def close(self) -> None:
        self._buckets.close()
        self._totals, self._pending, self._roots = [], [], []


# -- how it is chosen --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DdpConfig:
    """Nothing to choose: buckets, overlap and reduction are the Engine's own."""


class DdpMaker:
    """Strategies of one job share an exchange, and with it the order in which their buckets travel."""

    def __init__(self, job: Job, exchange: Exchange, *, overlap: bool) -> None:
        self._job, self._exchange, self._overlap = job, exchange, overlap
        self._masters = WholeMasters.of(job)

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Ddp:
        job = self._job
        return Ddp(
            named,
            job.comm,
            self._exchange,
            bucket_bytes=job.bucket_bytes,
            overlap=self._overlap,
            masters=self._masters,
            lanes_rounded_to=job.precision.lanes_rounded_to,
        )

    def close(self) -> None:
        if self._masters is not None:
            self._masters.close()
        self._exchange.close()

    def dismantle(self) -> None:
        """Every worker has all there is, so it keeps it."""
        drop_gradients(self._job.optimizers)
        if self._masters is not None:
            self._masters.dismantle()
        self._exchange.close()


def _open(config: DdpConfig, job: Job) -> DdpMaker:
    return DdpMaker(job, GradientExchange(job.comm, job.reduction, job.algorithm), overlap=job.overlap)


register(Registered("ddp", DdpConfig, _open, takes_low_precision=True, replicated=True))
