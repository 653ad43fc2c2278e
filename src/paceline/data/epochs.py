"""An epoch's order and cut, from the user's DataLoader: which sample stands where, and which positions make a step.

| the DataLoader has          | the order                                              | the cut      |
|-----------------------------|--------------------------------------------------------|--------------|
| shuffle=True, or False      | a keyed permutation, or the dataset's: no list          | `BatchPlan`  |
| a sampler with an `order`   | what it says (`OrderedSampler`)                         | `BatchPlan`  |
| any other sampler           | its ids, drawn once an epoch under a seed of ours       | `BatchPlan`  |
| a batch sampler             | its batches, drawn likewise                             | `ListedPlan` |

An order that was drawn has a digest. It is compared between workers and when a job goes on in the middle of an epoch: a
sampler that gives something else there would lose and repeat samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from paceline.data.global_order import GlobalOrder, Listed, Sequential, Shuffled
from paceline.data.sharded_sampler import BatchPlan, Cut, ListedPlan
from paceline.data.work_source import Deal
from paceline.errors import ConfigError
from paceline.world.determinism import drawing_from, mix

BegunWith = tuple[int, int, int, bool]  # batch size, lanes, accumulate, drop_last


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

    def __init__(self, source: DataLoader[Any], deal: Deal) -> None:
        self._source, self._deal = source, deal
        self._sampler: Any = source.sampler if source.batch_size is not None else source.batch_sampler
        self.batch_size = 0 if source.batch_size is None else batch_size_of(source, deal)
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
        begun = (self.batch_size, self._deal.lanes, self._deal.accumulate, self._source.drop_last)
        return Place(epoch, 0, 0, self._deal.seed, samples, begun)

    def of(self, place: Place) -> Epoch:
        """The epoch that `place` stands in; kept, since a sampler of the user's own is drawn for it."""
        key = (place.epoch, place.start, place.seed, place.samples, place.cut)
        if self._known is None or self._known[0] != key:
            self._known = key, self._listed_epoch(place) if self.listed else self._even_epoch(place)
        return self._known[1]

    def _even_epoch(self, place: Place) -> Epoch:
        deal, drop_last = self._deal, self._source.drop_last
        if self.kind == "drawn":
            with self._drawing(place):
                ids = np.fromiter((int(index) for index in self._sampler), dtype=np.int64)
            plan = BatchPlan(len(ids), self.batch_size, deal.lanes, deal.accumulate, drop_last, place.start)
            return Epoch(plan, Listed(tuple(ids.tolist())), _digest(ids))
        samples = self.samples if place.samples is None else place.samples
        plan = BatchPlan(samples, self.batch_size, deal.lanes, deal.accumulate, drop_last, place.start)
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
        plan = ListedPlan(ends, self._deal.lanes, self._deal.accumulate, place.start)
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
