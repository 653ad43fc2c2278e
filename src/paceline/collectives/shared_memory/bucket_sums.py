"""The canonical sum of gradient buckets over shared memory: exact mode, on any number of workers and roots.

    a root at home       barrier ─► every worker adds its own range of all roots along the tree, and writes the sum
                         over that range of every root ─► barrier

    several roots        every worker copies its roots' foreign ranges into its slot ─► barrier ─► adds its own range
                         of all roots, and writes the sum into every worker's total ─► barrier

Totals lie in shared memory, one for each bucket and worker, and are that worker's gradients as they stand: nothing is
copied out. A worker's total is also the home of its root, if it has one and makes it there: then nothing is copied in
either. Each has one owner at a time: between the barriers its ranges belong to the workers that write them, and
otherwise to the worker itself.

In a *scatter* only the owner of a range gets its sum, and only it writes:

    a root at home       barrier ─► the owner adds its range of all homes, in its own
    other nodes          foreign ranges into slots, a piece of each range at a time ─► barrier ─► the owner adds

There is no barrier at the end. A home may still be read when the scatter is over, but no worker comes to a later
barrier before it has read it: who has passed one, such as the step vote's, may write to its home again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.collectives.canonical_sum import Scatter, SumPlan, owner_ranges
from paceline.collectives.shared_memory.barrier import Call
from paceline.collectives.shared_memory.kernels import Merges
from paceline.collectives.shared_memory.operations import ALIGNED, Operations, combined
from paceline.collectives.shared_memory.segment import Arenas


class BucketSums:
    """`sum` is a collective of the group whose operations this uses; each `owner` of buckets has totals of its own."""

    def __init__(self, operations: Operations, arenas: Arenas, rank: int, size: int) -> None:
        self._operations, self._arenas, self._rank, self._size = operations, arenas, rank, size
        self._totals: dict[tuple[int, int], list[Tensor]] = {}  # by owner and bucket: everybody's, in rank order

    def home(self, owner: int, bucket: int, elements: int, dtype: torch.dtype) -> Tensor:
        """This worker's total, for its root to be made in. All workers ask for the same ones in the same order."""
        return self._totals_of((owner, bucket), elements, dtype)[self._rank]

    def sum(
        self, owner: int, bucket: int, plan: SumPlan, roots: Mapping[int, Tensor], elements: int, dtype: torch.dtype
    ) -> Tensor:
        """The sum of all workers' roots (by lane) of one bucket, in this worker's total."""
        totals = self._totals_of((owner, bucket), elements, dtype)
        call = Call(f"bucket {bucket}", str(dtype), elements)
        if all(len(plan.roots(worker)) == 1 for worker in range(self._size)):
            return self._sum_at_home(totals, plan, roots, call)
        owners = [(worker, lane) for worker in range(self._size) for lane in plan.roots(worker)]
        merges = _by_row(plan, [lane for _, lane in owners])
        most_roots = max(len(plan.roots(worker)) for worker in range(self._size))
        step = self._operations.slot_bytes // (most_roots * dtype.itemsize) // ALIGNED * ALIGNED
        for low in range(0, elements, step):
            high = min(low + step, elements)
            self._sum_piece(totals, owners, merges, roots, low, high, call)
        self._operations.wait_for_all(call)
        return totals[self._rank]

    def _sum_at_home(self, totals: list[Tensor], plan: SumPlan, roots: Mapping[int, Tensor], call: Call) -> Tensor:
        mine = totals[self._rank]
        (root,) = roots.values()
        if root.data_ptr() != mine.data_ptr():
            self._operations.copy(mine, root)
        merges = _by_row(plan, [lane for worker in range(self._size) for lane in plan.roots(worker)])
        self._operations.sum_in_place(totals, merges, call)
        return mine

    def _sum_piece(
        self,
        totals: list[Tensor],
        owners: list[tuple[int, int]],
        merges: Merges,
        roots: Mapping[int, Tensor],
        low: int,
        high: int,
        call: Call,
    ) -> None:
        operations, width, dtype = self._operations, high - low, totals[0].dtype
        begin, end = owner_ranges(width, self._size, ALIGNED)[self._rank]
        for place, root in enumerate(roots.values()):
            room = operations.slot(self._rank, dtype, (place + 1) * width)[place * width :]
            piece = root[low:high]
            operations.copy(room[:begin], piece[:begin])
            operations.copy(room[end:], piece[end:])
        operations.wait_for_all(call)
        if end == begin:
            return
        rows, seen = [], [0] * self._size
        for worker, lane in owners:
            place = seen[worker]
            seen[worker] += 1
            if worker == self._rank:
                rows.append(roots[lane][low + begin : low + end])
            else:
                rows.append(operations.read(worker, dtype, place * width + end)[place * width + begin :])
        self._add([total[low + begin : low + end] for total in totals], rows, merges)

    def _add(self, outs: list[Tensor], rows: list[Tensor], merges: Merges) -> None:
        if rows[0].dtype == torch.float32:
            self._operations.kernels.sum_into(outs, rows, merges)
            return
        total = combined(rows, merges)
        for out in outs:
            out.copy_(total)

    # -- only for the owners of ranges -------------------------------------------------------------------------------

    def scatter(self, owner: int, scatter: Scatter) -> None:
        """Add a bucket up at the owners of its ranges. Roots that are one each belong at home."""
        elements = scatter.ranges[-1][1]
        call = Call(f"bucket {scatter.bucket}", str(scatter.dtype), elements, "scattered")
        totals = self._totals.get((owner, scatter.bucket))
        if totals is not None and scatter.plan.one_each:
            self._scatter_at_home(totals, scatter, call)
        else:
            self._scatter_by_slots(scatter, call)

    def _scatter_at_home(self, totals: list[Tensor], scatter: Scatter, call: Call) -> None:
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

    def _scatter_by_slots(self, scatter: Scatter, call: Call) -> None:
        """A slot has a row for each other worker and each node that the busiest worker sends."""
        sent = scatter.plan.sent
        most = max(map(len, sent))
        rows = max(1, self._size - 1) * most
        fit = self._operations.slot_bytes // (rows * scatter.dtype.itemsize)
        step = fit // ALIGNED * ALIGNED or fit
        start, stop = scatter.ranges[self._rank]
        outs = scatter.outs() if start < stop else {}
        for low in range(0, max(high - low for low, high in scatter.ranges), step):
            self._write_rows(scatter, most, step, low)
            self._operations.wait_for_all(call)
            if start + low < stop:
                self._add_rows(scatter, most, step, low, outs)
        if start < stop:
            scatter.keep(outs)

    def _write_rows(self, scatter: Scatter, most: int, step: int, low: int) -> None:
        for peer, (begin, end) in enumerate(scatter.ranges):
            if peer == self._rank:
                continue
            for place, name in enumerate(scatter.plan.sent[self._rank]):
                piece = scatter.nodes[name][begin + low : min(begin + low + step, end)]
                at = self._row(self._rank, peer, most, place) * step
                self._operations.copy(self._operations.slot(self._rank, scatter.dtype, at + piece.numel())[at:], piece)

    def _add_rows(self, scatter: Scatter, most: int, step: int, low: int, outs: Mapping[int, Tensor]) -> None:
        start, stop = scatter.ranges[self._rank]
        width = min(step, stop - start - low)
        parts = {name: tensor[low : low + width] for name, tensor in scatter.held.items()}
        parts |= {name: node[start + low : start + low + width] for name, node in scatter.nodes.items()}
        for worker, names in enumerate(scatter.plan.sent):
            if worker != self._rank:
                for place, name in enumerate(names):
                    at = self._row(worker, self._rank, most, place) * step
                    parts[name] = self._operations.read(worker, scatter.dtype, at + width)[at:]
        for total in scatter.plan.sums:
            out = outs[total.node][low : low + width]
            if total.merges:
                self._add([out], [parts[part] for part in total.parts], total.merges)
            elif parts[total.node].data_ptr() != out.data_ptr():
                self._operations.copy(out, parts[total.node])

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
