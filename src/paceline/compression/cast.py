"""fp16, bf16: values in half precision.                                                  bytes: 1/2 of fp32

What is too large for the format is sent as its largest number; the rest of it stays in the residual and follows in the
next steps. So an overflow of fp16 leaves no step out; gradients that are not finite stay so, and are seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.compression.block_codec import BlockCodec, Partial, clear_beyond
from paceline.world.checked_values import one_word

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

    def decode(self, payload: Tensor, partial: Partial, out: Tensor) -> None:
        out.copy_(payload.view(_DTYPES[self.to]))
        clear_beyond(out, partial)
