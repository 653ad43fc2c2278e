"""Buckets: gradients that travel together, in the order in which backward finishes them.

    bucket 0      bucket 1              bucket 2
    head.weight   ln.weight ln.bias …   layers.4.weight          a large gradient travels alone and in its own memory:
    (alone)       (packed)              (alone)                  no copy in, no copy out

Small gradients are packed into one flat buffer. Which gradients share a bucket changes when bytes move, never what they
sum to: the canonical sum is element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import torch

LAST_PART = 8
ALIGNED = 64  # bytes: where torch's own memory starts. Products and sums of a tensor have other bits where it starts
# elsewhere, so what is handed to modules or optimizers whole starts there too


@dataclass(frozen=True)
class GradientSpec:
    """What a bucket needs to know about one parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the parameter
    device: torch.device

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Gradients are added in fp32, whatever the parameter's precision; fp64 stays fp64."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Member:
    parameter: int
    offset: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    members: tuple[Member, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def elements(self) -> int:
        """Of the flat buffer; there may be gaps between members."""
        return self.members[-1].offset + self.members[-1].elements

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Elements of the flat buffer that are no member's."""
        ends = [(left.offset + left.elements, right.offset) for left, right in pairwise(self.members)]
        return [(start, stop) for start, stop in ends if start < stop]

    @property
    def alone(self) -> bool:
        return len(self.members) == 1


def plan_buckets(
    specs: Sequence[GradientSpec], order: Sequence[int], bucket_bytes: int, *, aligned: bool = True
) -> tuple[Bucket, ...]:
    """Cut `order` into buckets, filled from its end: the last holds an eighth of `bucket_bytes`, those before it more.

    What leaves last has nothing to hide behind, so it should be small; what leaves early should be large, because every
    message costs. A gradient of half a bucket or more travels alone. Buckets are numbered by the place of their *last*
    member in `order`, since that is when they can leave. `aligned`: every member starts where memory is aligned.
    """
    planned: list[tuple[int, list[int]]] = []
    filling: dict[tuple[torch.dtype, torch.device], _Filling] = {}
    for place, index in reversed(list(enumerate(order))):
        spec = specs[index]
        size = spec.elements * spec.sum_dtype.itemsize
        if size * 2 >= bucket_bytes:
            planned.append((place, [index]))
            continue
        room = filling.setdefault((spec.sum_dtype, spec.device), _Filling(max(1, bucket_bytes // LAST_PART)))
        room.add(place, index, size)
        if room.bytes >= room.wanted:
            planned.append(room.empty(bucket_bytes))
    planned += [room.empty(bucket_bytes) for room in filling.values() if room.members]
    step = ALIGNED if aligned else 1
    return tuple(packed(specs, members[::-1], step) for _, members in sorted(planned))


@dataclass
class _Filling:
    """A bucket being filled from its last member backwards."""

    wanted: int
    last_place: int = -1
    members: list[int] = field(default_factory=list)
    bytes: int = 0

    def add(self, place: int, index: int, size: int) -> None:
        if not self.members:
            self.last_place = place
        self.members.append(index)
        self.bytes += size

    def empty(self, bucket_bytes: int) -> tuple[int, list[int]]:
        """What was filled; the next may grow to twice as much."""
        filled = self.last_place, self.members
        self.wanted, self.members, self.bytes = min(bucket_bytes, 2 * self.wanted), [], 0
        return filled


def packed(specs: Sequence[GradientSpec], parameters: Sequence[int], aligned_to: int = 1) -> Bucket:
    """Parameters in one bucket, each at a multiple of so many bytes."""
    first = specs[parameters[0]]
    step = max(1, aligned_to // first.dtype.itemsize)  # weights are laid out as their sums are, and are smaller
    members: list[Member] = []
    offset = 0
    for parameter in parameters:
        members.append(Member(parameter, offset, specs[parameter].shape))
        offset += -(-specs[parameter].elements // step) * step
    return Bucket(tuple(members), first.sum_dtype, first.device)
