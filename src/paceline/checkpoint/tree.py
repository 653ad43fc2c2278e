"""Trees on disk without pickle: a state_dict becomes JSON plus a flat table of tensors.

{"state": {0: {"exp_avg": Tensor}}, "betas": (0.9, 0.95)}
  ──►  {"state": {"int:0": {"exp_avg": {"$tensor": "/state/int:0/exp_avg"}}}, "betas": {"$tuple": [0.9, 0.95]}}
       + {"/state/int:0/exp_avg": Tensor}
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from paceline.errors import CheckpointError


def flatten(tree: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """The tree as JSON, and its tensors by path."""
    tensors: dict[str, Tensor] = {}
    return _encode(tree, path, tensors), tensors


def _encode(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors[path] = tree
        return {"$tensor": path}
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {"$float": repr(tree)}
    if isinstance(tree, dict):
        keys = [_key(key, path) for key in tree]
        return {
            key: _encode(value, f"{path}/{_in_path(key)}", tensors)
            for key, value in zip(keys, tree.values(), strict=True)
        }
    if isinstance(tree, tuple):
        return {"$tuple": [_encode(value, f"{path}/{place}", tensors) for place, value in enumerate(tree)]}
    if isinstance(tree, list):
        return [_encode(value, f"{path}/{place}", tensors) for place, value in enumerate(tree)]
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


def unflatten(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """What `flatten` took apart."""
    if isinstance(tree, list):
        return [unflatten(value, tensors) for value in tree]
    if isinstance(tree, dict):
        if "$tensor" in tree:
            return tensors[tree["$tensor"]]
        if "$tuple" in tree:
            return tuple(unflatten(value, tensors) for value in tree["$tuple"])
        if "$float" in tree:
            return float(tree["$float"])
        return {_unkey(key): unflatten(value, tensors) for key, value in tree.items()}
    return tree


def _unkey(key: str) -> str | int:
    if key.startswith("int:"):
        return int(key[4:])
    return key.removeprefix("str:")


def _in_path(key: str) -> str:
    """Different keys give different paths, as in a JSON pointer: a tensor is named by its path."""
    return key.replace("~", "~0").replace("/", "~1")
