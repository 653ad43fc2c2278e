"""Buckets: gradients that travel together, in the order in which backward finishes them.

    bucket 0      bucket 1              bucket 2
    head.weight   ln.weight ln.bias …   layers.4.weight          a large gradient travels alone and in its own memory:
    (alone)       (packed)              (alone)                  no copy in, no copy out

Small gradients are packed into one flat buffer. Which gradients share a bucket changes when bytes move, never what they
sum to: the canonical sum is element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch


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
        return sum(member.elements for member in self.members)

    @property
    def alone(self) -> bool:
        return len(self.members) == 1


def plan_buckets(specs: Sequence[GradientSpec], order: Sequence[int], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Fill buckets along `order`; a gradient of half a bucket or more travels alone.

    Buckets are numbered by the place of their *last* member in `order`, since that is when they can leave.
    """
    planned: list[tuple[int, Bucket]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Member]] = {}

    def close(key: tuple[torch.dtype, torch.device], place: int) -> None:
        planned.append((place, Bucket(tuple(filling.pop(key)), *key)))

    for place, index in enumerate(order):
        spec = specs[index]
        key = (spec.sum_dtype, spec.device)
        size = spec.elements * spec.sum_dtype.itemsize
        if size * 2 >= bucket_bytes:
            planned.append((place, Bucket((Member(index, 0, spec.shape),), *key)))
            continue
        members = filling.setdefault(key, [])
        offset = members[-1].offset + members[-1].elements if members else 0
        members.append(Member(index, offset, spec.shape))
        if (offset + spec.elements) * spec.sum_dtype.itemsize >= bucket_bytes:
            close(key, place)
    for key in list(filling):
        close(key, order.index(filling[key][-1].parameter))
    return tuple(bucket for _, bucket in sorted(planned, key=lambda entry: entry[0]))
