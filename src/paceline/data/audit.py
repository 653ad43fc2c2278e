"""The audit: proves from the sample log that each sample was used exactly once, or says which was not and where.

    attempt 1    ├──────────────────────┤╳╳╳╳╳╳╳╳╳╳     went further than what it had saved: ╳ is rolled back, and void,
    attempt 2                           ├────────────   because attempt 2 begins here and does it again
                 0 ──────────── positions of an epoch ────────────► samples_per_epoch

What stands must cover every position exactly once: of a finished epoch all of them, of the last one those up to the
furthest. A gap is *lost*, a position twice is *repeated*. Where the order is a permutation, ids are held to it too:
none twice in an epoch, and in a finished one all but those that drop_last drops. A stream is proved lane by lane, up to
where each lane's log ends: where the stream itself would have ended is not known.

Told in this order: what is found, the proof, which samples stand, what is checked of the attempts themselves, the last
step, where a sample stands or should have stood. The limits of the proof: an id exchanged for one that its epoch never
uses can't be seen before the epoch is finished, nor under drop_last after it; and a log cut off behind a whole step
looks like a run that ended there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from paceline.data.exactly_once import NOTHING_AGAIN, Spans, TrackProof, prove_track, unused_ids
from paceline.data.sample_log import Attempt, Ints, LoggedRun, read_log
from paceline.world.lanes import neighbouring_lanes

NAMED = 10  # problems of a kind

Places = dict[tuple[int, int], tuple[int, int]]  # by (attempt, track): (epoch, position)

_LAST_EPOCH = np.iinfo(np.int32).max


# -- what is found, as plain values: they make the tables, and the JSON as they are ------------------------------------


@dataclass(frozen=True)
class Where:
    """The place of a sample in the run; None for what can't be known."""

    epoch: int
    step: int | None = None
    lane: int | None = None
    attempt: int | None = None
    worker: int | None = None


@dataclass(frozen=True)
class Lost:
    position: int
    id: int | None  # where a rolled back step had the same position
    where: Where  # it should have been


@dataclass(frozen=True)
class Repeated:
    position: int
    id: int | None
    where: tuple[Where, ...]


@dataclass(frozen=True)
class AttemptReport:
    attempt: int
    workers: int
    epoch: int
    position: int  # where it began; in a stream, of all lanes together
    steps: int
    samples: int
    rolled_back_steps: int
    rolled_back_samples: int


@dataclass(frozen=True)
class EpochReport:
    first: int
    last: int  # the same, but for epochs of which there is no line at all: they make one report
    steps: int
    samples: int
    of: int | None
    finished: bool
    lost: int
    repeated: int
    dropped: int
    left_out: int
    unused_ids: tuple[int, ...]  # the first of them, where samples of a finished epoch are lost


@dataclass(frozen=True)
class Report:
    folder: str
    lanes: int
    stream: bool
    ids_proved: bool
    attempts: tuple[AttemptReport, ...]
    epochs: tuple[EpochReport, ...]
    lost: int
    repeated: int
    left_out: int
    first_lost: tuple[Lost, ...]
    first_repeated: tuple[Repeated, ...]
    problems: tuple[str, ...]  # what keeps the log from being a proof
    notes: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not (self.lost or self.repeated or self.problems)

    @property
    def verdict(self) -> str:
        left_out = f", {self.left_out:,} left out by the loop" if self.left_out else ""
        return f"{self.lost:,} lost, {self.repeated:,} repeated{left_out}"


# -- the proof ---------------------------------------------------------------------------------------------------------


def audit(folder: Path, listed: int = 10) -> Report:
    """Hold the sample log of a run to the rules above; the first `listed` lost and repeated samples are named."""
    return _Audit(read_log(folder), listed).report()


