"""The loader: a user's DataLoader that hands out work items instead of batches, from any place in the data.

    place (epoch, position)  ──►  steps  ──►  (lane, micro-batch) items of this worker  ──►  torch's DataLoader

The user's dataset, collate_fn and loader processes are kept; only the question *which samples next* is answered here.
First, from the DataLoader, an epoch's order and cut: which sample stands where, and which positions make a step.

| the DataLoader has          | the order                                              | the cut      |
|-----------------------------|--------------------------------------------------------|--------------|
| shuffle=True, or False      | a keyed permutation, or the dataset's: no list          | `BatchPlan`  |
| a sampler with an `order`   | what it says (`OrderedSampler`)                         | `BatchPlan`  |
| any other sampler           | its ids, drawn once an epoch under a seed of ours       | `BatchPlan`  |
| a batch sampler             | its batches, drawn likewise                             | `ListedPlan` |

An order that was drawn has a digest. It is compared between workers and when a job goes on in the middle of an epoch: a
sampler that gives something else there would lose and repeat samples.

The place moves when a step commits (`state_after`), so what loader processes fetched ahead is never counted. When
workers come or go in the middle of a step, the loop goes on from that place with other lanes:

    items()   step 4: lane 0, lane 1   step 5: lane 0 ┊ reassign((0, 1, 2))   items()   step 5: lane 0, lane 1, lane 2
                                     commit           ┊ a worker was lost
    └──────────────────────────────────────── one loop, of one epoch ─────────────────────────────────────────────┘
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from paceline.data.fetching import ItemFetcher, Loops, ProcessFetcher
from paceline.data.global_order import GlobalOrder, Listed, Sequential, Shuffled
from paceline.data.sharded_sampler import BatchPlan, Cut, ListedPlan, WorkItem, count_items, lane_items, work_items
from paceline.data.work_source import Assignment
from paceline.errors import ConfigError, DataError
from paceline.world.determinism import drawing_from, mix

# -- an epoch's order and cut ------------------------------------------------------------------------------------------

BegunWith = tuple[int, int, int, bool]  # batch size, lanes, accumulate, drop_last


@dataclass(frozen=True)
class Place:
    """Where the job is in the data: `position` samples of `epoch` are done.

    The others say how the epoch in progress was begun. A job that goes on with another batch size, seed or a grown
    dataset finishes the epoch in that order, so that nothing is lost or repeated.
    """

    epoch: int
    position: int
    start: int  # where the cut begins: where the epoch was when the cut changed
    seed: int
    samples: int | None  # None: as many as the sampler gives
    cut: BegunWith  # an order that balances lanes depends on it
    digest: str | None = None  # of an order that was drawn


@dataclass(frozen=True)
class Epoch:
    plan: Cut
    order: GlobalOrder
    digest: str | None = None


class Epochs:
    """The epochs that a DataLoader gives."""

    def __init__(self, source: DataLoader[Any], assignment: Assignment) -> None:
        self._source, self._assignment = source, assignment
        self._sampler: Any = source.sampler if source.batch_size is not None else source.batch_sampler
        self.batch_size = 0 if source.batch_size is None else batch_size_of(source, assignment)
        self._known: tuple[tuple[Any, ...], Epoch] | None = None

    @property
    def listed(self) -> bool:
        """Batches come from a batch sampler."""
        return self._source.batch_size is None

    @property
    def kind(self) -> str:
        sampler = self._sampler
        if self.listed:
            return "batches"
        if isinstance(getattr(sampler, "identity", None), str) and callable(getattr(sampler, "order", None)):
            return "ordered"
        if is_plain_shuffle(sampler):
            return "shuffled"
        return "sequential" if type(sampler) is SequentialSampler else "drawn"

    @property
    def name(self) -> str:
        """The order, in a word; another name is another order."""
        kind = self.kind
        if kind == "ordered":
            return f"{type(self._sampler).__name__} {self._sampler.identity}"
        return kind if kind in ("shuffled", "sequential") else type(self._sampler).__name__

    @property
    def samples(self) -> int:
        return len(self._source.dataset) if self.listed else _length_of(self._sampler)  # type: ignore[arg-type]

    def first_place(self, epoch: int) -> Place:
        samples = None if self.kind in ("batches", "drawn") else self.samples
        begun = (self.batch_size, self._assignment.lanes, self._assignment.accumulate, self._source.drop_last)
        return Place(epoch, 0, 0, self._assignment.seed, samples, begun)

    def of(self, place: Place) -> Epoch:
        """The epoch that `place` stands in; remembered, since a sampler of the user's own is drawn for it."""
        key = (place.epoch, place.start, place.seed, place.samples, place.cut)
        if self._known is None or self._known[0] != key:
            self._known = key, self._listed_epoch(place) if self.listed else self._even_epoch(place)
        return self._known[1]

    def _even_epoch(self, place: Place) -> Epoch:
        assignment, drop_last = self._assignment, self._source.drop_last
        if self.kind == "drawn":
            with self._drawing(place):
                ids = np.fromiter((int(index) for index in self._sampler), dtype=np.int64)
            plan = BatchPlan(len(ids), self.batch_size, assignment.lanes, assignment.accumulate, drop_last, place.start)
            return Epoch(plan, Listed(tuple(ids.tolist())), _digest(ids))
        samples = self.samples if place.samples is None else place.samples
        plan = BatchPlan(samples, self.batch_size, assignment.lanes, assignment.accumulate, drop_last, place.start)
        match self.kind:
            case "shuffled":
                return Epoch(plan, Shuffled(samples, place.seed, place.epoch))
            case "sequential":
                return Epoch(plan, Sequential(samples))
        return Epoch(plan, self._sampler.order(place.seed, place.epoch, BatchPlan(samples, *place.cut)))

    def _listed_epoch(self, place: Place) -> Epoch:
        with self._drawing(place):
            batches = [[int(index) for index in batch] for batch in self._sampler]
        if not batches:
            again = " again: an iterator can be used only once, give an object with __iter__" if place.epoch else ""
            raise ConfigError(f"the batch sampler {type(self._sampler).__name__} gave no batches{again}")
        for number, batch in enumerate(batches):
            if not batch:
                raise ConfigError(f"batch {number} of the batch sampler {type(self._sampler).__name__} is empty")
        ends = np.cumsum([0, *(len(batch) for batch in batches)])
        ids = np.array([index for batch in batches for index in batch], dtype=np.int64)
        plan = ListedPlan(ends, self._assignment.lanes, self._assignment.accumulate, place.start)
        return Epoch(plan, Listed(tuple(ids.tolist())), _digest(ids, ends))

    @contextmanager
    def _drawing(self, place: Place) -> Iterator[None]:
        """A sampler of the user's own draws its epoch from a seed of ours, the same on every worker."""
        for sampler in self._samplers():
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(place.epoch)
        for generator in self._generators():
            generator.manual_seed(mix(place.seed, "sampler", place.epoch))
        with drawing_from(mix(place.seed, "sampler", place.epoch)):
            yield

    def _samplers(self) -> list[Any]:
        """The sampler, and one inside it, as a BatchSampler has."""
        inner = getattr(self._sampler, "sampler", None)
        return [self._sampler] if inner is None else [self._sampler, inner]

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(sampler, "generator", None) for sampler in self._samplers()]
        return [generator for generator in found if isinstance(generator, torch.Generator)]


