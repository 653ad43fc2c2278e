"""Batches of equal work instead of equal count: as many samples as fit into a budget of tokens.

    tokens = 12 and samples of 7 4 4 3 2 2 1 1 1 1

        padded: samples × longest                       padded=False: the sum
        7                 1 × 7 =  7                    7 4   1             12
        4 4 3             3 × 4 = 12                    4 3 2 2   1         12
        2 2 1 1 1 1       6 × 2 = 12                    1 1                  2

Samples are shuffled, sorted by length inside windows, and cut from the longest down; batches are shuffled inside their
window. What doesn't fill a batch at a window's end goes into the next window, so one batch per epoch is not full. Where
nothing is padded, the shortest samples fill the room that long ones leave.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from paceline.data.length_grouped import GivenLengths, Lengths, checked_lengths
from paceline.errors import ConfigError
from paceline.world.determinism import drawing_from

WINDOW_BATCHES = 128

Ids: TypeAlias = NDArray[np.int64]


class TokenBudgetSampler(Sampler[list[int]]):
    """For a DataLoader: `batch_sampler=TokenBudgetSampler(lengths, tokens=8192)`; every sample once per epoch.

    A batch has at most `tokens` tokens, counted with padding (samples × the longest of them) or, with padded=False,
    without; and at most `max_samples` samples. `window` says how many batches' worth of samples are sorted together;
    there are at least two windows, so that every epoch groups differently. Random numbers come from torch's global
    generator, as in torch's own samplers.

    `len()` is the number of batches of the epoch drawn last. Another epoch may have a few more or fewer; before the
    first, it is the number in an epoch drawn from a fixed seed.
    """

    def __init__(
        self,
        lengths: GivenLengths,
        tokens: int = 8192,
        max_samples: int | None = None,
        *,
        padded: bool = True,
        window: int = WINDOW_BATCHES,
    ) -> None:
        self.lengths = checked_lengths(lengths)
        self.tokens, self.max_samples, self.padded = tokens, max_samples, padded
        self._check(window)
        fitting = min(len(self.lengths) * tokens // max(1, int(self.lengths.sum())), max_samples or len(self.lengths))
        self._window = min(window * max(1, fitting), -(-len(self.lengths) // 2))
        self._batches: int | None = None

    def __len__(self) -> int:
        if self._batches is None:
            with drawing_from(0):
                self._batches = len(self._draw())
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._draw()
        self._batches = len(batches)
        return (batch.tolist() for batch in batches)

    def _draw(self) -> list[Ids]:
        shuffled: Ids = torch.randperm(len(self.lengths)).numpy()
        batches: list[Ids] = []
        over: Ids = shuffled[:0]
        for start in range(0, len(shuffled), self._window):
            ids = np.concatenate([over, shuffled[start : start + self._window]])
            ids = ids[np.argsort(-self.lengths[ids], kind="stable")]
            cut = self._cut(self.lengths[ids])
            last = start + self._window >= len(shuffled)
            over = ids[:0] if last else ids[cut.pop()]
            batches += [ids[cut[number]] for number in torch.randperm(len(cut)).tolist()]
        return batches

    def _cut(self, lengths: Lengths) -> list[NDArray[np.intp]]:
        """The places of each batch among `lengths`, which are sorted; only the last batch may not be full."""
        cut = cut_by_padded_size if self.padded else cut_by_sum
        return cut(lengths, self.tokens, self.max_samples or len(lengths))

    def _check(self, window: int) -> None:
        for name, value in (("tokens", self.tokens), ("max_samples", self.max_samples), ("window", window)):
            if value is not None and value < 1:
                raise ConfigError(f"TokenBudgetSampler: {name}={value}; it must be at least 1")
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > self.tokens:
            longer = int((self.lengths > self.tokens).sum())
            raise ConfigError(
                f"sample {longest} has {self.lengths[longest]:,} tokens and a batch at most tokens={self.tokens:,} "
                f"({longer:,} of {len(self.lengths):,} samples don't fit); truncate or leave out what is longer, or "
                f"raise tokens to {self.lengths[longest]}"
            )


def cut_by_padded_size(lengths: Lengths, tokens: int, at_most: int) -> list[NDArray[np.intp]]:
    """Neighbours, from the longest down: the first of a batch is its longest and says how many fit."""
    places = np.arange(len(lengths))
    batches = []
    start = 0
    while start < len(lengths):
        stop = start + min(tokens // max(1, int(lengths[start])), at_most)
        batches.append(places[start:stop])
        start = stop
    return batches


def cut_by_sum(lengths: Lengths, tokens: int, at_most: int) -> list[NDArray[np.intp]]:
    """The longest that fit, then the shortest into the room that is left."""
    places = np.arange(len(lengths))
    before: list[int] = [0, *np.cumsum(lengths).tolist()]  # tokens of all longer ones
    batches = []
    low, high = 0, len(lengths)
    while low < high:
        longest = min(bisect_right(before, before[low] + tokens) - 1, low + at_most, high)
        room = tokens - (before[longest] - before[low])
        shortest = max(bisect_left(before, before[high] - room), high - (at_most - (longest - low)), longest)
        batches.append(np.concatenate([places[low:longest], places[shortest:high]]))
        low, high = longest, shortest
    return batches
