"""FSDP: weights, gradients and optimizer state in shards, by the name that people know from PyTorch.

It is zero3 with weights in shards wherever the workers are (`zero3.py`, `unit_weights.py`). zero3 itself does without
gathers where workers share memory: there it is the better choice, and the bits are the same.

Why not torch's `fully_shard`: it places and gathers weights by hooks on what modules return, and loses them where a
module returns a view or its output is changed in place; every worker has to run the same units in the same order, so
experts that a micro-batch skips can't be units; and its shards are rows, whose ends fused optimizers round otherwise.
Here a saved weight is gathered when autograd asks for it, and a worker asks for a unit whenever it needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from paceline.sharding.unit import Classes
from paceline.strategies.registry import Job, Registered, register
from paceline.strategies.zero3 import Zero3Config, Zero3Maker
from paceline.world.lanes import strided_lanes


@dataclass(frozen=True)
class FsdpConfig:
    """`units`: classes of modules (or their names) that are gathered whole; by default modules of at most a bucket."""

    units: Classes | type[nn.Module] | str | None = None


def _open(config: FsdpConfig, job: Job) -> Zero3Maker:
    return Zero3Maker(Zero3Config(weights="in shards", units=config.units), job, name="fsdp")


register(
    Registered(
        "fsdp",
        FsdpConfig,
        _open,
        rides=strided_lanes,
        takes_low_precision=True,
        takes_offload=True,
        fills_meta=True,
    )
)
