"""The distributed sampler: torch's, with an order that needs no list and an epoch that moves on by itself.

    7 samples, 3 replicas
    position in the epoch's order     0  1  2  3  4  5  6 │ 0  1      completed from the start; drop_last: 0 … 5
    replica                           0  1  2  0  1  2  0 │ 1  2

A loop of one's own takes it where it took torch's; `Engine.prepare` assigns samples itself and refuses both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch.distributed as dist
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data.global_order import GlobalOrder, Sequential, Shuffled
from paceline.errors import ConfigError
from paceline.world.environment import read_world


class DistributedSampler(TorchDistributedSampler[int]):
    """Every `num_replicas`-th sample from `rank` on: torch's parameters, attributes and rules, except for these.

    - The order is `Shuffled(samples, seed, epoch)` and not `torch.randperm`: other values, no memory, no wait.
    - The epoch moves on by itself: an iteration that starts after another one has the epoch after it, so that a
      forgotten `set_epoch` doesn't repeat one order for ever. `set_epoch` in between wins. An iteration starts when its
      first sample is asked for. All processes must start the same number of iterations; after one of them looked at the
      data alone, `set_epoch` brings them together again.
    - `num_replicas` and `rank` are by default what the launcher said, not what a process group says.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        num_replicas, rank = _place(type(self).__name__, num_replicas, rank)
        self._samples = _length_of(dataset)
        self._started: int | None = None  # the epoch of the latest iteration; None: `epoch` was set and not yet used
        super().__init__(cast("Dataset[Any]", dataset), num_replicas, rank, shuffle, seed, drop_last)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration has this epoch, the one after it the next, and so on."""
        super().set_epoch(epoch)
        self._started = None

    # A generator, because a DataLoader with loader processes calls iter() twice and uses one of the two.
    def __iter__(self) -> Iterator[int]:
        order = self._order_of(self._next_epoch())
        for position in range(self.rank, self.total_size, self.num_replicas):
            yield order.sample_at(position % self._samples)

    def _order_of(self, epoch: int) -> GlobalOrder:
        return Shuffled(self._samples, self.seed, epoch) if self.shuffle else Sequential(self._samples)

    def _next_epoch(self) -> int:
        if (now := _length_of(self.dataset)) != self._samples:
            raise ConfigError(
                f"rank {self.rank}: the dataset had {self._samples:,} samples when its DistributedSampler was made and "
                f"has {now:,} now; make a new sampler after changing the dataset"
            )
        if self._started == self.epoch:
            self.epoch += 1
        self._started = self.epoch
        return self.epoch


def _place(owner: str, num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    if num_replicas is None or rank is None:
        world = read_world()
        grouped = dist.is_available() and dist.is_initialized()
        if grouped and (dist.get_world_size(), dist.get_rank()) != (world.size, world.rank):
            raise ConfigError(
                f"{owner}: the launcher ({world.source}) says rank {world.rank} of {world.size}, the "
                f"process group says rank {dist.get_rank()} of {dist.get_world_size()}; pass num_replicas= and rank="
            )
        num_replicas = world.size if num_replicas is None else num_replicas
        rank = world.rank if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ConfigError(
            f"{owner}: there is no rank {rank} among num_replicas={num_replicas}; "
            "ranks count from 0 to num_replicas - 1"
        )
    return num_replicas, rank


def _length_of(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise ConfigError(
            f"DistributedSampler needs a dataset with a length, and {type(dataset).__name__} has none; "
            "shard an iterable dataset with IterableDatasetShard"
        ) from error
