"""The audit: proves from the ledger of samples that each was used exactly once, or says which was not and where.

    attempt 1    ├──────────────────────┤╳╳╳╳╳╳╳╳╳╳     went further than what it had saved: ╳ is rolled back, and void,
    attempt 2                           ├────────────   because attempt 2 begins here and does it again
                 0 ──────────── positions of an epoch ────────────► samples_per_epoch

What stands must cover every position exactly once: of a finished epoch all of them, of the last one those up to the
furthest. A gap is *lost*, a position twice is *repeated*. Where the order is a permutation, ids are held to it too:
none twice in an epoch, and in a finished one all but those that drop_last drops. A stream is proved lane by lane, up to
where each lane's record ends: nobody knows where the stream itself would have ended.

The limits of the proof: an id exchanged for one that its epoch never uses can't be seen before the epoch is finished,
nor under drop_last after it; and a record cut off behind a whole step looks like a run that ended there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data.ledger import whereabouts
from paceline.data.ledger.attempts import check_files, check_places, check_riders, workers_named
from paceline.data.ledger.exactly_once import NOTHING_AGAIN, Spans, TrackProof, prove_track, unused_ids
from paceline.data.ledger.last_step import unfinished_step
from paceline.data.ledger.reader import Attempt, Ints, Record, read_record
from paceline.data.ledger.report import AttemptReport, EpochReport, Lost, Repeated, Report
from paceline.data.ledger.rollback import furthest_begun, places_that_count, standing_samples


def audit(folder: Path, listed: int = 10) -> Report:
    """Hold the record in a run folder to the rules above; the first `listed` lost and repeated samples are named."""
    return _Audit(read_record(folder), listed).report()


class _Audit:
    def __init__(self, record: Record, listed: int) -> None:
        self._record, self._entries, self._listed = record, record.entries, listed
        self._standing = standing_samples(record)
        self._lost: list[Lost] = []
        self._repeated: list[Repeated] = []

    def report(self) -> Report:
        record = self._record
        attempts = tuple(self._attempt(attempt) for attempt in record.attempts)
        check_files(record, self._standing)
        check_riders(record, self._standing)
        check_places(record, self._standing)
        epochs = tuple(self._epochs(unwritten=self._settle_last_step()))
        return Report(
            folder=str(record.folder),
            lanes=record.lanes,
            stream=record.stream,
            ids_proved=all(attempt.header.each_id_once for attempt in record.attempts),
            attempts=attempts,
            epochs=epochs,
            lost=sum(epoch.lost for epoch in epochs),
            repeated=sum(epoch.repeated for epoch in epochs),
            left_out=sum(epoch.left_out for epoch in epochs),
            first_lost=tuple(self._lost),
            first_repeated=tuple(self._repeated),
            problems=tuple(record.problems),
            notes=tuple(record.notes),
        )

    def _attempt(self, attempt: Attempt) -> AttemptReport:
        rows = attempt.rows
        void = self._entries.count[rows] - self._standing[rows]
        steps = self._entries.step[rows]
        return AttemptReport(
            attempt=attempt.number,
            workers=attempt.header.workers,
            epoch=attempt.header.epoch,
            position=sum(position for _, position in attempt.places.values()),
            steps=len(np.unique(steps)),
            samples=int(self._entries.count[rows].sum()),
            rolled_back_steps=len(np.unique(steps[void > 0])),
            rolled_back_samples=int(void.sum()),
        )

    def _settle_last_step(self) -> int:
        """Set aside a step that nobody finished recording; returns the samples lost behind one that is damaged."""
        last = None if self._record.stream else unfinished_step(self._record, self._standing)
        if last is None:
            return 0
        if last.behind:
            self._standing[last.rows] = 0
            written = int(self._entries.count[last.rows].sum())
            self._record.notes.append(
                f"the run ended while step {last.step} was being recorded: {workers_named(last.behind)} had not "
                f"written it. No saved state has that step; the {written:,} samples written are set aside"
            )
        else:
            names = [f"lane {lane} micro-batch {number}" for lane, number in last.missing]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            self._record.problems.append(
                f"step {last.step}, the last, was recorded without {', '.join(names[:4])}{more}"
            )
        return last.lost_at_its_end

    # -- epochs --------------------------------------------------------------------------------------------------------

    def _epochs(self, unwritten: int) -> Iterator[EpochReport]:
        entries, record = self._entries, self._record
        rows = np.flatnonzero(self._standing)
        rows = rows[np.lexsort((entries.position[rows], record.track[rows], entries.epoch[rows]))]
        of_epoch = entries.epoch[rows]
        began = places_that_count(record)
        seen = {*np.unique(of_epoch).tolist(), *(epoch for epoch, position in began.values() if position)}
        last = max([*seen, *(epoch for epoch, _ in began.values())])
        first = record.attempts[0]
        begin = first.places if first.number == 1 else {0: (0, 0)}
        expected = first.header.epoch if first.number == 1 else 0
        for epoch in sorted({*seen, last}):
            if epoch > expected and not record.stream:
                yield self._unrecorded(expected, epoch - 1)
            expected = epoch + 1
            if epoch in seen:
                low, high = np.searchsorted(of_epoch, [epoch, epoch + 1])
                span = _Span(
                    epoch,
                    begin={track: position for track, (at, position) in begin.items() if at == epoch},
                    reach=furthest_begun(began, epoch),
                    unwritten=unwritten if epoch == last else 0,
                    over=epoch < last,
                )
                yield self._epoch(span, rows[low:high])

    def _attempt_at(self, epoch: int) -> Attempt:
        """The one that had the last word on an epoch."""
        had = [attempt for attempt in self._record.attempts if attempt.header.epoch <= epoch]
        return had[-1] if had else self._record.attempts[0]

    def _unrecorded(self, first: int, last: int) -> EpochReport:
        of = self._attempt_at(first).length(first)[1]
        lost = (of or 0) * (last - first + 1)
        what = f"epoch {first} has" if first == last else f"epochs {first} to {last} have"
        self._record.problems.append(f"{what} no line in the record")
        nothing = Spans(np.zeros(1, np.int64), np.full(1, of or 0))
        self._name(TrackProof(np.zeros(0, np.int64), nothing, NOTHING_AGAIN), first, 0)
        return EpochReport(first, last, 0, 0, of, True, lost, 0, 0, 0, ())

    def _epoch(self, span: _Span, rows: Ints) -> EpochReport:
        entries, stream = self._entries, self._record.stream
        attempt = self._attempt_at(span.epoch)
        samples, of = (None, None) if stream else attempt.length(span.epoch)
        rows = rows if of is None else self._without_those_beyond(span.epoch, rows, of)
        track = self._record.track[rows]
        finished, lost, repeated = span.over, 0, 0
        unused: tuple[int, ...] = ()
        for number in sorted({*np.unique(track).tolist(), *span.reach}) if stream else [0]:
            mine = rows[track == number]
            begin, end = span.of_track(number, entries.position[mine], self._standing[mine], of)
            finished = finished or end == of
            by_id = samples if attempt.header.each_id_once else None
            proof = prove_track(entries, self._standing, mine, begin, end, by_id)
            never = 0
            if proof.ids_used is not None and of is not None and finished and begin == 0:
                never = max(0, of - proof.ids_used)
                unused = self._unused(mine, samples or 0) if never else ()
            lost += max(proof.gaps.total, never)
            repeated += len(proof.again.row)
            self._name(proof, span.epoch, number)
        return EpochReport(
            first=span.epoch,
            last=span.epoch,
            steps=len(np.unique(entries.step[rows])),
            samples=int(self._standing[rows].sum()),
            of=of,
            finished=finished,
            lost=lost,
            repeated=repeated,
            dropped=(samples or 0) - (of or 0) if finished else 0,
            left_out=int(self._standing[rows][entries.used[rows] == 0].sum()),
            unused_ids=unused,
        )

    def _unused(self, rows: Ints, samples: int) -> tuple[int, ...]:
        spans = unused_ids(self._entries, self._standing, rows, samples)
        return tuple(id for id, _, _ in spans.first(self._listed))

    def _without_those_beyond(self, epoch: int, rows: Ints, of: int) -> Ints:
        beyond = self._entries.position[rows] + self._standing[rows] > of
        for row in rows[beyond][: self._listed].tolist():
            where = whereabouts.standing(self._record, row)
            self._record.problems.append(
                f"attempt {where.attempt}, step {where.step}: lane {where.lane} has position "
                f"{self._entries.position[row]:,}, beyond the {of:,} samples of epoch {epoch}"
            )
        return rows[~beyond]

    def _name(self, proof: TrackProof, epoch: int, track: int) -> None:
        """The first samples lost and repeated, one by one."""
        if proof.strange_ids:
            self._record.problems.append(f"epoch {epoch}: {proof.strange_ids:,} ids are not of the dataset")
        for position, low, high in proof.gaps.first(self._listed - len(self._lost)):
            where = whereabouts.lost(self._record, proof.rows, epoch, track, position, (low, high))
            self._lost.append(Lost(position, self._id_once_at(epoch, position), where))
        room = self._listed - len(self._repeated)
        for row, position in zip(proof.again.row[:room].tolist(), proof.again.position[:room].tolist(), strict=True):
            sample, rows = self._met(proof, row, position)
            where_all = tuple(whereabouts.standing(self._record, met) for met in rows)
            self._repeated.append(Repeated(position, sample, where_all))

    def _met(self, proof: TrackProof, row: int, position: int) -> tuple[int | None, list[int]]:
        """The id of a sample, and every row on the track that has it or its position."""
        entries, rows = self._entries, proof.rows
        start = entries.position[rows]
        has = (start <= position) & (position < start + self._standing[rows])
        if self._record.stream:
            return None, rows[has].tolist()
        sample = int(entries.ids[entries.first_id[row] + position - entries.position[row]])
        if proof.ids_used is not None:
            places = np.flatnonzero(entries.ids == sample)
            owners = np.searchsorted(entries.first_id, places, side="right") - 1
            stands = places - entries.first_id[owners] < self._standing[owners]
            has |= np.isin(rows, owners[stands])
        return sample, rows[has][np.argsort(entries.step[rows[has]], kind="stable")].tolist()

    def _id_once_at(self, epoch: int, position: int) -> int | None:
        """The id that a step which no longer counts had at a position."""
        entries = self._entries
        if self._record.stream:
            return None
        had = (entries.epoch == epoch) & (entries.position <= position) & (position < entries.position + entries.count)
        row = np.flatnonzero(had)[-1:]
        return int(entries.ids[entries.first_id[row] + position - entries.position[row]][0]) if len(row) else None


@dataclass(frozen=True)
class _Span:
    """What an epoch should cover."""

    epoch: int
    begin: dict[int, int]  # by track, where the record begins in it
    reach: dict[int, int]  # by track, where an attempt began in it: up to there it was used before
    unwritten: int  # behind the furthest
    over: bool  # a later epoch has begun

    def of_track(self, track: int, position: Ints, count: Ints, of: int | None) -> tuple[int, int]:
        begin = min(self.begin.get(track, 0), int(position.min(initial=self.begin.get(track, 0))))
        furthest = max(int((position + count).max(initial=begin)), self.reach.get(track, 0)) + self.unwritten
        if of is None:
            return begin, furthest
        return begin, of if self.over else min(of, furthest)
