"""Trees without pickle: what was taken apart comes back, and what can't be is named by its path."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint.tree import flatten, unflatten
from paceline.errors import CheckpointError

tensors = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).view(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | tensors
keys = st.text(alphabet="abc._", max_size=4) | st.integers(-5, 5)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def through_json(tree: Any) -> Any:
    encoded, table = flatten(tree)
    return unflatten(json.loads(json.dumps(encoded, allow_nan=False)), table)


def kept_or_refused(tree: Any) -> Any:
    """`tree` as it comes back; a tree that is refused was not changed either."""
    try:
        return through_json(tree)
    except CheckpointError:
        return tree


def same(a: Any, b: Any) -> bool:
    """Equal in values, types and, for tensors, dtypes; 1, 1.0 and True are three different things."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@settings(max_examples=120, deadline=None)
@given(trees)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(through_json(tree), tree)


def test_the_tree_of_the_docstring_is_encoded_as_it_says() -> None:
    moment = torch.zeros(20)
    encoded, table = flatten({"state": {0: {"exp_avg": moment}}, "betas": (0.9, 0.95)})
    path = encoded["state"]["int:0"]["exp_avg"]["$tensor"]
    assert encoded["betas"] == {"$tuple": [0.9, 0.95]}
    assert (path.strip("/"), table) == ("state/int:0/exp_avg", {path: moment})


def test_nan_and_infinities_come_back() -> None:
    assert [str(value) for value in through_json([math.nan, math.inf, -math.inf])] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"model": {"path": [1, Path("/tmp")]}}, "'model/path/1' is a PosixPath, which can't be saved without pickle"),
        ({"seen": {1, 2}}, "'seen' is a set"),
        ({"z": (0, 1j)}, "'z/1' is a complex"),
        ({"groups": {0: {"f": len}}}, "'groups/int:0/f' is a builtin_function_or_method"),
        ({"counts": {(1, 2): 3}}, "'counts' has a key of type tuple; only strings and ints are saved"),
        ({"flags": {True: 3}}, "'flags' has a key of type bool"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_path(tree: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        flatten(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {0: torch.zeros(1), "0": torch.ones(1)},
        {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}},
    ],
    ids=["int and str", "slash"],
)
def test_tensors_whose_paths_read_the_same_are_kept_apart_or_refused(tree: Any) -> None:
    assert same(kept_or_refused(tree), tree)


@pytest.mark.parametrize("tree", [{"int:1": 1}, {"int:x": 1}, {"$tuple": [1]}, {"$float": "1"}])
def test_keys_that_look_like_the_encoding_are_kept_or_refused(tree: Any) -> None:
    assert same(kept_or_refused(tree), tree)
