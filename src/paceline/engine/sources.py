"""From what the user gave to `prepare` to a source of work items."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from paceline.collectives.communicator import Communicator
from paceline.data.loader import ShardedLoader
from paceline.data.step_source import StepSource
from paceline.data.streams import Counts, StreamLoader
from paceline.data.work_source import Assignment, WorkSource
from paceline.engine.config import EngineConfig
from paceline.engine.step import TrainStep
from paceline.errors import ConfigError, ReplicaError

_UNKNOWN = -1
_SAME = "a stream that every worker reads whole must give the same everywhere"


def as_loader(thing: Any, config: EngineConfig, *, trains: bool) -> Any:
    """A plain dataset or a source of steps as a DataLoader; everything else as it is."""
    if isinstance(thing, StepSource):
        if not trains:
            raise ConfigError(
                "a StepSource is what trains: give it to prepare() with the optimizer, and no other loader"
            )
        if config.global_batch_size is not None:
            raise ConfigError(
                f"Engine(global_batch_size={config.global_batch_size}) with a StepSource, whose function makes batches "
                "as large as it likes; leave it out"
            )
        return thing.loader(config.lanes, config.accumulate)
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
    return DataLoader(thing, batch_size=batch_size, shuffle=trains)


def undivided(loader: Any) -> Any:
    """A DataLoader without torch's DistributedSampler, which would divide once more what `prepare` deals.

    What it says, shuffled or not, is kept. A subclass may do anything, and is refused with all others that divide.
    """
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return loader
    if type(loader.sampler) is not DistributedSampler:
        return loader
    data: Any = loader.dataset
    sampler = RandomSampler(data) if loader.sampler.shuffle else SequentialSampler(data)
    whole = copy.copy(loader)
    for name, value in (
        ("sampler", sampler),
        ("batch_sampler", BatchSampler(sampler, loader.batch_size, loader.drop_last)),
    ):
        object.__setattr__(whole, name, value)  # DataLoader's own refuses: here nothing has been iterated yet
    object.__setattr__(whole, _AS_GIVEN, loader)
    return whole


_AS_GIVEN = "paceline_as_given"
"""An attribute of what `undivided` has made: the loader that the script made."""


def lengths_seen(loader: Any) -> list[int]:
    """What len() of it gives a script, and gave before `undivided`."""
    as_given = getattr(loader, _AS_GIVEN, None)
    lengths = (length_of(loader), None if as_given is None else length_of(as_given))
    return [length for length in lengths if length is not None]


def hear_epochs(loader: Any, set_epoch: Callable[[int], None]) -> None:
    """Scripts that resume by hand call `sampler.set_epoch(epoch)` of the sampler that gave way."""
    if (as_given := getattr(loader, _AS_GIVEN, None)) is not None:
        as_given.sampler.set_epoch = set_epoch


def make_source(
    loader: DataLoader[Any],
    assignment: Assignment,
    comm: Callable[[], Communicator],
    step: TrainStep,
) -> WorkSource:
    """`comm` gives the current group: it is another after workers came or went."""
    if not isinstance(loader.dataset, IterableDataset):
        return ShardedLoader(loader, assignment)

    def agreed(mine: Counts, check: int) -> Counts:
        return _agreed(mine, check, assignment, comm(), step)

    return StreamLoader(loader, assignment, agreed)


def _agreed(mine: Counts, check: int, assignment: Assignment, comm: Communicator, step: TrainStep) -> Counts:
    """What the lanes of all workers have for the next step, in one small all-gather.

    `check` is the same everywhere where all workers read the same stream.
    """
    table = torch.full((assignment.lanes, assignment.accumulate), _UNKNOWN, dtype=torch.int64)
    for lane, counts in mine.items():
        table[lane] = torch.tensor([*counts, *[0] * (assignment.accumulate - len(counts))])
    rows, handle = comm.all_gather(torch.cat([table.view(-1), torch.tensor([check])]))
    handle.wait_for_vote(step.votes)
    tables = rows[:, :-1].reshape(comm.size, assignment.lanes, assignment.accumulate)
    agreed = tables.amax(0)
    told = (tables == agreed) | (tables == _UNKNOWN)
    if not bool(told.all()):
        rank, lane, _ = (~told).nonzero()[0].tolist()
        raise ReplicaError(
            f"the stream gives worker {rank} other samples than the others: lane {lane} has "
            f"{tables[rank, lane].tolist()} samples there and {agreed[lane].tolist()} elsewhere; {_SAME}"
        )
    if len(set(rows[:, -1].tolist())) > 1:
        rank = next(r for r in range(1, comm.size) if rows[r, -1] != rows[0, -1])
        raise ReplicaError(f"the stream gives worker {rank} other samples than worker 0; {_SAME}")
    return {lane: [n for n in agreed[lane].tolist() if n > 0] for lane in range(assignment.lanes)}


def facts_of_data(loader: DataLoader[Any]) -> dict[str, Any]:
    """What costs nothing to compare, before an epoch was spent on data that are not the same on every worker."""
    dealt = loader.batch_sampler if loader.batch_size is None else loader.sampler
    return {
        "a dataset of type": type(loader.dataset).__qualname__,
        "samples": length_of(loader.dataset),
        "batch size": loader.batch_size,
        "drop_last": loader.drop_last,
        "a sampler of type": type(dealt).__qualname__,
        "in the sampler": length_of(dealt),
        "in its attributes": _numbers_of(loader.dataset) if isinstance(loader.dataset, IterableDataset) else None,
    }


def _numbers_of(stream: Any) -> dict[str, int]:
    """A stream that was told its rank would leave samples out: it is read in parts, or whole."""
    return {name: value for name, value in sorted(getattr(stream, "__dict__", {}).items()) if type(value) is int}


def length_of(of: Any) -> int | None:
    try:
        return len(of)
    except (TypeError, NotImplementedError):  # a stream, or a sampler that does not know
        return None


def check_same_data(told: Sequence[Mapping[str, Any]]) -> None:
    """Of every worker what `prepare` was given."""
    for rank, theirs in enumerate(told):
        for name, ours in told[0].items():
            if theirs[name] != ours:
                found = f"worker {rank} has {name} {theirs[name]}, worker 0 has {name} {ours}"
                raise ReplicaError(
                    f"the data or settings differ: {found}; "
                    "give every worker the whole dataset and the same settings: the engine deals the samples out"
                )


def check_same_order(digests: Sequence[str]) -> None:
    """A sampler of the user's own has to give every worker the same."""
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ReplicaError(
                f"the sampler gives worker {rank} another order than worker 0, so samples would be lost and repeated; "
                "it must not depend on the process: draw from torch, numpy or random, which are seeded for it"
            )
