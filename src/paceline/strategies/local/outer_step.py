"""The outer step: lanes meet, and the mean of (outer weights - lane's weights) is a gradient for one more optimizer.

    lane 0    θ - θ₀ ┐
    lane 1    θ - θ₁ ├─ · nₗ, canonical sum, / Σn ──► .grad ──► outer optimizer ──► θ, with which all lanes go on
    lane 2    θ - θ₂ ┘

nₗ is the weight of the samples that lane l has trained with in the window, so a lane that had fewer counts less. With
SGD of learning rate 1 the step is the mean of the lanes' weights. It moves what ddp moves in a step, once a window, or
in int8 about a quarter of that. How the lanes' parts of a bucket become their sum, on every worker with the same bits:

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
from torch.nn import Parameter

from paceline.collectives.canonical_sum import SumPlan, merges, owner_ranges
from paceline.collectives.communicator import Communicator, wait_all
from paceline.collectives.gradient_exchange import TAGS_PER_BUCKET, GradientExchange, PendingSum
from paceline.compression.int8 import Int8
from paceline.sharding.bucket import Bucket, GradientSpec, packed, plan_buckets
from paceline.strategies.buckets import LaneSums, expected_order, gradient_specs
from paceline.strategies.ddp import Pending
from paceline.strategies.local.lane_optimizer import LaneOptimizer, Meeting, copied_state
from paceline.torch_compat import foreach_mul_

Wire = Literal["fp32", "int8"]
WIRES: tuple[Wire, ...] = ("fp32", "int8")

BLOCK = 256
CODEC = Int8(block=BLOCK)
INT8 = "int8 sum"  # in counts of bytes


class OuterSteps:
    """Of all optimizers of a job; all workers make the same ones in the same order."""

    def __init__(self, comm: Communicator, sums: SumOfLanes, lanes: int, bucket_bytes: int) -> None:
        """`lanes`: how many there are in the job."""
        self._comm, self._sums, self._lanes, self._bucket_bytes = comm, sums, lanes, bucket_bytes
        self._sets: dict[tuple[int, int], tuple[tuple[int, ...], int, tuple[Bucket, ...]]] = {}
        """By optimizer and fragment."""

    def synchronise(self, lanes: LaneOptimizer) -> None:
        """Close all windows: the parameters are what outer steps make of them."""
        lanes.show_outer()
        for fragment in range(len(lanes.trained)):
            self._step(lanes, self.begin(lanes, fragment))
            lanes.close_window(fragment)

    def begin(self, lanes: LaneOptimizer, fragment: int, round: int = 0) -> Meeting:
        """Send what the lanes have moved; until the end of the meeting they stay where they are."""
        mine = torch.zeros(self._lanes, dtype=torch.float64)
        for lane, weight in lanes.trained[fragment].items():
            mine[lane] = weight
        rows, weighed = self._comm.all_gather(mine)
        parameters = lanes.members(fragment)
        number_of_set, buckets = self._buckets_of(lanes, fragment, parameters)
        sent = []
        for number, bucket in enumerate(buckets):
            sums = LaneSums(bucket, parameters)
            for lane in lanes.lanes:
                with torch.no_grad():
                    self._fill(sums, lanes, parameters, lane, lanes.trained[fragment].get(lane, 0.0))
                self._sums.took(sums, lane)
            sent.append((sums, self._sums.start(number_of_set, number, sums)))
        return Meeting(round, fragment, parameters, rows, weighed, sent)

    def finish(self, lanes: LaneOptimizer, meeting: Meeting) -> None:
        """The fragment's parameters, which hold the outer weights, become what the outer step makes of them."""
        self._step(lanes, meeting)
        lanes.begin_again(meeting.fragment)

    def preview(self, lanes: LaneOptimizer) -> None:
        """Let the model show what that would give; the lanes go on as if nothing had been."""
        if not lanes.in_window or lanes.is_previewed:
            return
        lanes.show_preview()
        kept = lanes.outer_optimizer.state
        lanes.outer_optimizer.state = copied_state(kept)
        try:
            for fragment in range(len(lanes.trained)):
                self._step(lanes, self.begin(lanes, fragment))
        finally:
            lanes.outer_optimizer.state = kept
        lanes.mark_clean()

    def _step(self, lanes: LaneOptimizer, meeting: Meeting) -> None:
        with torch.no_grad():
            weight = meeting.hand_out()
        gradients = [parameter.grad for parameter in meeting.parameters if parameter.grad is not None]
        if weight > 0 and gradients:  # otherwise no lane has trained
            foreach_mul_(gradients, 1 / weight)
            lanes.outer_optimizer.step()
        for parameter in meeting.parameters:
            parameter.grad = None

    def _fill(
        self, sums: LaneSums, lanes: LaneOptimizer, parameters: Sequence[Parameter], lane: int, weight: float
    ) -> None:
        moved: list[Tensor | None] = []
        for entry in sums.bucket.entries:
            parameter = parameters[entry.parameter]
            there = lanes.weights_of(lane, parameter)
            if there is None or weight == 0:
                moved.append(None)
            else:
                outer = lanes.outer[parameter].to(sums.bucket.dtype)
                moved.append((outer - there.to(sums.bucket.dtype)).mul_(weight))
        sums.take(lane, moved)

    def _buckets_of(
        self, lanes: LaneOptimizer, fragment: int, parameters: Sequence[Parameter]
    ) -> tuple[int, tuple[Bucket, ...]]:
        """Cut anew only when what is trained has changed."""
        key, place = tuple(map(id, parameters)), (id(lanes), fragment)
        known = self._sets.get(place)
        if known is None or known[0] != key:
            buckets = self._sums.cut(gradient_specs(parameters), self._bucket_bytes)
            number = self._sums.new_set(None if known is None else known[1])
            known = self._sets[place] = key, number, buckets
        return known[1], known[2]


# -- the sum of one bucket ---------------------------------------------------------------------------------------------


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