def _digest(*arrays: npt.NDArray[np.int64]) -> str:
    return hashlib.blake2b(b"".join(array.tobytes() for array in arrays), digest_size=12).hexdigest()


def steps_of(source: DataLoader[Any], assignment: Assignment) -> int:
    """Steps in an epoch of a loader that is not prepared yet."""
    epochs = Epochs(source, assignment)
    return epochs.of(epochs.first_place(0)).plan.steps


def batch_size_of(source: DataLoader[Any], assignment: Assignment) -> int:
    size, wanted = source.batch_size, assignment.global_batch_size
    assert size is not None
    if wanted is None:
        return size
    parts = assignment.lanes * assignment.accumulate
    if wanted % parts or wanted < parts:
        raise ConfigError(
            f"global_batch_size={wanted} can't be cut into {assignment.lanes} lanes × {assignment.accumulate} "
            f"micro-batches of equal size; nearest that can: "
            + (f"{wanted // parts * parts} or {(wanted // parts + 1) * parts}" if wanted >= parts else f"{parts}")
        )
    return wanted // parts


def is_plain_shuffle(sampler: Any) -> bool:
    """`shuffle=True`: every sample once. With replacement, a number of samples or a subclass the order is its own."""
    if type(sampler) is not RandomSampler:
        return False
    return not sampler.replacement and len(sampler) == len(sampler.data_source)


