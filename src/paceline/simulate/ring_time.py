"""A ring of any length in one formula: when each member has finished H hops, of which every one is like the others.

    t'[r] = max( t[r] + stay[r],  t[r-1] + move[r] )        a hop: be done with the last, have the left one's chunk

After H hops t[r] is the longest of all walks that end at r, each of H moves or stays. A walk from s passes every member
between s and r once, and spends the hops that are left where staying is dearest:

    t_H[r] = max over s of   t_0[s]  +  Σ move (s, r]  +  (H - k) · max stay [s, r]            k = moves from s to r

Costs take few values (inside a host, between hosts, between racks), so the inner maximum is tried for each of them:
with a value v, s is any start from which a member that costs v is passed, at most H moves away. That is a maximum over
a window of the ring unrolled to a line, for all r at once. From one lap to the next what is compared grows or shrinks
by the same amount, so of a window of a lap or more its newest lap counts, or its oldest: two running maxima. Half a
ring (H = N - 1, an all-gather) has windows that end or begin with a lap. Either takes as many operations as there are
members, instead of the N·H of its messages.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Times: TypeAlias = NDArray[np.float64]

FEW_HOPS = 16
MOST_VALUES = 16
"""Of costs; with more a ring is walked hop by hop. A tree of switches gives one or two for each level."""


def after_hops(start: Times, move: Times, stay: Times, hops: int) -> Times:
    """Rows of rings."""
    size = start.shape[1]
    if size == 1:
        return start
    values = np.unique(stay)
    half = hops == size - 1
    if hops <= FEW_HOPS or not (half or hops >= 2 * (size - 1)) or len(values) > MOST_VALUES:
        for _ in range(hops):
            start = np.maximum(start + stay, np.roll(start, 1, axis=1) + move)
        return start
    passed = move.cumsum(axis=1)
    lap = passed[:, -1:]
    place = np.arange(size)
    best = np.full(start.shape, -np.inf)
    for value in values:
        grows = size * value - lap  # from one lap to the next
        line = start - passed + place * value
        dear = stay >= value
        if half:
            longest = _since_itself(line, grows, dear)
        else:
            longest = np.where(grows >= 0, _newest_lap(line, grows, dear), _oldest_lap(line, grows, hops))
        found = longest + passed + (hops - place) * value
        best = np.maximum(best, np.where(dear.any(axis=1, keepdims=True), found, -np.inf))
    return best


def _newest_lap(line: Times, grows: Times, dear: NDArray[np.bool_]) -> Times:
    """For each member the largest of the lap that ends with the last dear member before it, or itself."""
    size = line.shape[1]
    upto, from_on = _running_maxima(line)
    twice = np.maximum.accumulate(np.where(np.concatenate([dear, dear], axis=1), np.arange(2 * size), -1), axis=1)
    last = twice[:, size:].clip(min=0)  # unrolled: the lap of `place` begins at `size`
    ends, laps_back = last % size, 1 - last // size
    row = np.arange(len(line))[:, None]
    before = from_on[row, ends + 1] - grows
    newest: Times = np.maximum(upto[row, ends], before) - laps_back * grows
    return newest


def _since_itself(line: Times, grows: Times, dear: NDArray[np.bool_]) -> Times:
    """For each member the largest from behind its own place a lap ago up to the last dear member before it."""
    size = line.shape[1]
    place = np.arange(size)
    last = np.maximum.accumulate(np.where(dear, place, -1), axis=1)  # of this lap; -1: it is in the one before
    upto, from_on = _running_maxima(line)
    row = np.arange(len(line))[:, None]
    this_lap = np.maximum(upto[row, last], from_on[:, 1:] - grows)
    _, up_to_last = _running_maxima(np.where(place <= last[:, -1:], line, -np.inf))
    found: Times = np.where(last >= 0, this_lap, up_to_last[:, 1:] - grows)
    return found


def _oldest_lap(line: Times, grows: Times, hops: int) -> Times:
    """For each member the largest of the lap that begins `hops` before it."""
    size = line.shape[1]
    upto, from_on = _running_maxima(line)
    first = np.arange(size) - hops
    begins, laps = first % size, first // size
    after = np.concatenate([np.full((len(line), 1), -np.inf), upto], axis=1)[:, begins] + (laps + 1) * grows
    oldest: Times = np.maximum(from_on[:, begins] + laps * grows, after)
    return oldest


def _running_maxima(line: Times) -> tuple[Times, Times]:
    """Up to each place, and from each on; behind the last there is nothing."""
    nothing = np.full((len(line), 1), -np.inf)
    from_on = np.maximum.accumulate(line[:, ::-1], axis=1)[:, ::-1]
    return np.maximum.accumulate(line, axis=1), np.concatenate([from_on, nothing], axis=1)
