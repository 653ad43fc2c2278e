"""Evaluation: every sample counted once, at any number of workers.

    batches    0 1 2 | 3 4 5 | 6 · ·          3 workers take one batch each per round
    worker     0 1 2   0 1 2   0 1 2          a worker with none left repeats the first batch as a *shadow*

All workers run the same number of rounds, so `gather_for_metrics` may be called in the loop body; it drops the shadows
and returns the round's results in the dataset's order. Batches have the same samples whatever the number of workers,
and the same random numbers, in fetching and in the loop's body: those of their first sample.
A stream is read whole by every worker, which keeps its batch of each round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from paceline.data.epochs import is_plain_shuffle
from paceline.data.loader import refuse_what_cannot_be_dealt
from paceline.data.prefetch import to_device
from paceline.errors import ConfigError
from paceline.world.determinism import drawing_from, mix, seed_everything
from paceline.world.world import World


class EvaluationLoader:
    def __init__(
        self,
        source: DataLoader[Any],
        world: World,
        device: torch.device,
        *,
        seed: int,
        timeout_s: float,
        on_start: Callable[[], None],
    ) -> None:
        refuse_what_cannot_be_dealt(source)
        self._seed, self._timeout_s, self._on_start = seed, timeout_s, on_start
        self._source = source
        self._world = world
        self._device = device
        self._stream = isinstance(source.dataset, IterableDataset)
        if self._stream and source.batch_size is None:
            raise ConfigError("an evaluation over a stream needs batch_size=: its batches are dealt to the workers")
        self._kept: DataLoader[Any] | None = None
        self.real_rows: list[int] | None = None  # which workers hold a real batch this round; None outside

    def deal_to(self, world: World) -> None:
        """From now on batches are dealt to these workers."""
        self._world, self._kept = world, None

    @property
    def dataset(self) -> Any:
        return self._source.dataset

    @property
    def batches(self) -> int:
        return len(self._batches)

    @cached_property
    def _batches(self) -> Sequence[Sequence[int]]:
        """In the dataset's order, whatever `shuffle` says; a sampler of the user's own is asked once, under a seed."""
        sampler, size = self._source.sampler, self._source.batch_size
        if size is None:
            assert self._source.batch_sampler is not None
            with drawing_from(mix(self._seed, "evaluation")):
                return [list(batch) for batch in self._source.batch_sampler]
        if is_plain_shuffle(sampler) or type(sampler) is SequentialSampler:
            ids: Sequence[int] = range(len(self._source.dataset))  # type: ignore[arg-type]
        else:
            with drawing_from(mix(self._seed, "evaluation")):
                ids = [int(index) for index in sampler]
        stop = len(ids) - len(ids) % size if self._source.drop_last else len(ids)
        return [ids[low : low + size] for low in range(0, stop, size)]

    def __len__(self) -> int:
        """Rounds: what every worker iterates."""
        if self._stream:
            raise TypeError("an evaluation over a stream has no length")
        return -(-self.batches // self._world.size)

    def __iter__(self) -> Iterator[Any]:
        self._on_start()
        try:
            for number, (real, batch) in enumerate(self._rounds()):
                self.real_rows = list(range(real))
                seed_everything(self._seed_of(number * self._world.size + self._world.rank), self._device)
                yield to_device(batch, self._device)
        finally:
            self.real_rows = None
            seed_everything(mix(self._seed, "after evaluation"), self._device)

    def _seed_of(self, batch: int) -> int:
        return mix(self._seed, "evaluation", batch)

    def _rounds(self) -> Iterator[tuple[int, Any]]:
        """(workers that hold a real batch, this worker's batch) of each round."""
        if self._stream:
            yield from self._fetching(_Rounds(self._source, self._world), batch_size=None, collate_fn=_as_it_is)
            return
        numbers = [first + self._world.rank for first in range(0, self.batches, self._world.size)]
        mine = [list(self._batches[number if number < self.batches else 0]) for number in numbers]
        fetched = self._fetching(
            _Seeded(self._source.dataset, self._seed), batch_sampler=mine, collate_fn=self._source.collate_fn
        )
        for first, batch in zip(range(0, self.batches, self._world.size), fetched, strict=True):
            yield min(self._world.size, self.batches - first), batch

    def _fetching(self, dataset: Any, **options: Any) -> DataLoader[Any]:
        source = self._source
        processes = min(1, source.num_workers) if self._stream else source.num_workers
        if processes:
            options |= {
                "prefetch_factor": source.prefetch_factor,
                "multiprocessing_context": source.multiprocessing_context,
                "worker_init_fn": source.worker_init_fn,
                "timeout": source.timeout or self._timeout_s,
                "persistent_workers": source.persistent_workers,
            }
        if self._kept is None or not source.persistent_workers:
            self._kept = DataLoader(dataset, num_workers=processes, pin_memory=source.pin_memory, **options)
        return self._kept


class _Seeded:
    """A dataset whose batches are fetched, and collated right after it, under seeds of their own."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        seed_everything(mix(self._seed, "evaluation", "fetched", ids[0] if ids else 0), torch.device("cpu"))
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(ids)  # type: ignore[no-any-return]
        return [self._dataset[number] for number in ids]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        """A worker_init_fn finds the user's dataset in `get_worker_info().dataset`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _Rounds(IterableDataset[Any]):
    """A stream in rounds of one batch for each worker, of which this worker's is collated."""

    def __init__(self, source: DataLoader[Any], world: World) -> None:
        assert source.batch_size is not None
        self._stream, self._collate, self._drop_last = source.dataset, source.collate_fn, source.drop_last
        self._size, self._world = source.batch_size, world

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        samples = iter(self._stream)
        first: list[Any] | None = None
        while chunk := list(islice(samples, self._size * self._world.size)):
            batches = [chunk[low : low + self._size] for low in range(0, len(chunk), self._size)]
            if self._drop_last and len(batches[-1]) < self._size:
                batches.pop()
            if not batches:
                return
            first = first or batches[0]
            mine = batches[self._world.rank] if self._world.rank < len(batches) else first
            yield len(batches), self._collate(mine)


def _as_it_is(batch: Any) -> Any:
    return batch


def padded_rows(tensor: Tensor, rows: int) -> Tensor:
    """Workers may hold batches of different length; an all-gather needs them equal."""
    if tensor.shape[0] == rows:
        return tensor.contiguous()
    out = torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    out[: tensor.shape[0]] = tensor
    return out
