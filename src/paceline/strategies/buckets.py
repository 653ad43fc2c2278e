"""Gradients on their way out: hooks see them become final, lane sums take them, and buckets leave in a fixed order.

    backward ─hook─► .grad ─take─► lane's node ─merge─► roots ─leave─►    roots: in the backward of the step's last item
    backward ─hook─► .grad ─take─► lane's node ────────────────leave─►    by lane: in the backward of a lane's last item

Where a bucket goes is up to the strategy, which is called with the bucket's number and its nodes by lane. Every bucket
leaves once a step (by lane: once for each lane with samples), in the order of their numbers, on every worker alike.
Buckets are rebuilt once, after the first step: in the order in which worker 0's gradients came, agreed by all, with the
parameters that no worker used in the last bucket, so that they don't hold a used one back.

What is below: `GradientBuckets`, all gradients of a strategy, and the base of those that have them (`InBuckets`);
`LaneSums`, one bucket; `BufferPool`, the memory that they use; `GradientPlaceholder`, what `.grad` is where the sum of
a gradient is sharded; `NotCompressed`, what a strategy asks where no gradient is compressed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import Merge, SumPlan
from paceline.collectives.communicator import Communicator
from paceline.errors import LoopError
from paceline.sharding.bucket import ALIGNED, Bucket, BucketEntry, GradientSpec, Shards
from paceline.strategies.strategy import Agreement, ItemPlace, StrategyBase
from paceline.torch_compat import foreach_copy_, nothing_else_views, plain_torch_function, version_of

Cut = Callable[[Sequence[GradientSpec], Sequence[int]], tuple[Bucket, ...]]  # of (specs, order of parameters)
Leave = Callable[[int, dict[int, Tensor]], None]  # of (bucket, its nodes by lane)
Compress = Callable[[int, ItemPlace, Tensor], bool]  # of (bucket, item, a lane's gradient): whether it was taken over
SlotOf = Callable[[int, int, torch.dtype], Tensor | None]  # of (bucket, elements, dtype): shared memory, if there is


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
        rebuilds: bool = True,
        pool: BufferPool | None = None,
        lanes_rounded_to: torch.dtype | None = None,
        compress: Compress | None = None,
    ) -> None:
        self._names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._worker = worker
        self._cut, self._leave = cut, leave
        self._overlap, self._by_lane = overlap, by_lane
        self._pool = pool
        self._rounded_to = lanes_rounded_to
        self._compress = compress
        self._specs = gradient_specs(self.parameters)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]
        self._held: list[Tensor | None] = [None] * len(self.parameters)
        self._armed = False
        self._before: tuple[list[bool], list[int | None]] = [], []  # used, versions of what is held: before the item
        self._observed_order: list[int] | None = [] if rebuilds else None
        self._plan: SumPlan | None = None
        self.left_during_backward, self.first_left = 0, 0.0
        self.left_at: list[float] = []
        self.lane_checks: dict[int, int] | None = None  # of each lane's gradients, where they are wanted
        self._set_buckets(expected_order(len(self.parameters)))

    # -- one step --------------------------------------------------------------------------------------------------

    def start_step(self, plan: SumPlan) -> None:
        self._plan = plan
        for parameter in self.parameters:  # a backward of the user's own before this step is none of its gradient
            parameter.grad = None
        self.used = [False] * len(self.parameters)
        self._next = 0
        self.left_during_backward, self.left_at = 0, [0.0] * len(self.sums)

    def start_backward(self, place: ItemPlace, *, last: bool) -> None:
        """Put the lane's gradients so far back into `.grad`; with `last`, buckets may leave as they fill."""
        is_first = not self._armed
        if is_first:
            self._before = list(self.used), [None if held is None else version_of(held) for held in self._held]
        self._armed, self.first_left = True, 0.0
        self._place = place
        self._start_leaving()
        leaves_now = place.last_of_lane if self._by_lane else place.last_of_step
        self._live = last and self._overlap and leaves_now and not place.shadow
        self._missing = [len(sums.bucket.entries) for sums in self.sums]
        if any(held is not None for held in self._held):
            for index, parameter in enumerate(self.parameters):
                # After another backward of the item `.grad` has that one's gradient too, or all there is of it.
                if parameter.dtype == self._specs[index].sum_dtype and (is_first or parameter.grad is None):
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
                    self._take(number, place)
            self._held = [None] * len(self.parameters)
        self._leave_the_rest(place)

    def skip(self, place: ItemPlace) -> None:
        """The loop left this item without a backward, or with half of one; a lane with no other item adds +0.0."""
        if self._armed:
            self._drop_half(place)
        else:
            self._drop_gradients()  # a backward of the user's own in the item that is left
        self._start_leaving()
        if not place.shadow and place.last_of_lane:
            nothing = all(held is None for held in self._held)
            for number, sums in enumerate(self.sums):
                if nothing:
                    sums.take_nothing(place.lane)
                    self._merge(number, place)
                else:
                    self._take(number, place)
            self._held = [None] * len(self.parameters)
        self._leave_the_rest(place)

    def _drop_half(self, place: ItemPlace) -> None:
        """A backward of the item failed, or its last one never came: forget what there is of it."""
        self._armed = False
        used, versions = self._before
        added = any(h is not None and version_of(h) != v for h, v in zip(self._held, versions, strict=True))
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
            self._take(self._next, self._place)
            if not self.first_left:
                self.first_left = time.perf_counter()
            self._let_leave(self._next)
            self.left_during_backward += 1

    def _put(self, number: int, index: int) -> bool:
        """Copy the gradient into its bucket while it is in the caches; whether it is the parameter's first."""
        sums, parameter = self.sums[number], self.parameters[index]
        gradient = parameter.grad
        if sums.moves or parameter.dtype != sums.bucket.dtype or gradient is None or gradient.is_sparse:
            return True
        parameter.grad = None
        self.used[index] = True
        return sums.put(self._place_of[index], gradient)

    def _take(self, number: int, place: ItemPlace) -> None:
        sums, lane = self.sums[number], place.lane
        gradients: list[Tensor | None] = []
        for at, entry in enumerate(sums.bucket.entries):
            if sums.has(at):
                gradients.append(None)
                continue
            parameter = self.parameters[entry.parameter]
            if parameter.dtype == sums.bucket.dtype:
                gradient = parameter.grad if parameter.grad is not None else self._held[entry.parameter]
            elif self._held[entry.parameter] is None:
                gradient = parameter.grad  # it becomes precise where it is put
            else:
                gradient = self._added_to_held(entry.parameter, parameter)
            parameter.grad = None
            if gradient is not None:
                self.used[entry.parameter] = True
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
            gradients.append(gradient)
        sums.take(lane, gradients)
        if sums.rounded_to is not None:
            sums.nodes[lane].copy_(sums.nodes[lane].to(sums.rounded_to))
        if self.lane_checks is not None:
            self.lane_checks[lane] = (self.lane_checks.get(lane, 0) + bits_sum(sums.nodes[lane])) % (1 << 62)
        self._merge(number, place)
        self._taken[number] = True

    def _merge(self, number: int, place: ItemPlace) -> None:
        sums, lane = self.sums[number], place.lane
        if self._compress is not None and self._compress(number, place, sums.nodes[lane]):
            del sums.nodes[lane]
        elif not self._by_lane:
            assert self._plan is not None
            sums.merge(self._plan.merges_after[self._worker][lane])

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
        self.left_at[number] = time.perf_counter()
        self._leave(number, nodes)
        self._next = number + 1

    # -- which gradients travel together -----------------------------------------------------------------------------

    def use_slots(self, slot_of: SlotOf) -> None:
        """Make roots where they travel best, as long as buckets are not rebuilt."""
        for number, sums in enumerate(self.sums):
            slot = slot_of(number, sums.bucket.elements, sums.bucket.dtype)
            if slot is not None:
                sums.use_slot(slot)

    def _set_buckets(self, order: Sequence[int]) -> None:
        buckets = self._cut(self._specs, order)
        self.sums = [LaneSums(bucket, self.parameters, self._pool, self._rounded_to) for bucket in buckets]
        self._bucket_of = {entry.parameter: number for number, bucket in enumerate(buckets) for entry in bucket.entries}
        self._place_of = {entry.parameter: place for bucket in buckets for place, entry in enumerate(bucket.entries)}
        self._next_order: list[int] | None = None

    def plan_rebuild(self, used: Sequence[bool], comm: Communicator) -> None:
        """Agree, once, on the order in which worker 0's backward finished its gradients; unused ones come last."""
        if self._observed_order is None:
            return
        seen = dict.fromkeys(self._observed_order)
        self._observed_order = None
        order = [index for index in seen if used[index]]
        order += [index for index in reversed(range(len(used))) if used[index] and index not in seen]
        order += [index for index, is_used in enumerate(used) if not is_used]
        agreed = torch.tensor(order, dtype=torch.int64)
        comm.broadcast(agreed, root=0).wait()
        self._next_order = agreed.tolist()

    def rebuild(self) -> bool:
        """After the step in which an order was agreed on: buckets are cut by it."""
        if self._next_order is None:
            return False
        self._set_buckets(self._next_order)
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


