"""Fetching one work item: its samples, each under its own random state, then the collate function.

    (seed, epoch, position) ──► random, numpy, torch ──► dataset[id]      the same values wherever the sample is fetched

Seeding costs more than fetching from a simple dataset does, so only libraries that the dataset draws from are seeded
before each sample. Which these are is observed: an item begins with the others in a known state, and if one of them has
moved on at the end, the item is fetched again.

This runs in the worker itself or in a loader process. There, `loader_watch` keeps a slot that says which sample the
process is at.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import Dataset, default_collate, get_worker_info

from paceline.data.batch_ring import BatchRing, RingAddress
from paceline.data.global_order import scrambled
from paceline.data.loader_watch import COLLATING, HANDING_OVER, Slot, Slots
from paceline.errors import DataError
from paceline.world.determinism import mix, seed_everything

# What fetching has to know of a work item: epoch, position, sample ids. It travels to a loader process, which plain
# tuples do faster.
Wanted = tuple[int, int, tuple[int, ...]]


class Failure:
    """What a loader process hands over instead of a batch: torch would wrap a raised error in its own words."""

    def __init__(self, text: str) -> None:
        self.text = text


class Library(NamedTuple):
    """Random numbers that a whole process shares; `mark` is another one if something was drawn since `seed`."""

    seed: Callable[[int], Any]
    mark: Callable[[], float]


def _cuda_offset() -> float:
    return torch.cuda.default_generators[torch.cuda.current_device()].get_offset()


_torch_number = torch.empty((), dtype=torch.int64, device="cpu")
LIBRARIES = (
    Library(random.seed, random.random),
    Library(lambda seed: np.random.seed(seed & 0xFFFF_FFFF), np.random.random_sample),
    Library(torch.default_generator.manual_seed, lambda: _torch_number.random_().item()),
)
CUDA = Library(torch.cuda.manual_seed, _cuda_offset)


class ItemDataset(Dataset[Any]):
    """`dataset[wanted]` is the collated micro-batch of a work item."""

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[Any], Any], seed: int,
        slots: Slots | None = None, rings: RingAddress | None = None,
    ) -> None:  # fmt: skip
        self.dataset = self._dataset = dataset
        self._collate, self._seed, self._slots, self._rings = collate, seed, slots, rings
        self._ring: BatchRing | None = None
        self._epoch: int | None = None
        self._undrawn = self._sample_key = 0
        self._drawn: list[Library] = []  # seeded before each sample
        self._quiet: list[tuple[Library, float]] = []  # seeded before each item, with their marks if nothing is drawn
        self._ready_made = False
        self._fetch_one: Callable[[int], Any] = dataset.__getitem__
        self._fetch_many_of: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)

    def __getitem__(self, wanted: Wanted) -> Any:
        info = get_worker_info()
        if info is None:
            return self._batch(wanted, None)
        assert self._slots is not None
        assert self._rings is not None
        if self._ring is None:
            self._ring = BatchRing(self._rings, info.id)
        try:
            batch = self._batch(wanted, self._slots[info.id])
            try:
                return self._ring.packed(batch)
            except Exception as error:
                raise _failed(f"the batch of {_names(wanted[2])} can't leave the loader process", error) from error
        except DataError as error:
            return Failure(str(error))

    def _batch(self, wanted: Wanted, slot: Slot | None) -> Any:
        epoch, position, ids = wanted
        if epoch != self._epoch:
            self._enter(epoch, position)
        samples = self._samples(position, ids, slot)
        if slot is not None:
            slot.state = COLLATING
        try:
            batch = self._collated(samples, epoch, position)
        except Exception as error:
            raise _failed(f"collate_fn failed on {_names(ids)}", error) from error
        if slot is not None:
            slot.state = HANDING_OVER
        return batch

    def _collated(self, samples: Any, epoch: int, position: int) -> Any:
        if self._collate is not default_collate:
            seed_everything(mix(self._seed, "collate", epoch, position))
            return self._collate(samples)
        # It draws nothing; and where it does not see that this is a loader process, it does not open shared memory.
        info = torch_worker._worker_info
        if self._ring is not None and self._ring.took_the_last:
            torch_worker._worker_info = None
        try:
            return default_collate(samples)
        finally:
            torch_worker._worker_info = info

    def _samples(self, position: int, ids: tuple[int, ...], slot: Slot | None) -> Any:
        while True:
            for library, _ in self._quiet:
                library.seed(self._undrawn)
            samples = self._fetch_each(position, ids, slot) if self._drawn else self._fetch(ids, slot)
            drawn = [library for library, mark in self._quiet if library.mark() != mark]
            if not drawn:
                return samples
            self._drawn += drawn
            self._quiet = [(library, mark) for library, mark in self._quiet if library not in drawn]

    def _fetch_each(self, position: int, ids: tuple[int, ...], slot: Slot | None) -> Any:
        samples: list[Any] = []
        key, libraries = self._sample_key + position, [library.seed for library in self._drawn]
        for place, sample in enumerate(ids):
            seed = scrambled(key + place)
            for seed_library in libraries:
                seed_library(seed)
            if self._ready_made:
                return self._fetch(ids, slot)
            samples += self._fetch((sample,), slot)
        return samples

    def _fetch(self, ids: Sequence[int], slot: Slot | None) -> Any:
        fetch_many = self._fetch_many_of
        if fetch_many is not None:
            return self._fetch_many(fetch_many, ids, slot)
        samples: list[Any] = []
        try:
            if slot is None:
                samples.extend(map(self._fetch_one, ids))  # what was fetched before an error is in the list
            else:
                slot.state = 1
                for sample in ids:
                    slot.sample = sample
                    samples.append(self._fetch_one(sample))
        except Exception as error:
            raise _failed(f"the dataset failed on sample {ids[len(samples)]}", error) from error
        return samples

    def _fetch_many(self, fetch_many: Callable[[list[int]], Any], ids: Sequence[int], slot: Slot | None) -> Any:
        if slot is not None:
            slot.sample, slot.state = ids[0], len(ids)
        try:
            fetched = fetch_many(list(ids))
        except Exception as error:
            raise _failed(f"the dataset failed on {_names(ids)}", error) from error
        self._ready_made = not isinstance(fetched, list)  # a batch, which can't be put together from single samples
        return fetched

    def _enter(self, epoch: int, position: int) -> None:
        """A dataset that wants to know its epoch is told; nobody calls set_epoch."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if set_epoch is not None:
            seed_everything(mix(self._seed, "set_epoch", epoch))
            with named(f"the dataset's set_epoch({epoch}) failed"):
                set_epoch(epoch)
        self._epoch = epoch
        self._sample_key = mix(self._seed, "sample", epoch)
        # Another one in every process and epoch: a dataset may make a generator of its own from torch.initial_seed().
        self._undrawn = mix(self._seed, "undrawn", epoch, position)
        self._quiet = []
        for library in (*LIBRARIES, CUDA) if torch.cuda.is_initialized() else LIBRARIES:  # type: ignore[no-untyped-call]
            if library not in self._drawn:
                library.seed(self._undrawn)
                self._quiet.append((library, library.mark()))


@contextmanager
def named(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _failed(what, error) from error


def _failed(what: str, error: Exception) -> DataError:
    # A traceback can't leave a loader process, so it becomes part of the text.
    lines = "".join(traceback.format_exception(error)).rstrip()
    return DataError(f"{what}: {type(error).__name__}: {error}\n{lines}")


def samples_in(batch: Any) -> int:
    """How many samples a ready-made batch holds: the length of the first tensor found in it."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return samples_in(batch[0])
    return 1


def _names(ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return f"sample {ids[0]}"
    shown = ", ".join(str(sample) for sample in ids[:8])
    return f"the samples {shown}, … ({len(ids)} in all)" if len(ids) > 8 else f"the samples {shown}"
