"""To the device ahead of use: while the loop works on a batch, the next one is already being copied.

    copy stream       batch 1 ▓▓   batch 2 ▓▓   batch 3 ▓▓
    compute stream            step on batch 1 ▓▓▓▓▓▓  step on batch 2 ▓▓▓▓▓▓

Looking ahead is worth it where loader processes prepare batches meanwhile; without them the next batch would have to be
made before this one is handed out. On the CPU there is nowhere to copy to.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.data.sharded_sampler import WorkItem

Pair = tuple[WorkItem, Any]


class Prefetch:
    """Iterates (item, batch on the device); `waited_s` is the time spent on waiting for data so far."""

    def __init__(self, items: Iterator[Pair], device: torch.device, *, ahead: bool) -> None:
        self._items, self._device = items, device
        self._copies = torch.Stream(device=device) if ahead and device.type != "cpu" else None
        self._next: Pair | Exception | None = None
        self.waited_s = 0.0

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Pair:
        found = self._next if self._next is not None else self._fetched()
        self._next = None
        if isinstance(found, Exception):
            raise found
        item, batch = found
        if self._copies is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_stream(self._copies)
            _used_on(batch, current)
            self._next = self._fetched()
        return item, to_device(batch, self._device)

    def close(self) -> None:
        self._next = None
        close = getattr(self._items, "close", None)
        if close is not None:
            close()

    def _fetched(self) -> Pair | Exception:
        """The next pair, or what came in its place: a failure ahead must not keep this batch from being used."""
        began = time.perf_counter()
        try:
            item, batch = next(self._items)
        except Exception as error:
            return error
        finally:
            self.waited_s += time.perf_counter() - began
        if self._copies is None:
            return item, batch
        with self._copies:
            return item, to_device(batch, self._device, seen_through=True)


def to_device(batch: Any, device: torch.device, *, seen_through: bool = False) -> Any:
    """The batch with its tensors on the device.

    With `seen_through`, only what `_used_on` finds: other objects are moved when they are handed out.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):  # a transformers BatchEncoding, a PackedSequence, a graph
        return batch if seen_through and not isinstance(batch, Mapping | list | tuple) else _asked_to(batch, device)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device, seen_through=seen_through) for key, value in batch.items()}
        return moved if type(batch) is dict else _like(batch, moved)
    if isinstance(batch, list | tuple):
        values = [to_device(value, device, seen_through=seen_through) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def _asked_to(batch: Any, device: torch.device) -> Any:
    try:
        return batch.to(device, non_blocking=True)
    except TypeError:
        return batch.to(device)


def _like(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """A mapping of the user's own type keeps what else it holds."""
    copied: Any = copy.copy(batch)
    if not hasattr(copied, "update"):
        return moved
    copied.update(moved)
    return copied


def _used_on(batch: Any, stream: torch.Stream) -> None:
    """The allocator must not reuse a copied tensor's memory before the compute stream is done with it."""
    if isinstance(batch, Tensor):
        if batch.device.type != "cpu":  # a PackedSequence keeps its lengths there
            batch.record_stream(stream)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _used_on(value, stream)
    elif isinstance(batch, list | tuple):
        for value in batch:
            _used_on(value, stream)
