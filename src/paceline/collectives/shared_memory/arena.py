"""Tensors inside shared memory: every rank has one of the same size at the same place, and sees everybody's.

A tensor's memory tells whether it lies in an arena: its address. Its place (which arena, how far in) has to be the same
on every rank, since then the others' counterparts are known without asking.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.collectives.shared_memory.segment import PAGE, Segment

_OFFSET_BITS = 40


@dataclass(frozen=True)
class Arena:
    segment: Segment
    rows: Tensor  # size × bytes
    first: int  # address of this rank's row
    bytes: int


class Arenas:
    """What a group has allocated; `make` creates a segment of so many bytes, the same on every rank."""

    def __init__(self, rank: int, size: int, make: Callable[[int], Segment]) -> None:
        self._rank, self._size, self._make = rank, size, make
        self._arenas: dict[int, Arena] = {}  # by number, the same on every rank
        self._commons: list[Segment] = []
        self._numbers = itertools.count()

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A tensor in shared memory. All ranks allocate the same, in the same order."""
        each = -(-elements * dtype.itemsize // PAGE) * PAGE or PAGE
        segment = self._make(each * self._size)
        rows = segment.memory[PAGE:].view(self._size, each)
        arena = Arena(segment, rows, rows[self._rank].data_ptr(), each)
        self._arenas[next(self._numbers)] = arena
        return rows[self._rank, : elements * dtype.itemsize].view(dtype)

    def common(self, bytes_wanted: int) -> Tensor:
        """Memory that exists once for all ranks, as bytes; it belongs to nobody, so they agree on who writes when."""
        segment = self._make(max(1, bytes_wanted))
        self._commons.append(segment)
        return segment.memory[PAGE : PAGE + bytes_wanted]

    def place_of(self, tensor: Tensor) -> str | None:
        """Which arena and how far in, if `tensor` is there."""
        found = self._find(tensor)
        return None if found is None else f"{found[0]}:{found[1]}"

    def number_of(self, tensor: Tensor) -> int | None:
        """The same as one number, to be told to a rank that wants to read the tensor where it lies."""
        found = self._find(tensor)
        return None if found is None else found[0] << _OFFSET_BITS | found[1]

    def there(self, rank: int, number: int, elements: int, dtype: torch.dtype) -> Tensor:
        """What `rank` named by that number."""
        rows, offset = self._arenas[number >> _OFFSET_BITS].rows, number & (1 << _OFFSET_BITS) - 1
        return rows[rank, offset : offset + elements * dtype.itemsize].view(dtype)

    def everyones(self, tensor: Tensor) -> list[Tensor]:
        """The counterparts of `tensor` on all ranks, in rank order."""
        number = self.number_of(tensor)
        assert number is not None
        return [self.there(rank, number, tensor.numel(), tensor.dtype) for rank in range(self._size)]

    def release(self, tensor: Tensor) -> None:
        """Let go of the arena that `tensor` lies in; the memory is free when every rank has, and no tensor is left."""
        found = self._find(tensor)
        if found is not None:
            self._arenas.pop(found[0]).segment.close()

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.segment.close()
        for segment in self._commons:
            segment.close()
        self._arenas.clear()
        self._commons.clear()

    def _find(self, tensor: Tensor) -> tuple[int, int] | None:
        address = tensor.data_ptr()
        for number, arena in self._arenas.items():
            if arena.first <= address < arena.first + arena.bytes:
                return number, address - arena.first
        return None
