"""Rooms: a few flat buffers that many buckets use in turn, where none of them keeps its gradients.

    bucket 0 ─fill─► room A ─leave─► … ─give back─┐
    bucket 1 ─fill─► room B ─leave─► …            └─► bucket 2 ─fill─► room A

All rooms of a dtype are as large as the largest bucket, so that any of them will do. There are as many as were needed
at once: those being filled, and those whose gradients are on their way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sharding.bucket import Bucket

Kind = tuple[torch.dtype, torch.device]


class Rooms:
    def __init__(self) -> None:
        self._largest: dict[Kind, int] = {}
        self._free: dict[Kind, list[Tensor]] = {}
        self._taken: dict[int, tuple[Kind, Tensor]] = {}  # by address

    @property
    def bytes(self) -> int:
        """Of all rooms, free and taken."""
        free = [room for rooms in self._free.values() for room in rooms]
        return sum(room.nbytes for room in (*free, *(room for _, room in self._taken.values())))

    def expect(self, bucket: Bucket) -> None:
        """A bucket that will come."""
        kind = bucket.dtype, bucket.device
        self._largest[kind] = max(self._largest.get(kind, 0), bucket.elements)

    def take(self, bucket: Bucket) -> Tensor:
        """Memory for one bucket, until it is given back."""
        kind = bucket.dtype, bucket.device
        if not bucket.elements:
            return torch.empty(0, dtype=bucket.dtype, device=bucket.device)
        wanted = max(bucket.elements, self._largest.get(kind, 0))
        free = self._free.setdefault(kind, [])
        while free and free[-1].numel() < wanted:  # buckets have been cut anew, and are larger now
            free.pop()
        room = free.pop() if free else torch.empty(wanted, dtype=bucket.dtype, device=bucket.device)
        self._taken[room.data_ptr()] = kind, room
        return room[: bucket.elements]

    def give_back(self, flat: Tensor) -> None:
        if flat.numel():
            kind, room = self._taken.pop(flat.data_ptr())
            self._free[kind].append(room)  # not by the room's own device: "cuda" is "cuda:0" there
