"""The canonical sum: lanes are added along one fixed binary tree that does not know how many workers there are.

    level 3                 0                    A node at level k sums the present lanes of [i·2^k, (i+1)·2^k).
                    ┌───────┴───────┐            A node with one present child *is* that child, so nothing is
    level 2         0               4            ever added to a lane that is not there.
                ┌───┴───┐       ┌───┘
    level 1     0       2       4                Each node is named by its lowest lane, which makes the whole tree a
              ┌─┴─┐   ┌─┴─┐   ┌─┘                list of merges "left += right":
    lanes     0   1   2   3   4                      (0,1) (2,3) (0,2) (0,4)

A worker performs the merges whose lanes it all holds and is left with its *roots*; the owner that receives the roots of
all workers performs the rest. Both do the same additions in the same order, so the cut between them changes no bit.

A *reduce-scatter plan* says what the workers send to the owners of ranges at one moment, and which sums an owner then
holds:

    five lanes, two workers       sent                 an owner adds          and holds
    roots, once a step            0 1 | 2 4            (0,2) (0,4)            0                one plan
    lane by lane                  0   | 1              (0,1)                  0
                                  2   | 3              (2,3) (0,2)            0
                                  4   |                (0,4)                  0                three plans

Every merge is done in the first plan after which all its lanes are there, in the tree's order, so that the sums have
its bits however the lanes arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from paceline.collectives.shared_memory.kernels import TorchKernels
from paceline.world.lanes import neighbouring_lanes


@dataclass(frozen=True)
class Merge:
    """`left += right`: the two children of the tree node at `level` that holds lane `left`."""

    left: int
    right: int
    level: int


@lru_cache(maxsize=256)
def merges(present: tuple[int, ...]) -> tuple[Merge, ...]:
    """The canonical tree over the lanes that have samples, leaves first."""
    out: list[Merge] = []
    nodes = sorted(present)
    level = 0
    while len(nodes) > 1:
        level += 1
        parents: list[int] = []
        for node in nodes:
            if parents and parents[-1] >> level == node >> level:
                out.append(Merge(parents[-1], node, level))
            else:
                parents.append(node)
        nodes = parents
    return tuple(out)


@dataclass(frozen=True)
class SumPlan:
    """Who performs which merge of one step: a pure function of the lanes present and of who holds them."""

    present: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = sorted(lane for lanes in self.holders for lane in lanes)
        if held != sorted(self.present):
            raise ValueError(f"lanes {sorted(self.present)} are present but workers hold {held}")

    @cached_property
    def _worker_of(self) -> dict[int, int]:
        return {lane: worker for worker, lanes in enumerate(self.holders) for lane in lanes}

    @cached_property
    def _local(self) -> tuple[tuple[Merge, ...], ...]:
        """The merges inside one worker, per worker."""
        local: list[list[Merge]] = [[] for _ in self.holders]
        for merge in merges(self.present):
            below = {self._worker_of[lane] for lane in self.present if lane >> merge.level == merge.left >> merge.level}
            if len(below) == 1:
                local[below.pop()].append(merge)
        return tuple(tuple(found) for found in local)

    @cached_property
    def merges_after(self) -> tuple[dict[int, list[Merge]], ...]:
        """By worker and lane: the merges that become possible there once the lane is finished, lanes in order."""
        after: tuple[dict[int, list[Merge]], ...] = tuple({lane: [] for lane in lanes} for lanes in self.holders)
        for worker, found in enumerate(self._local):
            for merge in found:
                below = [lane for lane in self.holders[worker] if lane >> merge.level == merge.left >> merge.level]
                after[worker][max(below)].append(merge)
        return after

    def roots(self, worker: int) -> tuple[int, ...]:
        """The partial sums that `worker` is left with, named by their lowest lane."""
        merged = {merge.right for merge in self._local[worker]}
        return tuple(lane for lane in sorted(self.holders[worker]) if lane not in merged)

    @cached_property
    def between_workers(self) -> tuple[Merge, ...]:
        """The merges that need roots of more than one worker, in order."""
        local = {merge for found in self._local for merge in found}
        return tuple(merge for merge in merges(self.present) if merge not in local)

    @property
    def one_root_each(self) -> bool:
        return all(len(self.roots(worker)) == 1 for worker in range(len(self.holders)))

    @cached_property
    def is_pairwise(self) -> bool:
        """True when the rest of the tree pairs neighbours, then pairs of pairs, …: recursive halving's own order."""
        workers = len(self.holders)
        if not self.one_root_each or workers & (workers - 1):
            return False
        root = [self.roots(worker)[0] for worker in range(workers)]
        expected = []
        distance = 1
        while distance < workers:
            expected += [(root[low], root[low + distance]) for low in range(0, workers, 2 * distance)]
            distance *= 2
        return sorted(expected) == sorted((merge.left, merge.right) for merge in self.between_workers)


