"""The loader: a user's DataLoader, re-dealt so that it hands out work items instead of batches.

    place (epoch, position)  ──►  steps  ──►  (lane, micro-batch) items of this worker  ──►  torch's DataLoader

The user's dataset, collate_fn and loader processes are kept; only the question *which samples next* is answered here.
The place moves when a step commits (`state_after`), so what loader processes fetched ahead is never counted. When
workers come or go in the middle of a step, the loop goes on from that place with other lanes:

    items()   step 4: lane 0, lane 1   step 5: lane 0 ┊ redeal((0, 1, 2))   items()   step 5: lane 0, lane 1, lane 2
                                     commit           ┊ a worker was lost
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data.epochs import Epochs, Place
from paceline.data.item_fetching import ItemFetching
from paceline.data.loops import Loops
from paceline.data.sharded_sampler import BatchPlan, Cut, WorkItem, lane_items, work_items
from paceline.data.work_source import Deal
from paceline.errors import ConfigError, DataError


class ShardedLoader:
    """Items of a map-style dataset, from any place; a `WorkSource`."""

    def __init__(self, source: DataLoader[Any], deal: Deal) -> None:
        refuse_what_cannot_be_dealt(source)
        self._deal = deal
        self.dataset: Dataset[Any] = source.dataset
        self._source = source
        self._epochs = Epochs(source, deal)
        self._place = self._epochs.first_place(epoch=0)
        self._epochs.of(self._place)  # says now what is wrong with it
        self._fetching = ItemFetching(source, deal)
        self._loops = Loops()

    # -- the place ---------------------------------------------------------------------------------------------------

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
                "what is left of that epoch can't be dealt"
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

    def facts(self) -> dict[str, Any]:
        facts = {"order": self._epochs.name, "samples": self._epochs.samples}
        if self._epochs.listed:
            return facts
        return {"batch size": self._epochs.batch_size, **facts, "drop_last": self._source.drop_last}

    def record_header(self) -> dict[str, Any]:
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
        plan, deal = self.plan, self._deal
        shape = f"{_count(deal.lanes, 'lane')} × {_count(deal.accumulate, 'micro-batch', 'es')}"
        if isinstance(plan, BatchPlan):
            batch = f"{plan.global_batch} = {shape} × {_count(plan.batch_size, 'sample')}"
        else:
            batch = f"{shape} of about {plan.samples / max(1, plan.steps * deal.lanes * deal.accumulate):.0f} samples"
        return batch, f"{plan.samples:,} samples, {_count(plan.steps, 'step')} an epoch"

    # -- items -------------------------------------------------------------------------------------------------------

    takes_places = False  # every worker knows the place

    def committed_place(self) -> dict[str, Any]:
        return self.state_after(None)

    def redeal(self, ride: tuple[int, ...], places: Mapping[str, Any] | None = None) -> None:
        self._deal = replace(self._deal, ride=ride)
        with self._fetching.staying():
            self._loops.interrupt()
        self._fetching.ride(ride)

    def items(self) -> Iterator[tuple[WorkItem, Any]]:
        return self._loops.begin(
            self._place.epoch, lambda over: self._fetching.of(iter(()) if over else self._what_is_left())
        )

    def _what_is_left(self) -> Iterator[WorkItem]:
        place, epoch, deal = self._place, self._epochs.of(self._place), self._deal
        first_step = epoch.plan.step_at(place.position)
        return work_items(epoch.plan, epoch.order, deal.ride, epoch=place.epoch, first_step=first_step)

    def items_in(self, rides: Iterable[tuple[int, int]]) -> Iterator[tuple[WorkItem, Any]]:
        """Items of this epoch in another order: those of (step, lane) after (step, lane)."""
        epoch = self._epochs.of(self._place)
        return self._fetching.of(lane_items(epoch.plan, epoch.order, rides, epoch=self._place.epoch))

    def close(self) -> None:
        """End the loader processes."""
        self._fetching.close()

    def _place_after(self, item: WorkItem) -> Place:
        plan = self.plan
        done = min(plan.step_range(item.step)[1], plan.samples_per_epoch)
        if done >= plan.samples_per_epoch:
            return self._epochs.first_place(item.epoch + 1)
        return replace(self._place, epoch=item.epoch, position=done)


def refuse_what_cannot_be_dealt(source: DataLoader[Any]) -> None:
    for sampler in (source.sampler, source.batch_sampler, source.dataset):
        if is_distributed(sampler):
            raise ConfigError(
                f"the DataLoader already has a {type(sampler).__name__}, so samples would be dealt twice; "
                "pass shuffle=True (or a sampler over the whole dataset) instead and let prepare deal them"
            )
    if source.batch_size is None and source.batch_sampler is None and not isinstance(source.dataset, IterableDataset):
        raise ConfigError(
            "a DataLoader with batch_size=None can't be dealt to lanes; give it batch_size= (per lane), or a "
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
