"""To the device ahead of use: while the loop works on a batch, the next one is already being copied.

    copy stream       batch 1 ▓▓   batch 2 ▓▓   batch 3 ▓▓
    compute stream            step on batch 1 ▓▓▓▓▓▓  step on batch 2 ▓▓▓▓▓▓

Looking ahead is worth it where loader processes prepare batches meanwhile; without them the next batch would have to be
made before this one is handed out. On the CPU there is nowhere to copy to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.data.sharded_sampler import WorkItem

Pair = tuple[WorkItem, Any]


class Prefetch:
    """Iterates (item, batch on the device); `waited_s` is the time spent on waiting for data so far."""

    def __init__(self, items: Iterator[Pair], device: torch.device, *, ahead: bool) -> None:
        self._items, self._device = items, device
        self._ahead = ahead and device.type != "cpu"
        self._copies = torch.Stream(device=device) if self._ahead else None
        self._next: Pair | None = None
        self._exhausted = False
        self.waited_s = 0.0

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Pair:
        pair = self._next if self._next is not None else self._fetched()
        self._next = None
        if pair is None:
            raise StopIteration
        if self._copies is None:
            return pair[0], to_device(pair[1], self._device)
        current = torch.accelerator.current_stream(self._device)
        current.wait_stream(self._copies)
        _used_on(pair[1], current)
        self._next = self._fetched()
        return pair

    def close(self) -> None:
        close = getattr(self._items, "close", None)
        if close is not None:
            close()

    def _fetched(self) -> Pair | None:
        if self._exhausted:
            return None
        began = time.perf_counter()
        pair = next(self._items, None)
        self.waited_s += time.perf_counter() - began
        if pair is None:
            self._exhausted = True
        elif self._copies is not None:
            with self._copies:
                pair = pair[0], to_device(pair[1], self._device)
        return pair


def to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _used_on(batch: Any, stream: torch.Stream) -> None:
    """The allocator must not reuse a copied tensor's memory before the compute stream is done with it."""
    if isinstance(batch, Tensor):
        batch.record_stream(stream)
    elif isinstance(batch, dict):
        for value in batch.values():
            _used_on(value, stream)
    elif isinstance(batch, list | tuple):
        for value in batch:
            _used_on(value, stream)
