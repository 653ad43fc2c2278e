"""How the lanes' parts of one bucket become their sum, on every worker with the same bits.

            sent by each of N workers with m lanes        the bits are those of
    exact   2·(N-1)/N · 4Ψ, whatever m is                 the canonical sum
    int8    (m + 1)·(N-1)/N · Ψ·(1 + 4/256)               the canonical sum of what each lane's part is in int8, in int8

In int8 a block of 256 elements has one scale in fp32 (compression/int8.py). Blocks are counted from the first element
of a parameter, so that they don't depend on buckets; each lane's part is rounded by itself, and owners of ranges add up
what the lanes sent, so that they don't depend on workers either. The sum comes back in int8 as well: every worker goes
on with that, its owner too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.collectives.canonical_sum import SumPlan, merges, owner_ranges
from paceline.collectives.communicator import Communicator, wait_all
from paceline.collectives.gradient_exchange import TAGS_PER_BUCKET, GradientExchange, PendingSum
from paceline.compression.int8 import Int8
from paceline.sharding.bucket import Bucket, GradientSpec, packed, plan_buckets
from paceline.strategies.buckets import LaneSums, expected_order
from paceline.strategies.ddp import Pending

Wire = Literal["fp32", "int8"]
WIRES: tuple[Wire, ...] = ("fp32", "int8")

BLOCK = 256
CODEC = Int8(block=BLOCK)
INT8 = "int8 sum"  # in counts of bytes


class SumOfLanes(Protocol):
    def cut(self, specs: Sequence[GradientSpec], bucket_bytes: int) -> tuple[Bucket, ...]: ...

    def new_set(self, old: int | None) -> int: ...

    def took(self, sums: LaneSums, lane: int) -> None:
        """The lane's part is among the nodes."""
        ...

    def start(self, of: int, number: int, sums: LaneSums) -> Pending:
        """All of this worker's lanes are."""
        ...

    def close(self) -> None: ...


class ExactSum:
    def __init__(self, comm: Communicator, exchange: GradientExchange, plan: SumPlan) -> None:
        self._exchange, self._plan, self._merges = exchange, plan, plan.merges_after[comm.rank]

    def cut(self, specs: Sequence[GradientSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
        return plan_buckets(specs, expected_order(len(specs)), bucket_bytes)

    def new_set(self, old: int | None) -> int:
        return self._exchange.new_set(old=old)

    def took(self, sums: LaneSums, lane: int) -> None:
        sums.merge(self._merges[lane])

    def start(self, of: int, number: int, sums: LaneSums) -> Pending:
        return self._exchange.start(of, number, self._plan, sums.nodes, sums.buffer)

    def close(self) -> None:
        self._exchange.close()


class Int8Sum:
    def __init__(self, comm: Communicator, exchange: GradientExchange, plan: SumPlan) -> None:
        self._comm, self._exchange, self._plan = comm, exchange, plan

    def cut(self, specs: Sequence[GradientSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
        """As ever, but parameters begin where blocks do."""
        plain = plan_buckets(specs, expected_order(len(specs)), bucket_bytes)
        return tuple(packed(specs, [entry.parameter for entry in b.entries], BLOCK * b.dtype.itemsize) for b in plain)

    def new_set(self, old: int | None) -> int:
        return 0

    def took(self, sums: LaneSums, lane: int) -> None:
        """It is rounded before it is added to another."""

    def start(self, of: int, number: int, sums: LaneSums) -> Pending:
        out, tag = sums.buffer(), number * TAGS_PER_BUCKET

        def exchange() -> None:
            with torch.no_grad():
                out.copy_(int8_sum(self._comm, self._plan, sums.nodes, out.numel(), tag=tag))

        return PendingSum([out], self._exchange.start_messages(exchange, out.device))

    def close(self) -> None:
        self._exchange.close()


def _rows(flat: Tensor) -> Tensor:
    """In blocks, the last of them filled up with zeros."""
    return F.pad(flat.float(), (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def int8_sum(comm: Communicator, plan: SumPlan, nodes: Mapping[int, Tensor], elements: int, *, tag: int) -> Tensor:
    """The sum over all lanes, in fp32 on the host. Takes two tags."""
    blocks = -(-elements // BLOCK)
    ranges = owner_ranges(blocks, comm.size, 1)  # of whole blocks
    own = slice(*ranges[comm.rank])
    others = [(comm.rank + hop) % comm.size for hop in range(1, comm.size)]
    owners = [peer for peer in others if ranges[peer][0] < ranges[peer][1]]
    mine = {lane: CODEC.encode(_rows(node), ()).cpu() for lane, node in nodes.items()}
    out, coded = torch.empty(blocks, BLOCK), torch.empty(blocks, CODEC.row_bytes, dtype=torch.uint8)

    sends = [(mine[lane][slice(*ranges[peer])], peer) for peer in owners for lane in plan.holders[comm.rank]]
    outgoing = [comm.send(rows, to=peer, tag=tag, operation=INT8) for rows, peer in sends]
    if own.start < own.stop:
        foreign = [(peer, lane) for peer in others for lane in plan.holders[peer]]
        arrived = {lane: torch.empty_like(coded[own]) for _, lane in foreign}
        wait_all([comm.receive(arrived[lane], source=peer, tag=tag, operation=INT8) for peer, lane in foreign])
        arrived |= {lane: rows[own] for lane, rows in mine.items()}
        parts = {lane: torch.empty_like(out[own]) for lane in arrived}
        for lane, rows in arrived.items():
            CODEC.decode(rows, (), parts[lane])
        for merge in merges(plan.present):
            parts[merge.left].add_(parts.pop(merge.right))
        (total,) = parts.values()
        coded[own] = CODEC.encode(total, ())
    wait_all(outgoing)

    outgoing = [comm.send(coded[own], to=peer, tag=tag + 1, operation=INT8) for peer in others if own.start < own.stop]
    rest = [(coded[slice(*ranges[peer])], peer) for peer in owners]
    incoming = [comm.receive(rows, source=peer, tag=tag + 1, operation=INT8) for rows, peer in rest]
    wait_all([*incoming, *outgoing])
    CODEC.decode(coded, (), out)
    return out.view(-1)[:elements]
