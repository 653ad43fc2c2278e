"""Trees of tensors and arrays: the same thing done to every leaf, and rows of different length put under each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PADDING = -100


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with every leaf changed."""
    if isinstance(tree, Mapping):
        return {name: mapped(change, part) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(mapped(change, part) for part in tree)
    return change(tree)


def joined(parts: Sequence[Any]) -> Any:
    """Trees of the same form, with the rows of their leaves one after another, as arrays."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: joined([part[name] for part in parts]) for name in first}
    if isinstance(first, list | tuple):
        return tuple(joined([part[place] for part in parts]) for place in range(len(first)))
    return _under_each_other([as_array(part) for part in parts])


def as_array(leaf: Tensor | NDArray[Any]) -> NDArray[Any]:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().cpu()
    array: NDArray[Any] = (leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf).numpy()
    return array


def padded_to(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor at the start of a larger one; the rows stay as many as they are."""
    shape = (tensor.shape[0], *shape[1:])
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    out = tensor.new_full(shape, PADDING)
    out[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return out


def _under_each_other(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) == 1:
        return np.concatenate(arrays)
    longest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    out = np.full((sum(len(array) for array in arrays), *longest), PADDING, dtype=arrays[0].dtype)
    row = 0
    for array in arrays:
        out[(slice(row, row + len(array)), *(slice(0, size) for size in array.shape[1:]))] = array
        row += len(array)
    return out
