"""The loader: a user's DataLoader, re-dealt so that it hands out work items instead of batches.

    position (one integer)  ──►  steps  ──►  (lane, micro-batch) items of this worker  ──►  torch's DataLoader

The user's dataset, collate_fn and loader processes are kept; only the question *which samples next* is answered here.
Every item is fetched under a random state derived from (seed, epoch, step, lane, micro-batch), inside loader processes
too, so augmentations give the same values with any number of workers and of loader processes.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from paceline.data.global_order import GlobalOrder, Listed, Sequential, Shuffled
from paceline.data.sharded_sampler import BatchPlan, WorkItem, rides
from paceline.errors import ConfigError
from paceline.world.determinism import drawing_from, mix, seed_everything

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Deal:
    """What this worker is dealt, and from which seed: the job's constants that the loader needs."""

    lanes: int
    accumulate: int
    ride: tuple[int, ...]
    seed: int
    global_batch_size: int | None = None


class ShardedLoader:
    """Iterates over (work item, batch) from any position, once per epoch."""

    def __init__(self, source: DataLoader[Any], deal: Deal) -> None:
        refuse_what_cannot_be_dealt(source)
        self._source = source
        self._deal = deal
        self._custom_order: Iterable[int] | None = None
        sampler = source.sampler
        self._shuffle = is_plain_shuffle(sampler)
        if not self._shuffle and type(sampler) is not SequentialSampler:
            self._custom_order = sampler
        self.plan = BatchPlan(
            samples=_length_of(sampler),
            batch_size=self._batch_size(),
            lanes=deal.lanes,
            accumulate=deal.accumulate,
            drop_last=source.drop_last,
        )

    @property
    def dataset(self) -> Dataset[Any]:
        return self._source.dataset

    def items(self, epoch: int, first_step: int) -> Iterator[tuple[WorkItem, Any]]:
        """This worker's items of `epoch`, beginning with `first_step`."""
        dealt = _WorkItems(self.plan, self._order(epoch), self._deal, epoch, first_step)
        fetched = iter(self._fetching(dealt))
        for item in dealt:
            yield item, next(fetched)

    def _order(self, epoch: int) -> GlobalOrder:
        if self._custom_order is not None:
            with drawing_from(mix(self._deal.seed, "sampler", epoch)):
                ids = tuple(int(index) for index in self._custom_order)
            if len(ids) < self.plan.samples:
                raise ConfigError(f"the sampler says it has {self.plan.samples} samples but gave {len(ids)}")
            return Listed(ids)
        if self._shuffle:
            return Shuffled(self.plan.samples, self._deal.seed, epoch)
        return Sequential(self.plan.samples)

    def _fetching(self, items: _WorkItems) -> DataLoader[Any]:
        source = self._source
        options: dict[str, Any] = {}
        if source.num_workers > 0:
            options = {
                "prefetch_factor": source.prefetch_factor,
                "multiprocessing_context": source.multiprocessing_context,
                "worker_init_fn": _WorkerStart(source.worker_init_fn),
            }
        generator = torch.Generator()
        generator.manual_seed(mix(self._deal.seed, "loader processes"))
        return DataLoader(
            _ItemDataset(source.dataset, source.collate_fn, self._deal.seed),
            batch_size=None,
            sampler=items,
            collate_fn=_as_it_is,
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            generator=generator,
            **options,
        )

    def _batch_size(self) -> int:
        size = self._source.batch_size
        assert size is not None
        wanted = self._deal.global_batch_size
        if wanted is None:
            return size
        parts = self._deal.lanes * self._deal.accumulate
        if wanted % parts or wanted < parts:
            raise ConfigError(
                f"global_batch_size={wanted} can't be cut into {self._deal.lanes} lanes × {self._deal.accumulate} "
                f"micro-batches of equal size; nearest that can: "
                + (f"{wanted // parts * parts} or {(wanted // parts + 1) * parts}" if wanted >= parts else f"{parts}")
            )
        return wanted // parts


class _WorkItems:
    """The sampler behind torch's DataLoader: yields work items rather than indices."""

    def __init__(self, plan: BatchPlan, order: GlobalOrder, deal: Deal, epoch: int, first_step: int) -> None:
        self._plan, self._order, self._deal, self._epoch, self._first_step = plan, order, deal, epoch, first_step

    def __iter__(self) -> Iterator[WorkItem]:
        for step in range(self._first_step, self._plan.steps):
            present = tuple(self._plan.micro_batches(step))
            low, high = self._plan.step_range(step)
            mine = list(rides(self._plan, step, self._deal.ride))
            for number, (lane, micro_batch, positions, shadow) in enumerate(mine):
                yield WorkItem(
                    epoch=self._epoch,
                    step=step,
                    lane=lane,
                    micro_batch=micro_batch,
                    sample_ids=tuple(self._order.sample_at(position) for position in positions),
                    present=present,
                    step_samples=high - low,
                    first_of_step=number == 0,
                    first_of_lane=micro_batch == 0,
                    last_of_lane=number + 1 == len(mine) or mine[number + 1][0] != lane,
                    last_of_step=number + 1 == len(mine),
                    shadow=shadow,
                )


class _ItemDataset(Dataset[Any]):
    """Fetches a whole work item under its own random state."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed

    def __getitem__(self, item: WorkItem) -> Any:
        seed_everything(mix(self._seed, "fetch", item.epoch, item.step, item.lane, item.micro_batch))
        fetch_many = getattr(self._dataset, "__getitems__", None)
        if fetch_many is not None:
            return self._collate(fetch_many(list(item.sample_ids)))
        return self._collate([self._dataset[sample] for sample in item.sample_ids])


class _WorkerStart:
    """Runs in each loader process: it must not outlive its trainer, even by torch's five-second check."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._then is not None:
            self._then(worker)


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


def _as_it_is(batch: Any) -> Any:
    return batch


def refuse_what_cannot_be_dealt(source: DataLoader[Any]) -> None:
    if isinstance(source.dataset, IterableDataset):
        raise ConfigError(
            "an IterableDataset has no positions to deal out yet; wrap a map-style dataset (one with __len__ and "
            "__getitem__)"
        )
    if isinstance(source.sampler, DistributedSampler):
        raise ConfigError(
            "the DataLoader already has a DistributedSampler, so samples would be dealt twice; "
            "pass shuffle=True instead of a sampler and let prepare deal them"
        )
    if source.batch_size is None or type(source.batch_sampler) is not BatchSampler:
        raise ConfigError(
            "a DataLoader with its own batch_sampler, or with batch_size=None, can't be dealt to lanes; "
            "give it batch_size= (per lane) and, if the order matters, a sampler"
        )
