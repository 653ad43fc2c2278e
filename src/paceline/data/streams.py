"""Streams: iterable datasets, assigned to lanes so that the same samples meet in a step at any number of workers.

A stream that splits itself (by torch's `get_worker_info()`, as its documentation teaches) is read in parts, and no part
twice: lane l has `readers` parts, and each part's reader is told to be one of lanes × readers loader processes.

    lane 0   part 0 ─ batch, batch, batch …      a lane takes its parts in turn, as torch takes its loader processes;
             part 1 ─ batch, batch …             parts live in the worker that has the lane
    lane 1   part 2 ─ …

A stream that can't be split, or has fewer shards than there are lanes, is read whole by every worker, which keeps the
samples of its lanes. Lanes run dry at different times, which can't be known beforehand: before each step the workers
tell each other what their lanes have. Each worker knows the places of its own lanes; where workers come or go, all of
them are merged (`merged`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.fetching import Loops
from paceline.data.loader import batch_size_of, check_assignable
from paceline.data.sharded_sampler import WorkItem, assigned_items
from paceline.data.stream_reading import (
    WHOLE,
    PartFetcher,
    Request,
    StreamReader,
    StreamShape,
    shards_of,
    splits_itself,
)
from paceline.data.work_source import Assignment
from paceline.errors import ConfigError, DataError
from paceline.world import messages

Counts = dict[int, list[int]]  # per lane, the samples of its micro-batches


@dataclass
class LaneProgress:
    """How far a lane has come: its parts' progress, and whose turn it is."""

    samples: int = 0
    turn: int = 0
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)

    def copied(self) -> LaneProgress:
        return LaneProgress(self.samples, self.turn, dict(self.parts))


