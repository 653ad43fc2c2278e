"""Saved weights: autograd keeps the place of a gathered weight, not the weight, and looks it up again in backward.

    forward    torch saves W, a view of a gathered flat ─► Place(unit 3, bucket 0, size, stride, offset)
    backward   torch wants W ─► unit 3 is gathered again, if it is not here ─► the same view of it

The hooks hold from `prepare` to `close`, wherever a weight is used: without them autograd would keep the parameter
itself, whose memory goes when its unit is let go. Hooks that somebody pushes on top (checkpointing) are given a tensor
of the same memory instead of the parameter, and keep that alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Gathered(Protocol):
    def place_of(self, address: int) -> tuple[int, int, torch.dtype] | None:
        """The unit, the bucket in it and the dtype of the gathered weights that lie there."""
        ...

    def for_backward(self, unit: int, bucket: int) -> Tensor:
        """The bucket, gathered."""
        ...


@dataclass(frozen=True)
class _Place:
    of: Gathered
    unit: int
    bucket: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedWeights:
    """`gathered` may grow."""

    def __init__(self, gathered: Sequence[Gathered]) -> None:
        self._gathered = gathered
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def close(self) -> None:
        self._hooks.__exit__()

    def _pack(self, saved: Tensor) -> Tensor | _Place:
        if saved.layout is not torch.strided or not saved.numel():
            return saved
        address = saved.untyped_storage().data_ptr()
        for some in self._gathered:
            found = some.place_of(address)
            if found is not None:
                unit, bucket, dtype = found
                if dtype == saved.dtype:
                    return _Place(some, unit, bucket, saved.size(), saved.stride(), int(saved.storage_offset()))
        return saved

    def _unpack(self, packed: Tensor | _Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        flat = packed.of.for_backward(packed.unit, packed.bucket)
        return flat.as_strided(packed.size, packed.stride, packed.offset)