class _Audit:
    def __init__(self, run: LoggedRun, listed: int) -> None:
        self._run, self._entries, self._listed = run, run.entries, listed
        self._standing = standing_samples(run)
        self._lost: list[Lost] = []
        self._repeated: list[Repeated] = []

    def report(self) -> Report:
        run = self._run
        attempts = tuple(self._attempt(attempt) for attempt in run.attempts)
        check_files(run, self._standing)
        check_lanes(run, self._standing)
        check_places(run, self._standing)
        epochs = tuple(self._epochs(unwritten=self._settle_last_step()))
        return Report(
            folder=str(run.folder),
            lanes=run.lanes,
            stream=run.stream,
            ids_proved=all(attempt.header.each_id_once for attempt in run.attempts),
            attempts=attempts,
            epochs=epochs,
            lost=sum(epoch.lost for epoch in epochs),
            repeated=sum(epoch.repeated for epoch in epochs),
            left_out=sum(epoch.left_out for epoch in epochs),
            first_lost=tuple(self._lost),
            first_repeated=tuple(self._repeated),
            problems=tuple(run.problems),
            notes=tuple(run.notes),
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
        """Set aside a step that not all workers finished recording; the samples lost behind one that is damaged."""
        last = None if self._run.stream else unfinished_step(self._run, self._standing)
        if last is None:
            return 0
        if last.behind:
            self._standing[last.rows] = 0
            written = int(self._entries.count[last.rows].sum())
            self._run.notes.append(
                f"the run ended while step {last.step} was being recorded: {workers_named(last.behind)} had not "
                f"written it. No saved state has that step; the {written:,} samples written are set aside"
            )
        else:
            names = [f"lane {lane} micro-batch {number}" for lane, number in last.missing]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            self._run.problems.append(f"step {last.step}, the last, was recorded without {', '.join(names[:4])}{more}")
        return last.lost_at_its_end

    # -- epochs --------------------------------------------------------------------------------------------------------

    def _epochs(self, unwritten: int) -> Iterator[EpochReport]:
        entries, run = self._entries, self._run
        rows = np.flatnonzero(self._standing)
        rows = rows[np.lexsort((entries.position[rows], run.track[rows], entries.epoch[rows]))]
        of_epoch = entries.epoch[rows]
        began = places_that_count(run)
        seen = {*np.unique(of_epoch).tolist(), *(epoch for epoch, position in began.values() if position)}
        last = max([*seen, *(epoch for epoch, _ in began.values())])
        first = run.attempts[0]
        begin = first.places if first.number == 1 else {0: (0, 0)}
        expected = first.header.epoch if first.number == 1 else 0
        for epoch in sorted({*seen, last}):
            if epoch > expected and not run.stream:
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
        had = [attempt for attempt in self._run.attempts if attempt.header.epoch <= epoch]
        return had[-1] if had else self._run.attempts[0]

    def _unrecorded(self, first: int, last: int) -> EpochReport:
        of = self._attempt_at(first).length(first)[1]
        lost = (of or 0) * (last - first + 1)
        what = f"epoch {first} has" if first == last else f"epochs {first} to {last} have"
        self._run.problems.append(f"{what} no line in the log")
        nothing = Spans(np.zeros(1, np.int64), np.full(1, of or 0))
        self._name(TrackProof(np.zeros(0, np.int64), nothing, NOTHING_AGAIN), first, 0)
        return EpochReport(first, last, 0, 0, of, True, lost, 0, 0, 0, ())

    def _epoch(self, span: _Span, rows: Ints) -> EpochReport:
        entries, stream = self._entries, self._run.stream
        attempt = self._attempt_at(span.epoch)
        samples, of = (None, None) if stream else attempt.length(span.epoch)
        rows = rows if of is None else self._without_those_beyond(span.epoch, rows, of)
        track = self._run.track[rows]
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
            where = place_of(self._run, row)
            self._run.problems.append(
                f"attempt {where.attempt}, step {where.step}: lane {where.lane} has position "
                f"{self._entries.position[row]:,}, beyond the {of:,} samples of epoch {epoch}"
            )
        return rows[~beyond]

    def _name(self, proof: TrackProof, epoch: int, track: int) -> None:
        """The first samples lost and repeated, one by one."""
        if proof.strange_ids:
            self._run.problems.append(f"epoch {epoch}: {proof.strange_ids:,} ids are not of the dataset")
        for position, low, high in proof.gaps.first(self._listed - len(self._lost)):
            where = place_of_lost(self._run, proof.rows, epoch, track, position, (low, high))
            self._lost.append(Lost(position, self._id_once_at(epoch, position), where))
        room = self._listed - len(self._repeated)
        for row, position in zip(proof.again.row[:room].tolist(), proof.again.position[:room].tolist(), strict=True):
            sample, rows = self._met(proof, row, position)
            where_all = tuple(place_of(self._run, met) for met in rows)
            self._repeated.append(Repeated(position, sample, where_all))

    def _met(self, proof: TrackProof, row: int, position: int) -> tuple[int | None, list[int]]:
        """The id of a sample, and every row on the track that has it or its position."""
        entries, rows = self._entries, proof.rows
        start = entries.position[rows]
        has = (start <= position) & (position < start + self._standing[rows])
        if self._run.stream:
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
        if self._run.stream:
            return None
        had = (entries.epoch == epoch) & (entries.position <= position) & (position < entries.position + entries.count)
        row = np.flatnonzero(had)[-1:]
        return int(entries.ids[entries.first_id[row] + position - entries.position[row]][0]) if len(row) else None


@dataclass(frozen=True)
class _Span:
    """What an epoch should cover."""

    epoch: int
    begin: dict[int, int]  # by track, where the log begins in it
    reach: dict[int, int]  # by track, where an attempt began in it: up to there it was used before
    unwritten: int  # behind the furthest
    over: bool  # a later epoch has begun

    def of_track(self, track: int, position: Ints, count: Ints, of: int | None) -> tuple[int, int]:
        begin = min(self.begin.get(track, 0), int(position.min(initial=self.begin.get(track, 0))))
        furthest = max(int((position + count).max(initial=begin)), self.reach.get(track, 0)) + self.unwritten
        if of is None:
            return begin, furthest
        return begin, of if self.over else min(of, furthest)


# -- which samples stand -----------------------------------------------------------------------------------------------


def standing_samples(run: LoggedRun) -> Ints:
    """Per row, how many of its samples no later attempt rolled back.

        attempt 1    ├──────────────┤╳╳╳╳╳╳╳╳╳╳╳╳╳╳    ╳: trained, but the state that a later attempt began from
        attempt 2                           ├╳╳╳╳╳╳╳╳╳     has not seen it, so that it was done again
        attempt 3                   ├───────────────────

    So from the last attempt back: what stands of one is what lies before the earliest place where a later one began.
    Rows are cut by the sample, for a place may lie inside a micro-batch when a job goes on with another batch size.
    """
    entries, track = run.entries, run.track
    standing = entries.count.astype(np.int64)
    cut_epoch = np.full(run.lanes, _LAST_EPOCH, np.int64)
    cut_position = np.zeros(run.lanes, np.int64)
    for attempt in reversed(run.attempts):
        rows = attempt.rows
        epoch, cut = entries.epoch[rows], cut_epoch[track[rows]]
        left = np.clip(cut_position[track[rows]] - entries.position[rows], 0, standing[rows])
        standing[rows] = np.where(epoch < cut, standing[rows], np.where(epoch == cut, left, 0))
        for lane, place in attempt.places.items():
            if place < (cut_epoch[lane], cut_position[lane]):
                cut_epoch[lane], cut_position[lane] = place
    return standing


def places_that_count(run: LoggedRun) -> Places:
    """Where attempts began, by (attempt, track), without the places that a later attempt rolled back."""
    cut: dict[int, tuple[int, int]] = {}
    counting = {}
    for attempt in reversed(run.attempts):
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


# -- files, lanes and places of the attempts; what is wrong goes to the problems, what need not be to the notes --------


def check_files(run: LoggedRun, standing: Ints) -> None:
    for attempt in run.attempts:
        workers, lacking = attempt.header.workers, attempt.without_file
        strangers = [file.worker for file in attempt.files if file.worker >= workers]
        if strangers:
            run.problems.append(
                f"attempt {attempt.number} has {workers} workers but also a file of {workers_named(strangers)}: "
                "two runs share the folder"
            )
        if lacking:
            text = f"attempt {attempt.number}: no file of {workers_named(lacking)}, of {workers} workers"
            if standing[attempt.rows].any():
                run.problems.append(f"{text}; what it used is unknown")
            else:
                run.notes.append(f"{text}; nothing of this attempt counts")
    for before, after in pairwise([0, *(attempt.number for attempt in run.attempts)]):
        if after - before == 2:
            run.notes.append(f"attempt {before + 1} has no readable file")
        elif after - before > 2:
            run.notes.append(f"attempts {before + 1} to {after - 1} have no readable file")


def check_lanes(run: LoggedRun, standing: Ints) -> None:
    for attempt in run.attempts:
        lane = run.entries.lane[attempt.rows].astype(np.int64)
        worker = np.concatenate([np.full(file.rows.stop - file.rows.start, file.worker) for file in attempt.files])
        pairs = np.unique(lane * (worker.max(initial=0) + 1) + worker)
        if len(pairs) == len(np.unique(lane)):
            continue  # every lane had one worker from beginning to end
        used = np.stack([run.entries.step[attempt.rows], lane, worker], axis=1)
        used = np.unique(used[standing[attempt.rows] > 0], axis=0)
        shared = used[1:][(np.diff(used[:, :2], axis=0) == 0).all(axis=1)]
        for step, contested, _ in shared[:NAMED].tolist():
            both = used[(used[:, 0] == step) & (used[:, 1] == contested), 2].tolist()
            run.problems.append(
                f"attempt {attempt.number}, step {step}: lane {contested} was recorded by {workers_named(both)}"
            )


def check_places(run: LoggedRun, standing: Ints) -> None:
    reached: dict[int, tuple[int, int]] = {}
    counting = places_that_count(run)
    for attempt in run.attempts:
        for track, (epoch, position) in attempt.places.items():
            if (attempt.number, track) not in counting:
                continue
            been = reached.get(track, (0, 0))
            if (epoch, position) > been:
                of_lane = f" of lane {track}" if run.stream else ""
                before = f"the log before it ends at epoch {been[0]}, position {been[1]:,}"
                run.problems.append(
                    f"attempt {attempt.number} begins at epoch {epoch}, position {position:,}{of_lane}, but "
                    + (before if attempt.number > 1 else "what was used before it was not recorded")
                )
            reached[track] = (epoch, position)
        reached |= _reached_in(run, standing, attempt)


def _reached_in(run: LoggedRun, standing: Ints, attempt: Attempt) -> dict[int, tuple[int, int]]:
    """By track, the place behind the last sample of an attempt that stands."""
    entries, track = run.entries, run.track
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


# -- the last step -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LastStep:
    """A last step that was not recorded whole: a kill may fall between the first worker's lines of it and the last's.

        worker 0     … step 6 ┤ step 7 ┤      wrote step 7, then was killed
        worker 1     … step 6 ┤ st            was killed while it wrote (torn)
        worker 2     … step 6 ┤               was killed before

    No saved state has such a step, since a worker writes its lines before it helps to save. So it is neither used nor
    lost: it is set aside. Unless every worker wrote its lines whole, or the step before it lacks some too: then lines
    were taken away. Which lines a step has is known: parts are assigned to all lanes in turn, then again for the next
    micro-batch, and only the step that ends an epoch may have fewer.
    """

    step: int
    rows: Ints
    behind: tuple[int, ...]  # workers that were killed before they had written it; empty: lines were taken away
    missing: tuple[tuple[int, int], ...]  # (lane, micro-batch)
    lost_at_its_end: int  # samples behind its last line, as far as the other lines tell


def unfinished_step(run: LoggedRun, standing: Ints) -> LastStep | None:
    entries, attempt = run.entries, run.attempts[-1]
    rows = np.arange(attempt.rows.start, attempt.rows.stop)[standing[attempt.rows] > 0]
    if not len(rows):
        return None
    *before, last = [rows[entries.step[rows] == step] for step in np.unique(entries.step[rows])[-2:]]
    step = int(entries.step[last[0]])
    missing = _missing(run, attempt, last)
    if not len(missing) and not any(file.torn_step == step for file in attempt.files):
        return None
    wrote = {run.file_of(row).worker for row in last.tolist()}
    behind = [file.worker for file in attempt.files if file.torn or file.worker not in wrote]
    if any(len(_missing(run, attempt, previous)) for previous in before):
        behind = []
    lanes = attempt.header.lanes
    at_the_end = int((missing > _parts(run, last, lanes).max()).sum())
    return LastStep(
        step=step,
        rows=last,
        behind=tuple(behind),
        missing=tuple((part % lanes, part // lanes) for part in missing.tolist()),
        lost_at_its_end=0 if behind else at_the_end * int(entries.count[last].max()),
    )


def _missing(run: LoggedRun, attempt: Attempt, rows: Ints) -> Ints:
    """The parts that a step's rows lack."""
    entries, lanes = run.entries, attempt.header.lanes
    parts = _parts(run, rows, lanes)
    end = int((entries.position[rows] + entries.count[rows]).max())
    if end == attempt.length(int(entries.epoch[rows[0]]))[1]:
        assigned = int(parts.max()) + 1
    else:
        assigned = lanes * (int(entries.micro_batch[attempt.rows].max()) + 1)
    return np.setdiff1d(np.arange(assigned), parts)


def _parts(run: LoggedRun, rows: Ints, lanes: int) -> Ints:
    parts: Ints = run.entries.micro_batch[rows].astype(np.int64) * lanes + run.entries.lane[rows]
    return parts


# -- where a sample stands in the run, or should have stood ------------------------------------------------------------


def place_of(run: LoggedRun, row: int) -> Where:
    file = run.file_of(row)
    return Where(
        int(run.entries.epoch[row]),
        int(run.entries.step[row]),
        int(run.entries.lane[row]),
        file.attempt,
        file.worker,
    )


def place_of_lost(run: LoggedRun, rows: Ints, epoch: int, track: int, position: int, gap: tuple[int, int]) -> Where:
    """Where the sample at `position` should have been; `rows` are those of its track, by position.

    Micro-batches follow each other in the epoch's order as they are assigned: all lanes of micro-batch 0, all lanes of
    micro-batch 1, …, then the next step. So between two neighbours it is known which ones are missing:

        recorded      step 4 lane 2 ├────┤                    ├────┤ step 5 lane 1         3 lanes
        missing                           step 5 lane 0 ─┘                                 1 between them, all of it
    """
    entries = run.entries
    attempt = _responsible(run, epoch, track, position)
    if attempt is None:
        return Where(epoch)
    began_epoch, began = attempt.places.get(track, (0, 0))
    low, high = max(gap[0], began) if began_epoch == epoch else gap[0], gap[1]
    own = rows[(rows >= attempt.rows.start) & (rows < attempt.rows.stop)]
    at = int(np.searchsorted(entries.position[own], position))
    before, after = own[:at][-1:].tolist(), own[at:][:1].tolist()
    if not before and not after:
        return Where(epoch, attempt=attempt.number)
    lanes = 1 if run.stream else attempt.header.lanes
    per_step = lanes * (int(entries.micro_batch[attempt.rows].max()) + 1)

    def serial(row: int) -> int:
        lane = 0 if run.stream else int(entries.lane[row])
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
    lane = track if run.stream else part % lanes
    step = int(entries.step[known]) + epoch_step - int(entries.epoch_step[known])
    return Where(epoch, step, lane, attempt.number, _worker_of(run, attempt, lane))


def _responsible(run: LoggedRun, epoch: int, track: int, position: int) -> Attempt | None:
    """The last attempt that began at or before a position: no later one redid what it did there."""
    had = [attempt for attempt in run.attempts if attempt.places.get(track, (0, 0)) <= (epoch, position)]
    return had[-1] if had else None


def _worker_of(run: LoggedRun, attempt: Attempt, lane: int) -> int | None:
    """The worker that recorded the lane most often; without any, the one that it is assigned to by the rule."""
    lines = {file.worker: int((run.entries.lane[file.rows] == lane).sum()) for file in attempt.files}
    if any(lines.values()):
        return max(lines, key=lambda worker: lines[worker])
    assigned = neighbouring_lanes(attempt.header.lanes, attempt.header.workers)
    return next((worker for worker, lanes in enumerate(assigned) if lane in lanes), None)
