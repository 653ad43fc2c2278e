"""The first `start_after` steps: lanes are not apart yet, and every one makes its step on the gradient of all.

    lane 0    g₀ ┐                                    ┌─► step of lane 0 ─► θ'
    lane 1    g₁ ┴─ canonical sum, weighted mean ──► g ┴─► step of lane 1 ─► θ', to the last bit the same

These are the steps of ddp, bit for bit, and send what ddp sends. A run that begins so loses far less by being apart
later (docs/concepts/local_sgd.md has figures).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.gradient_exchange import GradientExchange
from paceline.sharding.bucket import Bucket, plan_buckets
from paceline.strategies.buckets import LaneSums, expected_order, gradient_specs
from paceline.strategies.strategy import Tally

OfLanes = Mapping[int, Mapping[Parameter, Tensor]]


class GradientOfAllLanes:
    def __init__(self, exchange: GradientExchange, rank: int, bucket_bytes: int) -> None:
        self._exchange, self._rank, self._bucket_bytes = exchange, rank, bucket_bytes
        self._set = exchange.new_set()
        self._cut: tuple[tuple[int, ...], tuple[Bucket, ...]] = ((), ())

    def hand_out(self, parameters: Sequence[Parameter], of_lanes: OfLanes, plan: SumPlan, tally: Tally) -> None:
        """`.grad` becomes the gradient of the global batch, on every worker."""
        under_way = []
        for number, bucket in enumerate(self._buckets(parameters)):
            sums = LaneSums(bucket, parameters)
            for lane in plan.holders[self._rank]:
                gradients = of_lanes.get(lane)
                if gradients is None:
                    sums.take_nothing(lane)
                else:
                    sums.take(lane, [gradients.get(parameters[entry.parameter]) for entry in bucket.entries])
                sums.merge(plan.merges_after[self._rank][lane])
            under_way.append((sums, self._exchange.start(self._set, number, plan, sums.nodes, sums.buffer)))
        for sums, pending in under_way:
            total = pending.wait()
            if tally.scale != 1.0:
                total.mul_(tally.scale)
            sums.hand_out(total, tally.used)

    def _buckets(self, parameters: Sequence[Parameter]) -> tuple[Bucket, ...]:
        key = tuple(map(id, parameters))
        if self._cut[0] != key:
            if self._cut[1]:
                self._set = self._exchange.new_set(old=self._set)
            specs = gradient_specs(parameters)
            self._cut = key, plan_buckets(specs, expected_order(len(specs)), self._bucket_bytes)
        return self._cut[1]
