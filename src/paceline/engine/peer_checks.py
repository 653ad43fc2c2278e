"""Workers that share a model: what an item is worth on one of them, and what all of them must have alike.

Those of a tensor-parallel group are in the same step with the same samples, so each lane's loss is the same number on
all of them; and a parameter that is not sharded gets the same gradient. Where it does not, a plan leaves out a module
that computes with sharded activations, and the group would train several models. So losses are compared in every step,
with a wish to stop, and the parameters that are not sharded after the first update.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.collectives.communicator import Communicator
from paceline.data.sharded_sampler import WorkItem
from paceline.engine.sequence_parts import WholeSequences
from paceline.engine.step import NoPeers
from paceline.engine.strategy_table import StrategyTable
from paceline.engine.vote import StepVote, Stop
from paceline.errors import ReplicaError
from paceline.mesh.tensor_parallel import TensorParallel
from paceline.strategies.buckets import bits_sum

_HEAD = struct.Struct("<qqqq")
_LANE = struct.Struct("<qd")


class SequencePeers(NoPeers):
    """Those that share sequences: what an item gives is that of this worker's parts of them."""

    def __init__(self, sequences: WholeSequences) -> None:
        self._sequences = sequences

    def loss(self, item: WorkItem, loss: Any) -> Any:
        return self._sequences.loss(item, loss)

    def weight(self, item: WorkItem) -> float:
        return self._sequences.weight(item)


class PeerChecks(SequencePeers):
    def __init__(self, sequences: WholeSequences, peers: Communicator, parallel: TensorParallel) -> None:
        super().__init__(sequences)
        self._peers, self._parallel = peers, parallel
        self._compared = False

    def loss(self, item: WorkItem, loss: Any) -> Any:
        """Of logits that are sharded it may be a DTensor."""
        return super().loss(item, loss.full_tensor() if isinstance(loss, DTensor) else loss)

    def agree(self, vote: StepVote, stops: Sequence[Stop]) -> Sequence[Stop]:
        lanes = sorted((report.lane, report.loss) for report in vote.lanes)
        head = _HEAD.pack(vote.step, vote.update, vote.stop, len(lanes))
        mine = torch.frombuffer(bytearray(head + b"".join(_LANE.pack(*lane) for lane in lanes)), dtype=torch.uint8)
        rows, handle = self._peers.all_gather(mine)
        handle.wait()
        said = [row.numpy().tobytes() for row in rows]
        heads = [_HEAD.unpack_from(one) for one in said]
        for worker, (step, update, _, _) in enumerate(heads):
            if (step, update) != (vote.step, vote.update):
                raise ReplicaError(
                    f"worker {worker} of this tensor-parallel group is in step {step + 1}, this one in step "
                    f"{vote.step + 1}; their loops took different turns"
                )
        for place, (lane, _) in enumerate(lanes):
            found = [one[_HEAD.size + place * _LANE.size :][: _LANE.size] for one in said]
            if len(set(found)) > 1:
                losses = [_LANE.unpack(one)[1] for one in found]
                raise ReplicaError(
                    f"the workers of a tensor-parallel group have different losses in lane {lane} of step "
                    f"{vote.step + 1}: {losses}; a weight or a random number that all of them need is not the same"
                )
        return [Stop(stop) for _, _, stop, _ in heads]

    def compare_weights(self, strategies: StrategyTable) -> None:
        if self._compared:
            return
        self._compared = True
        layouts = self._parallel.layouts()
        whole = [p for p in strategies.parameters if (own := layouts.get(id(p))) is None or own.dim is None]
        sums = torch.tensor([_sum_of(strategies, parameter) for parameter in whole], dtype=torch.int64)
        rows, handle = self._peers.all_gather(sums)
        handle.wait()
        for number, parameter in enumerate(whole):
            if len(set(rows[:, number].tolist())) > 1:
                raise ReplicaError(
                    f"after the first update {strategies.name_of(parameter)!r} is not the same on the workers of a "
                    "tensor-parallel group: each has a part of its gradient. It is used on sharded activations; give "
                    "its module the style 'replicated_with_grad_allreduce' in the plan, or shard it"
                )


def _sum_of(strategies: StrategyTable, parameter: Tensor) -> int:
    local = strategies.local_shard(parameter)
    parts = [local] if isinstance(local, Tensor) else [values for _, values in local.parts]
    return sum(bits_sum(part.detach()) for part in parts) % (1 << 62)
