"""ZeRO 2: gradients and optimizer state in shards. Weights are whole on every worker.

    weights full · gradients shard · optimizer state shard
    during backward: reduce-scatter per bucket      at step: update the own shard, all-gather weights

No worker ever holds a whole gradient. A bucket leaves as soon as a lane's backward has filled it, its memory serves the
next one, and the owners of its ranges add the lane to the canonical tree. Workers are assigned every N-th lane, so that
those that arrive together merge at once and owners hold one or two partial sums:

    worker 0   lane 0 ──► lane 2 ──►            owner    (0,1) ─► 0     (2,3) (0,2) ─► 0
    worker 1   lane 1 ──► lane 3 ──►

The micro-batches of a lane are added up where they are made, in `.grad`, since the tree starts from whole lanes. With
accumulate > 1 that is a whole gradient; sending each of them would keep as much (the owners' N unfinished lanes of
1/N each) and move `accumulate` times the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import Scatter, ScatterPlan, SumPlan, scatter_plans_by_lane
from paceline.collectives.communicator import Handle
from paceline.strategies.buckets import BufferPool, Cut, PendingTotal
from paceline.strategies.registry import Job, Registered, register
from paceline.strategies.strategy import ItemPlace
from paceline.strategies.zero.sharded import ShardedMaker, ShardedParts, ShardedStrategy, full_weights
from paceline.strategies.zero.sharded_optimizer import LocalPieces
from paceline.strategies.zero.weights import Weights
from paceline.world.lanes import strided_lanes

BUCKETS_UNDER_WAY = 2  # as many full ones, in bytes; then backward waits for the first to arrive


@dataclass(frozen=True)
class Departed:
    """A bucket of one lane that is on its way to the owners of its ranges."""

    handle: Handle
    bucket: int
    nodes: tuple[Tensor, ...]  # those to give back
    bytes: int


class Zero2(ShardedStrategy):
    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        optimizers: Sequence[Optimizer],
        parts: ShardedParts,
        *,
        cut: Cut | None = None,
    ) -> None:
        pool = BufferPool() if parts.job.compression is None else None  # of compressed lanes every one has its own
        super().__init__(named, optimizers, parts, by_lane=True, pool=pool, cut=cut)
        self._set = parts.exchange.new_set()
        self._under_way: deque[Departed] = deque()
        self._sums: list[Tensor] = []
        self._held: list[dict[int, Tensor]] = []
        self._pending: dict[int, PendingTotal] = {}  # by bucket, of compressed ones

    def _prepare_sums(self, pieces: LocalPieces) -> None:
        """The only gradients that stay: the sums of the own ranges."""
        self._sums = []  # those of another cut go first
        self._sums = [
            torch.empty(shards.width(self._parts.rank), dtype=shards.bucket.dtype, device=shards.bucket.device)
            for shards in pieces.shards.buckets
        ]

    def start_step(self, round: int, plan: SumPlan) -> None:
        super().start_step(round, plan)
        self._scatter_plans, self._lowest = self._scatter_plans_of(plan)
        self._held = [{} for _ in self._sums]
        self._pending = {}
        self._sent = [0] * len(self._sums)

    def _scatter_plans_of(self, plan: SumPlan) -> tuple[Sequence[ScatterPlan], int]:
        """What the owners of ranges are sent in this step, and the lowest lane among it."""
        return scatter_plans_by_lane(plan), plan.present[0]

    def finish_backward(self, place: ItemPlace) -> None:
        super().finish_backward(place)
        self._send_the_rest(place)

    def skip(self, place: ItemPlace) -> None:
        super().skip(place)
        self._send_the_rest(place)

    def _send_the_rest(self, place: ItemPlace) -> None:
        """Others may have more lanes: this worker has nothing to send then, but owns ranges of what they do."""
        if place.last_of_step:
            for _ in range(self._sent[-1] if self._sent else 0, len(self._scatter_plans)):
                for number in range(len(self._sums)):
                    self._leave(number, {})

    def _leave(self, number: int, nodes: dict[int, Tensor]) -> None:
        assert self._pieces is not None
        plan = self._scatter_plans[self._sent[number]]
        self._sent[number] += 1
        if number in self._compressed.now:  # lanes go together, when those of all workers are there
            if self._sent[number] == len(self._scatter_plans):
                self._pending[number] = self._compressed.start(number)
            return
        shards, own, sums = self._pieces.shards.buckets[number], self._sums[number], self._buckets.sums[number]
        lowest = self._lowest
        scatter = Scatter(
            number, plan, shards.ranges, shards.bucket.dtype, nodes, self._held[number],
            buffer_for=lambda node: own if node == lowest else torch.empty_like(own),
            wire=sums.rounded_to,
        )  # fmt: skip
        size = sum(node.nbytes for node in nodes.values())
        self._make_way(size)
        pooled = () if sums.moves else tuple(nodes.values())
        handle = self._parts.exchange.start_scatter(self._set, scatter, own)
        self._under_way.append(Departed(handle, number, pooled, size))

    def _make_way(self, wanted: int) -> None:
        """Backward must not run ahead of the exchange by more than a few buckets, or gradients would pile up."""
        most = BUCKETS_UNDER_WAY * self._parts.job.bucket_bytes
        while self._under_way and sum(departed.bytes for departed in self._under_way) + wanted > most:
            self._arrived(self._under_way.popleft())

    def _arrived(self, departed: Departed) -> None:
        departed.handle.wait()
        for node in departed.nodes:
            self._buckets.sums[departed.bucket].give_back(node)

    def _totals(self) -> list[Tensor | None]:
        while self._under_way:
            self._arrived(self._under_way.popleft())
        return self._finished()

    def _finished(self) -> list[Tensor | None]:
        """All lanes have arrived: what is held is the sum of all lanes."""
        return [
            self._pending[number].own_range() if number in self._pending else next(iter(held.values()), None)
            for number, held in enumerate(self._held)
        ]

    def close(self) -> None:
        super().close()
        self._under_way.clear()
        self._sums, self._held, self._pending = [], [], {}


@dataclass(frozen=True)
class Zero2Config:
    """`weights`: one copy for all workers of a host, the default where they share memory, or one for each worker."""

    weights: Weights | None = None


def _open(config: Zero2Config, job: Job) -> ShardedMaker:
    return ShardedMaker(ShardedParts(job, "zero2", full_weights(config.weights)), Zero2)


register(
    Registered(
        "zero2",
        Zero2Config,
        _open,
        examples=(Zero2Config(weights="per worker"),),
        takes_compression=True,
        takes_low_precision=True,
        takes_offload=True,
        full_weights=True,
        passes_lanes_on=True,
        assign_lanes=strided_lanes,
    )
)
