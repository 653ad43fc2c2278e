"""Iterable shards: what one process takes of a stream that every process reads.

    2 processes, batch_size = 2      0 1 2 3 │ 4 5 6 7 │ 8              real batch = 2 × 2; split_batches: 2, parts of 1
    process 0                        0 1       4 5       8 (0)          (0): from the first real batch; or drop_last
    process 1                            2 3       6 7       (1 2)

Nothing of a real batch is given out before all of it has been read, so that a stream which ends gives every process the
same number of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data.batch_sampler_shard import part_of, refuse_bad_place
from paceline.errors import ConfigError

MOST_LOADER_PROCESSES = 1023


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of process `process_index`: the parameters and rules of transformers, and accelerate's split_batches.

    Unlike there, the epoch moves on by itself: an iteration that starts after another one has the epoch after it, and
    `set_epoch` in between wins. This holds in loader processes too, persistent ones included. When an iteration starts,
    the dataset's `set_epoch` is told the epoch; where it has none, a `torch.Generator` named `generator` that it has is
    seeded with `seed + epoch`.

    The dataset must give all processes the same samples in the same order. As with every iterable dataset, each loader
    process reads its own copy, and it is the dataset that has to divide itself among them (`get_worker_info()`).
    `num_examples` counts what was read in the present iteration, in the process that reads. Where two DataLoaders with
    different `num_workers` take turns on one shard, call `set_epoch`: each loader process counts its own iterations.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
        split_batches: bool = False,
    ) -> None:
        owner = type(self).__name__
        refuse_bad_place(owner, num_processes, process_index)
        if batch_size < 1:
            raise ConfigError(f"{owner}: batch_size={batch_size}; a batch has at least one sample")
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.seed = seed
        self.split_batches = split_batches
        self.num_examples = 0
        self._part = part_of(owner, batch_size, num_processes) if split_batches else batch_size
        self._epochs = _EpochCount()

    @property
    def epoch(self) -> int:
        """Of the iteration that started last, or what was set since."""
        return self._epochs.latest

    def set_epoch(self, epoch: int) -> None:
        """The next iteration has this epoch, the one after it the next, and so on."""
        self._epochs.set(epoch)
        self._tell_dataset(epoch)

    def __iter__(self) -> Iterator[Any]:
        # Counted here and not at the first sample: a loader process that starts late may be stopped without giving one.
        return self._samples_of(self._epochs.start())

    def __len__(self) -> int:
        """The samples of this process; a TypeError, which torch expects, where the dataset has no length."""
        batches, left = divmod(len(self.dataset), self._real_batch)  # type: ignore[arg-type]
        return (batches + (left > 0 and not self.drop_last)) * self._part

    @property
    def _real_batch(self) -> int:
        return self._part * self.num_processes

    def _samples_of(self, epoch: int) -> Iterator[Any]:
        self._begin(epoch)
        first: list[Any] = []
        stream = iter(self.dataset)
        while batch := list(islice(stream, self._real_batch)):
            self.num_examples += len(batch)
            first = first or batch
            if len(batch) < self._real_batch:
                if not self.drop_last:
                    yield from self._mine(list(islice(chain(batch, cycle(first)), self._real_batch)))
                return
            yield from self._mine(batch)

    def _mine(self, batch: list[Any]) -> list[Any]:
        return batch[self._part * self.process_index : self._part * (self.process_index + 1)]

    def _begin(self, epoch: int) -> None:
        self.num_examples = 0
        if not self._tell_dataset(epoch) and isinstance(
            generator := getattr(self.dataset, "generator", None), torch.Generator
        ):
            generator.manual_seed(self.seed + epoch)

    def _tell_dataset(self, epoch: int) -> bool:
        tell = getattr(self.dataset, "set_epoch", None)
        if tell is not None:
            tell(epoch)
        return tell is not None


class _EpochCount:
    """Counts iterations where they start: in this process, or in each loader process, which has a copy of the dataset.

    A place per loader process, in memory that they share with this one: a loader process that lives for one iteration
    finds what the one before it left, and persistent ones hear of `set`.
    """

    def __init__(self) -> None:
        self.__setstate__(torch.zeros(2, 1 + MOST_LOADER_PROCESSES, dtype=torch.int64))

    @property
    def latest(self) -> int:
        return int(self._epoch.max())

    def set(self, epoch: int) -> None:
        self._epoch.fill_(epoch)
        self._begun.fill_(0)

    def start(self) -> int:
        loader = get_worker_info()
        place = 0 if loader is None else 1 + loader.id
        due = self._epoch + self._begun
        # Other loader processes may be in this iteration already or still in the last one: they say nothing here.
        epoch = int(due.max()) if loader is None else max(int(due[0]), int(due[place]))
        self._epoch[place], self._begun[place] = epoch, 1
        return epoch

    def __getstate__(self) -> torch.Tensor:
        return self._counts

    def __setstate__(self, counts: torch.Tensor) -> None:
        # A deep copy of shared memory is not shared by itself; a spawned loader process gets the one that is.
        self._counts: torch.Tensor = counts.share_memory_()  # type: ignore[no-untyped-call]
        self._epoch, self._begun = self._counts
