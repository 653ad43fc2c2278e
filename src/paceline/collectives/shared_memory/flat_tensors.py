"""The tensors that c10d hands over, of any shape and stride, as the flat contiguous ones that operations work on.

contiguous        a view: written to in place
anything else     a copy, which is copied back at the end
complex           pairs of reals, which can be moved and added as such
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CollectiveError


def flat_of(tensor: Tensor) -> Tensor:
    if tensor.is_sparse or tensor.device.type != "cpu":
        raise CollectiveError(f"the paceline backend moves dense CPU tensors, not {tensor.layout} on {tensor.device}")
    flat = tensor.detach().contiguous().view(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


@contextlib.contextmanager
def flat_outs(tensors: Sequence[Tensor], *, filled: bool = False) -> Iterator[list[Tensor]]:
    """Flat tensors to write to; those that are not contiguous are copied back at the end."""
    flats = [
        flat_of(tensor if filled or tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype))
        for tensor in tensors
    ]
    yield flats
    for tensor, flat in zip(tensors, flats, strict=True):
        if not tensor.is_contiguous():
            whole = torch.view_as_complex(flat.view(-1, 2)) if tensor.is_complex() else flat
            tensor.detach().copy_(whole.view(tensor.shape))


def equal_parts(flat: Tensor, size: int, what: str) -> list[Tensor]:
    if flat.numel() % size:
        raise CollectiveError(f"{what}: {flat.numel():,} elements can't be cut into {size} equal parts")
    return list(flat.view(size, -1).unbind()) if flat.numel() else [flat] * size


def split_rows(flat: Tensor, tensor: Tensor, splits: Any, size: int) -> list[Tensor]:
    """Parts of so many rows each; equal ones where nothing is said."""
    if not splits:
        return equal_parts(flat, size, "all_to_all")
    row = flat.numel() // tensor.shape[0] if tensor.shape[0] else 0
    if sum(splits) != tensor.shape[0]:
        raise CollectiveError(f"all_to_all: splits {list(splits)} don't add up to {tensor.shape[0]} rows")
    return list(torch.split(flat, [rows * row for rows in splits]))
