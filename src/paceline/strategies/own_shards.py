"""Own shards: this worker's range of every bucket of weights, one piece of memory each.

bucket      |── weight 0 ──|─ bias ─|────── weight 1 ──────|        weights as they lie in memory, one after another
own range            |──────────────────|                           pieces of three parameters, in one tensor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.sharding.flat_layout import Piece, part_of
from paceline.sharding.shards import BucketShards, OwnedPiece
from paceline.sharding.slices import Slices
from paceline.strategies.own_pieces import in_logical_order, piece_of

Room = Callable[[int, torch.dtype], Tensor]  # of (elements, dtype)


class OwnShards:
    def __init__(self, parameters: Sequence[Parameter], rank: int, room: Room) -> None:
        """`room` makes memory where shards are kept."""
        self._parameters, self._rank, self._room = parameters, rank, room
        self._index = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._strides = [parameter.stride() for parameter in parameters]
        self._bucket_of: dict[int, tuple[BucketShards, Tensor]] = {}
        self._slices: dict[int, Slices] = {}

    def cut(self, shards: BucketShards) -> Tensor:
        """The own range of a bucket, from parameters that have their weights."""
        start, stop = shards.ranges[self._rank]
        part = self._room(stop - start, self._parameters[shards.bucket.members[0].parameter].dtype).zero_()
        for member in shards.bucket.members:
            self._bucket_of[member.parameter] = shards, part
        for owned in shards.pieces(self._rank):
            self._kept(owned, part).copy_(piece_of(self._parameters[owned.piece.parameter], owned.piece))
        return part

    def _kept(self, owned: OwnedPiece, part: Tensor) -> Tensor:
        """An own piece where it lies: one-dimensional, or a whole parameter whose memory has another order."""
        piece, kept = owned.piece, part[owned.offset : owned.offset + owned.piece.elements]
        parameter = self._parameters[piece.parameter]
        if parameter.dim() == 0:
            return kept.view(())
        if not in_logical_order(parameter):
            return kept.as_strided(parameter.shape, self._strides[piece.parameter])
        return kept

    def keep(self, parameter: Parameter, piece: Piece) -> Tensor:
        """Where the values of an own piece are; the piece may be numbered by another order of parameters."""
        number = self._index[id(parameter)]
        shards, part = self._bucket_of[number]
        mine = Piece(number, piece.start, piece.stop)
        return self._kept(next(owned for owned in shards.pieces(self._rank) if owned.piece == mine), part)

    def of(self, parameter: Parameter) -> Slices:
        """All own pieces of a parameter, as they are now and, where their memory is in order, as they will be."""
        number = self._index[id(parameter)]
        if number not in self._slices:
            part = self._bucket_of[number][1]
            parts = [(owned.piece.start, self._kept(owned, part)) for owned in self._owned(parameter)]
            slices = Slices.of(parameter.shape, part.dtype, parts)
            if not in_logical_order(parameter):
                return slices
            self._slices[number] = slices
        return self._slices[number]

    def pieces_of(self, parameter: Parameter) -> list[Piece]:
        return [owned.piece for owned in self._owned(parameter)]

    def put(self, parameter: Parameter, whole: Tensor) -> None:
        """Take the own pieces of a parameter's weights."""
        part = self._bucket_of[self._index[id(parameter)]][1]
        for owned in self._owned(parameter):
            kept = self._kept(owned, part)
            kept.copy_(whole if kept.shape == whole.shape else part_of(whole, owned.piece))

    def forget(self) -> None:
        self._bucket_of.clear()
        self._slices.clear()

    def _owned(self, parameter: Parameter) -> list[OwnedPiece]:
        number = self._index[id(parameter)]
        shards = self._bucket_of[number][0]
        return [owned for owned in shards.pieces(self._rank) if owned.piece.parameter == number]
