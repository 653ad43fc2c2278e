"""A compressed bucket: each lane's gradient is compressed by itself, and what that loses is the lane's residual.

    lane's gradient g + residual e ──compress──► payload ──► owners or all workers        ĝ = decompress(payload)
                                         └─────► g + e - ĝ: the residual of the next step

The unit is a lane's whole gradient of a step, never a worker's sum: payloads, and the sum of the ĝ, don't depend on who
computes which lane. The residual moves with its lane. It is *staged* until the step is about to be committed. A step
that is left out finds the residuals as they were; one that is done again reads them from the in-memory checkpoint.

Residuals are in the unit of backward's gradients without the loss scale (`gradients.py` takes it out and puts it back).
Where a step weighs its samples (tokens), they count in the next one with that step's weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.load import StoredTensor
from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.collectives.gradient_exchange import GradientExchange
from paceline.sharding.bucket import BucketEntry
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.buckets import LaneSums

State = dict[str, dict[str, Any]]  # by name of parameter, then by what it is
OPERATION = "compressed"  # in the count of bytes


@dataclass(frozen=True)
class Compressing:
    """What the compressed buckets of a strategy have in common."""

    names: Sequence[str]  # of parameters
    lanes: int
    seed: int
    feedback: bool


@dataclass(frozen=True)
class Exchanging(Compressing):
    """And those that workers exchange among themselves."""

    comm: Communicator
    exchange: GradientExchange
    whole: bool  # every worker gets all of the sum; otherwise the owner of a range

    def wire_device(self, device: torch.device) -> torch.device:
        """Where payloads of a bucket on `device` are sent from: gloo's messages are for the host's."""
        return device if self.comm.sends(device) else torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """The step that is under way."""

    round: int
    steps: int  # compressed ones before it
    plan: SumPlan


class CompressedLanes(Protocol):
    """The lanes' side of a bucket. Called in this order in a step that is compressed."""

    def take(self, step: Step, lane: int, gradient: Tensor) -> None:
        """A lane's gradient is finished; its memory is the bucket's from now on."""
        ...

    def commit(self, used: Sequence[bool]) -> None:
        """The step is about to be committed; a parameter that no lane used keeps its state."""
        ...

    def forget(self) -> None:
        """The step is over, applied or not."""
        ...

    def state(self, lanes: Sequence[int]) -> State:
        """This worker's part, of its lanes."""
        ...

    def load(self, saved: Mapping[str, Mapping[str, Any]], lanes: Sequence[int]) -> None: ...


class CompressedBucket(CompressedLanes, Protocol):
    """One that workers exchange: between `take` and `commit`, in this order."""

    def start(self, step: Step) -> None:
        """This worker's lanes have all been taken."""
        ...

    def advance(self) -> None:
        """All workers' lanes have been taken, and all buckets have started: what comes second, if there is such."""
        ...

    def wait(self) -> Tensor:
        """The sum: of the whole bucket, or of the own range."""
        ...


class LaneTensors:
    """One flat tensor of the bucket for each of this worker's lanes: their residuals, and what they become."""

    def __init__(self, sums: LaneSums, lanes: int) -> None:
        self._sums, self._lanes = sums, lanes
        self.now: dict[int, Tensor] = {}
        self._next: dict[int, Tensor] = {}

    def stage(self, lane: int, tensor: Tensor) -> None:
        self._next[lane] = tensor

    def commit(self, used: Sequence[bool]) -> None:
        for lane, tensor in self._next.items():
            old = self.now.get(lane)
            for entry in self._sums.bucket.entries:
                if not used[entry.parameter]:
                    kept = part_of(tensor, entry)
                    kept.zero_() if old is None else kept.copy_(part_of(old, entry))
            if old is not None:
                self._sums.give_back(old)
            self.now[lane] = tensor
        self._next = {}

    def forget(self) -> None:
        for tensor in self._next.values():
            self._sums.give_back(tensor)
        self._next = {}

    def state(self, lanes: Sequence[int], names: Sequence[str]) -> dict[str, LocalShard]:
        """Of each parameter one tensor of (lanes, elements), of which this worker has some rows."""
        for lane in lanes:
            self._of(lane)
        return {
            names[entry.parameter]: LocalShard(
                (self._lanes, entry.elements),
                self._sums.bucket.dtype,
                tuple((lane * entry.elements, part_of(self.now[lane], entry)) for lane in sorted(lanes)),
            )
            for entry in self._sums.bucket.entries
            if entry.elements
        }

    def load(self, saved: Sequence[Any], lanes: Sequence[int]) -> None:
        """What was saved for each entry of the bucket, or None."""
        for entry, rows in zip(self._sums.bucket.entries, saved, strict=True):
            for lane in lanes if rows is not None else ():
                start = lane * entry.elements
                part_of(self._of(lane), entry).copy_(part(rows, start, start + entry.elements))

    def _of(self, lane: int) -> Tensor:
        if lane not in self.now:
            bucket = self._sums.bucket
            self.now[lane] = torch.zeros(bucket.elements, dtype=bucket.dtype, device=bucket.device)
        return self.now[lane]


def merged_states(by_kind: Mapping[str, Mapping[str, Any]]) -> State:
    """By parameter, from dicts of what there is of each kind by parameter."""
    found: State = {}
    for kind, tensors in by_kind.items():
        for name, tensor in tensors.items():
            found.setdefault(name, {})[kind] = tensor
    return found


def part_of(flat: Tensor, entry: BucketEntry) -> Tensor:
    return flat[entry.offset : entry.offset + entry.elements]


def part(saved: Tensor | StoredTensor, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of a saved tensor, which may be on the disk."""
    return saved.part(start, stop) if isinstance(saved, StoredTensor) else saved.reshape(-1)[start:stop]
