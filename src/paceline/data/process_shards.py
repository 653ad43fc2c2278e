"""Shards for loops of one's own: what one process takes of the batches, or of the stream, that all processes see.

    2 processes, batch_size = 4              0 1 2 3 │ 4 5 6 7 │ 8 9         (0 1): taken again from the start

    whole batches, in turn     process 0     0 1 2 3           │ 8 9 (0 1)
                               process 1               4 5 6 7 │ (2 3 4 5)
    split_batches              process 0     0 1     │ 4 5     │ 8 9
                               process 1         2 3 │     6 7 │ (0 1)

A *round* is what gives every process one batch: one batch that is split, or as many whole ones as there are processes.
An even epoch ends with a complete round, as if the epoch had begun again; `drop_last` drops an incomplete one.

    2 processes, batch_size = 2              0 1 2 3 │ 4 5 6 7 │ 8           of a stream, a round is read before any of
    stream                     process 0     0 1       4 5       8 (0)       it is given out: where the stream ends,
                               process 1         2 3       6 7     (1 2)     every process has had as many samples

`Engine.prepare` assigns samples itself and refuses both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from paceline.errors import ConfigError

MOST_LOADER_PROCESSES = 1023


class BatchSamplerShard(BatchSampler):
    """The batches of process `process_index`, of another batch sampler's: accelerate's parameters and rules.

    | `even_batches` | `drop_last` of the sampler | its last, incomplete round                                  |
    |----------------|----------------------------|-------------------------------------------------------------|
    | any            | True                       | dropped                                                     |
    | True           | False                      | completed from the start: all processes get equally many    |
    | False          | False                      | given as far as it goes: the last processes may get nothing |

    A sampler whose `batch_size` is missing or None may give batches of any length, and whole ones complete a round. So
    may any sampler with `even_batches=False`, unless batches are split or dropped. Otherwise only the last batch may be
    short: where accelerate would leave such batches out and go on, this says so.

    All processes must see the same batches: give a random sampler the same seed everywhere.
    """

    def __init__(
        self,
        batch_sampler: Iterable[list[int]],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        # torch's own __init__ is left out: it is for cutting batches from single indices.
        _check_process(type(self).__name__, num_processes, process_index)
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self._part = _part_of(type(self).__name__, self.batch_size, num_processes) if split_batches else 0

    @property
    def total_length(self) -> int:
        """The batches of all processes, before any is split or repeated."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """The batches of this process.

        As in accelerate, a last batch to split counts for all, also where `even_batches=False` leaves some without.
        """
        rounds, left = divmod(self.total_length, self._round)
        if left == 0 or self.drop_last:
            return rounds
        return rounds + (self.even_batches or self.process_index < left)

    def __iter__(self) -> Iterator[list[int]]:
        start: list[list[int]] = []
        batches: list[list[int]] = []
        for batch in self.batch_sampler:
            self._refuse_misfit(batch, before=batches)
            batches.append(batch)
            if len(start) < self._round:
                start.append(batch)
            if len(batches) == self._round and self._is_full(batch):
                yield from self._mine(batches)
                batches = []
        if batches and not self.drop_last:
            yield from self._mine(self._completed(batches, start) if self.even_batches else batches)

    @property
    def _round(self) -> int:
        return 1 if self.split_batches else self.num_processes

    @property
    def _any_length(self) -> bool:
        return self.batch_size is None or not (self.even_batches or self.split_batches or self.drop_last)

    def _is_full(self, batch: list[int]) -> bool:
        return self._any_length or len(batch) == self.batch_size

    def _mine(self, batches: list[list[int]]) -> Iterator[list[int]]:
        if not self.split_batches:
            yield from batches[self.process_index : self.process_index + 1]
        elif len(part := batches[0][self._part * self.process_index : self._part * (self.process_index + 1)]) > 0:
            yield part

    def _completed(self, batches: list[list[int]], start: list[list[int]]) -> list[list[int]]:
        if self.batch_size is None:
            return list(islice(chain(batches, cycle(start)), self._round))
        indices = chain(chain.from_iterable(batches), cycle(chain.from_iterable(start)))
        return [list(islice(indices, self.batch_size)) for _ in range(self._round)]

    def _refuse_misfit(self, batch: list[int], before: list[list[int]]) -> None:
        if self._any_length:
            return
        assert self.batch_size is not None
        if len(batch) > self.batch_size:
            wrong = f"a batch of {len(batch)}"
        elif before and len(before[-1]) < self.batch_size:
            wrong = f"a batch of {len(before[-1])} before the last"
        else:
            return
        raise ConfigError(
            f"{type(self).__name__}, process {self.process_index}: {type(self.batch_sampler).__name__} says "
            f"batch_size={self.batch_size} and gave {wrong}; where batches vary, leave batch_size off the batch "
            "sampler, or pass even_batches=False, and don't split them"
        )


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
        _check_process(owner, num_processes, process_index)
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
        self._part = _part_of(owner, batch_size, num_processes) if split_batches else batch_size
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


def _check_process(owner: str, num_processes: int, process_index: int) -> None:
    if not 0 <= process_index < num_processes:
        raise ConfigError(
            f"{owner}: there is no process_index={process_index} among num_processes={num_processes}; "
            "processes count from 0 to num_processes - 1"
        )


def _part_of(owner: str, batch_size: int | None, num_processes: int) -> int:
    """The samples of one process in a batch that is split among all."""
    if batch_size is None:
        raise ConfigError(
            f"{owner}: split_batches needs to know how long a batch is, and the batch sampler has no batch_size; "
            "give it one or give out whole batches (split_batches=False)"
        )
    if batch_size % num_processes:
        raise ConfigError(
            f"{owner}: split_batches cuts a batch into equal parts, and batch_size={batch_size} is no round multiple "
            f"of num_processes={num_processes}; nearest that is: "
            f"{' or '.join(str(size) for size in _nearest(batch_size, num_processes))}"
        )
    return batch_size // num_processes


def _nearest(size: int, divisor: int) -> list[int]:
    below = size // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple > 0]
