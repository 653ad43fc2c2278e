"""What is checked of the attempts themselves, before their samples: files, riders and places.

    files      every worker that the header counts left a file, and nobody else
    riders     a lane of one step was recorded by one worker
    places     an attempt begins where the ones before it got to, or earlier

What is wrong goes to the record's problems, by name; what need not be wrong goes to its notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from paceline.data.ledger.reader import Attempt, Ints, Record
from paceline.data.ledger.rollback import places_that_count

NAMED = 10  # of a kind


def check_files(record: Record, standing: Ints) -> None:
    for attempt in record.attempts:
        workers, lacking = attempt.header.workers, attempt.without_file
        strangers = [file.worker for file in attempt.files if file.worker >= workers]
        if strangers:
            record.problems.append(
                f"attempt {attempt.number} has {workers} workers but also a file of {workers_named(strangers)}: "
                "two runs share the folder"
            )
        if lacking:
            text = f"attempt {attempt.number}: no file of {workers_named(lacking)}, of {workers} workers"
            if standing[attempt.rows].any():
                record.problems.append(f"{text}; what it used is unknown")
            else:
                record.notes.append(f"{text}; nothing of this attempt counts")
    for before, after in pairwise([0, *(attempt.number for attempt in record.attempts)]):
        if after - before == 2:
            record.notes.append(f"attempt {before + 1} has no readable file")
        elif after - before > 2:
            record.notes.append(f"attempts {before + 1} to {after - 1} have no readable file")


def check_riders(record: Record, standing: Ints) -> None:
    for attempt in record.attempts:
        lane = record.entries.lane[attempt.rows].astype(np.int64)
        worker = np.concatenate([np.full(file.rows.stop - file.rows.start, file.worker) for file in attempt.files])
        riders = np.unique(lane * (worker.max(initial=0) + 1) + worker)
        if len(riders) == len(np.unique(lane)):
            continue  # every lane had one worker from beginning to end
        rode = np.stack([record.entries.step[attempt.rows], lane, worker], axis=1)
        rode = np.unique(rode[standing[attempt.rows] > 0], axis=0)
        shared = rode[1:][(np.diff(rode[:, :2], axis=0) == 0).all(axis=1)]
        for step, contested, _ in shared[:NAMED].tolist():
            both = rode[(rode[:, 0] == step) & (rode[:, 1] == contested), 2].tolist()
            record.problems.append(
                f"attempt {attempt.number}, step {step}: lane {contested} was recorded by {workers_named(both)}"
            )


def check_places(record: Record, standing: Ints) -> None:
    reached: dict[int, tuple[int, int]] = {}
    counting = places_that_count(record)
    for attempt in record.attempts:
        for track, (epoch, position) in attempt.places.items():
            if (attempt.number, track) not in counting:
                continue
            been = reached.get(track, (0, 0))
            if (epoch, position) > been:
                of_lane = f" of lane {track}" if record.stream else ""
                before = f"the record before it ends at epoch {been[0]}, position {been[1]:,}"
                record.problems.append(
                    f"attempt {attempt.number} begins at epoch {epoch}, position {position:,}{of_lane}, but "
                    + (before if attempt.number > 1 else "what was used before it was not recorded")
                )
            reached[track] = (epoch, position)
        reached |= _reached_in(record, standing, attempt)


def _reached_in(record: Record, standing: Ints, attempt: Attempt) -> dict[int, tuple[int, int]]:
    """By track, the place behind the last sample of an attempt that stands."""
    entries, track = record.entries, record.track
    rows = np.arange(attempt.rows.start, attempt.rows.stop)[standing[attempt.rows] > 0]
    reached = {}
    for number in np.unique(track[rows]).tolist():
        mine = rows[track[rows] == number]
        epoch = int(entries.epoch[mine].max())
        last = mine[entries.epoch[mine] == epoch]
        end = int((entries.position[last] + standing[last]).max())
        reached[number] = (epoch + 1, 0) if end == attempt.length(epoch)[1] else (epoch, end)
    return reached


def workers_named(numbers: Sequence[int]) -> str:
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
