"""Evaluation: every sample counted once, at any number of workers.

    batches    0 1 2 | 3 4 5 | 6 · ·          3 workers take one batch each per round
    worker     0 1 2   0 1 2   0 1 2          a worker with none left repeats the first batch as a *shadow*

All workers run the same number of rounds, so `gather_for_metrics` may be called in the loop body; it drops the shadows
and returns the round's results in the dataset's order. Batches have the same samples whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from paceline.data.loader import is_plain_shuffle, refuse_what_cannot_be_dealt
from paceline.engine.prepared_loader import to_device
from paceline.world.determinism import drawing_from, mix
from paceline.world.world import World


class EvaluationLoader:
    def __init__(self, source: DataLoader[Any], world: World, device: torch.device, seed: int) -> None:
        refuse_what_cannot_be_dealt(source)
        self._seed = seed
        self._source = source
        self._world = world
        self._device = device
        self.real_rows: list[int] | None = None  # how many workers hold a real batch this round; None outside

    @property
    def dataset(self) -> Any:
        return self._source.dataset

    @property
    def batches(self) -> int:
        size = self._source.batch_size
        assert size is not None
        samples = len(self._ids)
        return samples // size if self._source.drop_last else -(-samples // size)

    @cached_property
    def _ids(self) -> Sequence[int]:
        """The dataset's order, whatever `shuffle` says; a sampler of the user's own is asked once, under a seed."""
        sampler = self._source.sampler
        if is_plain_shuffle(sampler) or type(sampler) is SequentialSampler:
            return range(len(self._source.dataset))  # type: ignore[arg-type]
        with drawing_from(mix(self._seed, "evaluation")):
            return [int(index) for index in sampler]

    def __len__(self) -> int:
        """Rounds: what every worker iterates."""
        return -(-self.batches // self._world.size)

    def __iter__(self) -> Iterator[Any]:
        mine = [
            number * self._world.size + self._world.rank if self._is_real(number, self._world.rank) else 0
            for number in range(len(self))
        ]
        try:
            for number, batch in enumerate(self._fetching(mine)):
                self.real_rows = [rank for rank in range(self._world.size) if self._is_real(number, rank)]
                yield to_device(batch, self._device)
        finally:
            self.real_rows = None

    def _is_real(self, number: int, rank: int) -> bool:
        return number * self._world.size + rank < self.batches

    def _fetching(self, mine: list[int]) -> DataLoader[Any]:
        source = self._source
        size = source.batch_size
        assert size is not None
        return DataLoader(
            source.dataset,
            batch_sampler=[list(self._ids[batch * size : (batch + 1) * size]) for batch in mine],
            collate_fn=source.collate_fn,
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
        )


def padded_rows(tensor: Tensor, rows: int) -> Tensor:
    """Workers may hold batches of different length; an all-gather needs them equal."""
    if tensor.shape[0] == rows:
        return tensor.contiguous()
    out = torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    out[: tensor.shape[0]] = tensor
    return out