class InBuckets(StrategyBase):
    """The base of strategies whose gradients leave in buckets: what the loop says of an item is theirs to do."""

    _buckets: GradientBuckets

    @property
    def left_during_backward(self) -> int:
        return self._buckets.left_during_backward

    @property
    def first_left(self) -> float:
        return self._buckets.first_left

    @property
    def left_at(self) -> Sequence[float]:
        return self._buckets.left_at

    @property
    def lane_checks(self) -> Mapping[int, int] | None:
        return self._buckets.lane_checks

    def watch_lanes(self, wanted: bool) -> None:
        self._buckets.lane_checks = {} if wanted else None

    def agreement(self, round: int) -> Agreement:
        return Agreement.NOW

    def start_backward(self, place: ItemPlace, *, last: bool) -> None:
        self._buckets.start_backward(place, last=last)

    def finish_backward(self, place: ItemPlace) -> None:
        self._buckets.finish_backward(place)

    def skip(self, place: ItemPlace) -> None:
        self._buckets.skip(place)

    def used(self) -> Sequence[bool]:
        return self._buckets.used


# -- one bucket: from .grad to this worker's partial sums --------------------------------------------------------------


class PendingTotal(Protocol):
    """A compressed bucket's sum that is under way."""

    def wait(self) -> Tensor: ...

    def own_range(self) -> Tensor | None:
        """Where owners keep the sums: None if this worker owns nothing of it."""
        ...


