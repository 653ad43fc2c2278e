"""`eval_use_gather_object=True`: results of an evaluation that are no tensors, one for each sample, as a list.

    ["a cat", "two dogs"]            a list is rows; tuples and dicts say how results are arranged, as ever
    [{"boxes": Tensor}, …]           a row: numbers, texts, None, and lists, dicts and tensors of them

Workers exchange them as tensors do: each row is JSON, and its bytes are a row of a tensor, filled up with -100. So rows
are gathered in the dataset's order, and no object is pickled. Tensors come back as arrays, tuples as lists.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import LoopError

_ARRAY = "__array__"


class Rows(list[Any]):
    """One object for each sample."""


def marked(tree: Any) -> Any:
    """The tree with its lists as `Rows`."""
    if isinstance(tree, Mapping):
        return {name: marked(part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(marked(part) for part in tree)
    return Rows(tree) if isinstance(tree, list) else tree


def packed(rows: Rows, device: torch.device, filler: int) -> Tensor:
    texts = [json.dumps(row, default=_described).encode() for row in rows]
    longest = max(map(len, texts), default=0)
    out = torch.full((len(texts), max(1, longest)), filler, dtype=torch.int16)
    for place, text in enumerate(texts):
        out[place, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return out.to(device)


def unpacked(packed_rows: Tensor) -> Rows:
    rows = packed_rows.cpu().numpy()
    return Rows(json.loads(row[row >= 0].astype(np.uint8).tobytes(), object_hook=_made) for row in rows)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype is torch.bfloat16 else value).numpy()  # numpy has none
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {
            _ARRAY: base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
            "dtype": value.dtype.str,
            "shape": value.shape,
        }
    raise LoopError(
        f"eval_use_gather_object: a {type(value).__name__} is among the predictions or labels, but rows are numbers, "
        "texts, None, tensors, and lists and dicts of them; return what it is made from"
    )


def _made(found: dict[str, Any]) -> Any:
    if _ARRAY not in found:
        return found
    return np.frombuffer(base64.b64decode(found[_ARRAY]), found["dtype"]).reshape(found["shape"]).copy()
