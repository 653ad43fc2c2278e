"""What a later start of the job rolled back.

    attempt 1    ├──────────────┤╳╳╳╳╳╳╳╳╳╳╳╳╳╳    ╳: trained, but the state that a later attempt began from
    attempt 2                           ├╳╳╳╳╳╳╳╳╳     has not seen it, so that it was done again
    attempt 3                   ├───────────────────

So from the last attempt back: what stands of one is what lies before the earliest place where a later one began. Lines
are cut by the sample, for a place may lie inside a micro-batch when a job goes on with another batch size.
"""

from __future__ import annotations

import numpy as np

from paceline.data.ledger.reader import Ints, Record

Places = dict[tuple[int, int], tuple[int, int]]  # by (attempt, track): (epoch, position)

_LAST_EPOCH = np.iinfo(np.int32).max


def standing_samples(record: Record) -> Ints:
    """Per row, how many of its samples no later attempt rolled back."""
    entries, track = record.entries, record.track
    standing = entries.count.astype(np.int64)
    cut_epoch = np.full(record.lanes, _LAST_EPOCH, np.int64)
    cut_position = np.zeros(record.lanes, np.int64)
    for attempt in reversed(record.attempts):
        rows = attempt.rows
        epoch, cut = entries.epoch[rows], cut_epoch[track[rows]]
        left = np.clip(cut_position[track[rows]] - entries.position[rows], 0, standing[rows])
        standing[rows] = np.where(epoch < cut, standing[rows], np.where(epoch == cut, left, 0))
        for lane, place in attempt.places.items():
            if place < (cut_epoch[lane], cut_position[lane]):
                cut_epoch[lane], cut_position[lane] = place
    return standing


def places_that_count(record: Record) -> Places:
    """Where attempts began, by (attempt, track), without the places that a later attempt rolled back."""
    cut: dict[int, tuple[int, int]] = {}
    counting = {}
    for attempt in reversed(record.attempts):
        for track, place in attempt.places.items():
            if place <= cut.get(track, place):
                cut[track] = counting[attempt.number, track] = place
    return counting


def furthest_begun(places: Places, epoch: int) -> dict[int, int]:
    """By track, the furthest position of an epoch at which an attempt began; everything before it was used."""
    furthest: dict[int, int] = {}
    for (_, track), (at, position) in places.items():
        if at == epoch:
            furthest[track] = max(position, furthest.get(track, 0))
    return furthest
