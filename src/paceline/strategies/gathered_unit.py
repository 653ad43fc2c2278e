"""A gathered unit: whole buckets of weights that are on their way here, or here.

    asked for ──► messages end ──► its parameters have their weights ──► let go
                       │
                       └─ the group is over: it is *lost*, and its parameters are filled with a value that stands for it

Nobody waits for a lost unit and no error comes of it, since it is found out inside the user's forward. What is computed
with it is of no use: the engine drops it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.communicator import Work
from paceline.errors import GenerationEnded
from paceline.optim.offload import Lift
from paceline.sharding.shards import BucketShards


@dataclass
class GatheredUnit:
    flats: list[Tensor]
    works: Sequence[Work]
    rooms: Sequence[tuple[Tensor, Tensor]]  # on the host, and where its elements go
    lifted: Any = None  # when what this worker has on the host is there
    versions: list[int] | None = None  # of its parameters, when it came
    by_hand: bool = False  # somebody asked for a weight who may also write to it, past the version counters
    is_lost: bool = False

    def end(self, lift: Lift) -> None:
        """Wait until nothing writes to it any more."""
        for work in self.works:
            try:
                work.wait()
            except GenerationEnded:
                self.is_lost = True
        self.works = ()
        lift.arrive(self.lifted)

    def arrive(self, stands_for_lost: float) -> None:
        """Its messages have ended: let all of it be in its buckets."""
        for room, part in self.rooms:
            part.copy_(room, non_blocking=True)
        self.rooms = ()
        if self.is_lost:
            for flat in self.flats:
                flat.fill_(stands_for_lost)

    def raise_if_lost(self, rank: int) -> None:
        if self.is_lost:
            raise GenerationEnded(f"worker {rank} looked at weights of others when the workers changed")

    def warn_if_lost(self, rank: int, name: str) -> None:
        if self.is_lost:
            warnings.warn(
                f"worker {rank}: the workers changed while the model was used between two steps; the weights of "
                f"{name!r} can't be had before the next step, and are nan until then",
                stacklevel=3,
            )

    def was_written(
        self, parameters: Sequence[Parameter], shards: BucketShards, rank: int, flat: Tensor, own: Tensor
    ) -> bool:
        """Whether a bucket has other weights than its parameters came with, as far as `rank` can tell by its `own`."""
        for member in shards.bucket.members:
            weights = parameters[member.parameter]
            if weights.numel() and weights.data_ptr() != flat[member.offset :].data_ptr():
                return True
        return self.by_hand and not _same_bytes(flat[slice(*shards.ranges[rank])], own)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.to(a.device).view(torch.uint8))
