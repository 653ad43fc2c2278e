"""CPU offload: what is kept for the update lies on the host, and the update runs there.

    offload        on the host                                on the device
    "optimizer"    masters, optimizer state                   weights
    "parameters"   the same, and the weights' shards          the units that are being used: zero3, fsdp

    device    sums of gradients  0 ─┐ 1 ─┐ 2 ─┐          ┌─► 0 ┌─► 1 ┌─► 2       weights, for the next forward
    stream                          └─►  └─►  └─►        │     │     │           one for each direction
    host                            update 0 ─────────► update 1 ─► update 2     as soon as a bucket's gradient is there

Only pinned memory is copied while others compute. Masters go up as they are and are rounded on the device: the way is
free while the host updates, and the host is what all wait for. Nothing on the host is written again before the
device has it: the next gradient that is waited for was computed from it. Shards of weights go up when their unit is
used, the next one's while this one computes (`Lift`); nothing writes to them before all of that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.errors import ConfigError

OffloadName = Literal["optimizer", "parameters"]
PARAMETERS: OffloadName = "parameters"
IN_SHARDS = ("zero3", "fsdp")  # strategies whose weights can be away from the device
HOST = torch.device("cpu")
LARGEST_SLAB = 2**30  # of pinned memory; a larger tensor has one for itself
ALIGNED = 64


def check_offload(offload: str | None, device: torch.device, strategy: str, able: Sequence[str]) -> None:
    if offload is None:
        return
    if not isinstance(offload, str) or offload not in ("optimizer", PARAMETERS):
        raise ConfigError(f"offload={offload!r} is not known; choose 'optimizer' or 'parameters', or leave it out")
    if device.type == "cpu":
        raise ConfigError(f"offload={offload!r} on the CPU: everything is on the CPU already; leave offload out")
    if strategy not in able:
        raise ConfigError(
            f"offload={offload!r} with strategy={strategy!r}, which updates weights where they are; choose one of "
            f"{', '.join(able)} (with one worker they update everything too)"
        )
    if offload == PARAMETERS and strategy not in IN_SHARDS:
        raise ConfigError(
            f"offload='parameters' with strategy={strategy!r}, which has all weights on the device; choose "
            "strategy='zero3', or offload='optimizer'"
        )


class HostMemory:
    """Memory on the host for what stays there; pinned, it is cut from slabs whose size is a power of two.

    torch's allocator of pinned memory rounds each request up to a power of two: 4,096 × 11,008 weights would take 1.49
    times as much. A slab is freed when nobody has a tensor in it, nor this object.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: list[Tensor] = []  # bytes
        self._taken: list[int] = []  # of each slab

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        if not self._pinned:
            return torch.empty(elements, dtype=dtype, device=HOST)
        size = -(-elements * dtype.itemsize // ALIGNED) * ALIGNED
        rooms = [place for place, slab in enumerate(self._slabs) if self._taken[place] + size <= len(slab)]
        if not rooms:
            self._slabs.append(_pinned_bytes(self._next_slab(size)))
            self._taken.append(0)
        place = rooms[0] if rooms else -1
        start = self._taken[place]
        self._taken[place] += size
        return self._slabs[place][start : start + elements * dtype.itemsize].view(dtype)

    def _next_slab(self, size: int) -> int:
        """As much as there is already, so that small models take little and large ones few slabs."""
        held = sum(map(len, self._slabs))
        return max(_power_of_two(size), min(LARGEST_SLAB, _power_of_two(held)))


def _pinned_bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=HOST, pin_memory=True)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


class Offload:
    """The way between a device and the host, both directions. On a device without streams copies are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._has_streams = device.type == "cuda"
        self._down = torch.cuda.Stream(device) if self._has_streams else None  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device) if self._has_streams else None  # type: ignore[no-untyped-call]
        self._landed: dict[int, tuple[Tensor, Any]] = {}  # by bucket: where its gradient is, and the event of the copy
        self._masters, self._gradients = (HostMemory(pinned=self._has_streams) for _ in range(2))

    def host_copy(self, master: Tensor) -> Tensor:
        """On the host, in the same layout."""
        strides = torch.empty_like(master, device="meta").stride()  # dense, whatever the original is
        room = self._masters.empty(master.numel(), master.dtype)
        return room.as_strided(master.shape, strides).copy_(master.detach())

    def land(self, number: int, total: Tensor) -> Tensor:
        """Where a bucket's gradient will be, once it is waited for; what has landed is where it is."""
        landed, _ = self._landed.get(number, (None, None))
        if landed is total:
            return total
        if landed is None or landed.shape != total.shape:
            landed = self._gradients.empty(total.numel(), total.dtype).view(total.shape)
        event = None
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(total.device))
            total.record_stream(self._down)  # the caller may let go of it
        with self._on(self._down):
            landed.copy_(total, non_blocking=True)
            if self._down is not None:
                event = self._down.record_event()
        self._landed[number] = landed, event
        return landed

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
        """Buckets have been rebuilt, and masters will be: memory goes with the tensors in it."""
        self.wait()
        self._landed.clear()
        self._masters, self._gradients = (HostMemory(pinned=self._has_streams) for _ in range(2))

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)


class Lift:
    """The way up for weights that are about to be used. On a device without streams copies are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._kept = HostMemory(pinned=self._stream is not None)

    def keep(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Memory on the host from which the device can read by itself, as long as weights are cut this way."""
        return self._kept.empty(elements, dtype)

    def host_buffer(self, elements: int, dtype: torch.dtype) -> Tensor:
        """The same for something that is soon let go of."""
        return torch.empty(elements, dtype=dtype, device=HOST, pin_memory=self._stream is not None)

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """From the host to the device, beside what is computed from now on; what was asked for before comes first.

        Memory on the device may have been another tensor's, with which something is still computed.
        """
        if self._stream is None:
            for here, there in pairs:
                there.copy_(here)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for here, there in pairs:
                there.copy_(here, non_blocking=True)
            return self._stream.record_event()

    def arrive(self, event: Any) -> None:
        """What is computed from now on sees what was started with this event, or may have its memory."""
        if self._stream is not None and event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)

    def finish(self) -> None:
        """The host may write again to what was lifted."""
        if self._stream is not None:
            self._stream.synchronize()
