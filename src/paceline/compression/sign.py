"""sign: one bit for each value, and the mean size of a block's values.         bytes: (1/8 + 4/block) / 4 of fp32

    scale = mean |x|        x̂ = scale if x ≥ 0, else -scale

(Seide et al., 2014; with error feedback: Karimireddy et al., 2019.) By itself it says little about small values next to
large ones; over steps the residuals give them back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.compression.block_codec import Partial, payload_like, row_scales
from paceline.compression.int8 import check_block


@dataclass(frozen=True)
class Sign:
    block: int = 1024

    def __post_init__(self) -> None:
        check_block("Sign", self.block, least=32)  # bits of four bytes, after which the scale is aligned

    @property
    def row_bytes(self) -> int:
        return self.block // 8 + 4

    @property
    def draws(self) -> bool:
        return False

    def encode(self, values: Tensor, partial: Partial, noise: Tensor | None = None) -> Tensor:
        """Values beyond the end of a parameter are zeros: they change no sum, only how many it is divided by."""
        payload = payload_like(values, self.row_bytes)
        scales = torch.linalg.vector_norm(values, 1, dim=1, keepdim=True).div_(self.block)
        for row, elements in partial:
            scales[row].mul_(self.block / elements)
        bits = (values < 0).view(values.shape[0], self.block // 8, 8)
        payload[:, :-4] = (bits * _WEIGHTS.to(values.device)).sum(dim=2, dtype=torch.uint8)
        row_scales(payload).copy_(scales)
        return payload

    def decode(self, payload: Tensor, partial: Partial, out: Tensor) -> None:
        bits = payload[:, :-4].unsqueeze(2).bitwise_and(_WEIGHTS.to(payload.device)).ne(0)
        torch.where(bits.view_as(out), -row_scales(payload), row_scales(payload), out=out)
        for row, elements in partial:
            out[row, elements:] = 0


_WEIGHTS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
