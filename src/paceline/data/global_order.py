"""The global order: which sample stands at a position of an epoch, with random access and no memory.

    position ──► Feistel network keyed by (seed, epoch) over the next power of four ──► sample id
                 a result outside [0, n) is fed in again ("cycle walking"): still a bijection of [0, n)

A shuffle of 10^12 samples costs nothing to start and nothing to resume, because there is no list: the place in the data
is one integer and everything else is a function of it.

A network over few bits is no fair shuffle: with 6 samples one order came 2.3 times as often as it should. So up to 256
samples are shuffled as cards are, in a table. And a network over a power of four makes even permutations only: above
256 samples a keyed coin says whether the first two positions change places, which gives the odd ones their half.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.world.determinism import mix

ROUNDS = 6
TABLE_UP_TO = 256  # pairs of samples show the network's bias in 2 · 10^6 orders of 256 samples, and of 257 no longer
ARRAY_FROM = 24  # measured: below, a loop in Python is faster than the 80 calls of numpy that an array costs

_MASK64 = (1 << 64) - 1
_ADD, _MULTIPLY_1, _MULTIPLY_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's

Ids = NDArray[np.uint64]


class GlobalOrder(Protocol):
    """A bijection from positions [0, n) to sample ids [0, n)."""

    def sample_at(self, position: int) -> int: ...

    def samples_at(self, positions: range) -> list[int]:
        """`sample_at` of each, for a batch at a time."""
        ...


@dataclass(frozen=True)
class Sequential:
    """Position is sample id."""

    samples: int

    def sample_at(self, position: int) -> int:
        return position

    def samples_at(self, positions: range) -> list[int]:
        return list(positions)


@dataclass(frozen=True)
class Listed:
    """The order that a sampler of the user's own gave for this epoch."""

    ids: tuple[int, ...]

    def sample_at(self, position: int) -> int:
        return self.ids[position]

    def samples_at(self, positions: range) -> list[int]:
        return [self.ids[position] for position in positions]


@dataclass(frozen=True)
class Shuffled:
    """A keyed pseudo-random permutation of [0, samples), for up to 2^63 samples."""

    samples: int
    seed: int
    epoch: int

    def sample_at(self, position: int) -> int:
        if self._table is not None:
            return self._table[position]
        return self._walk(position ^ self._coin if position < 2 else position)

    def samples_at(self, positions: range) -> list[int]:
        if self._table is not None or len(positions) < ARRAY_FROM:
            return [self.sample_at(position) for position in positions]
        found: list[int] = self.samples_for(as_array(positions)).tolist()
        return found

    def samples_for(self, positions: Ids) -> Ids:
        """`sample_at` of any positions, in any order."""
        if self._table is not None:
            return np.array(self._table, np.uint64)[positions]
        if self._coin:
            positions = np.where(positions < 2, positions ^ np.uint64(1), positions)
        found = self._permute_array(positions)
        outside = np.flatnonzero(found >= self.samples)
        while outside.size >= ARRAY_FROM:
            found[outside] = again = self._permute_array(found[outside])
            outside = outside[again >= self.samples]
        for place in outside.tolist():
            found[place] = self._walk(int(found[place]))
        return found

    @cached_property
    def _table(self) -> tuple[int, ...] | None:
        """Fisher and Yates' shuffle, which makes every order equally likely."""
        if self.samples > TABLE_UP_TO:
            return None
        ids = list(range(self.samples))
        for last in range(self.samples - 1, 0, -1):
            chosen = mix(self.seed, "order", self.epoch, "table", last) % (last + 1)
            ids[last], ids[chosen] = ids[chosen], ids[last]
        return tuple(ids)

    @cached_property
    def _coin(self) -> int:
        return mix(self.seed, "order", self.epoch, "coin") & 1

    @cached_property
    def _half_bits(self) -> int:
        return -(-(self.samples - 1).bit_length() // 2)

    @cached_property
    def _keys(self) -> tuple[int, ...]:
        return tuple(mix(self.seed, "order", self.epoch, number) for number in range(ROUNDS))

    def _walk(self, value: int) -> int:
        value = self._permute(value)
        while value >= self.samples:
            value = self._permute(value)
        return value

    def _permute(self, value: int) -> int:
        bits = self._half_bits
        mask = (1 << bits) - 1
        left, right = value >> bits, value & mask
        for key in self._keys:
            left, right = right, left ^ (scrambled(right ^ key) & mask)
        return left << bits | right

    def _permute_array(self, values: Ids) -> Ids:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            scrambled = _scramble_array(right ^ np.uint64(key))
            scrambled &= mask
            scrambled ^= left
            left, right = right, scrambled
        return left << bits | right


def as_array(positions: range) -> Ids:
    # numpy's own arange goes through int64 or float64, which end before 2^63 or blur it.
    steps = np.arange(len(positions), dtype=np.uint64) * np.uint64(positions.step & _MASK64)
    return steps + np.uint64(positions.start)


def scrambled(value: int) -> int:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    value = (value + _ADD) & _MASK64
    value = ((value ^ (value >> 30)) * _MULTIPLY_1) & _MASK64
    value = ((value ^ (value >> 27)) * _MULTIPLY_2) & _MASK64
    return value ^ (value >> 31)


def _scramble_array(values: Ids) -> Ids:
    """`scrambled` in place: uint64 wraps where Python's integers are masked."""
    values += np.uint64(_ADD)
    values ^= values >> np.uint64(30)
    values *= np.uint64(_MULTIPLY_1)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_MULTIPLY_2)
    values ^= values >> np.uint64(31)
    return values
