"""Block shuffle: random enough to train on, local enough for data that is read in long pieces.

    samples    0 1 2 3 │ 4 5 6 7 │ 8 9 …                            blocks of `block` neighbours, the last may be short
    slots      block 7 │ block 2 │ short │ block 0 │ block 4 │ …    the blocks in a shuffled order
    windows    ╰──── window 0 ───╯╰──── window 1 ──╯╰─────── …      `window` slots each, the positions inside shuffled

Who follows the order reads `window` blocks, then the next `window`, and no block twice. A key chooses the short block's
slot, so that the same samples don't come last in every epoch. There is no list here either: a position finds its
window, its place there, the slot and the block by arithmetic and two keyed permutations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Sampler

from paceline.data.global_order import ARRAY_FROM, GlobalOrder, Ids, Shuffled, as_array
from paceline.errors import ConfigError
from paceline.world.determinism import mix

if TYPE_CHECKING:
    from paceline.data.sharded_sampler import BatchPlan

IDS_AT_ONCE = 4096


class BlockShuffleSampler(Sampler[int]):
    """For a DataLoader: `sampler=BlockShuffleSampler(dataset, block=1024, window=16)`.

    `block` is how many neighbouring samples are read in one go (a file, a row group), `window` how many such pieces are
    open at once. A prepared loader asks for an epoch's `order`; iterated by itself, every epoch differs, drawn from
    torch's global generator as torch's own samplers are.
    """

    def __init__(self, samples: int | Sized, *, block: int, window: int) -> None:
        _check(len(samples) if isinstance(samples, Sized) else samples, block, window)
        self._samples, self._block, self._window = samples, int(block), int(window)

    def __len__(self) -> int:
        return len(self._samples) if isinstance(self._samples, Sized) else self._samples

    def __iter__(self) -> Iterator[int]:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        order = BlockShuffled(len(self), seed, 0, self._block, self._window)
        for start in range(0, order.samples, IDS_AT_ONCE):
            yield from order.samples_at(range(start, min(start + IDS_AT_ONCE, order.samples)))

    @property
    def identity(self) -> str:
        return f"of blocks of {self._block}, {self._window} in a window"

    def order(self, seed: int, epoch: int, cut: BatchPlan) -> GlobalOrder:
        """The epoch's order. An epoch that began before the dataset grew has fewer samples than there are now."""
        return BlockShuffled(cut.samples, seed, epoch, self._block, self._window)


@dataclass(frozen=True)
class BlockShuffled:
    """A keyed bijection of [0, samples) whose windows of positions come from `window` blocks each."""

    samples: int
    seed: int
    epoch: int
    block: int
    window: int

    def __post_init__(self) -> None:
        _check(self.samples, self.block, self.window)

    def sample_at(self, position: int) -> int:
        low, _, inside = self._window_around(position)
        slot, offset = divmod(self._padded(low + inside.sample_at(position - low)), self._length)
        if slot == self._short_slot:
            return self._whole_blocks * self._length + offset
        return self._block_order.sample_at(slot - (slot > self._short_slot)) * self._length + offset

    def samples_at(self, positions: range) -> list[int]:
        if len(positions) < ARRAY_FROM or positions.step != 1:
            return [self.sample_at(position) for position in positions]
        found: list[int] = []
        while positions:
            low, high, inside = self._window_around(positions.start)
            stop = min(positions.stop, high)
            places = inside.samples_for(as_array(range(positions.start - low, stop - low)))
            found += self._samples_in_slots(places + np.uint64(low)).tolist()
            positions = range(stop, positions.stop)
        return found

    def _samples_in_slots(self, places: Ids) -> Ids:
        """What stands at these places while the windows are not shuffled."""
        padded = places + np.uint64(self._gap) * (places >= self._short_stop)
        slots, offsets = np.divmod(padded, np.uint64(self._length))
        short = slots == self._short_slot
        slots -= slots > self._short_slot
        slots[short] = 0  # any valid slot: what it finds is replaced
        blocks = self._block_order.samples_for(slots)
        blocks[short] = self._whole_blocks
        found: Ids = blocks * np.uint64(self._length) + offsets
        return found

    def _window_around(self, position: int) -> tuple[int, int, Shuffled]:
        """Where the position's window begins and ends, and the order inside it."""
        number = self._padded(position) // self._length // self.window
        low = self._start_of(number * self.window)
        high = min(self._start_of((number + 1) * self.window), self.samples)
        return low, high, _inside_window(high - low, self.seed, self.epoch, number)

    def _padded(self, place: int) -> int:
        """The place as if the short block were a whole one: then slots are a division apart."""
        return place + self._gap if place >= self._short_stop else place

    def _start_of(self, slot: int) -> int:
        return slot * self._length - (self._gap if slot > self._short_slot else 0)

    @cached_property
    def _length(self) -> int:
        return min(self.block, self.samples)

    @cached_property
    def _whole_blocks(self) -> int:
        return self.samples // self._length

    @cached_property
    def _gap(self) -> int:
        """What the short block lacks."""
        return -self.samples % self._length

    @cached_property
    def _short_slot(self) -> int:
        """Past the last slot when all blocks are whole."""
        if self._gap == 0:
            return self._whole_blocks
        return mix(self.seed, "short block", self.epoch) % (self._whole_blocks + 1)

    @cached_property
    def _short_stop(self) -> int:
        return (self._short_slot + 1) * self._length - self._gap

    @cached_property
    def _block_order(self) -> Shuffled:
        return Shuffled(self._whole_blocks, mix(self.seed, "blocks"), self.epoch)


@lru_cache(maxsize=8)  # a batch lies in one window or two, and their keys cost more than a sample
def _inside_window(samples: int, seed: int, epoch: int, window: int) -> Shuffled:
    return Shuffled(samples, mix(seed, "window", window), epoch)


def _check(samples: object, block: object, window: object) -> None:
    if not isinstance(samples, Integral):
        raise ConfigError(
            f"block shuffle of a {type(samples).__name__}, which has no length: give a dataset with __len__, "
            "or the number of samples"
        )
    if samples < 1:
        raise ConfigError(f"block shuffle of {samples} samples: the dataset is empty, there is nothing to shuffle")
    for name, value, unit in (("block", block, "samples read in one go"), ("window", window, "blocks open at once")):
        if not isinstance(value, Integral) or value < 1:
            raise ConfigError(f"block shuffle with {name}={value!r}: give the number of {unit}, a whole number from 1")
