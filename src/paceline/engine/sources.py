"""From what the user gave to `prepare` to a source of work items."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.collectives.communicator import Communicator
from paceline.data.loader import ShardedLoader
from paceline.data.streams import Counts, StreamLoader
from paceline.data.work_source import Deal, WorkSource
from paceline.engine.config import EngineConfig
from paceline.engine.train_step import TrainStep
from paceline.errors import ConfigError, ReplicaError

_UNKNOWN = -1


def as_loader(thing: Any, config: EngineConfig, *, shuffle: bool) -> Any:
    """A plain dataset as a DataLoader; everything else as it is."""
    if not isinstance(thing, Dataset):
        return thing
    wanted = config.global_batch_size
    if wanted is None:
        raise ConfigError(
            f"prepare() got a {type(thing).__name__} without a batch size; give Engine(global_batch_size=…), or "
            "DataLoader(dataset, batch_size=…) with the batch size of one lane"
        )
    batch_size = max(1, wanted // (config.lanes * config.accumulate))
    if isinstance(thing, IterableDataset):
        return DataLoader(thing, batch_size=batch_size)
    return DataLoader(thing, batch_size=batch_size, shuffle=shuffle)


def make_source(loader: DataLoader[Any], deal: Deal, comm: Communicator | None, step: TrainStep) -> WorkSource:
    if not isinstance(loader.dataset, IterableDataset):
        return ShardedLoader(loader, deal)
    return StreamLoader(loader, deal, lambda mine: mine if comm is None else _agreed(mine, deal, comm, step))


def _agreed(mine: Counts, deal: Deal, comm: Communicator, step: TrainStep) -> Counts:
    """What the lanes of all workers have for the next step, in one small all-gather."""
    table = torch.full((deal.lanes, deal.accumulate), _UNKNOWN, dtype=torch.int64)
    for lane, counts in mine.items():
        table[lane] = torch.tensor([*counts, *[0] * (deal.accumulate - len(counts))])
    rows, handle = comm.all_gather(table)
    handle.wait_for_vote(step.votes)
    tables = rows.view(comm.size, deal.lanes, deal.accumulate)
    agreed = tables.amax(0)
    told = (tables == agreed) | (tables == _UNKNOWN)
    if not bool(told.all()):
        rank, lane, _ = (~told).nonzero()[0].tolist()
        raise ReplicaError(
            f"the stream gives worker {rank} other samples than the others: lane {lane} has "
            f"{tables[rank, lane].tolist()} samples there and {agreed[lane].tolist()} elsewhere; a stream that every "
            "worker reads whole must give the same everywhere"
        )
    return {lane: [n for n in agreed[lane].tolist() if n > 0] for lane in range(deal.lanes)}
