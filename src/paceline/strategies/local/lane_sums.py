"""How the lanes' parts of one bucket become their sum, on every worker with the same bits.

            sent by each of N workers with m lanes        the bits are those of
    exact   2·(N-1)/N · 4Ψ, whatever m is                 the canonical sum
    int8    (m + 1)·(N-1)/N · Ψ·(1 + 4/256)               the canonical sum of what each lane's part is in int8, in int8

In int8 a block of 256 elements has one scale in fp32, its largest magnitude / 127. Blocks are counted from the first
element of a parameter, so that they don't depend on buckets; each lane's part is rounded by itself, and owners of
ranges add up what the lanes sent, so that they don't depend on workers either. The sum comes back in int8 as well:
every worker goes on with that, its owner too.
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
from paceline.sharding.bucket import Bucket, GradientSpec, packed, plan_buckets
from paceline.strategies.buckets import LaneSums, expected_order
from paceline.strategies.ddp import Pending

Wire = Literal["fp32", "int8"]
WIRES: tuple[Wire, ...] = ("fp32", "int8")

BLOCK = 256
INT8 = "int8 sum"  # in counts of bytes
_SCALE = torch.float32.itemsize


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

        return PendingSum(out, self._exchange.in_turn(exchange))

    def close(self) -> None:
        self._exchange.close()


# -- blocks ------------------------------------------------------------------------------------------------------------


Coded = tuple[Tensor, Tensor]  # elements in int8, and the scales of their blocks


def encoded(values: Tensor) -> Coded:
    """On the host. A block in which one element is not finite has none that is."""
    blocks = F.pad(values.float(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1) / 127
    rounded = (blocks / scales.unsqueeze(1)).nan_to_num(0.0, 0.0, 0.0).round_().clamp_(-127, 127)
    return rounded.view(-1)[: values.numel()].to(torch.int8).cpu(), scales.cpu()


def decoded(elements: Tensor, scales: Tensor) -> Tensor:
    blocks = F.pad(elements.float(), (0, -elements.numel() % BLOCK)).view(-1, BLOCK)
    return blocks.mul_(scales.unsqueeze(1)).view(-1)[: elements.numel()]


def _message_bytes(width: int) -> int:
    return width + -(-width // BLOCK) * _SCALE


def _message(coded: Coded, start: int, stop: int) -> Tensor:
    """A range of whole blocks; the scales come first, where they are aligned."""
    elements, scales = coded
    some = scales[start // BLOCK : -(-stop // BLOCK)]
    return torch.cat([some.view(torch.uint8), elements[start:stop].view(torch.uint8)])


def _read(message: Tensor, width: int) -> Tensor:
    split = message.numel() - width
    return decoded(message[split:].view(torch.int8), message[:split].view(torch.float32))


def int8_sum(comm: Communicator, plan: SumPlan, nodes: Mapping[int, Tensor], elements: int, *, tag: int) -> Tensor:
    """The sum over all lanes, in fp32 on the host. Takes two tags."""
    ranges = owner_ranges(elements, comm.size, BLOCK)
    start, stop = ranges[comm.rank]
    width = stop - start
    others = [(comm.rank + hop) % comm.size for hop in range(1, comm.size)]
    owners = [peer for peer in others if ranges[peer][0] < ranges[peer][1]]
    mine = {lane: encoded(node) for lane, node in nodes.items()}

    parting = [(peer, _message(mine[lane], *ranges[peer])) for peer in owners for lane in plan.holders[comm.rank]]
    outgoing = [comm.send(message, to=peer, tag=tag, operation=INT8) for peer, message in parting]
    foreign = [(peer, lane) for peer in others for lane in plan.holders[peer]] if width else []
    arrived = [torch.empty(_message_bytes(width), dtype=torch.uint8) for _ in foreign]
    wait_all(
        [
            comm.receive(row, source=peer, tag=tag, operation=INT8)
            for (peer, _), row in zip(foreign, arrived, strict=True)
        ]
    )
    message = torch.empty(0, dtype=torch.uint8)
    if width:
        parts = {lane: _read(_message(mine[lane], start, stop), width) for lane in mine}
        parts |= {lane: _read(row, width) for (_, lane), row in zip(foreign, arrived, strict=True)}
        for merge in merges(plan.present):
            parts[merge.left].add_(parts.pop(merge.right))
        (total,) = parts.values()
        message = _message(encoded(total), 0, width)
    wait_all(outgoing)

    back = {peer: torch.empty(_message_bytes(ranges[peer][1] - ranges[peer][0]), dtype=torch.uint8) for peer in owners}
    outgoing = [comm.send(message, to=peer, tag=tag + 1, operation=INT8) for peer in others] if width else []
    incoming = [comm.receive(row, source=peer, tag=tag + 1, operation=INT8) for peer, row in back.items()]
    wait_all([*incoming, *outgoing])
    out = torch.empty(elements)
    for peer, row in {comm.rank: message, **back}.items():
        low, high = ranges[peer]
        if low < high:
            out[low:high] = _read(row, high - low)
    return out
