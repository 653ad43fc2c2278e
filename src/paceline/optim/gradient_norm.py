"""The norm of all gradients, by the block rule: the same bits however the tensors are cut.

    parameter     |------ block ------|------ block ------|-- tail --|       counted from the parameter's first element
    inside        one norm in fp32 (fp64 stays fp64), over the same 4096 elements wherever they live
    between       squares of the blocks' norms, as whole numbers of a unit far below the largest: their sum is exact in
                  any order, on the host and on a device, and is rounded once

A sum of per-worker partial sums would depend on where the shards end; this does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.torch_compat import foreach_norm

BLOCK = 4096


def block_norms(gradient: Tensor) -> Tensor:
    """The norm of each block of one gradient."""
    flat = gradient.detach().contiguous().view(-1)
    precision = torch.promote_types(flat.dtype, torch.float32)
    whole = flat.numel() // BLOCK * BLOCK
    rows: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1, dtype=precision)
    if whole == flat.numel():
        return rows
    tail = torch.linalg.vector_norm(flat[whole:].view(1, -1), dim=1, dtype=precision)
    return torch.cat([rows, tail])


def counted_norms(gradients: Iterable[tuple[Tensor, bool]]) -> Tensor:
    """The norms of all blocks; those of a gradient that another worker counts are 0."""
    found = [(block_norms(gradient).double(), counts) for gradient, counts in gradients]
    norms = [one if counts else torch.zeros_like(one) for one, counts in found]
    return torch.cat([one.to(norms[0].device) for one in norms]) if norms else torch.zeros(0, dtype=torch.float64)


def global_norm(gradients: Iterable[Tensor]) -> float:
    return norm_of_blocks(counted_norms((gradient, True) for gradient in gradients))


DIGITS = 33  # bits of each of the two parts of a square: 2^30 blocks of them can be added


def norm_of_blocks(norms: Tensor) -> float:
    """Of blocks in any order; a block of norm 0 changes nothing."""
    if not norms.numel():
        return 0.0
    squares = norms.square()
    exponent = torch.frexp(squares.max())[1].clamp(min=-900)  # 2^power has to be a number: norms under 1e-135 come to 0
    scaled = torch.ldexp(squares, DIGITS - exponent)
    high = scaled.floor()
    low = ((scaled - high) * 2.0**DIGITS).round()
    parts = [high.long().sum(), low.long().sum(), exponent.long(), squares.isnan().any(), squares.isinf().any()]
    of_high, of_low, power, any_nan, any_infinite = torch.stack([part.long() for part in parts]).tolist()
    if any_nan or any_infinite:
        return math.nan if any_nan else math.inf
    return math.sqrt(math.ldexp((of_high << DIGITS) + of_low, power - 2 * DIGITS))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by, as in PyTorch: at most 1, and never a division by zero."""
    return norm if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6))


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """One number of each tensor is looked at: its largest magnitude, which is NaN if anything in it is."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    return not filled or bool(torch.stack(foreach_norm(filled, math.inf)).isfinite().all())
