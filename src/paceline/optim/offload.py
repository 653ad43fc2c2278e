"""CPU offload of the optimizer: masters and optimizer state lie on the host, and the update runs there.

    device    sums of gradients  0 ─┐ 1 ─┐ 2 ─┐          ┌─► 0 ┌─► 1 ┌─► 2       weights, for the next forward
    stream                          └─►  └─►  └─►        │     │     │           one for each direction
    host                            update 0 ─────────► update 1 ─► update 2     as soon as a bucket's gradient is there

Only pinned memory is copied while others compute. Masters go up as they are and are rounded on the device: the way is
free while the host updates, and the host is what everybody waits for. Nothing on the host is written again before the
device has it: the next gradient that is waited for was computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.errors import ConfigError

OffloadName = Literal["optimizer"]
HOST = torch.device("cpu")


def check_offload(offload: str | None, device: torch.device, strategy: str, able: Sequence[str]) -> None:
    if offload is None:
        return
    if offload != "optimizer":
        raise ConfigError(f"offload={offload!r} is not known; choose 'optimizer', or leave it out")
    if device.type == "cpu":
        raise ConfigError("offload='optimizer' on the CPU: everything is on the CPU already; leave offload out")
    if strategy not in able:
        raise ConfigError(
            f"offload='optimizer' with strategy={strategy!r}, which updates weights where they are; choose one of "
            f"{', '.join(able)} (with one worker they update everything too)"
        )


class Offload:
    """The way between a device and the host, both directions. On a device without streams copies are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._has_streams = device.type == "cuda"
        self._down = torch.cuda.Stream(device) if self._has_streams else None  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device) if self._has_streams else None  # type: ignore[no-untyped-call]
        self._landed: dict[int, tuple[Tensor, Any]] = {}  # by bucket: where its gradient is, and the event of the copy

    def room(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory on the host for a tensor of this layout."""
        return torch.empty_like(like, dtype=dtype, device=HOST, pin_memory=self._has_streams).detach()

    def land(self, number: int, total: Tensor) -> Tensor:
        """Where a bucket's gradient will be, once it is waited for."""
        room, _ = self._landed.get(number, (None, None))
        if room is None or room.shape != total.shape:
            room = self.room(total, total.dtype)
        event = None
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(total.device))
        with self._on(self._down):
            room.copy_(total, non_blocking=True)
            if self._down is not None:
                event = self._down.record_event()
        self._landed[number] = room, event
        return room

    def wait(self, number: int | None = None) -> None:
        """Until a bucket's gradient is on the host; without a number all of them."""
        for place in list(self._landed) if number is None else [number]:
            event = self._landed[place][1] if place in self._landed else None
            if event is not None:
                event.synchronize()

    def give(self, parts: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Send updated masters to the weights, and round them to their precision there."""
        with self._on(self._up):
            for part, master in zip(parts, masters, strict=True):
                part.copy_(master.to(part.device, non_blocking=True))

    def finish(self) -> None:
        """What the device computes from now on sees all that was given."""
        if self._up is not None:
            torch.cuda.current_stream(self._up.device).wait_stream(self._up)

    def forget(self) -> None:
        """Buckets and pieces have been cut anew."""
        self.wait()
        self._landed.clear()

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)