class NotCompressed:
    """Gradients travel as they are; `compressed/gradients.py` has what compresses them."""

    any = False
    now: Collection[int] = ()  # buckets that are compressed in this step

    def grouped(self, specs: Sequence[GradientSpec]) -> Sequence[GradientSpec]:
        """The same, with those apart that must not share a bucket."""
        return specs

    def has(self, number: int) -> bool:
        """Whether this bucket may be compressed, now or later."""
        return False

    def begin(self, round: int, plan: SumPlan, sums: Sequence[LaneSums], shards: Callable[[], Shards]) -> None:
        """A step starts, with these buckets and owners of their ranges."""

    def take(self, number: int, place: ItemPlace, gradient: Tensor) -> bool:
        """Whether it takes a lane's finished gradient over, because it is compressed in this step."""
        return False

    def start(self, number: int) -> PendingTotal:
        """The worker's lanes have been taken: begin the exchange of the bucket."""
        raise NotImplementedError

    def advance(self, loss_scale: float) -> None:
        """All buckets have started, on all workers; gradients came multiplied by `loss_scale`."""

    def commit(self, used: Sequence[bool]) -> None:
        """The step is to be applied."""

    def forget(self) -> None:
        """The step is over."""

    def state(self, lanes: Sequence[int], sums: Sequence[LaneSums], shards: Callable[[], Shards]) -> dict[str, Any]:
        return {}

    def load(
        self, saved: Mapping[str, Any], lanes: Sequence[int], sums: Sequence[LaneSums], shards: Callable[[], Shards]
    ) -> None: ...


