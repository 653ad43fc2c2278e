"""The norm of all gradients, by the block rule: the same bits however the tensors are cut.

    parameter     |------ block ------|------ block ------|-- tail --|       counted from the parameter's first element
    inside        one norm in fp32 (fp64 stays fp64), over the same 4096 elements wherever they live
    between       squares of the blocks' norms, added exactly (`math.fsum`), then rounded once

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


def global_norm(gradients: Iterable[Tensor]) -> float:
    return norm_of_blocks(all_block_norms(gradients))


def all_block_norms(gradients: Iterable[Tensor]) -> Tensor:
    """The norms of all blocks, in fp64 on the host, to be sent to other workers."""
    norms = [block_norms(gradient).to("cpu", torch.float64) for gradient in gradients]
    return torch.cat(norms) if norms else torch.zeros(0, dtype=torch.float64)


def norm_of_blocks(norms: Tensor) -> float:
    """Of blocks in any order; a block of norm 0 changes nothing."""
    squares = norms.square().tolist()
    if not all(map(math.isfinite, squares)):
        return math.nan if any(map(math.isnan, squares)) else math.inf
    return math.sqrt(math.fsum(squares))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by, as in PyTorch: at most 1, and never a division by zero."""
    return norm if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6))


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """One number of each tensor is looked at: its largest magnitude, which is NaN if anything in it is."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    return not filled or bool(torch.stack(foreach_norm(filled, math.inf)).isfinite().all())
