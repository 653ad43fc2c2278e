"""Buffers such as BatchNorm statistics: every lane starts the step from the step's buffers.

    step's buffers ──► lane 0 ──► what lane 0 leaves becomes the next step's, on every worker
                   ├─► lane 1 ──► dropped
                   └─► lane 2 ──► dropped

That is what DDP's broadcast of rank 0's buffers does, said in lanes: it does not depend on who rode which lane. Buffers
are restored when a lane's first micro-batch is handed out, never between a forward and its backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.collectives.communicator import Communicator, Handle


class LaneBuffers:
    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._live: list[Tensor] = []
        self._at_start: list[Tensor] = []
        self._kept: list[Tensor] | None = None
        self._touched = False
        self._moving: list[int] = []  # buffers that some step has changed: the same list on every worker
        self._ahead: _Sent | None = None

    def start_step(self) -> None:
        seen: dict[int, Tensor] = {}
        for model in self._models:
            for buffer in model.buffers():
                if buffer.numel():
                    seen.setdefault(id(buffer), buffer)
        self._live = list(seen.values())
        same = len(self._live) == len(self._at_start) and all(
            a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
            for a, b in zip(self._live, self._at_start, strict=True)
        )
        if not same:
            self._at_start = [torch.empty_like(buffer) for buffer in self._live]
            self._moving = []
        self._copy(self._live, self._at_start)
        self._kept = None
        self._touched = False

    def start_lane(self) -> None:
        if self._touched:
            self._copy(self._at_start, self._live)
        self._touched = True

    def finish_lane(self, *, keep: bool) -> None:
        """After the lane's last forward; `keep` for the step's lowest lane, whose buffers live on."""
        if keep and self._live:
            self._kept = [buffer.detach().clone() for buffer in self._live]

    def changed(self) -> list[bool]:
        """Which buffers the step changed, as the worker that rode the lowest lane sees it; others see no change."""
        if self._kept is None:
            return [False] * len(self._live)
        return [not torch.equal(a, b) for a, b in zip(self._kept, self._at_start, strict=True)]

    def send_ahead(self, comm: Communicator | None, owner: int) -> None:
        """Before the worker's last backward: send the buffers that changed in earlier steps while it runs."""
        if comm is not None and self._moving:
            self._ahead = self._broadcast(comm, owner, self._moving)

    def finish_step(
        self, comm: Communicator | None, owner: int, changed: Sequence[bool], *, dropped: bool = False
    ) -> None:
        """Every worker takes over what the lowest lane left, or, of a step that is left out, what it began with.

        `owner` is the worker that rode the lowest lane.
        """
        if not self._live:
            return
        if dropped:
            if self._ahead is not None:
                self._ahead.handle.wait()
                self._ahead = None
            self._copy(self._at_start, self._live)
            return
        moved = [number for number, is_changed in enumerate(changed) if is_changed]
        final = list(self._at_start)
        if comm is None:
            for number in moved:
                final[number] = self._mine(number)
        else:
            late = [number for number in moved if number not in self._moving]
            sent = [self._ahead] if self._ahead is not None else []
            sent += [self._broadcast(comm, owner, late)] if late else []
            for under_way in sent:
                for number, value in under_way.received():
                    final[number] = value
            self._moving = sorted({*self._moving, *late})
            self._ahead = None
        self._copy(final, self._live)

    def _broadcast(self, comm: Communicator, owner: int, numbers: Sequence[int]) -> _Sent:
        tensors = [self._mine(number) for number in numbers]
        packed = torch.cat([_bytes(tensor) for tensor in tensors])
        return _Sent(list(numbers), tensors, packed, comm.broadcast(packed, root=owner))

    def _mine(self, number: int) -> Tensor:
        return self._kept[number] if self._kept is not None else self._live[number]

    def _copy(self, source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
        if source:
            with torch.no_grad():
                torch._foreach_copy_(list(target), list(source))


@dataclass(frozen=True)
class _Sent:
    """Some buffers on their way in one message."""

    numbers: list[int]
    tensors: list[Tensor]
    packed: Tensor
    handle: Handle

    def received(self) -> Iterator[tuple[int, Tensor]]:
        self.handle.wait()
        parts = torch.split(self.packed, [_bytes(tensor).numel() for tensor in self.tensors])
        for number, tensor, part in zip(self.numbers, self.tensors, parts, strict=True):
            # A slice may start at an odd byte; a clone starts where its dtype can.
            yield number, part.clone().view(tensor.dtype).view(tensor.shape)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