class LaneSums:
    """The nodes of one bucket that this worker holds, named by lane.

        .grad ──take──► node of the lane ──merge──► roots     a binary counter: about log2(lanes)+1 buffers are alive

    Gradients are copied into one flat buffer, best at once (`put`) while they are in the caches; their memory then
    serves the next ones. The first buffer may be a *slot* of shared memory, from which the root travels without another
    copy. Without one a large gradient is *moved*: the tensor that backward made becomes the node. A parameter unused in
    a lane counts as +0.0 there. Where no bucket keeps its gradients all of them take their buffers from one pool.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Sequence[Parameter],
        pool: BufferPool | None = None,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        """`rounded_to`: what each lane's gradients are rounded to, if they are; not what a model keeps in fp64."""
        self.bucket = bucket
        self.rounded_to = rounded_to if bucket.dtype == torch.float32 else None
        self.moves = bucket.alone  # otherwise gradients are copied as they come
        self._gaps = bucket.gaps
        self._shared = pool
        if pool is not None and not self.moves:
            pool.expect(bucket.elements, bucket.dtype, bucket.device)
        self._parameters = [parameters[entry.parameter] for entry in bucket.entries]
        self._pool: list[Tensor] = []
        self._views: dict[int, list[Tensor]] = {}  # of pooled buffers, by address: they live as long as we do
        self.nodes: dict[int, Tensor] = {}
        self._filling: Tensor | None = None
        self._there: set[int] = set()  # entries that have been put into it

    def use_slot(self, slot: Tensor) -> None:
        """Make roots in this memory from now on."""
        self.moves = False
        self._clear_gaps(slot)
        self._pool = [slot]  # the first to ask gets it, and the lane that a worker takes first becomes its root

    def put(self, place: int, gradient: Tensor) -> bool:
        """Copy one entry's gradient before the others are there; whether it is that entry's first."""
        if self._filling is None:
            self._filling = self.buffer()
        view = self._views_of(self._filling)[place]
        if place in self._there:  # a backward inside the backward, as checkpointing has: the gradient comes in parts
            view.add_(gradient)
            return False
        view.copy_(gradient)
        self._there.add(place)
        return True

    def has(self, place: int) -> bool:
        return place in self._there

    def forget_put(self) -> None:
        """The entries' gradients that have been put belong to an item that counts as empty."""
        if self._filling is not None:
            self.give_back(self._filling)
        self._filling = None
        self._there.clear()

    def take(self, lane: int, gradients: Sequence[Tensor | None]) -> None:
        """Make the entries' finished gradients of `lane` a node of the tree, with those that were put before."""
        if self.moves and gradients[0] is not None:
            self.nodes[lane] = _memory_in_order(gradients[0], self.bucket.dtype)
            return
        flat = self._filling if self._filling is not None else self.buffer()
        if len(self._there) < len(gradients):
            self._fill(flat, gradients)
        self._filling = None
        self._there.clear()
        self.nodes[lane] = flat

    def _fill(self, flat: Tensor, gradients: Sequence[Tensor | None]) -> None:
        views = self._views_of(flat)
        late = [(place, g) for place, g in enumerate(gradients) if g is not None]
        for place, gradient in enumerate(gradients):
            if gradient is None and place not in self._there:
                views[place].zero_()
        if late:
            foreach_copy_([views[place] for place, _ in late], [gradient for _, gradient in late])

    def take_nothing(self, lane: int) -> None:
        """A lane whose micro-batches were all skipped by the loop: it was given samples, and adds +0.0."""
        self.nodes[lane] = self.buffer().zero_()

    def merge(self, merges: Sequence[Merge]) -> None:
        for merge in merges:
            right = self.nodes.pop(merge.right)
            self.nodes[merge.left].add_(right)
            self.give_back(right)

    def buffer(self) -> Tensor:
        if self._pool:
            return self._pool.pop()
        if self._shared is not None and not self.moves:
            flat = self._shared.take(self.bucket.elements, self.bucket.dtype, self.bucket.device)
        else:
            flat = torch.empty(self.bucket.elements, dtype=self.bucket.dtype, device=self.bucket.device)
        self._clear_gaps(flat)
        return flat

    def _clear_gaps(self, flat: Tensor) -> None:
        """What is no gradient is added up too, hashed, and looked through for what is not finite."""
        for start, stop in self._gaps:
            flat[start:stop].zero_()

    def give_back(self, flat: Tensor) -> None:
        # What backward allocated itself is not ours to keep: holding it would only add to the peak.
        if self.moves:
            return
        if self._shared is not None:
            self._shared.give_back(flat)
        else:
            self._pool.append(flat)

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        if self.moves:
            return [flat.view(self.bucket.entries[0].shape)]
        views = self._views.get(flat.data_ptr())
        if views is None:
            views = self._views[flat.data_ptr()] = [_view(flat, entry) for entry in self.bucket.entries]
        return views

    def hand_out(self, total: Tensor, used: Sequence[bool]) -> None:
        """Make the finished sum the parameters' gradients; one that no lane used (`used`, of all) keeps None."""
        views = self._views_of(total)
        for parameter, entry, view in zip(self._parameters, self.bucket.entries, views, strict=True):
            parameter.grad = _as_gradient_of(parameter, view) if used[entry.parameter] else None


def _view(flat: Tensor, entry: BucketEntry) -> Tensor:
    return flat[entry.offset : entry.offset + entry.elements].view(entry.shape)


