"""Owner sums: lanes arrive shipment by shipment, and their owner adds what they say about its ranges to the tree.

    ship(bucket, nodes) ─► slices to their owners ─► held: one or two partial sums of the own range ─► `totals`
                           buffers come back when a shipment has arrived

All workers ship every bucket of a turn in the same order, those without a lane in it send nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.collectives.gradient_exchange import GradientExchange
from paceline.collectives.shipments import Scatter, Shipment
from paceline.collectives.work import Handle
from paceline.sharding.shards import BucketShards


@dataclass(frozen=True)
class _Departed:
    handle: Handle
    bytes: int
    give_back: Callable[[], None]


class OwnerSums:
    """`under_way_bytes`: as much may be on its way; then backward waits for the first to arrive."""

    def __init__(
        self, exchange: GradientExchange, rank: int, shards: Sequence[BucketShards], under_way_bytes: int
    ) -> None:
        self._exchange, self._shards, self._most = exchange, shards, under_way_bytes
        self._set = exchange.new_set()
        self._under_way: deque[_Departed] = deque()
        self._sums = [torch.empty(s.width(rank), dtype=s.bucket.dtype, device=s.bucket.device) for s in shards]
        self.start([], lowest=0)

    @property
    def elements(self) -> int:
        """Of the gradients that stay here."""
        return sum(total.numel() for total in self._sums)

    def start(self, shipments: Sequence[Shipment], lowest: int) -> None:
        """A step begins, in which these shipments are sent; `lowest` is the lowest lane that has samples."""
        self._shipments, self._lowest = shipments, lowest
        self._held: list[dict[int, Tensor]] = [{} for _ in self._sums]
        self._shipped = [0] * len(self._sums)

    def ship(self, number: int, nodes: dict[int, Tensor], give_back: Callable[[], None] = lambda: None) -> None:
        """This worker's part of the bucket's next shipment; `give_back` is called when its nodes are free again."""
        if self._shipped[number] == len(self._shipments):
            assert not nodes, f"bucket {number}: more lanes than shipments"
            return
        shipment = self._shipments[self._shipped[number]]
        self._shipped[number] += 1
        own, shards, lowest = self._sums[number], self._shards[number], self._lowest
        scatter = Scatter(
            number, shipment, shards.ranges, shards.bucket.dtype, nodes, self._held[number],
            room=lambda node: own if node == lowest else torch.empty_like(own),
        )  # fmt: skip
        size = sum(node.nbytes for node in nodes.values())
        self._make_way(size)
        handle = self._exchange.start_scatter(self._set, scatter, own)
        self._under_way.append(_Departed(handle, size, give_back))

    def _make_way(self, wanted: int) -> None:
        while self._under_way and sum(departed.bytes for departed in self._under_way) + wanted > self._most:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        departed = self._under_way.popleft()
        departed.handle.wait()
        departed.give_back()

    def roots(self) -> list[dict[int, Tensor]]:
        """Bucket by bucket what there is of the own range when all has arrived, by lowest lane."""
        while self._under_way:
            self._wait_for_first()
        return self._held

    def room(self, number: int) -> Tensor:
        """Memory of the own range for a sum that comes from elsewhere."""
        return self._sums[number]
