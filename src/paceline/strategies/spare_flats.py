"""Spare flats: memory of units that were let go, for the next ones of that size, once nobody looks at it any more.

An allocator that gives the same few buffers again and again keeps a heap small and its pages warm. A view of a flat may
outlive the unit, in autograd or in the user's hands; as long as one does the flat is not used again. torch's allocator
for GPUs does the same by itself, so memory there is left to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 4
_ALONE = 2  # references to memory that one tensor has, while it is being counted


class SpareFlats:
    def __init__(self) -> None:
        self._spare: list[Tensor] = []

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        for place, flat in enumerate(self._spare):
            if flat.numel() == elements and flat.dtype == dtype and flat.device == device and _is_alone(flat):
                return self._spare.pop(place)
        return torch.empty(elements, dtype=dtype, device=device)

    def give_back(self, flat: Tensor) -> None:
        """Of those that nobody takes the oldest are freed."""
        if flat.device.type == "cpu":
            self._spare = [*self._spare[-MOST + 1 :], flat]


def _is_alone(flat: Tensor) -> bool:
    return bool(torch._C._storage_Use_Count(flat.untyped_storage()._cdata) == _ALONE)
