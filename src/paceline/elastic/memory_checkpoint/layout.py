"""What of a job's state a worker keeps in memory, and where: decided once, until the state has another form.

    {"lr": 0.1, "weight": Tensor, "exp_avg": LocalShard}        ──flattened─►   plain    [0.1]
                                                                            leaves   [Tensor, LocalShard]
    data   │ weight[1024:2048] │ exp_avg[0:512] │ …         ◄──Layout───    form     keys, shapes, dtypes, starts

| leaf                                 | kept by this worker                                   |
|--------------------------------------|-------------------------------------------------------|
| `LocalShard`                             | the ranges that it has                                |
| tensor, 4096 elements or more        | its share, [rank · n / size, (rank + 1) · n / size)   |
| tensor, fewer                        | all of it, as every worker does                       |
| anything else                        | itself, as JSON, anew in every step                   |

The table, which a file has once, says which path of the tree is which range of bytes. It uses the checkpoint's words
for the tree, with the number of a plain value in the value's place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.tensor_file import code_of
from paceline.checkpoint.tree import Leaf, flatten
from paceline.errors import CheckpointError
from paceline.sharding.local_shard import LocalShard

ALIGN = 64  # bytes between starts of parts, and elements between cuts
SHARED_FROM = 4096  # elements: below, a share is not worth a cut

_PLAIN = frozenset({int, float, str, bool, type(None)})


@dataclass(frozen=True)
class FlatTree:
    """A tree taken apart: two trees of equal form have one layout."""

    form: list[Any]
    leaves: list[Leaf]  # each object once
    plain: list[Any]

    @classmethod
    def of(cls, tree: Any) -> FlatTree:
        found = cls([], [], [])
        found._take(tree, {})
        return found

    def _take(self, node: Any, seen: dict[int, int]) -> None:
        """In every step, for every node: the order of questions is that of how many nodes there are of a kind."""
        kind = type(node)
        if kind in _PLAIN:
            self.form.append(None)
            self.plain.append(node)
        elif isinstance(node, dict):
            self.form.extend((dict, tuple(node)))
            for value in node.values():
                self._take(value, seen)
        elif isinstance(node, Tensor | LocalShard):
            self._take_leaf(node, seen)
        elif isinstance(node, list | tuple):
            self.form.extend((list if isinstance(node, list) else tuple, len(node)))
            for value in node:
                self._take(value, seen)
        else:
            self.form.append(None)
            self.plain.append(node)

    def _take_leaf(self, leaf: Leaf, seen: dict[int, int]) -> None:
        number = seen.setdefault(id(leaf), len(self.leaves))
        self.form.append(number)
        if number < len(self.leaves):
            return
        self.leaves.append(leaf)
        self.form.extend((leaf.shape, leaf.dtype))
        if isinstance(leaf, LocalShard):
            self.form.append(tuple((start, values.numel()) for start, values in leaf.parts))

    def values(self, tree: Any, own: Any) -> bytes:
        """The plain values as JSON, and `own` after them; what JSON does not have is refused with its place."""
        encoded, tensors = flatten(own, "own")
        if tensors:
            raise CheckpointError(
                f"{next(iter(tensors))!r} is a tensor: a worker's own values in memory are plain ones"
            )
        try:
            return json.dumps([*self.plain, encoded]).encode()
        except TypeError as error:
            flatten(tree)
            raise CheckpointError(f"the state can't be kept in memory: {error}") from error


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a leaf, at `offset` of the file's data."""

    leaf: int
    place: int | None  # among the parts of slices; None: of a tensor that is whole
    start: int
    stop: int
    dtype: torch.dtype
    offset: int

    @property
    def bytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


