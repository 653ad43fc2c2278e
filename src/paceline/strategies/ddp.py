"""Distributed data parallel: weights, gradients and optimizer state full on every worker; one all-reduce per bucket.

    weights full · gradients full · optimizer state full      during backward: all-reduce per bucket      at step: local

Buckets leave in their fixed order while backward still runs, from the hooks of the worker's last item. The order is
learned in the first step (worker 0's, agreed by all) and so are parameters that nobody used: those get the last bucket,
so that they don't hold a used one back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.collectives.gradient_exchange import GradientExchange, PendingSum
from paceline.errors import LoopError
from paceline.sharding.bucket import Bucket, GradientSpec, plan_buckets
from paceline.sharding.lane_sums import LaneSums
from paceline.strategies.strategy import ItemPlace


class Ddp:
    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        comm: Communicator | None,
        exchange: GradientExchange,
        *,
        bucket_bytes: int,
        overlap: bool = True,
    ) -> None:
        self._names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._comm = comm
        self._worker = comm.rank if comm is not None else 0
        self._exchange = exchange
        self._bucket_bytes = bucket_bytes
        self._overlap = overlap
        self._specs = [GradientSpec(tuple(p.shape), p.dtype, p.device) for p in self.parameters]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]
        self._held: list[Tensor | None] = [None] * len(self.parameters)
        self._totals: list[Tensor] = []
        self._armed = False
        self._observed_order: list[int] | None = []
        self._plan: SumPlan | None = None
        self._set = exchange.new_set()
        self._set_buckets(list(reversed(range(len(self.parameters)))))

    # -- one step --------------------------------------------------------------------------------------------------

    def start_step(self, plan: SumPlan) -> None:
        self._plan = plan
        for parameter in self.parameters:  # a backward of the user's own before this step is none of its gradient
            parameter.grad = None
        self._used = [False] * len(self.parameters)
        self._pending: list[PendingSum | None] = [None] * len(self._sums)
        self._roots: list[list[Tensor]] = [[] for _ in self._sums]
        self._next = 0
        self.left_during_backward = 0

    def start_backward(self, place: ItemPlace, *, last: bool) -> None:
        """Put the lane's gradients so far back into `.grad`; with `last`, buckets may leave as they fill."""
        self._armed = True
        self._place = place
        self._taken = [False] * len(self._sums)
        self._live = last and self._overlap and place.last_of_step and not place.shadow
        self._missing = [len(sums.bucket.members) for sums in self._sums]
        if any(held is not None for held in self._held):
            for index, parameter in enumerate(self.parameters):
                if parameter.dtype == self._specs[index].sum_dtype:
                    parameter.grad = self._held[index]

    def finish_backward(self, place: ItemPlace) -> None:
        self._armed = False
        if place.shadow:
            self._drop_gradients()
        elif not place.last_of_lane:
            self._hold_gradients()
        else:
            for number in range(len(self._sums)):
                if not self._taken[number]:
                    self._take(number, place.lane)
            self._held = [None] * len(self.parameters)
        if place.last_of_step:
            self._send_the_rest()

    def skip(self, place: ItemPlace) -> None:
        if not place.shadow and place.last_of_lane:
            if any(held is not None for held in self._held):
                self._taken = [False] * len(self._sums)
                for number in range(len(self._sums)):
                    self._take(number, place.lane)
                self._held = [None] * len(self.parameters)
            else:
                for sums in self._sums:
                    sums.take_nothing(place.lane)
                    sums.merge(self._step_plan, self._worker, place.lane)
        if place.last_of_step:
            self._send_the_rest()

    def used(self) -> Sequence[bool]:
        return self._used

    def collect(self, scale: float, used: Sequence[bool]) -> None:
        for number, sums in enumerate(self._sums):
            pending = self._pending[number]
            assert pending is not None
            total = pending.wait()
            for root in self._roots[number]:
                if root.data_ptr() != total.data_ptr():
                    sums.give_back(root)
            if scale != 1.0:
                total.mul_(scale)
            sums.hand_out(total, [used[member.parameter] for member in sums.bucket.members])
        self._totals = [pending.wait() for pending in self._pending if pending is not None]
        if self._observed_order is not None:
            self._learn(used)

    def end_step(self) -> None:
        """Forget the gradients; the buffers they lived in serve the next step."""
        for parameter in self.parameters:
            parameter.grad = None
        for sums, total in zip(self._sums, self._totals, strict=True):
            sums.give_back(total)
        self._totals = []
        if self._relearned is not None:
            self._set_buckets(self._relearned)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # -- gradients on their way --------------------------------------------------------------------------------------

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def ready(_: Any) -> None:
            if self._armed:
                self._gradient_is_ready(index)

        return ready

    def _gradient_is_ready(self, index: int) -> None:
        number = self._bucket_of[index]
        if self._taken[number]:
            raise LoopError(
                f"parameter {self._names[index]!r} got a second gradient after its bucket had left; "
                "when an item has several backward passes, all but the last need engine.backward(loss, last=False)"
            )
        if self._observed_order is not None and self._place.last_of_step:
            self._observed_order.append(index)
        if not self._live:
            return
        self._missing[number] -= 1
        while self._next < len(self._sums) and self._missing[self._next] == 0:
            self._take(self._next, self._place.lane)
            self._send(self._next)
            self.left_during_backward += 1

    def _take(self, number: int, lane: int) -> None:
        sums = self._sums[number]
        gradients: list[Tensor | None] = []
        for member in sums.bucket.members:
            parameter = self.parameters[member.parameter]
            if parameter.dtype == sums.bucket.dtype:
                gradient = parameter.grad if parameter.grad is not None else self._held[member.parameter]
            else:
                gradient = self._added_to_held(member.parameter, parameter)
            parameter.grad = None
            if gradient is not None:
                self._used[member.parameter] = True
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
            gradients.append(gradient)
        sums.take(lane, gradients)
        sums.merge(self._step_plan, self._worker, lane)
        self._taken[number] = True

    def _hold_gradients(self) -> None:
        for index, parameter in enumerate(self.parameters):
            if parameter.dtype == self._specs[index].sum_dtype:
                if parameter.grad is not None:
                    self._held[index] = parameter.grad
            else:
                self._held[index] = self._added_to_held(index, parameter)
            parameter.grad = None

    def _added_to_held(self, index: int, parameter: Parameter) -> Tensor | None:
        """Lower precisions accumulate their micro-batches in a buffer of the sum's precision, not in `.grad`."""
        held, gradient = self._held[index], parameter.grad
        if gradient is None:
            return held
        precise = gradient.to(self._specs[index].sum_dtype)
        return precise if held is None else held.add_(precise)

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _send_the_rest(self) -> None:
        while self._next < len(self._sums):
            self._send(self._next)

    def _send(self, number: int) -> None:
        sums = self._sums[number]
        roots, sums.nodes = sums.nodes, {}
        self._roots[number] = list(roots.values())
        self._pending[number] = self._exchange.start(self._set, number, self._step_plan, roots, sums.buffer)
        self._next = number + 1

    @property
    def _step_plan(self) -> SumPlan:
        assert self._plan is not None
        return self._plan

    # -- which gradients travel together -----------------------------------------------------------------------------

    def _set_buckets(self, order: Sequence[int]) -> None:
        buckets: tuple[Bucket, ...] = plan_buckets(self._specs, order, self._bucket_bytes)
        self._set = self._exchange.new_set(old=self._set)
        self._sums = [LaneSums(bucket, self.parameters) for bucket in buckets]
        self._bucket_of = {
            member.parameter: number for number, bucket in enumerate(buckets) for member in bucket.members
        }
        self._relearned: list[int] | None = None

    def _learn(self, used: Sequence[bool]) -> None:
        """Agree on the order in which worker 0's backward finished its gradients; unused parameters come last."""
        assert self._observed_order is not None
        seen = dict.fromkeys(self._observed_order)
        self._observed_order = None
        order = [index for index in seen if used[index]]
        order += [index for index in reversed(range(len(used))) if used[index] and index not in seen]
        order += [index for index, is_used in enumerate(used) if not is_used]
        if self._comm is not None:
            agreed = torch.tensor(order, dtype=torch.int64)
            self._comm.broadcast(agreed, root=0).wait()
            order = agreed.tolist()
        self._relearned = order
