"""The last step of a record: a kill may fall between the first worker's lines of it and the last's.

    worker 0     … step 6 ┤ step 7 ┤      wrote step 7, then was killed
    worker 1     … step 6 ┤ st            was killed while it wrote (torn)
    worker 2     … step 6 ┤               was killed before

No saved state has such a step, since a worker writes its lines before it helps to save. So it is neither used nor lost:
it is set aside. Unless every worker wrote its lines whole, or the step before it lacks some too: then lines were taken
away. Which lines a step has is known: parts are dealt to all lanes in turn, then again for the next micro-batch, and
only the step that ends an epoch may have fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.data.ledger.reader import Attempt, Ints, Record


@dataclass(frozen=True)
class LastStep:
    """A last step that was not recorded whole."""

    step: int
    rows: Ints
    behind: tuple[int, ...]  # workers that were killed before they had written it; empty: lines were taken away
    missing: tuple[tuple[int, int], ...]  # (lane, micro-batch)
    lost_at_its_end: int  # samples behind its last line, as far as the other lines tell


def unfinished_step(record: Record, standing: Ints) -> LastStep | None:
    entries, attempt = record.entries, record.attempts[-1]
    rows = np.arange(attempt.rows.start, attempt.rows.stop)[standing[attempt.rows] > 0]
    if not len(rows):
        return None
    *before, last = [rows[entries.step[rows] == step] for step in np.unique(entries.step[rows])[-2:]]
    step = int(entries.step[last[0]])
    missing = _missing(record, attempt, last)
    if not len(missing) and not any(file.torn_step == step for file in attempt.files):
        return None
    wrote = {record.file_of(row).worker for row in last.tolist()}
    behind = [file.worker for file in attempt.files if file.torn or file.worker not in wrote]
    if any(len(_missing(record, attempt, previous)) for previous in before):
        behind = []
    lanes = attempt.header.lanes
    at_the_end = int((missing > _parts(record, last, lanes).max()).sum())
    return LastStep(
        step=step,
        rows=last,
        behind=tuple(behind),
        missing=tuple((part % lanes, part // lanes) for part in missing.tolist()),
        lost_at_its_end=0 if behind else at_the_end * int(entries.count[last].max()),
    )


def _missing(record: Record, attempt: Attempt, rows: Ints) -> Ints:
    """The parts that a step's rows lack."""
    entries, lanes = record.entries, attempt.header.lanes
    parts = _parts(record, rows, lanes)
    end = int((entries.position[rows] + entries.count[rows]).max())
    if end == attempt.length(int(entries.epoch[rows[0]]))[1]:
        dealt = int(parts.max()) + 1
    else:
        dealt = lanes * (int(entries.micro_batch[attempt.rows].max()) + 1)
    return np.setdiff1d(np.arange(dealt), parts)


def _parts(record: Record, rows: Ints, lanes: int) -> Ints:
    parts: Ints = record.entries.micro_batch[rows].astype(np.int64) * lanes + record.entries.lane[rows]
    return parts
