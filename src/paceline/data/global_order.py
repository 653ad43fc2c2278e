"""The global order: which sample stands at a position of an epoch, with random access and no memory.

    position ──► Feistel network keyed by (seed, epoch) over the next power of four ──► sample id
                 a result outside [0, n) is fed in again ("cycle walking"): still a bijection of [0, n)

A shuffle of 10^12 samples costs nothing to start and nothing to resume, because there is no list: the place in the data
is one integer and everything else is a function of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from paceline.world.determinism import mix

ROUNDS = 6
_MASK64 = (1 << 64) - 1


class GlobalOrder(Protocol):
    """A bijection from positions [0, n) to sample ids [0, n)."""

    def sample_at(self, position: int) -> int: ...


@dataclass(frozen=True)
class Sequential:
    """Position is sample id."""

    samples: int

    def sample_at(self, position: int) -> int:
        return position


@dataclass(frozen=True)
class Shuffled:
    """A keyed pseudo-random permutation of [0, samples)."""

    samples: int
    seed: int
    epoch: int

    @cached_property
    def _half_bits(self) -> int:
        return max(1, -(-max(1, (self.samples - 1).bit_length()) // 2))

    @cached_property
    def _keys(self) -> tuple[int, ...]:
        return tuple(mix(self.seed, "order", self.epoch, number) for number in range(ROUNDS))

    def sample_at(self, position: int) -> int:
        value = self._permute(position)
        while value >= self.samples:
            value = self._permute(value)
        return value

    def _permute(self, value: int) -> int:
        bits = self._half_bits
        mask = (1 << bits) - 1
        left, right = value >> bits, value & mask
        for key in self._keys:
            left, right = right, left ^ (_scramble(right ^ key) & mask)
        return left << bits | right


@dataclass(frozen=True)
class Listed:
    """The order that a sampler of the user's own gave for this epoch."""

    ids: tuple[int, ...]

    def sample_at(self, position: int) -> int:
        return self.ids[position]


def _scramble(value: int) -> int:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
