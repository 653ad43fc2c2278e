"""Lane sums: one bucket's gradients on their way from `.grad` to this worker's roots.

    .grad ──take──► node of the lane ──merge──► roots        a binary counter: about log2(lanes)+1 buffers are alive

Gradients are copied into one flat buffer from a pool, best at once (`put`) while they are in the caches; their memory
then serves the next ones. The pool's first buffer may be a *home*, from which the root travels without another copy.
Without a home a large gradient is *moved*: the tensor that backward made becomes the node. A parameter unused in a lane
counts as +0.0 there. Where no bucket keeps its gradients all of them take their buffers from the same `Rooms`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.canonical_sum import SumPlan
from paceline.sharding.bucket import ALIGNED, Bucket, Member
from paceline.sharding.rooms import Rooms


class LaneSums:
    """The nodes of one bucket that this worker holds, named by lane."""

    def __init__(self, bucket: Bucket, parameters: Sequence[Parameter], rooms: Rooms | None = None) -> None:
        self.bucket = bucket
        self._moves = bucket.alone
        self._gaps = bucket.gaps
        self._rooms = rooms
        if rooms is not None and not self._moves:
            rooms.expect(bucket)
        self._parameters = [parameters[member.parameter] for member in bucket.members]
        self._pool: list[Tensor] = []
        self._views: dict[int, list[Tensor]] = {}  # of pooled buffers, by address: they live as long as we do
        self.nodes: dict[int, Tensor] = {}
        self._filling: Tensor | None = None
        self._there: set[int] = set()  # members that have been put into it

    @property
    def takes_at_once(self) -> bool:
        return not self._moves

    def live_in(self, home: Tensor) -> None:
        """Make roots in `home` from now on."""
        self._moves = False
        self._clear_gaps(home)
        self._pool = [home]  # whoever asks first gets it, and the lane that a worker takes first becomes its root

    def put(self, place: int, gradient: Tensor) -> bool:
        """Copy one member's gradient before the others are there; whether it is that member's first."""
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
        """The members' gradients that have been put belong to an item that counts as empty."""
        if self._filling is not None:
            self.give_back(self._filling)
        self._filling = None
        self._there.clear()

    def take(self, lane: int, gradients: Sequence[Tensor | None]) -> None:
        """Make the members' finished gradients of `lane` a node of the tree, with those that were put before."""
        if self._moves and gradients[0] is not None:
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
            torch._foreach_copy_([views[place] for place, _ in late], [gradient for _, gradient in late])

    def take_nothing(self, lane: int) -> None:
        """A lane whose micro-batches were all skipped by the loop: it was dealt samples, and adds +0.0."""
        self.nodes[lane] = self.buffer().zero_()

    def merge(self, plan: SumPlan, worker: int, lane: int) -> None:
        for step in plan.merges_after(worker, lane):
            right = self.nodes.pop(step.right)
            self.nodes[step.left].add_(right)
            self.give_back(right)

    def buffer(self) -> Tensor:
        if self._pool:
            return self._pool.pop()
        if self._rooms is not None and not self._moves:
            flat = self._rooms.take(self.bucket)
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
        if self._moves:
            return
        if self._rooms is not None:
            self._rooms.give_back(flat)
        else:
            self._pool.append(flat)

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        if self._moves:
            return [flat.view(self.bucket.members[0].shape)]
        views = self._views.get(flat.data_ptr())
        if views is None:
            views = self._views[flat.data_ptr()] = [_view(flat, member) for member in self.bucket.members]
        return views

    def hand_out(self, total: Tensor, used: Sequence[bool]) -> None:
        """Make the finished sum the parameters' gradients; a parameter that no lane used keeps None."""
        for parameter, view, is_used in zip(self._parameters, self._views_of(total), used, strict=True):
            parameter.grad = _as_gradient_of(parameter, view) if is_used else None


def _view(flat: Tensor, member: Member) -> Tensor:
    return flat[member.offset : member.offset + member.elements].view(member.shape)


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
