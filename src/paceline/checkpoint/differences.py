"""In what two checkpoints differ: values of the tree by path, tensors by their bits.

/job/lanes                  4 → 2
/models/0/embed.weight      3 of 81,920 elements differ, by up to 1.2e-07
/models/0/bias              only in the first
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.load import StoredTensor
from paceline.checkpoint.tensor_file import as_bytes

Difference = tuple[str, str]  # where, what


def differences(first: Any, second: Any, path: str = "") -> Iterator[Difference]:
    first = first.whole() if isinstance(first, StoredTensor) else first
    second = second.whole() if isinstance(second, StoredTensor) else second
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        yield from _of_tensors(first, second, path)
    elif isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            where = f"{path}/{key}"
            if key not in second or key not in first:
                yield where, f"only in the {'first' if key in first else 'second'}"
            else:
                yield from differences(first[key], second[key], where)
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        for place, (mine, theirs) in enumerate(zip(first, second, strict=True)):
            yield from differences(mine, theirs, f"{path}/{place}")
    elif repr(first) != repr(second):  # nan is nan here
        yield path, f"{_short(first)} → {_short(second)}"


def _of_tensors(first: Tensor, second: Tensor, path: str) -> Iterator[Difference]:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        yield path, f"{first.dtype} {tuple(first.shape)} → {second.dtype} {tuple(second.shape)}"
    elif as_bytes(first) != as_bytes(second):
        size = first.element_size()
        bits = [torch.frombuffer(bytearray(as_bytes(t)), dtype=torch.uint8).view(-1, size) for t in (first, second)]
        count = int((bits[0] != bits[1]).any(dim=1).sum())
        apart = (first.double() - second.double()).abs().max().item() if not first.is_complex() else float("nan")
        yield path, f"{count:,} of {first.numel():,} elements differ, by up to {apart:.3g}"


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
