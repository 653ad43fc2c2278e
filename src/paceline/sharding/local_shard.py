"""Local shards: a tensor of which this worker has some ranges, and the others the rest.

    exp_avg (6, 4096)      worker 0: [0, 8192)     worker 1: [8192, 24576)         each element is with one worker only

What is with a worker can be saved by it without asking the others; a checkpoint has the whole tensor all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LocalShard:
    """Shape and dtype of the whole tensor, and this worker's ranges of its elements in logical (row-major) order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[int, Tensor], ...]  # where it starts, and one dimension of values

    def __post_init__(self) -> None:
        for start, values in self.parts:
            if values.dim() != 1 or values.dtype != self.dtype or start + values.numel() > self.elements:
                got = f"{tuple(values.shape)} of {values.dtype} from element {start}"
                raise ValueError(f"{got} is no part of {self.shape} of {self.dtype}")

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @classmethod
    def of(cls, shape: Iterable[int], dtype: torch.dtype, parts: Iterable[tuple[int, Tensor]]) -> LocalShard:
        found = tuple((start, values.detach().reshape(-1)) for start, values in parts if values.numel())
        return cls(tuple(shape), dtype, found)

    @classmethod
    def all_here(cls, tensor: Tensor) -> LocalShard:
        """This worker has all of it, the others nothing."""
        return cls.of(tensor.shape, tensor.dtype, [(0, tensor)])

    def nothing_here(self) -> LocalShard:
        return LocalShard(self.shape, self.dtype, ())


def all_here(tree: Any) -> Any:
    """A tree of states in which every tensor is this worker's alone."""
    return _mapped(lambda leaf: LocalShard.all_here(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def others_have_it(tree: Any) -> Any:
    """A tree of states whose shards another worker has too, and saves."""
    return _mapped(lambda leaf: leaf.nothing_here() if isinstance(leaf, LocalShard) else leaf, tree)


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(change, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(change, value) for value in tree)
    return change(tree)
