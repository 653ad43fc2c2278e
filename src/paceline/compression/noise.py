"""Random numbers by position: element i of a stream is a function of the stream's seed and of i alone.

Whoever needs a part of a stream makes that part, so cuts and owners change no number. The mixing is that of SplitMix64
(Steele, Lea and Flood, 2014), in whole numbers, so that every device makes the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64  # as numbers with a sign
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
_BITS = 24  # all fp32 numbers of that many bits are below 1


def uniform(seed: int, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Elements [start, start + count) of a stream: fp32 in [0, 1)."""
    z = torch.arange(start, start + count, dtype=torch.int64, device=device).add_(seed).mul_(_STEP)
    z = (z ^ _shifted(z, 30)).mul_(_FIRST)
    z = (z ^ _shifted(z, 27)).mul_(_SECOND)
    z = z ^ _shifted(z, 31)
    return z.bitwise_and_(2**_BITS - 1).to(torch.float32).mul_(2.0**-_BITS)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Zeros come in from the left, as without a sign."""
    return (z >> bits).bitwise_and_(2 ** (64 - bits) - 1)