class Layout:
    """The parts of one worker, the table that describes them, and where in memory they come from."""

    def __init__(self, tree: Any, found: FlatTree, *, slot: int, rank: int, size: int) -> None:
        self.form, self.rank, self.size = found.form, rank, size
        self.parts: list[Part] = []
        self.data_bytes = 0
        for number, leaf in enumerate(found.leaves):
            self._add(number, leaf)
        self.bytes = sum(part.bytes for part in self.parts)
        self.table = json.dumps(self._described(tree, found, slot), separators=(",", ":")).encode()
        self._views: dict[int, Tensor] = {}

    def fits(self, found: FlatTree, rank: int, size: int) -> bool:
        return (self.rank, self.size) == (rank, size) and self.form == found.form

    def _add(self, number: int, leaf: Leaf) -> None:
        ranges: list[tuple[int | None, int, int]]
        if isinstance(leaf, LocalShard):
            ranges = [(place, start, start + values.numel()) for place, (start, values) in enumerate(leaf.parts)]
        else:
            ranges = [(None, *_share(leaf.numel(), self.rank, self.size))]
        for place, start, stop in ranges:
            if start < stop:
                part = Part(number, place, start, stop, leaf.dtype, self.data_bytes)
                self.parts.append(part)
                self.data_bytes += -(-part.bytes // ALIGN) * ALIGN

    def _described(self, tree: Any, found: FlatTree, slot: int) -> dict[str, Any]:
        stand_ins = [LocalShard(tuple(leaf.shape), leaf.dtype, ()) for leaf in found.leaves]
        by_leaf = {id(leaf): stand_in for leaf, stand_in in zip(found.leaves, stand_ins, strict=True)}
        encoded, paths = flatten(_numbered(tree, by_leaf, iter(range(len(found.plain)))))
        ranges: dict[int, list[list[int]]] = {id(stand_in): [] for stand_in in stand_ins}
        for part in self.parts:
            ranges[id(stand_ins[part.leaf])].append([part.start, part.stop, part.offset])
        everywhere = {
            id(stand_in): isinstance(leaf, Tensor) and leaf.numel() < SHARED_FROM
            for leaf, stand_in in zip(found.leaves, stand_ins, strict=True)
        }
        tensors = {
            path: {
                "dtype": code_of(leaf.dtype, path),
                "shape": leaf.shape,
                "everywhere": everywhere[id(leaf)],
                "ranges": ranges[id(leaf)],
            }
            for path, leaf in paths.items()
        }
        return {"slot": slot, "rank": self.rank, "size": self.size, "tree": encoded, "tensors": tensors}

    def sources(self, leaves: Sequence[Leaf]) -> list[Tensor]:
        """The memory of each part, of leaves that have this layout's form."""
        return [self._source(number, part, leaves[part.leaf]) for number, part in enumerate(self.parts)]

    def _source(self, number: int, part: Part, leaf: Leaf) -> Tensor:
        if isinstance(leaf, LocalShard):
            return leaf.parts[part.place or 0][1]
        view = self._views.get(number)
        ahead = part.start * part.dtype.itemsize
        if not leaf.is_contiguous():
            return leaf.detach().reshape(-1)[part.start : part.stop]
        if view is None or view.data_ptr() - ahead != leaf.data_ptr():
            # A view keeps its memory alive, so the same address later is the same memory.
            view = self._views[number] = leaf.detach().view(-1)[part.start : part.stop]
        return view


def _share(elements: int, rank: int, size: int) -> tuple[int, int]:
    if elements < SHARED_FROM:
        return 0, elements

    def cut(part: int) -> int:
        return elements if part == size else part * elements // size // ALIGN * ALIGN

    return cut(rank), cut(rank + 1)


def _numbered(node: Any, stand_ins: dict[int, LocalShard], numbers: Any) -> Any:
    """The tree with stand-ins for its leaves, and plain values numbered in the order of `FlatTree`."""
    if isinstance(node, Tensor | LocalShard):
        return stand_ins[id(node)]
    if isinstance(node, dict):
        return {key: _numbered(value, stand_ins, numbers) for key, value in node.items()}
    if isinstance(node, list | tuple):
        values = [_numbered(value, stand_ins, numbers) for value in node]
        return values if isinstance(node, list) else tuple(values)
    return next(numbers)


def with_values(encoded: Any, values: Sequence[Any]) -> Any:
    """A table's tree in the words of a checkpoint: with plain values where the table has their numbers."""
    if isinstance(encoded, int):
        value = values[encoded]
        return {"$float": repr(value)} if isinstance(value, float) and not isfinite(value) else value
    if isinstance(encoded, list):
        return [with_values(value, values) for value in encoded]
    if "$tensor" in encoded:
        return encoded
    return {key: with_values(value, values) for key, value in encoded.items()}
