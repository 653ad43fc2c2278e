"""ZeRO 1: optimizer state in shards. Gradients are whole until they are summed, weights are whole on every worker.

    weights full · gradients full · optimizer state shard
    during backward: reduce-scatter per bucket      at step: update the own shard, all-gather weights

A worker adds up its lanes as in ddp and sends its roots once a step. The owner of a range finishes the canonical tree
there; nothing comes back, so both exchanges together move what ddp's one all-reduce does. State is 1/N of ddp's, and so
is the work of the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import Scatter, SumPlan, scatter_plan_of_roots
from paceline.collectives.communicator import Handle
from paceline.strategies.buckets import PendingTotal
from paceline.strategies.registry import Job, Registered, register
from paceline.strategies.zero.sharded import ShardedMaker, ShardedParts, ShardedStrategy, full_weights
from paceline.strategies.zero.sharded_optimizer import LocalPieces
from paceline.strategies.zero.weights import Weights


@dataclass(frozen=True)
class _Departed:
    """A bucket on its way: this worker's roots, and the sum of its own range in one of them."""

    handle: Handle
    held: dict[int, Tensor]
    roots: dict[int, Tensor]
    sum_in: Tensor


class Zero1(ShardedStrategy):
    def __init__(
        self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer], parts: ShardedParts
    ) -> None:
        super().__init__(named, optimizers, parts)
        self._set: int | None = None
        self._departed: list[_Departed | PendingTotal] = []

    def _prepare_sums(self, pieces: LocalPieces) -> None:
        self._set = self._parts.exchange.new_set(old=self._set)
        slot = partial(self._parts.exchange.slot, self._set)
        # not for buckets whose lanes' memory stays with the compression
        self._buckets.use_slots(lambda number, *size: None if self._compressed.has(number) else slot(number, *size))

    @property
    def roots_held(self) -> list[Tensor]:
        """Whole gradients of this worker's lanes, of which only its own range has the sum over all workers."""
        return [departed.sum_in for departed in self._departed if isinstance(departed, _Departed)]

    def start_step(self, round: int, plan: SumPlan) -> None:
        super().start_step(round, plan)
        self._departed = []

    def _leave(self, number: int, roots: dict[int, Tensor]) -> None:
        assert self._pieces is not None
        assert self._set is not None
        if number in self._compressed.now:
            self._departed.append(self._compressed.start(number))
            return
        shards = self._pieces.shards.buckets[number]
        sum_in = next(iter(roots.values())) if roots else self._buckets.sums[number].buffer()
        start, stop = shards.ranges[self._parts.rank]
        held: dict[int, Tensor] = {}
        scatter = Scatter(
            number, scatter_plan_of_roots(self._plan), shards.ranges, shards.bucket.dtype, roots, held,
            buffer_for=lambda node: sum_in[start:stop],
        )  # fmt: skip
        handle = self._parts.exchange.start_scatter(self._set, scatter, sum_in)
        self._departed.append(_Departed(handle, held, roots, sum_in))

    def _totals(self) -> list[Tensor | None]:
        totals: list[Tensor | None] = []
        for sums, departed in zip(self._buckets.sums, self._departed, strict=True):
            if not isinstance(departed, _Departed):
                totals.append(departed.own_range())
                continue
            departed.handle.wait()
            for root in departed.roots.values():
                if root is not departed.sum_in:
                    sums.give_back(root)
            totals.append(next(iter(departed.held.values()), None))
        return totals

    def end_step(self) -> None:
        """Forget the gradients; the buffers they lived in serve the next step."""
        for sums, departed in zip(self._buckets.sums, self._departed, strict=True):
            if isinstance(departed, _Departed):
                sums.give_back(departed.sum_in)
        self._departed = []
        super().end_step()

    def close(self) -> None:
        super().close()
        self._departed = []


@dataclass(frozen=True)
class Zero1Config:
    """`weights`: one copy for all workers of a host, the default where they share memory, or one for each worker."""

    weights: Weights | None = None


def _open(config: Zero1Config, job: Job) -> ShardedMaker:
    return ShardedMaker(ShardedParts(job, "zero1", full_weights(config.weights)), Zero1)


register(
    Registered(
        "zero1",
        Zero1Config,
        _open,
        examples=(Zero1Config(weights="per worker"),),
        takes_compression=True,
        takes_low_precision=True,
        takes_offload=True,
        full_weights=True,
        passes_lanes_on=True,
    ),
)
