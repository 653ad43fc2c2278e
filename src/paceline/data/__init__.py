"""Data: which sample goes where, and how it gets there. What a user takes from here, by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.data.block_shuffle import BlockShuffleSampler
    from paceline.data.distributed_sampler import DistributedSampler
    from paceline.data.length_grouped import DistributedLengthGroupedSampler, LengthGroupedSampler
    from paceline.data.process_shards import BatchSamplerShard, IterableDatasetShard
    from paceline.data.sharded_sampler import ShardedSampler
    from paceline.data.step_source import StepPlace, StepSource
    from paceline.data.stream_reading import Stream
    from paceline.data.token_budget import TokenBudgetSampler
    from paceline.data.token_file import TokenFile

__all__ = [
    "BatchSamplerShard",
    "BlockShuffleSampler",
    "DistributedLengthGroupedSampler",
    "DistributedSampler",
    "IterableDatasetShard",
    "LengthGroupedSampler",
    "ShardedSampler",
    "StepPlace",
    "StepSource",
    "Stream",
    "TokenBudgetSampler",
    "TokenFile",
]

_HOMES = {
    "BatchSamplerShard": "process_shards",
    "BlockShuffleSampler": "block_shuffle",
    "DistributedLengthGroupedSampler": "length_grouped",
    "DistributedSampler": "distributed_sampler",
    "IterableDatasetShard": "process_shards",
    "LengthGroupedSampler": "length_grouped",
    "ShardedSampler": "sharded_sampler",
    "StepPlace": "step_source",
    "StepSource": "step_source",
    "Stream": "stream_reading",
    "TokenBudgetSampler": "token_budget",
    "TokenFile": "token_file",
}


def __getattr__(name: str) -> Any:
    """`paceline data audit` reads sample logs without waiting for torch: each name comes when asked for."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"paceline.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'paceline.data' has no attribute {name!r}")