def _memory_in_order(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient's elements in logical order as one flat tensor, without a copy where that is possible."""
    return gradient.detach().to(dtype).contiguous().view(-1)


def _as_gradient_of(parameter: Parameter, view: Tensor) -> Tensor:
    """A fused optimizer walks parameter and gradient by memory, so the gradient needs the parameter's strides.

    One that adds up its elements (`torch.dot`) finds another sum where it starts at another alignment.
    """
    if parameter.dtype == view.dtype and parameter.stride() == view.stride() and view.data_ptr() % ALIGNED == 0:
        return view
    return torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(view)


# -- memory that many buckets use in turn ------------------------------------------------------------------------------

Kind = tuple[torch.dtype, torch.device]
KEPT_FREE = 4  # buffers that may be viewed by others: the oldest of more are let go


class BufferPool:
    """Flat buffers that are used in turn.

        bucket 0 ─fill─► buffer A ─leave─► … ─give back─┐
        bucket 1 ─fill─► buffer B ─leave─► …            └─► bucket 2 ─fill─► buffer A

    All buffers of a dtype are as large as the largest bucket that is expected, so that any of them will do. There are
    as many as were needed at once: those being filled, and those whose gradients are on their way.

    `viewed`: autograd or the user may still look at a buffer that was given back (gathered weights). It is used again
    only when nothing does, and only for the same size; at most a few are kept. On a GPU torch's allocator does that.
    """

    def __init__(self, *, viewed: bool = False) -> None:
        self._viewed = viewed
        self._largest: dict[Kind, int] = {}
        self._free: dict[Kind, list[Tensor]] = {}
        self._taken: dict[int, tuple[Kind, Tensor]] = {}  # by address

    @property
    def bytes(self) -> int:
        """Of all buffers, free and taken."""
        free = [buffer for buffers in self._free.values() for buffer in buffers]
        return sum(buffer.nbytes for buffer in (*free, *(buffer for _, buffer in self._taken.values())))

    def expect(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        """A bucket that will come."""
        self._largest[dtype, device] = max(self._largest.get((dtype, device), 0), elements)

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for one bucket, until it is given back."""
        if not elements:
            return torch.empty(0, dtype=dtype, device=device)
        kind = dtype, device
        wanted = max(elements, self._largest.get(kind, 0))
        free = self._free.setdefault(kind, [])
        if self._viewed:
            fits = [place for place, b in enumerate(free) if b.numel() == elements and nothing_else_views(b)]
        else:
            free[:] = [
                buffer for buffer in free if buffer.numel() >= wanted
            ]  # buckets were rebuilt, and are larger now
            fits = [len(free) - 1] if free else []
        buffer = free.pop(fits[0]) if fits else torch.empty(wanted, dtype=dtype, device=device)
        if self._viewed:
            return buffer
        self._taken[buffer.data_ptr()] = kind, buffer
        return buffer[:elements]

    def give_back(self, flat: Tensor) -> None:
        if self._viewed:
            if flat.device.type == "cpu" and flat.numel():
                free = self._free.setdefault((flat.dtype, flat.device), [])
                free[:] = [*free[-KEPT_FREE + 1 :], flat]
        elif flat.numel():
            kind, buffer = self._taken.pop(flat.data_ptr())
            self._free[kind].append(buffer)  # not by the buffer's own device: "cuda" is "cuda:0" there


# -- what .grad is when the gradient has left --------------------------------------------------------------------------

# What the loop itself looks at.
_MAY_BE_SEEN = frozenset({"_version", "shape", "dtype", "device", "layout", "is_sparse", "requires_grad"})


class GradientPlaceholder(Tensor):
    """A tensor of the parameter's shape and dtype without memory, which says where the gradient is when it is used.

    None would be silent: torch's own clipping takes it for "nothing to clip" and returns a norm of zero.
    """

    message: str

    @classmethod
    def of(cls, parameter: Parameter, name: str, strategy: str) -> GradientPlaceholder:
        return cls.saying(
            parameter,
            f"the gradient of {name!r} is not here: under strategy={strategy!r} every worker has its part of the "
            "summed gradient, and .grad has none of it. To clip, use engine.clip_grad_norm_(max_norm); to look at "
            "gradients, train with strategy='ddp'",
        )

    @classmethod
    def saying(cls, parameter: Parameter, message: str) -> GradientPlaceholder:
        nothing = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        made: GradientPlaceholder = nothing.as_subclass(cls)
        made.message = message
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        read = getattr(getattr(func, "__self__", None), "__name__", None)
        if func.__name__ == "__get__" and read in _MAY_BE_SEEN:
            with plain_torch_function():
                return func(*args, **(kwargs or {}))
        found = next((tensor for tensor in _tensors(args) if isinstance(tensor, cls)), None)
        raise LoopError(
            found.message if found is not None else "a gradient that is spread over workers can't be used here"
        )


def _tensors(args: Any) -> list[Any]:
    out: list[Any] = []
    for arg in args:
        out += _tensors(arg) if isinstance(arg, list | tuple) else [arg]
    return out
