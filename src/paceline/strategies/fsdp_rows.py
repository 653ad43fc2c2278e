"""Rows: how `fully_shard` lays a unit's gradients for its reduce-scatter, and which parts of parameters are whose.

    weight (5, 3) and bias (5,), cut for two workers along dim 0         row = what one worker owns of the unit

    row 0   weight[0:3] ········· | bias[0:3]                            all rows are equally long
    row 1   weight[3:5] · 0 0 0   | bias[3:5] · 0                        the last ones are filled with zeros

A worker's rows of a parameter are one range of its elements, and the fill belongs to nobody: no piece covers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from paceline.sharding.bucket import Bucket, Member
from paceline.sharding.flat_layout import Piece
from paceline.sharding.shards import BucketShards, OwnedPiece


@dataclass(frozen=True)
class RowMember:
    """A parameter in a unit's rows. `parameter` is None if its gradient travels along but is nobody's here."""

    parameter: int | None
    shape: tuple[int, ...]

    def rows_each(self, workers: int) -> int:
        """Of dim 0, with the fill."""
        return -(-self.shape[0] // workers)

    def width(self, workers: int) -> int:
        """Elements in each row."""
        return self.rows_each(workers) * prod(self.shape[1:])

    def owned(self, worker: int, workers: int) -> tuple[int, int]:
        """The range of elements that a worker owns; it may be empty."""
        width, elements = self.width(workers), prod(self.shape)
        return min(elements, worker * width), min(elements, (worker + 1) * width)


@dataclass(frozen=True)
class RowShards(BucketShards):
    """A unit as a bucket that is cut into rows."""

    members: tuple[RowMember, ...]

    @classmethod
    def of(cls, members: Sequence[RowMember], workers: int, dtype: torch.dtype, device: torch.device) -> RowShards:
        row = sum(member.width(workers) for member in members)
        flat = Bucket((Member(-1, 0, (row * workers,)),), dtype, device)
        return cls(flat, tuple((worker * row, (worker + 1) * row) for worker in range(workers)), tuple(members))

    def _pieces_in(self, start: int, stop: int) -> Iterator[OwnedPiece]:
        workers = len(self.ranges)
        worker, offset = start // max(1, stop - start), 0
        for member in self.members:
            low, high = member.owned(worker, workers)
            if member.parameter is not None and low < high:
                yield OwnedPiece(Piece(member.parameter, low, high), offset)
            offset += member.width(workers)

    def spread(self, flat: Tensor, there: Sequence[bool], out: Tensor) -> Tensor:
        """Rows of the members that are `there`, with zeros for the others: a gradient that nobody computed is +0.0."""
        workers = len(self.ranges)
        given, rows = flat.view(workers, -1), out.view(workers, -1)
        begin = end = 0
        for member, is_there in zip(self.members, there, strict=True):
            width = member.width(workers)
            if is_there:
                rows[:, end : end + width] = given[:, begin : begin + width]
                begin += width
            else:
                rows[:, end : end + width] = 0
            end += width
        assert begin == given.shape[1], f"{begin} elements a row are told, {given.shape[1]} are there"
        return out
