"""Records of runs that nobody ran: the plan, the order and the writer are the real ones, the training is left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.data.global_order import Shuffled
from paceline.data.sample_log import LogHeader, MicroBatch, SampleLog, file_name, next_attempt
from paceline.data.sharded_sampler import BatchPlan, assigned_items
from paceline.world.lanes import neighbouring_lanes

Used = Callable[[MicroBatch], bool]


def assigned(plan: BatchPlan, step: int, lanes: tuple[int, ...]) -> Iterator[tuple[int, int, range, bool]]:
    """The micro-batches of a step of a worker with these lanes, as (lane, micro-batch, positions, shadow)."""
    cut = plan.micro_batches(step)
    for key in assigned_items({lane: len(ranges) for lane, ranges in cut.items()}, lanes):
        yield key.lane, key.micro_batch, cut[key.lane][key.micro_batch], key.shadow


@dataclass(frozen=True)
class Place:
    """What a saved state says about the data."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    start: int = 0
    batch_size: int = 0
    used: int = 0  # samples, since the job began


class RecordedRun:
    """A job that is started again and again in one run folder."""

    def __init__(
        self, folder: Path, samples: int, batch_size: int, lanes: int, accumulate: int = 1, drop_last: bool = False
    ) -> None:
        self.folder, self.samples = folder, samples
        self._lanes, self.accumulate, self._drop_last = lanes, accumulate, drop_last
        self.saved = [Place(batch_size=batch_size)]  # the state after every step that has one

    def plan(self, place: Place) -> BatchPlan:
        return BatchPlan(self.samples, place.batch_size, self._lanes, self.accumulate, self._drop_last, place.start)

    def attempt(
        self,
        workers: int,
        steps: int,
        *,
        back: int = 0,
        batch_size: int | None = None,
        behind: tuple[int, ...] = (),
        torn: tuple[int, ...] = (),
        skip: int = 0,
        used: Used = lambda entry: True,
    ) -> int:
        """Start from the state `back` steps before the last one, take `steps` and be killed.

        The workers in `behind` are killed before they write the last step, those in `torn` while they do.
        """
        del self.saved[len(self.saved) - back :]
        place = self.saved[-1]
        if batch_size is not None and batch_size != place.batch_size:
            place = replace(place, batch_size=batch_size, start=place.position)
        for _ in range(skip):
            place = self._after(place)
        number = next_attempt(self.folder)
        records = [self._start(number, place, worker, workers) for worker in range(workers)]
        for step in range(steps):
            after, whole = self._after(place), True
            for worker, record in enumerate(records):
                killed = step == steps - 1 and worker in (*behind, *torn)
                wrote = self._take_step(record, place, worker, workers, used, commit=not (killed and worker in behind))
                whole = whole and not (wrote and killed)
                if wrote and killed and worker not in behind:
                    cut_last_line(self.folder / "samples" / file_name(number, worker))
            if whole:
                self.saved.append(after)
            place = after
        for record in records:
            record.close()
        return number

    def _take_step(
        self, record: SampleLog, place: Place, worker: int, workers: int, used: Used, *, commit: bool
    ) -> bool:
        """Whether the worker had anything to write."""
        plan = self.plan(place)
        record.begin_epoch(place.epoch, plan.samples, plan.samples_per_epoch)
        entries = list(self._entries(place, neighbouring_lanes(self._lanes, workers)[worker]))
        for entry in entries:
            record.add(replace(entry, used=used(entry)))
        if commit:
            record.commit()
        return bool(entries)

    def _start(self, number: int, place: Place, worker: int, workers: int) -> SampleLog:
        plan = self.plan(place)
        header = LogHeader(
            worker=worker,
            workers=workers,
            lanes=self._lanes,
            epoch=place.epoch,
            position=place.position,
            samples=plan.samples,
            samples_per_epoch=plan.samples_per_epoch,
            each_id_once=True,
        )
        return SampleLog.start(self.folder, number, header)

    def _entries(self, place: Place, own_lanes: tuple[int, ...]) -> Iterator[MicroBatch]:
        plan, order = self.plan(place), Shuffled(self.samples, 0, place.epoch)
        step = plan.step_at(place.position)
        for lane, number, positions, shadow in assigned(plan, step, own_lanes):
            if not shadow:
                ids = order.samples_at(positions)
                yield MicroBatch(place.step + 1, place.epoch, step, lane, number, positions.start, ids)

    def _after(self, place: Place) -> Place:
        plan = self.plan(place)
        low, high = plan.step_range(plan.step_at(place.position))
        place = replace(place, step=place.step + 1, position=high, used=place.used + high - low)
        if high >= plan.samples_per_epoch:
            place = replace(place, epoch=place.epoch + 1, position=0, start=0)
        return place


def cut_last_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