def _length_of(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError as error:
        raise ConfigError(
            f"the sampler {type(sampler).__name__} has no length, so its samples can't be assigned to lanes; give it a "
            "__len__"
        ) from error


# -- the loader --------------------------------------------------------------------------------------------------------


class ShardedLoader:
    """Items of a map-style dataset, from any place; a `WorkSource`."""

    def __init__(self, source: DataLoader[Any], assignment: Assignment) -> None:
        check_assignable(source)
        self._assignment = assignment
        self.dataset: Dataset[Any] = source.dataset
        self._source = source
        self._epochs = Epochs(source, assignment)
        self._place = self._epochs.first_place(epoch=0)
        self._epochs.of(self._place)  # says now what is wrong with it
        self._fetching = (ProcessFetcher if source.num_workers > 0 else ItemFetcher)(source, assignment)
        self._loops = Loops()

    # -- the place ---------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int | None:
        return self._epochs.batch_size

    @property
    def epoch(self) -> int:
        return self._place.epoch

    @property
    def position(self) -> int:
        return self._place.position

    @property
    def plan(self) -> Cut:
        return self._epochs.of(self._place).plan

    @property
    def steps(self) -> int:
        return self.plan.steps

    @property
    def steps_left(self) -> int:
        return self.steps - self.plan.step_at(self.position)

    @property
    def own_items(self) -> int:
        return count_items(self.plan, self._assignment.own_lanes)

    @property
    def fetches_ahead(self) -> bool:
        return self._source.num_workers > 0

    @property
    def digest(self) -> str | None:
        return self._epochs.of(self._place).digest

    def state_after(self, item: WorkItem | None) -> dict[str, Any]:
        place = self._place if item is None else self._place_after(item)
        return {"kind": "positions", **asdict(replace(place, digest=self.digest if place.position else None))}

    def commit(self, item: WorkItem) -> None:
        self._place = self._place_after(item)

    def merged(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return dict(states[0])  # a function of the committed steps: the same everywhere

    def restore(self, state: Mapping[str, Any], *, changed: frozenset[str] = frozenset()) -> None:
        if state.get("kind") != "positions":
            raise DataError("the saved place is one in a stream; a dataset with positions can't go on from it")
        self._loops.moved()
        place = Place(**{k: v for k, v in state.items() if k != "kind"} | {"cut": tuple(state["cut"])})
        if place.position == 0:  # nothing of this epoch is done: it begins as this job begins them
            self._place = self._epochs.first_place(place.epoch)
            return
        middle = f"in the middle of epoch {place.epoch}, after {place.position:,} samples"
        if "order" in changed:
            raise DataError(
                f"another order can't be accepted {middle}: nothing says which samples are left; resume with the same"
            )
        if place.samples is not None and place.samples > self._epochs.samples:
            raise DataError(
                f"the dataset has shrunk from {place.samples:,} to {self._epochs.samples:,} samples {middle}; "
                "what is left of that epoch can't be assigned to lanes"
            )
        recut = changed & {"lanes", "accumulate", "batch size", "drop_last"}
        place = replace(place, start=place.position) if recut else place
        if self._epochs.of(place).digest != place.digest:
            raise DataError(
                f"the sampler {type(self._source.sampler).__name__} gives another order than the one the job is in, "
                f"{middle}: going on would lose and repeat samples. Resume with the same sampler and dataset; one that "
                "draws must draw from torch, numpy or random, or from a `generator` of its own"
            )
        self._place = place
        if place.position >= self.plan.samples_per_epoch:
            self._place = self._epochs.first_place(place.epoch + 1)

    def begin_epoch(self, epoch: int) -> None:
        self._loops.moved()
        self._place = self._epochs.first_place(epoch)

    def facts(self) -> dict[str, Any]:
        facts = {"order": self._epochs.name, "samples": self._epochs.samples}
        if self._epochs.listed:
            return facts
        return {"batch size": self._epochs.batch_size, **facts, "drop_last": self._source.drop_last}

    def log_header(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "epoch": self.epoch,
            "position": self.position,
            "samples": plan.samples,
            "samples_per_epoch": plan.samples_per_epoch,
            "each_id_once": self._epochs.kind in ("shuffled", "sequential", "ordered"),
            "stream": False,
        }

    def described(self) -> tuple[str, str]:
        plan, lanes, accumulate = self.plan, self._assignment.lanes, self._assignment.accumulate
        shape = f"{_count(lanes, 'lane')} × {_count(accumulate, 'micro-batch', 'es')}"
        if isinstance(plan, BatchPlan):
            batch = f"{plan.global_batch} = {shape} × {_count(plan.batch_size, 'sample')}"
        else:
            batch = f"{shape} of about {plan.samples / max(1, plan.steps * lanes * accumulate):.0f} samples"
        return batch, f"{plan.samples:,} samples, {_count(plan.steps, 'step')} an epoch"

    # -- items -------------------------------------------------------------------------------------------------------

    takes_places = False  # every worker knows the place

    def reassign(self, lanes: tuple[int, ...], places: Mapping[str, Any] | None = None) -> None:
        self._assignment = replace(self._assignment, own_lanes=lanes)
        with self._fetching.staying():
            self._loops.interrupt()
        self._fetching.assign(lanes)

    def items(self) -> Iterator[tuple[WorkItem, Any]]:
        return self._loops.begin(
            self._place.epoch, lambda over: self._fetching.of(iter(()) if over else self._what_is_left())
        )

    def _what_is_left(self) -> Iterator[WorkItem]:
        place, epoch, assignment = self._place, self._epochs.of(self._place), self._assignment
        first_step = epoch.plan.step_at(place.position)
        return work_items(epoch.plan, epoch.order, assignment.own_lanes, epoch=place.epoch, first_step=first_step)

    def items_in(self, turns: Iterable[tuple[int, int]]) -> Iterator[tuple[WorkItem, Any]]:
        """Items of this epoch in another order: those of (step, lane) after (step, lane)."""
        epoch = self._epochs.of(self._place)
        return self._fetching.of(lane_items(epoch.plan, epoch.order, turns, epoch=self._place.epoch))

    def close(self) -> None:
        """End the loader processes."""
        self._fetching.close()

    def _place_after(self, item: WorkItem) -> Place:
        plan = self.plan
        done = min(plan.step_range(item.step)[1], plan.samples_per_epoch)
        if done >= plan.samples_per_epoch:
            return self._epochs.first_place(item.epoch + 1)
        return replace(self._place, epoch=item.epoch, position=done)


def check_assignable(source: DataLoader[Any]) -> None:
    for sampler in (source.sampler, source.batch_sampler, source.dataset):
        if is_distributed(sampler):
            raise ConfigError(
                f"the DataLoader already has a {type(sampler).__name__}, so samples would be split twice; "
                "pass shuffle=True (or a sampler over the whole dataset) instead and let prepare split them"
            )
    if source.batch_size is None and source.batch_sampler is None and not isinstance(source.dataset, IterableDataset):
        raise ConfigError(
            "a DataLoader with batch_size=None can't be assigned to lanes; give it batch_size= (per lane), or a "
            "batch_sampler whose batches are micro-batches"
        )


def is_distributed(sampler: Any) -> bool:
    """A sampler or dataset that gives this process only its part: torch's, accelerate's, transformers' and ours."""
    for count, number in (("num_replicas", "rank"), ("num_processes", "process_index")):
        share = getattr(sampler, count, None)
        if isinstance(share, int) and share > 1 and hasattr(sampler, number):
            return True
    return False


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
