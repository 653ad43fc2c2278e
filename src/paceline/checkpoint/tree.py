"""Trees on disk without pickle: a state_dict becomes JSON plus a flat table of tensors.

{"state": {0: {"step": tensor(7.), "exp_avg": Tensor}}, "betas": (0.9, 0.95)}
  ──►  {"state": {"int:0": {"step": {"$small": ["F32", [], "0000e040"]},
                            "exp_avg": {"$tensor": "/state/int:0/exp_avg"}}}, "betas": {"$tuple": [0.9, 0.95]}}
       + {"/state/int:0/exp_avg": Tensor}

A leaf may also be a `LocalShard`, of which this worker has a part. A tensor that stands at two places, as tied weights
do, is in the table once. Tensors of a few bytes stay in the tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.tensor_file import DTYPES, as_bytes, code_of
from paceline.errors import CheckpointError
from paceline.sharding.local_shard import LocalShard

SMALL = 64  # bytes
DEEPEST = 100
"""Levels of a tree. States have five or so; what goes on for a thousand would end somewhere in Python's own stack."""

Leaf = Tensor | LocalShard


class _Leaves:
    """Tensors by path, each object once."""

    def __init__(self) -> None:
        self.by_path: dict[str, Leaf] = {}
        self._paths: dict[int, str] = {}

    def path_of(self, leaf: Leaf, path: str) -> str:
        if id(leaf) not in self._paths:
            self._paths[id(leaf)] = path
            self.by_path[path] = leaf
        return self._paths[id(leaf)]


def flatten(tree: Any, path: str = "") -> tuple[Any, dict[str, Leaf]]:
    """The tree as JSON, and its tensors by path."""
    leaves = _Leaves()
    return _encode(tree, path, leaves), leaves.by_path


def _encode(tree: Any, path: str, tensors: _Leaves, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise CheckpointError(f"{path.strip('/')[:60]!r}… is nested more than {DEEPEST} deep, which can't be saved")
    if isinstance(tree, Tensor) and tree.numel() * tree.element_size() <= SMALL:
        return {"$small": [code_of(tree.dtype, path), list(tree.shape), as_bytes(tree).hex()]}
    if isinstance(tree, Tensor | LocalShard):
        return {"$tensor": tensors.path_of(tree, path)}
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {"$float": repr(tree)}
    if isinstance(tree, dict):
        keys = [_key(key, path) for key in tree]
        return {
            key: _encode(value, f"{path}/{_in_path(key)}", tensors, depth + 1)
            for key, value in zip(keys, tree.values(), strict=True)
        }
    if isinstance(tree, tuple):
        return {"$tuple": [_encode(value, f"{path}/{place}", tensors, depth + 1) for place, value in enumerate(tree)]}
    if isinstance(tree, list):
        return [_encode(value, f"{path}/{place}", tensors, depth + 1) for place, value in enumerate(tree)]
    raise CheckpointError(
        f"{path.strip('/')!r} is a {type(tree).__name__}, which can't be saved without pickle; "
        "states hold tensors, numbers, strings, lists, tuples and dicts"
    )


def _key(key: Any, path: str) -> str:
    if isinstance(key, str):
        return f"str:{key}" if key.startswith(("int:", "str:", "$")) else key
    if isinstance(key, int) and not isinstance(key, bool):
        return f"int:{key}"
    raise CheckpointError(
        f"{path.strip('/')!r} has a key of type {type(key).__name__}; only strings and ints are saved"
    )


def unflatten(tree: Any, tensors: Mapping[str, Any], depth: int = 0) -> Any:
    """What `flatten` took apart, with whatever stands for its tensors.

    A tree that `flatten` has not made is a KeyError, TypeError or ValueError.
    """
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    if isinstance(tree, list):
        return [unflatten(value, tensors, depth + 1) for value in tree]
    if isinstance(tree, dict):
        if "$tensor" in tree:
            return tensors[tree["$tensor"]]
        if "$small" in tree:
            return _small(*tree["$small"])
        if "$tuple" in tree:
            return tuple(unflatten(value, tensors, depth + 1) for value in tree["$tuple"])
        if "$float" in tree:
            return float(tree["$float"])
        return {_unkey(key): unflatten(value, tensors, depth + 1) for key, value in tree.items()}
    return tree


def _small(code: str, shape: list[int], values: str) -> Tensor:
    data, dtype = bytearray.fromhex(values), DTYPES[code]
    if len(data) > SMALL or len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor {code} {shape} has {len(data)} bytes")
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _unkey(key: str) -> str | int:
    if key.startswith("int:"):
        return int(key[4:])
    return key.removeprefix("str:")


def _in_path(key: str) -> str:
    """Different keys give different paths, as in a JSON pointer: a tensor is named by its path."""
    return key.replace("~", "~0").replace("/", "~1")
