"""Gradients on their way out: hooks see them become final, lane sums take them, and buckets leave in a fixed order.

    backward ─hook─► .grad ─take─► lane's node ─merge─► roots ─leave─►    roots: in the backward of the step's last item
    backward ─hook─► .grad ─take─► lane's node ────────────────leave─►    by lane: in the backward of a lane's last item

Where a bucket goes is up to the strategy, which is called with the bucket's number and its nodes by lane. Every bucket
leaves once a step (by lane: once for each lane with samples), in the order of their numbers, on every worker alike.
The order is learned in the first step (worker 0's, agreed by all) and so are parameters that nobody used: those get
the last bucket, so that they don't hold a used one back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.errors import LoopError
from paceline.sharding.bucket import Bucket, GradientSpec
from paceline.sharding.lane_sums import LaneSums
from paceline.sharding.rooms import Rooms
from paceline.strategies.strategy import ItemPlace

Cut = Callable[[Sequence[GradientSpec], Sequence[int]], tuple[Bucket, ...]]  # of (specs, order of parameters)
Leave = Callable[[int, dict[int, Tensor]], None]  # of (bucket, its nodes by lane)


class GradientBuckets:
    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        worker: int,
        *,
        cut: Cut,
        leave: Leave,
        overlap: bool = True,
        by_lane: bool = False,
        learns: bool = True,
        rooms: Rooms | None = None,
        lanes_rounded_to: torch.dtype | None = None,
    ) -> None:
        self._names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._worker = worker
        self._cut, self._leave = cut, leave
        self._overlap, self._by_lane = overlap, by_lane
        self._rooms = rooms
        self._rounded_to = lanes_rounded_to
        self._specs = gradient_specs(self.parameters)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]
        self._held: list[Tensor | None] = [None] * len(self.parameters)
        self._armed = False
        self._before: tuple[list[bool], list[int | None]] = [], []  # used, versions of what is held: before the item
        self._observed_order: list[int] | None = [] if learns else None
        self._plan: SumPlan | None = None
        self.left_during_backward = 0
        self.lane_checks: dict[int, int] | None = None  # of each lane's gradients, where they are wanted
        self._set_buckets(expected_order(len(self.parameters)))

    # -- one step --------------------------------------------------------------------------------------------------

    def start_step(self, plan: SumPlan) -> None:
        self._plan = plan
        for parameter in self.parameters:  # a backward of the user's own before this step is none of its gradient
            parameter.grad = None
        self.used = [False] * len(self.parameters)
        self._next = 0
        self.left_during_backward = 0

    def start_backward(self, place: ItemPlace, *, last: bool) -> None:
        """Put the lane's gradients so far back into `.grad`; with `last`, buckets may leave as they fill."""
        if not self._armed:
            self._before = list(self.used), [None if held is None else held._version for held in self._held]
        self._armed = True
        self._place = place
        self._start_leaving()
        leaves_now = place.last_of_lane if self._by_lane else place.last_of_step
        self._live = last and self._overlap and leaves_now and not place.shadow
        self._missing = [len(sums.bucket.members) for sums in self.sums]
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
            for number in range(len(self.sums)):
                if not self._taken[number]:
                    self._take(number, place.lane)
            self._held = [None] * len(self.parameters)
        self._leave_the_rest(place)

    def skip(self, place: ItemPlace) -> None:
        """The loop left this item without a backward, or with half of one; a lane with no other item adds +0.0."""
        if self._armed:
            self._drop_half(place)
        self._start_leaving()
        if not place.shadow and place.last_of_lane:
            nothing = all(held is None for held in self._held)
            for number, sums in enumerate(self.sums):
                if nothing:
                    sums.take_nothing(place.lane)
                    self._merge(sums, place.lane)
                else:
                    self._take(number, place.lane)
            self._held = [None] * len(self.parameters)
        self._leave_the_rest(place)

    def _drop_half(self, place: ItemPlace) -> None:
        """A backward of the item failed, or its last one never came: forget what there is of it."""
        self._armed = False
        used, versions = self._before
        added = any(h is not None and h._version != v for h, v in zip(self._held, versions, strict=True))
        if added or any(self._taken):
            raise half_is_gone(place)
        for sums in self.sums:
            sums.forget_put()
        self._drop_gradients()
        self.used = used

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.sums: list[LaneSums] = []  # memory that may be a group's
        self._held = []

    # -- from .grad to nodes -----------------------------------------------------------------------------------------

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
        if not self._live or not self._put(number, index):
            return
        self._missing[number] -= 1
        while self._next < len(self.sums) and self._missing[self._next] == 0:
            self._take(self._next, self._place.lane)
            self._let_leave(self._next)
            self.left_during_backward += 1

    def _put(self, number: int, index: int) -> bool:
        """Copy the gradient into its bucket while it is in the caches; whether it is the parameter's first."""
        sums, parameter = self.sums[number], self.parameters[index]
        gradient = parameter.grad
        if not sums.takes_at_once or parameter.dtype != sums.bucket.dtype or gradient is None or gradient.is_sparse:
            return True
        parameter.grad = None
        self.used[index] = True
        return sums.put(self._place_of[index], gradient)

    def _take(self, number: int, lane: int) -> None:
        sums = self.sums[number]
        gradients: list[Tensor | None] = []
        for place, member in enumerate(sums.bucket.members):
            if sums.has(place):
                gradients.append(None)
                continue
            parameter = self.parameters[member.parameter]
            if parameter.dtype == sums.bucket.dtype:
                gradient = parameter.grad if parameter.grad is not None else self._held[member.parameter]
            elif self._held[member.parameter] is None:
                gradient = parameter.grad  # it becomes precise where it is put
            else:
                gradient = self._added_to_held(member.parameter, parameter)
            parameter.grad = None
            if gradient is not None:
                self.used[member.parameter] = True
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
            gradients.append(gradient)
        sums.take(lane, gradients)
        rounded_to = self.lanes_are_in(number)
        if rounded_to is not None:
            sums.nodes[lane].copy_(sums.nodes[lane].to(rounded_to))
        if self.lane_checks is not None:
            self.lane_checks[lane] = (self.lane_checks.get(lane, 0) + bits_sum(sums.nodes[lane])) % (1 << 62)
        self._merge(sums, lane)
        self._taken[number] = True

    def lanes_are_in(self, number: int) -> torch.dtype | None:
        """What each lane's gradients in this bucket are rounded to, if they are: not what a model keeps in fp64."""
        return self._rounded_to if self.sums[number].bucket.dtype == torch.float32 else None

    def _merge(self, sums: LaneSums, lane: int) -> None:
        if not self._by_lane:
            assert self._plan is not None
            sums.merge(self._plan, self._worker, lane)

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

    # -- from nodes to wherever they go ------------------------------------------------------------------------------

    def _start_leaving(self) -> None:
        self._taken = [False] * len(self.sums)
        if self._by_lane:
            self._next = 0

    def _leave_the_rest(self, place: ItemPlace) -> None:
        if (place.last_of_lane and not place.shadow) if self._by_lane else place.last_of_step:
            while self._next < len(self.sums):
                self._let_leave(self._next)

    def _let_leave(self, number: int) -> None:
        sums = self.sums[number]
        nodes, sums.nodes = sums.nodes, {}
        self._leave(number, nodes)
        self._next = number + 1

    # -- which gradients travel together -----------------------------------------------------------------------------

    def _set_buckets(self, order: Sequence[int]) -> None:
        buckets = self._cut(self._specs, order)
        self.sums = [LaneSums(bucket, self.parameters, self._rooms) for bucket in buckets]
        self._bucket_of = {
            member.parameter: number for number, bucket in enumerate(buckets) for member in bucket.members
        }
        self._place_of = {member.parameter: place for bucket in buckets for place, member in enumerate(bucket.members)}
        self._learned: list[int] | None = None

    def learn(self, used: Sequence[bool], comm: Communicator | None) -> None:
        """Agree, once, on the order in which worker 0's backward finished its gradients; unused ones come last."""
        if self._observed_order is None:
            return
        seen = dict.fromkeys(self._observed_order)
        self._observed_order = None
        order = [index for index in seen if used[index]]
        order += [index for index in reversed(range(len(used))) if used[index] and index not in seen]
        order += [index for index, is_used in enumerate(used) if not is_used]
        if comm is not None:
            agreed = torch.tensor(order, dtype=torch.int64)
            comm.broadcast(agreed, root=0).wait()
            order = agreed.tolist()
        self._learned = order

    def cut_anew(self) -> bool:
        """After the step in which an order was learned: buckets are cut by it."""
        if self._learned is None:
            return False
        self._set_buckets(self._learned)
        return True


def half_is_gone(place: ItemPlace) -> LoopError:
    return LoopError(
        f"lane {place.lane} was left in the middle of its backward, when a part of its gradients had been sent or "
        "added to those of other micro-batches: it can't be taken back, and the step would be wrong. Let an exception "
        "in engine.backward() end the program; what may fail belongs before it, where `continue` leaves the item out"
    )


def gradient_specs(parameters: Sequence[Parameter]) -> list[GradientSpec]:
    return [GradientSpec(tuple(p.shape), p.dtype, p.device) for p in parameters]


def drop_gradients(optimizers: Sequence[Optimizer]) -> None:
    for parameter in (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = None


def expected_order(parameters: int) -> list[int]:
    """In which gradients become final, before it was seen: the last layer's first."""
    return list(reversed(range(parameters)))


def bits_sum(tensor: Tensor) -> int:
    """The same for the same bits in any order of buckets."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.contiguous().view(whole).sum(dtype=torch.int64).item())
