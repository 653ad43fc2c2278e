"""The canonical sum of gradient buckets over shared memory: exact mode, on any number of workers and roots.

    a root in its buffer barrier ─► every worker adds its own range of all roots along the tree, and writes the sum
                         over that range of every root ─► barrier

    several roots        every worker copies its roots' foreign ranges into its slot, a piece of each range at a time
                         ─► barrier ─► adds its own range of all roots, and writes it into every total ─► barrier

Totals lie in shared memory, one for each bucket and worker, and are that worker's gradients as they stand: nothing is
copied out. A worker's total is also the buffer of its root, if it has one and makes it there: then nothing is copied in
either. Each has one owner at a time: between the barriers its ranges belong to the workers that write them, and
otherwise to the worker itself.

In a *scatter* only the owner of a range gets its sum, and only it writes:

    a root in its buffer barrier ─► the owner adds its range of all buffers, in its own
    other nodes          foreign ranges into slots, a piece of each range at a time ─► barrier ─► the owner adds

There is no barrier at the end. A buffer may still be read when the scatter is over, but no worker comes to a later
barrier before it has read it: who has passed one, such as the step vote's, may write to its buffer again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.collectives.canonical_sum import Scatter, ScatterPlan, SumPlan, owner_ranges, scatter_plan_of_roots
from paceline.collectives.shared_memory.barrier import Call
from paceline.collectives.shared_memory.kernels import Merges
from paceline.collectives.shared_memory.operations import ALIGNED, Operations, combined
from paceline.collectives.shared_memory.segment import Arenas


class BucketSums:
    """`sum` is a collective of the group whose operations this uses; each `owner` of buckets has totals of its own."""

    def __init__(self, operations: Operations, arenas: Arenas, rank: int, size: int) -> None:
        self._operations, self._arenas, self._rank, self._size = operations, arenas, rank, size
        self._totals: dict[tuple[int, int], list[Tensor]] = {}  # by owner and bucket: those of all ranks, in order

    def buffer(self, owner: int, bucket: int, elements: int, dtype: torch.dtype) -> Tensor:
        """This worker's total, for its root to be made in. All workers ask for the same ones in the same order."""
        return self._totals_of((owner, bucket), elements, dtype)[self._rank]

    def sum(
        self, owner: int, bucket: int, plan: SumPlan, roots: Mapping[int, Tensor], elements: int, dtype: torch.dtype
    ) -> Tensor:
        """The sum of all workers' roots (by lane) of one bucket, in this worker's total."""
        totals = self._totals_of((owner, bucket), elements, dtype)
        call = Call(f"bucket {bucket}", str(dtype), elements)
        if all(len(plan.roots(worker)) == 1 for worker in range(self._size)):
            return self._sum_in_buffers(totals, plan, roots, call)
        sending = scatter_plan_of_roots(plan)
        (total,) = sending.sums
        ranges = owner_ranges(elements, self._size, ALIGNED)
        start, stop = ranges[self._rank]
        outs = {total.node: [each[start:stop] for each in totals]}
        self._sum_by_slots(sending, ranges, roots, {}, outs, dtype, call)
        self._operations.wait_for_all(call)
        return totals[self._rank]

    def _sum_in_buffers(self, totals: list[Tensor], plan: SumPlan, roots: Mapping[int, Tensor], call: Call) -> Tensor:
        mine = totals[self._rank]
        (root,) = roots.values()
        if root.data_ptr() != mine.data_ptr():
            self._operations.copy(mine, root)
        merges = _by_row(plan, [lane for worker in range(self._size) for lane in plan.roots(worker)])
        self._operations.sum_in_place(totals, merges, call)
        return mine

    def _add(self, outs: Sequence[Tensor], rows: Sequence[Tensor], merges: Merges) -> None:
        if not merges:  # a node that is whole already, and may be where it belongs
            for out in outs:
                if rows[0].data_ptr() != out.data_ptr():
                    self._operations.copy(out, rows[0])
        elif rows[0].dtype == torch.float32:
            self._operations.kernels.sum_into(outs, rows, merges)
        else:
            total = combined(rows, merges)
            for out in outs:
                out.copy_(total)

    # -- only for the owners of ranges -------------------------------------------------------------------------------

    def scatter(self, owner: int, scatter: Scatter) -> None:
        """Add a bucket up at the owners of its ranges. Roots that are one each belong in their buffers."""
        elements = scatter.ranges[-1][1]
        call = Call(f"bucket {scatter.bucket}", str(scatter.dtype), elements, "scattered")
        totals = self._totals.get((owner, scatter.bucket))
        if totals is not None and scatter.plan.one_each:
            self._scatter_in_buffers(totals, scatter, call)
        else:
            start, stop = scatter.ranges[self._rank]
            outs = scatter.outs() if start < stop else {}
            where = {node: [out] for node, out in outs.items()}
            self._sum_by_slots(scatter.plan, scatter.ranges, scatter.nodes, scatter.held, where, scatter.dtype, call)
            if start < stop:
                scatter.keep(outs)

    def _scatter_in_buffers(self, totals: list[Tensor], scatter: Scatter, call: Call) -> None:
        (node,) = scatter.nodes.values()
        if node.data_ptr() != totals[self._rank].data_ptr():
            self._operations.copy(totals[self._rank], node)
        self._operations.wait_for_all(call)
        low, high = scatter.ranges[self._rank]
        if low == high:
            return
        (total,) = scatter.plan.sums
        worker_of = {name: worker for worker, (name,) in enumerate(scatter.plan.sent)}
        out = totals[self._rank][low:high]
        self._add([out], [totals[worker_of[part]][low:high] for part in total.parts], total.merges)
        scatter.keep({total.node: out})

    def _sum_by_slots(
        self,
        sending: ScatterPlan,
        ranges: Sequence[tuple[int, int]],
        nodes: Mapping[int, Tensor],
        held: Mapping[int, Tensor],
        outs: Mapping[int, Sequence[Tensor]],
        dtype: torch.dtype,
        call: Call,
    ) -> None:
        """Owners write each of their sums to all its `outs`, a piece of every range at a time.

        A slot has a row for each other worker and each node that the busiest worker sends.
        """
        most = max(map(len, sending.sent))
        fit = self._operations.slot_bytes // (max(1, self._size - 1) * most * dtype.itemsize)
        step = fit // ALIGNED * ALIGNED or fit
        start, stop = ranges[self._rank]
        for low in range(0, max(high - low for low, high in ranges), step):
            for peer, (begin, end) in enumerate(ranges):
                if peer != self._rank:
                    for place, name in enumerate(sending.sent[self._rank]):
                        piece = nodes[name][begin + low : min(begin + low + step, end)]
                        at = self._row(self._rank, peer, most, place) * step
                        self._operations.copy(self._operations.slot(self._rank, dtype, at + piece.numel())[at:], piece)
            self._operations.wait_for_all(call)
            width = min(step, stop - start - low)
            if width <= 0:
                continue
            parts = {name: tensor[low : low + width] for name, tensor in held.items()}
            parts |= {name: node[start + low : start + low + width] for name, node in nodes.items()}
            for worker, names in enumerate(sending.sent):
                if worker != self._rank:
                    for place, name in enumerate(names):
                        at = self._row(worker, self._rank, most, place) * step
                        parts[name] = self._operations.read(worker, dtype, at + width)[at:]
            for total in sending.sums:
                places = [out[low : low + width] for out in outs[total.node]]
                self._add(places, [parts[part] for part in total.parts], total.merges)

    def _row(self, worker: int, peer: int, most: int, place: int) -> int:
        """Which row of the worker's slot has a node's piece for `peer`."""
        return (peer - (peer > worker)) * most + place

    def forget(self, owner: int) -> None:
        """The owner's buckets are cut anew: their totals are not needed any more."""
        for key in [key for key in self._totals if key[0] == owner]:
            self._arenas.release(self._totals.pop(key)[self._rank])

    def _totals_of(self, key: tuple[int, int], elements: int, dtype: torch.dtype) -> list[Tensor]:
        if key not in self._totals:
            self._totals[key] = self._arenas.everyones(self._arenas.allocate(elements, dtype))
        return self._totals[key]


def _by_row(plan: SumPlan, lanes: list[int]) -> Merges:
    """The merges between workers, in rows of the table of all roots."""
    row = {lane: number for number, lane in enumerate(lanes)}
    return tuple((row[merge.left], row[merge.right]) for merge in plan.between_workers)
