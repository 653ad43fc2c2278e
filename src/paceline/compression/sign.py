"""sign: one bit for each value, and the mean size of a block's values.         bytes: (1/8 + 4/block) / 4 of fp32

    scale = mean |x|        x̂ = scale if x ≥ 0, else -scale

(Seide et al., 2014; with error feedback: Karimireddy et al., 2019.) By itself it says little about small values next to
large ones; over steps the residuals give them back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.compression.block_codec import (
    BlockCodec,
    Partial,
    clear_beyond,
    payload_like,
    row_scales,
)
from paceline.compression.int8 import check_block


@dataclass(frozen=True)
class Sign(BlockCodec):
    """Each `block` of values becomes one bit for each sign, and one fp32 scale."""

    block: int = 1024

    def __post_init__(self) -> None:
        check_block("Sign", self.block, least=32)  # bits of four bytes, after which the scale is aligned

    @property
    def row_bytes(self) -> int:
        return self.block // 8 + 4

    def encode(self, values: Tensor, partial: Partial, noise: Tensor | None = None) -> Tensor:
        """Values beyond the end of a parameter are zeros: they change no sum, only how many it is divided by."""
        payload = payload_like(values, self.row_bytes)
        scales = values.abs().sum(dim=1, keepdim=True).div_(self.block)
        for row, elements in partial:
            scales[row].mul_(self.block / elements)
        payload[:, :-4] = _packed(values < 0)
        row_scales(payload).copy_(scales)
        return payload

    def decode(self, payload: Tensor, partial: Partial, out: Tensor) -> None:
        signs = _SIGNS.to(payload.device).index_select(0, payload[:, :-4].flatten().int())
        torch.mul(signs.view_as(out), row_scales(payload), out=out)
        clear_beyond(out, partial)


_TO_ONE_BYTE = 0x0102040810204080  # bit 8·i becomes bit 56 + i, and nothing else comes there
_SIGNS = torch.where(torch.arange(256).unsqueeze(1).bitwise_and(2 ** torch.arange(8)).ne(0), -1.0, 1.0)


def _packed(flags: Tensor) -> Tensor:
    """Eight of them in a byte, the first in its lowest bit."""
    eights = flags.view(torch.uint8).view(torch.int64)
    return (eights * _TO_ONE_BYTE >> 56).to(torch.uint8)