class StreamLoader:
    """Items of an iterable dataset; a `WorkSource`."""

    fetches_ahead = False  # the workers agree on each step before it begins

    def __init__(self, source: DataLoader[Any], assignment: Assignment, agree: Callable[[Counts, int], Counts]) -> None:
        check_assignable(source)
        self.dataset: Any = source.dataset
        self._assignment, self._agree, self._source = assignment, agree, source
        self.batch_size = batch_size = None if source.batch_size is None else batch_size_of(source, assignment)
        shards, by_itself = shards_of(self.dataset), splits_itself(self.dataset)
        # Of fewer shards than lanes some lanes would have nothing, and a worker that has those alone nothing to do.
        self._too_few = by_itself and batch_size is not None and shards is not None and shards < assignment.lanes
        self.splits = by_itself and not self._too_few
        if batch_size is None and not self.splits:
            raise ConfigError(
                "a stream of ready-made batches (batch_size=None) that does not split itself by get_worker_info() "
                "can't be assigned to lanes; give the DataLoader batch_size= (per lane), or split the stream"
            )
        self.readers = self._readers() if self.splits else 1
        parts = assignment.lanes * self.readers
        self._shape = StreamShape(assignment, batch_size, source.drop_last, parts)
        self._fetchers = self._make_fetchers()
        self._epoch = self._step = self._runs = 0
        self._lanes = self._fresh()
        self._fetched: tuple[int, int, dict[int, LaneProgress]] = (0, 0, self._lanes)
        self._last: list[Any] = []
        self._check = 0
        self._loops = Loops()

    # -- the place ---------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that the lanes of this worker have used."""
        return sum(self._lanes[lane].samples for lane in self._assignment.own_lanes)

    digest = None

    @property
    def steps(self) -> int | None:
        """At most, where the stream has a length and its parts are equal."""
        size = self._shape.batch_size
        if getattr(type(self.dataset), "__len__", None) is None or size is None:
            return None
        if not self.splits:
            return -(-len(self.dataset) // (size * self._assignment.lanes * self._assignment.accumulate))
        of_a_part = -(-len(self.dataset) // self._shape.parts)
        return -(-self.readers * -(-of_a_part // size) // self._assignment.accumulate)

    @property
    def steps_left(self) -> int | None:
        return None if self.steps is None else max(0, self.steps - self._step)

    @property
    def own_items(self) -> int | None:
        """At most."""
        own = len(self._assignment.own_lanes) * self._assignment.accumulate
        return None if self.steps is None else self.steps * own

    def state_after(self, item: WorkItem | None) -> dict[str, Any]:
        epoch, step, lanes = (self._epoch, self._step, self._lanes) if item is None else self._fetched
        known = self._assignment.own_lanes if self.splits else lanes
        return {
            "kind": "stream",
            "epoch": epoch,
            "step": step,
            "lanes": {
                str(lane): {
                    "samples": lanes[lane].samples,
                    "turn": lanes[lane].turn,
                    "parts": {str(part): progress for part, progress in lanes[lane].parts.items()},
                }
                for lane in known
            },
        }

    def commit(self, item: WorkItem) -> None:
        self._epoch, self._step, self._lanes = self._fetched

    def merged(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Where some have learned that the epoch is over, and others not yet, it is over."""
        epoch = max(state["epoch"] for state in states)
        states = [state for state in states if state["epoch"] == epoch]
        return {**states[0], "lanes": {lane: value for state in states for lane, value in state["lanes"].items()}}

    def restore(self, state: Mapping[str, Any], *, changed: frozenset[str] = frozenset()) -> None:
        if state.get("kind") != "stream":
            raise DataError("the saved place is one in a dataset with positions; a stream can't go on from it")
        other = changed & {"lanes", "accumulate", "seed", *self.facts()}
        if other and any(lane["samples"] for lane in state["lanes"].values()):
            names = ", ".join(sorted(other))
            raise DataError(
                f"a stream in the middle of epoch {state['epoch']} can't go on with another {names}: only its lanes "
                "know where they are; resume with the same"
            )
        self._loops.moved()
        self._go_to(state)

    def begin_epoch(self, epoch: int) -> None:
        self._loops.moved()
        self._go_to({"epoch": epoch, "step": 0, "lanes": {}})

    def _go_to(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._step = state["epoch"], state["step"]
        self._lanes = self._fresh() | {
            int(lane): LaneProgress(
                value["samples"], value["turn"], {int(part): progress for part, progress in value["parts"].items()}
            )
            for lane, value in state["lanes"].items()
        }
        self._fetched = self._epoch, self._step, self._lanes
        self._warn_of_reading_again()

    @property
    def takes_places(self) -> bool:
        return self.splits  # who reads the whole stream knows the place of all lanes

    def reassign(self, lanes: tuple[int, ...], places: Mapping[str, Any] | None = None) -> None:
        """A part goes on from its committed place in a new iterator, whichever worker read it before."""
        before = self._assignment.own_lanes
        places = self.state_after(None) if places is None else places
        unknown = [str(lane) for lane in lanes if str(lane) not in places["lanes"]] if places["step"] else []
        if unknown:
            raise DataError(
                f"lanes {', '.join(unknown)} of the stream can't go on here: only the worker that had them knew their "
                "places; give reassign() those of all workers, merged"
            )
        self._loops.interrupt()
        self._assignment = replace(self._assignment, own_lanes=lanes)
        self._shape = replace(self._shape, assignment=self._assignment)
        if lanes != before:
            self.close()
            self._fetchers = self._make_fetchers()
        self._go_to(places)

    def facts(self) -> dict[str, Any]:
        return {
            "batch size": self._shape.batch_size,
            "drop_last": self._shape.drop_last,
            "order": "stream in parts" if self.splits else "stream read whole",
            "readers per lane": self.readers,
        }

    def log_header(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "lane_positions": {lane: progress.samples for lane, progress in self._lanes.items()},
            "samples": None,
            "samples_per_epoch": None,
            "each_id_once": False,
            "stream": True,
        }

    def described(self) -> tuple[str, str]:
        shape = self._shape
        size = "1 element" if shape.batch_size is None else f"{shape.batch_size} samples"
        if self.splits:
            how = f"a stream in {shape.parts} parts, {self.readers} for each lane"
        else:
            what = "has fewer shards than lanes" if self._too_few else "is not split"
            how = f"a stream that {what}: every worker reads all of it and keeps its lanes' samples"
        pieces = "1 micro-batch" if self._assignment.accumulate == 1 else f"{self._assignment.accumulate} micro-batches"
        return f"up to {self._assignment.lanes} lanes × {pieces} × {size}", how

    # -- items -------------------------------------------------------------------------------------------------------

    def items(self) -> Iterator[tuple[WorkItem, Any]]:
        """After a resume at the very end of an epoch there is nothing left of it, and the next call is the next."""
        return self._loops.begin(self._epoch, self._loop_items)

    def _loop_items(self, over: bool) -> Generator[tuple[WorkItem, Any]]:
        fresh = not self._step
        yielded = over or (yield from self._epoch_items())
        if fresh and not yielded:
            raise ConfigError(
                f"the stream gave nothing in epoch {self._epoch - 1}: it is empty, or can be read only once"
            )

    def _epoch_items(self) -> Generator[tuple[WorkItem, Any], None, bool]:
        """Yields the items; returns whether there were any."""
        self._runs += 1
        lanes = {lane: progress.copied() for lane, progress in self._lanes.items()}
        resume = {part: progress for lane in lanes.values() for part, progress in lane.parts.items()}
        for fetcher in self._fetchers:
            fetcher.begin(self._runs, self._epoch, resume)
        epoch, step = self._epoch, self._step
        yielded = False
        while True:
            mine = self._next_step(lanes)
            known = self._assignment.own_lanes if self.splits else range(self._assignment.lanes)
            counts = self._agree({lane: [count for count, _ in mine.get(lane, ())] for lane in known}, self._check)
            present = tuple(lane for lane in range(self._assignment.lanes) if counts.get(lane))
            if not present:
                self._epoch, self._step, self._lanes = epoch + 1, 0, self._fresh()
                return yielded
            self._fetched = epoch, step + 1, {lane: progress.copied() for lane, progress in lanes.items()}
            for item, batch in self._items_of(epoch, step, mine, counts, present):
                yielded = True
                yield item, batch
            step += 1

    def _items_of(
        self, epoch: int, step: int, mine: Mapping[int, Any], counts: Counts, present: tuple[int, ...]
    ) -> Iterator[tuple[WorkItem, Any]]:
        after = self._fetched[2]
        total = sum(sum(counts[lane]) for lane in present)
        keys = assigned_items({lane: len(counts[lane]) for lane in present}, self._assignment.own_lanes)
        for number, key in enumerate(keys):
            lane, place = key.lane, key.micro_batch
            if lane in self._assignment.own_lanes:
                samples, batch = mine[lane][place]
            else:
                samples, batch = self._shadow_batch(mine, lane)
            if key.shadow:  # the real one may follow, and the body may write into what it is given
                batch = copy.deepcopy(batch)
            before = after[lane].samples - sum(counts[lane][place:]) if lane in after else 0
            self._last = [samples, batch]
            yield (
                WorkItem(
                    epoch=epoch,
                    step=step,
                    lane=lane,
                    micro_batch=place,
                    position=before,
                    samples=samples,
                    sample_ids=(),
                    present=present,
                    step_samples=total,
                    first_of_step=number == 0,
                    first_of_lane=place == 0,
                    last_of_lane=key.last_of_lane,
                    last_of_step=number + 1 == len(keys),
                    shadow=key.shadow,
                ),
                batch,
            )

    def _shadow_batch(self, mine: Mapping[int, Any], lane: int) -> tuple[int, Any]:
        """A worker whose lanes have run dry runs its last batch once more, and everything it computes is dropped."""
        if mine.get(lane):
            return mine[lane][0]  # type: ignore[no-any-return]
        if not self._last:  # resumed when its lanes had run dry: their first batch will do
            reader = self._reader()
            replies = (reader[Request(0, self._epoch, part)] for part in self._own_parts())
            self._last = next(([samples, batch] for reply in replies for _, samples, batch in reply.batches), [])
        if not self._last:
            raise ConfigError(
                f"the stream gave lanes {', '.join(map(str, self._assignment.own_lanes))} nothing: it has fewer shards "
                f"than the {self._shape.parts} parts it is read in; use fewer lanes or loader processes, or more shards"
            )
        samples, batch = self._last
        return samples, batch

    def _next_step(self, lanes: dict[int, LaneProgress]) -> dict[int, list[tuple[int, Any]]]:
        """Per lane that this worker knows of, the (samples, batch) of its next micro-batches."""
        if self.splits:
            return {lane: self._next_of_lane(lane, lanes[lane]) for lane in self._assignment.own_lanes}
        step: dict[int, list[tuple[int, Any]]] = {}
        reply = self._fetchers[0].next_of(WHOLE)
        self._check = 0 if reply is None else reply.check
        if reply is not None:
            for lane, samples, batch in reply.batches:
                step.setdefault(lane, []).append((samples, batch))
            for lane, progress in lanes.items():
                progress.samples += sum(samples for samples, _ in step.get(lane, ()))
                progress.parts = {WHOLE: reply.progress}
        return step

    def _next_of_lane(self, lane: int, progress: LaneProgress) -> list[tuple[int, Any]]:
        """Its next `accumulate` micro-batches, one part after the other, passing over those that have ended."""
        found: list[tuple[int, Any]] = []
        dry = 0
        while len(found) < self._assignment.accumulate and dry < self.readers:
            part = lane * self.readers + progress.turn
            reply = self._fetcher_of(part).next_of(part)
            progress.turn = (progress.turn + 1) % self.readers
            if reply is None:
                dry += 1
                continue
            dry = 0
            ((_, samples, batch),) = reply.batches
            progress.samples += samples
            progress.parts[part] = reply.progress
            found.append((samples, batch))
        return found

    def close(self) -> None:
        for fetcher in self._fetchers:
            fetcher.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _fresh(self) -> dict[int, LaneProgress]:
        return {lane: LaneProgress() for lane in range(self._assignment.lanes)}

    def _readers(self) -> int:
        """Parts of each lane: a loader process each when a worker has one lane, never a function of the workers."""
        wanted = max(1, self._source.num_workers)
        shards = shards_of(self.dataset)
        return wanted if shards is None else max(1, min(wanted, shards // self._assignment.lanes))

    def _make_fetchers(self) -> list[PartFetcher]:
        mine = self._own_parts() if self.splits else [WHOLE]
        count = min(len(mine), max(1, self._source.num_workers))
        groups = [mine[number::count] for number in range(count)]
        return [PartFetcher(self._source, self._reader(), parts, self._assignment.timeout_s) for parts in groups]

    def _reader(self) -> StreamReader:
        return StreamReader(self.dataset, self._source.collate_fn, self._shape)

    def _own_parts(self) -> list[int]:
        return [lane * self.readers + number for lane in self._assignment.own_lanes for number in range(self.readers)]

    def _fetcher_of(self, part: int) -> PartFetcher:
        return next(fetcher for fetcher in self._fetchers if part in fetcher.parts)

    def _warn_of_reading_again(self) -> None:
        parts = [p for lane in self._assignment.own_lanes for p in self._lanes[lane].parts.values()]
        again = [progress["samples"] for progress in parts if progress["state"] is None]
        if any(again):
            lacks = "a shuffle buffer outside its state" if hasattr(self.dataset, "state_dict") else "no state_dict()"
            messages.warn(
                f"the stream {type(self.dataset).__name__} has {lacks}: to go on, up to {max(again):,} samples "
                "are read again and dropped, and it goes on exactly only if it gives the same samples again"
            )
