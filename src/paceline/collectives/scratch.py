"""Scratch memory that is taken again and again: a fresh 12 MiB tensor costs more in page faults than in copying."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """One thread's reusable buffer per dtype and device; what `take` returns is valid until the next `take`."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, like: Tensor, elements: int | None = None) -> Tensor:
        wanted = like.numel() if elements is None else elements
        key = (like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < wanted:
            buffer = self._buffers[key] = torch.empty(wanted, dtype=like.dtype, device=like.device)
        return buffer[:wanted]
