"""fp16, bf16: values in half precision.                                                  bytes: 1/2 of fp32

What is too large for the format is sent as its largest number; the rest of it stays in the residual and follows in the
next steps. So an overflow of fp16 leaves no step out; gradients that are not finite stay so, and are seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.collectives.shared_memory.kernels import Merges
from paceline.compression.block_codec import BlockCodec, OwnedRows, Partial, clear_beyond
from paceline.world.checked_values import one_word

_CHUNK = 1 << 17
"""Values at a time: what one operator makes of them is still in the cache for the next."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast(BlockCodec):
    """Gradients travel in bf16 or fp16: half the bytes of fp32."""

    to: Literal["bf16", "fp16"] = "bf16"

    def __post_init__(self) -> None:
        one_word("Cast(to=…)", self.to, tuple(_DTYPES))

    @property
    def block(self) -> int:
        """Any would do; memory is aligned to so many."""
        return 16

    @property
    def row_bytes(self) -> int:
        return 2 * self.block

    def encode(self, values: Tensor, partial: Partial, noise: Tensor | None = None) -> Tensor:
        dtype = _DTYPES[self.to]
        largest = torch.finfo(dtype).max
        sent = values.clamp(-largest, largest)
        sent.add_(values - values)  # 0 of what is finite, and otherwise nan
        return sent.to(dtype).view(torch.uint8)

    def split(self, values: Tensor, partial: Partial, noise: Tensor | None, residual: Tensor | None) -> Tensor:
        if values.device.type != "cpu":  # whose host would wait for each chunk
            return super().split(values, partial, noise, residual)
        payload = values.new_empty(values.shape, dtype=_DTYPES[self.to])
        room = self._room(values)
        for chunk in self._chunks(values):
            self._split_chunk(values[chunk], None if residual is None else residual[chunk], payload[chunk], room)
        clear_beyond(values, partial)
        return payload.view(torch.uint8)

    def sum(self, parts: Sequence[Tensor], merges: Merges, rows: OwnedRows) -> Tensor:
        if rows.lost.device.type != "cpu":
            return super().sum(parts, merges, rows)
        dtype, residual = _DTYPES[self.to], rows.residual
        payload = rows.lost.new_empty(rows.lost.shape, dtype=dtype)
        rooms = [self._room(rows.lost) for _ in parts]  # the first one's for what the sum decodes to
        for chunk in self._chunks(rows.lost):
            lost = rows.lost[chunk]
            values = [lost, *(room[: len(lost)] for room in rooms[1:])]
            for part, value in zip(parts, values, strict=True):
                value.copy_(part[chunk].view(dtype))
            for left, right in merges:
                values[left].add_(values[right])
            self._split_chunk(lost, None if residual is None else residual[chunk], payload[chunk], rooms[0])
            rows.out[chunk].copy_(payload[chunk])
        clear_beyond(rows.lost, rows.partial)
        clear_beyond(rows.out, rows.partial)
        return payload.view(torch.uint8)

    def _split_chunk(self, values: Tensor, residual: Tensor | None, sent: Tensor, room: Tensor) -> None:
        decoded = room[: len(values)]
        if residual is not None:
            values.add_(residual)
        sent.copy_(torch.add(values, 0.0, out=decoded))  # as in `encode`: -0.0 is sent as 0.0
        decoded.copy_(sent)
        if not math.isfinite(decoded.sum()):  # something is too large, or not finite
            decoded.copy_(sent.copy_(self.encode(values, ()).view(sent.dtype)))
        values.sub_(decoded)

    def _chunks(self, values: Tensor) -> list[slice]:
        rows = _CHUNK // self.block
        return [slice(low, low + rows) for low in range(0, len(values), rows)]

    def _room(self, values: Tensor) -> Tensor:
        return values.new_empty((min(len(values), _CHUNK // self.block), self.block))

    def decode(self, payload: Tensor, partial: Partial, out: Tensor) -> None:
        out.copy_(payload.view(_DTYPES[self.to]))
        clear_beyond(out, partial)
