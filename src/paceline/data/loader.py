"""The loader: a user's DataLoader, re-dealt so that it hands out work items instead of batches.

    place (epoch, position)  ──►  steps  ──►  (lane, micro-batch) items of this worker  ──►  torch's DataLoader

The user's dataset, collate_fn and loader processes are kept; only the question *which samples next* is answered here.
The place moves when a step commits (`state_after`), so what loader processes fetched ahead is never counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from paceline.data.global_order import GlobalOrder, Listed, Sequential, Shuffled
from paceline.data.item_fetching import ItemFetching
from paceline.data.sharded_sampler import BatchPlan, Cut, ListedPlan, WorkItem, work_items
from paceline.data.work_source import Deal
from paceline.errors import ConfigError, DataError
from paceline.world.determinism import drawing_from, mix


@dataclass(frozen=True)
class Place:
    """Where the job is in the data: `position` samples of `epoch` are done.

    The others say how the epoch in progress was begun. A job that goes on with another batch size, seed or a grown
    dataset finishes the epoch in that order, so that nothing is lost or repeated.
    """

    epoch: int
    position: int
    start: int  # where the cut begins: where the epoch was when it was cut anew
    seed: int
    samples: int | None  # None: what the batch sampler gives
    cut: tuple[int, int, int]  # batch size, lanes, accumulate: an order that balances lanes depends on them


class ShardedLoader:
    """Items of a map-style dataset, from any place; a `WorkSource`."""

    def __init__(self, source: DataLoader[Any], deal: Deal) -> None:
        refuse_what_cannot_be_dealt(source)
        self._source = source
        self._deal = deal
        self.dataset: Dataset[Any] = source.dataset
        self._listed = source.batch_size is None  # the batches come from a batch sampler of the user's own
        self._batch_size = 0 if self._listed else batch_size_of(source, deal)
        self._place = self._first_place(epoch=0)
        self._cut: tuple[tuple[Any, ...], Cut, GlobalOrder] | None = None
        self._fetching = ItemFetching(source, deal)
        if not self._listed:
            self._plan_of(self._place)  # says now what is wrong with it

    # -- the place ---------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._place.epoch

    @property
    def position(self) -> int:
        return self._place.position

    @property
    def plan(self) -> Cut:
        return self._cut_of(self._place)[1]

    @property
    def steps(self) -> int:
        return self.plan.steps

    @property
    def fetches_ahead(self) -> bool:
        return self._source.num_workers > 0

    def state_after(self, item: WorkItem | None) -> dict[str, Any]:
        return asdict(self._place if item is None else self._place_after(item))

    def commit(self, item: WorkItem) -> None:
        self._place = self._place_after(item)

    def merged(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return dict(states[0])  # a function of the committed steps: the same everywhere

    def restore(self, state: Mapping[str, Any], *, changed: frozenset[str] = frozenset()) -> None:
        place = Place(**{**state, "cut": tuple(state["cut"])})
        if place.position and (other := changed & {"order", "batch sampler"}):
            raise DataError(
                f"another {' and '.join(sorted(other))} can't be accepted in the middle of epoch {place.epoch}: "
                f"nothing says which of its samples are left after {place.position:,}; resume with the same"
            )
        if place.samples is not None and place.samples > self._samples():
            raise DataError(
                f"the dataset has shrunk from {place.samples:,} to {self._samples():,} samples in the middle of epoch "
                f"{place.epoch}; what is left of that epoch can't be dealt"
            )
        recut = changed & {"lanes", "accumulate", "batch size", "drop_last"}
        self._place = replace(place, start=place.position) if recut else place
        if place.position >= self.plan.samples_per_epoch:
            self._place = self._first_place(place.epoch + 1)

    def facts(self) -> dict[str, Any]:
        if self._listed:
            return {"batch sampler": type(self._source.batch_sampler).__name__, "samples": self._samples()}
        facts = {"batch size": self._batch_size, "samples": self._samples(), "drop_last": self._source.drop_last}
        return facts | {"order": self._order_name()}

    def record_header(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "epoch": self.epoch,
            "position": self.position,
            "samples": plan.samples,
            "samples_per_epoch": plan.samples_per_epoch,
            "each_id_once": self._order_name() != "custom" and not self._listed,
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

    def items(self) -> Iterator[tuple[WorkItem, Any]]:
        place, (_, plan, order) = self._place, self._cut_of(self._place)
        first_step = plan.step_at(place.position)
        return self._fetching.of(work_items(plan, order, self._deal.ride, epoch=place.epoch, first_step=first_step))

    def close(self) -> None:
        """End the loader processes."""
        self._fetching.close()

    # -- how an epoch is cut and ordered -----------------------------------------------------------------------------

    def _place_after(self, item: WorkItem) -> Place:
        plan = self._cut_of(self._place)[1]
        done = min(plan.step_range(item.step)[1], plan.samples_per_epoch)
        if done >= plan.samples_per_epoch:
            return self._first_place(item.epoch + 1)
        return replace(self._place, epoch=item.epoch, position=done)

    def _first_place(self, epoch: int) -> Place:
        cut = (self._batch_size, self._deal.lanes, self._deal.accumulate)
        return Place(epoch, 0, 0, self._deal.seed, None if self._listed else self._samples(), cut)

    def _cut_of(self, place: Place) -> tuple[tuple[Any, ...], Cut, GlobalOrder]:
        """The epoch that `place` stands in; kept, since a sampler of the user's own is drawn for it."""
        epoch = (place.epoch, place.start, place.seed, place.samples, place.cut)
        if self._cut is None or self._cut[0] != epoch:
            plan, order = self._listed_epoch(place) if self._listed else self._plan_of(place)
            self._cut = epoch, plan, order
        return self._cut

    def _plan_of(self, place: Place) -> tuple[Cut, GlobalOrder]:
        sampler: Any = self._source.sampler
        samples = self._samples() if place.samples is None else place.samples
        plan = BatchPlan(
            samples, self._batch_size, self._deal.lanes, self._deal.accumulate, self._source.drop_last, place.start
        )
        match self._order_name():
            case "shuffled":
                return plan, Shuffled(samples, place.seed, place.epoch)
            case "sequential":
                return plan, Sequential(samples)
            case "custom":
                return plan, Listed(self._drawn(sampler, place, at_least=samples))
        begun = BatchPlan(samples, *place.cut, self._source.drop_last)
        return plan, sampler.order(place.seed, place.epoch, begun)

    def _listed_epoch(self, place: Place) -> tuple[Cut, GlobalOrder]:
        batches: Any = self._source.batch_sampler
        with _drawing(batches, place):
            listed = [[int(index) for index in batch] for batch in batches]
        ends = np.cumsum([0, *(len(batch) for batch in listed)])
        order = Listed(tuple(index for batch in listed for index in batch))
        return ListedPlan(ends, self._deal.lanes, self._deal.accumulate, place.start), order

    def _drawn(self, sampler: Iterable[int], place: Place, *, at_least: int) -> tuple[int, ...]:
        with _drawing(sampler, place):
            ids = tuple(int(index) for index in sampler)
        if len(ids) < at_least:
            raise ConfigError(f"the sampler says it has {at_least} samples but gave {len(ids)}")
        return ids

    def _samples(self) -> int:
        return len(self.dataset) if self._listed else _length_of(self._source.sampler)  # type: ignore[arg-type]

    def _order_name(self) -> str:
        sampler = self._source.sampler
        if callable(getattr(sampler, "order", None)):
            return type(sampler).__name__
        if is_plain_shuffle(sampler):
            return "shuffled"
        return "sequential" if type(sampler) is SequentialSampler else "custom"


def _drawing(sampler: Any, place: Place) -> Any:
    """A sampler of the user's own draws its epoch under a seed of ours, the same on every worker."""
    set_epoch = getattr(sampler, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(place.epoch)
    return drawing_from(mix(place.seed, "sampler", place.epoch))


def batch_size_of(source: DataLoader[Any], deal: Deal) -> int:
    size, wanted = source.batch_size, deal.global_batch_size
    assert size is not None
    if wanted is None:
        return size
    parts = deal.lanes * deal.accumulate
    if wanted % parts or wanted < parts:
        raise ConfigError(
            f"global_batch_size={wanted} can't be cut into {deal.lanes} lanes × {deal.accumulate} "
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
            f"the sampler {type(sampler).__name__} has no length, so its samples can't be dealt; give it a __len__"
        ) from error


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
    shares = [getattr(sampler, name, None) for name in ("num_replicas", "num_processes")]
    return any(isinstance(share, int) and share > 1 for share in shares)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
