"""Where a sample stands in a run, or where a lost one should have stood.

Micro-batches follow each other in the epoch's order as they are dealt: all lanes of micro-batch 0, all lanes of
micro-batch 1, …, then the next step. So between two neighbours it is known which ones are missing:

    recorded      step 4 lane 2 ├────┤                    ├────┤ step 5 lane 1         3 lanes
    missing                           step 5 lane 0 ─┘                                 1 between them, so all of the gap
"""

from __future__ import annotations

import numpy as np

from paceline.data.ledger.reader import Attempt, Ints, Record
from paceline.data.ledger.report import Where
from paceline.world.lanes import neighbouring_lanes


def standing(record: Record, row: int) -> Where:
    file = record.file_of(row)
    return Where(
        int(record.entries.epoch[row]),
        int(record.entries.step[row]),
        int(record.entries.lane[row]),
        file.attempt,
        file.worker,
    )


def lost(record: Record, rows: Ints, epoch: int, track: int, position: int, gap: tuple[int, int]) -> Where:
    """Where the sample at `position` should have been; `rows` are those of its track, by position."""
    entries = record.entries
    attempt = _responsible(record, epoch, track, position)
    if attempt is None:
        return Where(epoch)
    began_epoch, began = attempt.places.get(track, (0, 0))
    low, high = max(gap[0], began) if began_epoch == epoch else gap[0], gap[1]
    own = rows[(rows >= attempt.rows.start) & (rows < attempt.rows.stop)]
    at = int(np.searchsorted(entries.position[own], position))
    before, after = own[:at][-1:].tolist(), own[at:][:1].tolist()
    if not before and not after:
        return Where(epoch, attempt=attempt.number)
    lanes = 1 if record.stream else attempt.header.lanes
    per_step = lanes * (int(entries.micro_batch[attempt.rows].max()) + 1)

    def serial(row: int) -> int:
        lane = 0 if record.stream else int(entries.lane[row])
        return int(entries.epoch_step[row]) * per_step + int(entries.micro_batch[row]) * lanes + lane

    if before:
        first = serial(before[0]) + 1
        beyond = serial(after[0]) if after else first + -(-(high - low) // int(entries.count[before[0]]))
    else:  # its first lines are missing: they begin with the step after that of the sample before
        beyond = serial(after[0])
        earlier = rows[entries.position[rows] < low][-1:].tolist()
        if low > 0 and not earlier:
            return Where(epoch, attempt=attempt.number)
        steps = (
            int(entries.step[after[0]] - entries.step[earlier[0]]) - 1 if low > 0 else int(entries.epoch_step[after[0]])
        )
        first = per_step * (int(entries.epoch_step[after[0]]) - steps)
    number = first + (position - low) * max(1, beyond - first) // (high - low)
    known = (before or after)[0]
    epoch_step, part = divmod(number, per_step)
    lane = track if record.stream else part % lanes
    step = int(entries.step[known]) + epoch_step - int(entries.epoch_step[known])
    return Where(epoch, step, lane, attempt.number, _rider(record, attempt, lane))


def _responsible(record: Record, epoch: int, track: int, position: int) -> Attempt | None:
    """The last attempt that began at or before a position: nobody redid what it did there."""
    had = [attempt for attempt in record.attempts if attempt.places.get(track, (0, 0)) <= (epoch, position)]
    return had[-1] if had else None


def _rider(record: Record, attempt: Attempt, lane: int) -> int | None:
    """The worker that recorded the lane most often; without any, the one that rides it by the rule."""
    lines = {file.worker: int((record.entries.lane[file.rows] == lane).sum()) for file in attempt.files}
    if any(lines.values()):
        return max(lines, key=lambda worker: lines[worker])
    rides = neighbouring_lanes(attempt.header.lanes, attempt.header.workers)
    return next((worker for worker, lanes in enumerate(rides) if lane in lanes), None)
