"""Rounds: the hops of all ranks at once. What a schedule says rank by rank, told in arrays for any number of ranks.

    pattern      who sends to whom                                          of
    Pairs        sources[i] to targets[i]                                   trees, halving and doubling, stars
    Ring         in each row every rank to the next, the last to the first  rings; rows are hosts, or places in hosts
    Everyone     in each row every rank to every other                      owners of ranges

A ring of 100,000 ranks has 20 billion messages and two facts: who is next, and how often. A schedule's `rounds` and its
`hops` say the same, which a test checks for every algorithm; the executor runs the hops, the simulator the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ranks: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pairs:
    sources: Ranks
    targets: Ranks

    def messages(self) -> tuple[Ranks, Ranks]:
        return self.sources, self.targets


@dataclass(frozen=True, eq=False)
class Ring:
    members: Ranks  # rows of ranks

    def messages(self) -> tuple[Ranks, Ranks]:
        return self.members.ravel(), np.roll(self.members, -1, axis=1).ravel()


@dataclass(frozen=True, eq=False)
class Everyone:
    members: Ranks  # rows of ranks, in order

    def messages(self) -> tuple[Ranks, Ranks]:
        """All of them: for a few ranks."""
        size = self.members.shape[1]
        others = ~np.eye(size, dtype=bool)
        sources = np.repeat(self.members[:, :, None], size, axis=2)[:, others]
        targets = np.repeat(self.members[:, None, :], size, axis=1)[:, others]
        return sources.ravel(), targets.ravel()


Pattern: TypeAlias = Pairs | Ring | Everyone


@dataclass(frozen=True)
class Round:
    """`times` hops in a row in which the same ranks send as many chunks to the same ones."""

    pattern: Pattern
    chunks: int = 1
    times: int = 1


def all_ranks(size: int) -> Ranks:
    """As one row."""
    return np.arange(size, dtype=np.int64)[None, :]


def rows(members: Sequence[Sequence[int]]) -> Ranks:
    return np.asarray(members, dtype=np.int64)


def span(first: int, stop: int, step: int = 1) -> Any:
    return np.arange(first, stop, step, dtype=np.int64)
