"""ZeRO 3: on one host it is zero2 with the host's shared weights; elsewhere its weights are in shards, as fsdp's.

    weights shard · gradients shard · optimizer state shard

    workers                      weights
    all on one host, which can   once, in shared memory (`zero/weights.py`): every worker reads them where they lie, and
    share memory                 updates its pieces. There is nothing to gather; a worker's share is 1/N all the same
    others                       each has its range of every bucket; a unit is gathered when it is used (`fsdp/`)
    one                          in the model

With offload="parameters" weights are in shards for any number of workers. Gradients and the update are zero2's in all
of these cases, so there is one way in which sums get to their owners, and one sharded update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from paceline.errors import ConfigError
from paceline.optim.offload import PARAMETERS
from paceline.sharding.unit import Classes
from paceline.strategies.fsdp.fsdp import open_weights
from paceline.strategies.registry import Job, Maker, Registered, register
from paceline.world.lanes import strided_lanes


@dataclass(frozen=True)
class Zero3Config:
    """`weights`: one copy for all workers of a host, the default where they share memory, or each worker has its shard.

    `units`: classes of modules (or their names) that are gathered whole; by default modules of at most a bucket.
    `shard_frozen`: where weights are in shards, so are parameters of no optimizer; they can't be changed in place.
    """

    weights: Literal["per host", "in shards"] | None = None
    units: Classes | type[nn.Module] | str | None = None
    shard_frozen: bool = True


def _open(config: Zero3Config, job: Job) -> Maker:
    if config.weights not in (None, "per host", "in shards"):
        raise ConfigError(f"weights={config.weights!r} is not known; choose 'per host' or 'in shards'")
    if job.facts.get("offload") == PARAMETERS and config.weights == "per host":
        raise ConfigError(
            "offload='parameters' with weights='per host': each worker has a shard of its own on "
            "its host; choose weights='in shards'"
        )
    wanted = "per worker" if config.weights == "in shards" else config.weights
    return open_weights(job, "zero3", wanted, config.units, shard_frozen=config.shard_frozen)


register(
    Registered(
        "zero3",
        Zero3Config,
        _open,
        examples=(Zero3Config(weights="in shards"),),
        assign_lanes=strided_lanes,
        takes_low_precision=True,
        takes_offload=True,
        passes_lanes_on=True,
        fills_meta=True,
    )
)