@lru_cache(maxsize=256)
def sum_plan(lanes: int, workers: int, present: tuple[int, ...]) -> SumPlan:
    """The plan for workers with neighbouring lanes, of which only `present` have samples this step."""
    there = set(present)
    holders = tuple(tuple(lane for lane in own if lane in there) for own in neighbouring_lanes(lanes, workers))
    return SumPlan(present=tuple(sorted(present)), holders=holders)


def owner_ranges(elements: int, owners: int, block: int = 64) -> Sequence[tuple[int, int]]:
    """Cut `elements` into one range per owner, on block boundaries; a small buffer leaves the first owners nothing."""
    blocks = -(-elements // block)
    cuts = [min(elements, owner * blocks // owners * block) for owner in range(owners)] + [elements]
    return list(itertools.pairwise(cuts))


# -- reduce-scatter plans ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    """A node that an owner holds after a plan was carried out, and the nodes that it is made of."""

    node: int
    parts: tuple[int, ...]
    merges: tuple[tuple[int, int], ...]  # by place in `parts`; the last left is the sum


@dataclass(frozen=True)
class ScatterPlan:
    """`sent`: for each worker the nodes that it sends. `sums`: all nodes that an owner holds afterwards."""

    sent: tuple[tuple[int, ...], ...]
    sums: tuple[Sum, ...]

    @property
    def one_each(self) -> bool:
        return all(len(nodes) == 1 for nodes in self.sent)


@lru_cache(maxsize=256)
def scatter_plan_of_roots(plan: SumPlan) -> ScatterPlan:
    """Every worker has merged what it could, and sends what is left."""
    sent = tuple(plan.roots(worker) for worker in range(len(plan.holders)))
    steps = tuple((merge.left, merge.right) for merge in plan.between_workers)
    return ScatterPlan(sent, _sums({node for nodes in sent for node in nodes}, steps))


@lru_cache(maxsize=256)
def scatter_plans_by_lane(plan: SumPlan, among: tuple[int, ...] | None = None) -> tuple[ScatterPlan, ...]:
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
        found.append(ScatterPlan(sent, _sums(nodes | arriving, [(m.left, m.right) for m in possible])))
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
    """One plan carried out on one bucket: `nodes` are this worker's, `held` the owner's of its own range."""

    bucket: int
    plan: ScatterPlan
    ranges: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    nodes: Mapping[int, Tensor]  # by name: the whole bucket, flat
    held: dict[int, Tensor]  # by name: this worker's range; afterwards those of the plan's sums
    buffer_for: Callable[[int], Tensor]  # memory for a node that is not held yet; it may be part of `nodes`
    wire: torch.dtype | None = None  # what messages are sent in, where that loses nothing: `nodes` were rounded to it

    def outs(self) -> dict[int, Tensor]:
        """Where each sum goes: a node that grows stays where it is."""
        return {
            total.node: self.held[total.node] if total.node in self.held else self.buffer_for(total.node)
            for total in self.plan.sums
        }

    def finish(self, arrived: Mapping[int, Tensor], outs: Mapping[int, Tensor], start: int, stop: int) -> None:
        """The owner of [start, stop) adds what has arrived, what it holds and its own along the canonical tree."""
        parts = {node: tensor[start:stop] for node, tensor in self.nodes.items()} | self.held | dict(arrived)
        for total in self.plan.sums:
            TorchKernels().sum_into([outs[total.node]], [parts[part] for part in total.parts], total.merges)
        self.keep(outs)

    def keep(self, outs: Mapping[int, Tensor]) -> None:
        self.held.clear()
        self.held.update(outs)
