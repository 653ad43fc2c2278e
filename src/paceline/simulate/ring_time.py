"""A ring of any length in one formula: when each member has finished H hops, of which every one is like the others.

    t'[r] = max( t[r] + stay[r],  t[r-1] + move[r] )        a hop: be done with the last, have the left one's chunk

After H hops t[r] is the longest of all walks that end at r, each of H moves or stays. A walk from s passes every member
between s and r once, and spends the hops that are left where staying is dearest:

    t_H[r] = max over s of   t_0[s]  +  Σ move (s, r]  +  (H - k) · max stay [s, r]            k = moves from s to r

Costs take few values (inside a host, between hosts, between racks), so the inner maximum is tried for each of them:
with a value v, s is any start from which a member that costs v is passed, at most H moves away. That is a maximum over
a window of a line, the ring unrolled, for all r at once: N·log N for a whole ring, instead of the N·H of its messages.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.collectives.rounds import Ranks

Times: TypeAlias = NDArray[np.float64]

MOST_VALUES = 16
"""Of costs; with more a ring is walked hop by hop. A tree of switches gives one or two for each level."""


def after_hops(start: Times, move: Times, stay: Times, hops: int) -> Times:
    """Rows of rings."""
    size = start.shape[1]
    if hops == 0 or size == 1:
        return start
    values = np.unique(stay)
    if len(values) > MOST_VALUES or hops < 4:
        for _ in range(hops):
            start = np.maximum(start + stay, np.roll(start, 1, axis=1) + move)
        return start
    return _longest_walk(start, move, stay, hops, values)


def _longest_walk(start: Times, move: Times, stay: Times, hops: int, values: Times) -> Times:
    size = start.shape[1]
    laps = -(-hops // size)  # before the one in which walks end
    place = np.arange((laps + 1) * size)
    around = place % size
    passed = move[:, around].cumsum(axis=1)  # all moves up to a place; of two places the difference counts
    begun, dear = start[:, around], stay[:, around]
    ends = place[laps * size :]
    best = np.full(start.shape, -np.inf)
    for value in values:
        last = np.maximum.accumulate(np.where(dear >= value, place, -1), axis=1)[:, laps * size :]
        first = np.broadcast_to(ends - hops, last.shape).clip(min=0)
        longest = window_max(begun - passed + place * value, np.minimum(first, last.clip(min=0)), last.clip(min=0))
        found = longest + passed[:, laps * size :] + (hops - ends) * value
        best = np.maximum(best, np.where(first <= last, found, -np.inf))
    return best


def window_max(values: Times, first: Ranks, last: Ranks) -> Times:
    """For each of a row's windows [first, last] the largest of the row's values in it."""
    width = last - first + 1
    level_of = np.frexp(width.astype(np.float64))[1] - 1  # ⌊log2⌋
    out = np.empty(first.shape)
    row = np.broadcast_to(np.arange(len(values))[:, None], first.shape)
    for level in range(int(level_of.max()) + 1):
        chosen = level_of == level
        if chosen.any():
            rows, low, high = row[chosen], first[chosen], last[chosen] - (1 << level) + 1
            out[chosen] = np.maximum(values[rows, low], values[rows, high])
        reach = 1 << level
        values = np.maximum(values[:, :-reach], values[:, reach:]) if values.shape[1] > reach else values
    return out
