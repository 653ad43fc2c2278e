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

from paceline.torch_compat import foreach_mul_, foreach_norm

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


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    return norm_of_blocks(counted_norms((gradient, True) for gradient in gradients))


DIGITS = 33  # bits of each of the two parts of a square: 2^30 blocks of them can be added
_SHIFT = 10  # bits that the sum of the high parts, below 2^63, has more than fp64 holds


def norm_of_blocks(norms: Tensor) -> Tensor:
    """Of blocks in any order, in fp64, where they are: nobody waits for it. A block of norm 0 changes nothing."""
    return norm_of_squares(norms.square())


def norm_of_squares(squares: Tensor) -> Tensor:
    """Of the blocks' norms, squared."""
    if not squares.numel():
        return squares.new_zeros(())
    exponent = torch.frexp(squares.max())[1].long().clamp(-900, 1024)  # norms under 1e-135 come to 0
    scaled = squares * _power_of_two(DIGITS - exponent)
    high = scaled.floor()
    low = ((scaled - high) * 2.0**DIGITS).round()
    of_high, of_low = high.long().sum(), low.long().sum()
    of_high = of_high + (of_low >> DIGITS)
    of_low = of_low & (2**DIGITS - 1)
    # Both terms are exact in fp64, so their sum is the whole number of 96 bits, rounded once.
    above = (of_high >> _SHIFT).double() * 2.0 ** (DIGITS + _SHIFT)
    below = (((of_high & (2**_SHIFT - 1)) << DIGITS) + of_low).double()
    squared = ((above + below) * _power_of_two(exponent - 2 * DIGITS)).abs()  # of what is not finite it is anything
    norm = _square_root(squared)
    norm = torch.where(squares.isinf().any(), math.inf, norm)
    return torch.where(squares.isnan().any(), math.nan, norm)


def _square_root(number: Tensor) -> Tensor:
    """Correctly rounded, as a GPU's is: torch's on the CPU is off by one in the last place now and then."""
    return number.sqrt() if number.device.type != "cpu" else number.new_tensor(math.sqrt(float(number)))


def _power_of_two(exponent: Tensor) -> Tensor:
    """By its bits: a device's pow() may be off by one in the last place."""
    return ((exponent + 1023) << 52).view(torch.float64)


def clip_(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> float | Tensor:
    """Multiply by the coefficient. Returns the norm: where gradients are on a GPU, there, so that nobody waits."""
    device = norm.device
    if device.type == "cpu" or not all(g.device == device and g.dtype in _AS_ON_HOST for g in gradients):
        known = float(norm)
        if gradients and not known <= max_norm:
            foreach_mul_(list(gradients), clip_coefficient(known, max_norm))
        return known
    bounded = torch.fmin(max_norm / (norm + 1e-6), norm.new_ones(()))
    coefficient = torch.where(norm.isnan(), norm, bounded)
    for dtype in _AS_ON_HOST:
        if of_dtype := [gradient for gradient in gradients if gradient.dtype == dtype]:
            foreach_mul_(of_dtype, coefficient.to(dtype))
    return norm


_AS_ON_HOST = (torch.float32, torch.float64)
"""A coefficient of these dtypes on the device is rounded as one from the host is; in bf16 it would lose bits."""


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by, as in PyTorch: at most 1, and never a division by zero."""
    return norm if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6))


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """One number of each tensor is looked at: its largest magnitude, which is NaN if anything in it is."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    return not filled or bool(torch.stack(foreach_norm(filled, math.inf)).isfinite().all())
