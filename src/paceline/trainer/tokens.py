"""How many tokens a batch has: the elements of its main input where they are whole numbers, with or without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def count_tokens(batch: Any, main_input: str, *, padding: bool) -> int:
    """`padding=False` counts where the attention mask is set; a batch without a mask has no padding."""
    if isinstance(batch, Mapping):
        mask = batch.get("attention_mask")
        if not padding and isinstance(mask, Tensor):
            return int(mask.sum())
        found = batch.get(main_input, next(iter(batch.values()), None))
    else:
        found = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(found, Tensor) or found.dim() < 2 or found.is_floating_point() or found.is_complex():
        return 0
    return int(found.numel())
