"""Exactly once: which positions no micro-batch covers, and which samples stand in two.

    positions     0 1 2 3 4 5 6 7 8 9      low = 0, high = 10
    rows          ├───┤   ├─────┤
                          ├─┤     ├─┤      gap: 2 3          again: 4 5 (the second row that has them)

Rows are sorted by where they begin, so one running maximum of their ends finds gaps and overlaps without looking at
single samples. Ids are sorted, and two equal neighbours are an id used twice. Only when something is wrong are samples
looked at one by one, to name them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from paceline.data.sample_log import Entries, Ints

BLOCK_ROWS = 1 << 15


@dataclass(frozen=True)
class Spans:
    """Numbers from each `low` up to, and without, its `high`."""

    low: Ints
    high: Ints

    @property
    def total(self) -> int:
        return int((self.high - self.low).sum())

    def first(self, count: int) -> Iterator[tuple[int, int, int]]:
        """The first numbers, each with the span it is in."""
        spans = zip(self.low[:count].tolist(), self.high[:count].tolist(), strict=True)
        return islice(((number, low, high) for low, high in spans for number in range(low, high)), count)


@dataclass(frozen=True)
class Again:
    """Samples whose position or id an earlier row has already; one element each."""

    row: Ints
    position: Ints


NOTHING_AGAIN = Again(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class TrackProof:
    """What stands on one track (an epoch's order, or one lane's stream) against what should."""

    rows: Ints  # in the order of their positions
    gaps: Spans
    again: Again
    ids_used: int | None = None  # different ids of [0, samples); None where ids need not differ
    strange_ids: int = 0  # outside [0, samples)


def prove_track(entries: Entries, standing: Ints, rows: Ints, low: int, high: int, samples: int | None) -> TrackProof:
    """`rows` begin in order, and should cover [low, high); with `samples`, no id of [0, samples) may come twice."""
    start = entries.position[rows]
    end = start + standing[rows]
    gaps = uncovered(start, end, low, high)
    twice = bool((start[1:] < np.maximum.accumulate(end)[:-1]).any())
    if samples is None:
        return TrackProof(rows, gaps, find_again(entries, standing, rows, by_id=False) if twice else NOTHING_AGAIN)
    ids = sorted_ids(entries, standing, rows)
    known = ids[np.searchsorted(ids, 0) : np.searchsorted(ids, samples)]
    same = int((ids[1:] == ids[:-1]).sum())
    again = find_again(entries, standing, rows, by_id=True) if twice or same else NOTHING_AGAIN
    used = len(known) - int((known[1:] == known[:-1]).sum()) if same else len(known)
    return TrackProof(rows, gaps, again, used, len(ids) - len(known))


def unused_ids(entries: Entries, standing: Ints, rows: Ints, samples: int) -> Spans:
    ids = sorted_ids(entries, standing, rows)
    return uncovered(ids, ids + 1, 0, samples)


def uncovered(start: Ints, end: Ints, low: int, high: int) -> Spans:
    """The parts of [low, high) in none of the spans, which are sorted by their starts."""
    reach = np.maximum.accumulate(np.concatenate([[low], end, [high]]))
    begins = np.minimum(np.concatenate([start, [high]]), high)
    gap = begins > reach[:-1]
    return Spans(reach[:-1][gap], begins[gap])


def ragged(first: Ints, length: Ints) -> Ints:
    """first[0], first[0] + 1, … (length[0] of them), first[1], …"""
    begin = np.cumsum(length) - length
    return np.repeat(first - begin, length) + np.arange(length.sum())


def sorted_ids(entries: Entries, standing: Ints, rows: Ints) -> Ints:
    # A block of rows at a time: the places of all ids at once would take as much memory as the ids, several times.
    blocks = (rows[at : at + BLOCK_ROWS] for at in range(0, len(rows), BLOCK_ROWS))
    ids = np.empty(int(standing[rows].sum()), np.int64)
    filled = 0
    for block in blocks:
        part = entries.ids[ragged(entries.first_id[block], standing[block])]
        ids[filled : filled + len(part)] = part
        filled += len(part)
    ids.sort()
    return ids


def find_again(entries: Entries, standing: Ints, rows: Ints, *, by_id: bool) -> Again:
    rows = rows[np.argsort(entries.step[rows], kind="stable")]  # what came first was right
    position = ragged(entries.position[rows], standing[rows])
    again = _not_first(position)
    if by_id:
        again |= _not_first(entries.ids[ragged(entries.first_id[rows], standing[rows])])
    return Again(np.repeat(rows, standing[rows])[again], position[again])


def _not_first(values: Ints) -> Ints:
    again = np.ones(len(values), bool)
    again[np.unique(values, return_index=True)[1]] = False
    return again
