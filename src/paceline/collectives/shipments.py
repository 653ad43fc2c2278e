"""Shipments: what the workers send to the owners of ranges at one moment, and which sums an owner then holds.

    five lanes, two workers       sent                 an owner adds          and holds
    roots, once a step            0 1 | 2 4            (0,2) (0,4)            0                one shipment
    lane by lane                  0   | 1              (0,1)                  0
                                  2   | 3              (2,3) (0,2)            0
                                  4   |                (0,4)                  0                three shipments

A node of the canonical tree is named by its lowest lane. Every merge is done in the first shipment after which all its
lanes are there, in the tree's order, so that the sums have its bits however the lanes arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from paceline.collectives.canonical_sum import SumPlan, merges
from paceline.collectives.shared_memory.kernels import TorchKernels


@dataclass(frozen=True)
class Sum:
    """A node that an owner holds after a shipment, and the nodes that it is made of."""

    node: int
    parts: tuple[int, ...]
    merges: tuple[tuple[int, int], ...]  # by place in `parts`; the last left is the sum


@dataclass(frozen=True)
class Shipment:
    """`sent`: for each worker the nodes that it sends. `sums`: all nodes that an owner holds afterwards."""

    sent: tuple[tuple[int, ...], ...]
    sums: tuple[Sum, ...]

    @property
    def one_each(self) -> bool:
        return all(len(nodes) == 1 for nodes in self.sent)


@lru_cache(maxsize=256)
def shipment_of_roots(plan: SumPlan) -> Shipment:
    """Every worker has merged what it could, and sends what is left."""
    sent = tuple(plan.roots(worker) for worker in range(len(plan.holders)))
    steps = tuple((merge.left, merge.right) for merge in plan.between_workers)
    return Shipment(sent, _sums({node for nodes in sent for node in nodes}, steps))


@lru_cache(maxsize=256)
def shipments_by_lane(plan: SumPlan, among: tuple[int, ...] | None = None) -> tuple[Shipment, ...]:
    """Every worker sends its lanes one after another; who has fewer than others sends nothing at the end.

    `among`: these workers alone, whose owners are left with their roots of the tree.
    """
    holders = plan.holders if among is None else tuple(plan.holders[worker] for worker in among)
    waiting = list(merges(plan.present))
    arrived: set[int] = set()
    nodes: set[int] = set()
    found = []
    for turn in range(max(len(lanes) for lanes in holders)):
        sent = tuple(lanes[turn : turn + 1] for lanes in holders)
        arriving = {lane for lanes in sent for lane in lanes}
        arrived |= arriving
        missing = set(plan.present) - arrived
        possible = [m for m in waiting if not any(lane >> m.level == m.left >> m.level for lane in missing)]
        waiting = [merge for merge in waiting if merge not in possible]
        found.append(Shipment(sent, _sums(nodes | arriving, [(m.left, m.right) for m in possible])))
        nodes = {total.node for total in found[-1].sums}
    return tuple(found)


def _sums(parts: set[int], steps: Sequence[tuple[int, int]]) -> tuple[Sum, ...]:
    below = {part: [part] for part in sorted(parts)}
    done: dict[int, list[tuple[int, int]]] = {part: [] for part in parts}
    for left, right in steps:
        below[left] += below.pop(right)
        done[left] += [*done.pop(right), (left, right)]
    sums = []
    for node, leaves in below.items():
        place = {part: number for number, part in enumerate(leaves)}
        sums.append(Sum(node, tuple(leaves), tuple((place[left], place[right]) for left, right in done[node])))
    return tuple(sums)


@dataclass(frozen=True)
class Scatter:
    """One shipment of one bucket: `nodes` are this worker's, `held` the owner's of its own range, made in `room`."""

    bucket: int
    shipment: Shipment
    ranges: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    nodes: Mapping[int, Tensor]  # by name: the whole bucket, flat
    held: dict[int, Tensor]  # by name: this worker's range; afterwards those of the shipment's sums
    room: Callable[[int], Tensor]  # memory for a node that is not held yet; it may be part of `nodes`
    wire: torch.dtype | None = None  # what messages are sent in, where that loses nothing: `nodes` were rounded to it

    def outs(self) -> dict[int, Tensor]:
        """Where each sum goes: a node that grows stays where it is."""
        return {
            total.node: self.held[total.node] if total.node in self.held else self.room(total.node)
            for total in self.shipment.sums
        }

    def finish(self, arrived: Mapping[int, Tensor], outs: Mapping[int, Tensor], start: int, stop: int) -> None:
        """The owner of [start, stop) adds what has arrived, what it holds and its own along the canonical tree."""
        parts = {node: tensor[start:stop] for node, tensor in self.nodes.items()} | self.held | dict(arrived)
        for total in self.shipment.sums:
            TorchKernels().sum_into([outs[total.node]], [parts[part] for part in total.parts], total.merges)
        self.keep(outs)

    def keep(self, outs: Mapping[int, Tensor]) -> None:
        self.held.clear()
        self.held.update(outs)
