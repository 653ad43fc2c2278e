"""The collectives, on shared memory: write what others need, wait at the barrier, read what is yours.

    round        every rank writes into its own slot ─► barrier ─► every rank reads from any slot

| operation       | rounds | copied in, per rank   | read, per rank                                         |
|-----------------|--------|-----------------------|--------------------------------------------------------|
| all-reduce      | 2      | (N-1)/N · Z           | own part of all N; then the other parts' sums          |
| … up to 32 KiB  | 1      | Z                     | N · Z                                                  |
| reduce-scatter  | 1      | (N-1)/N · Z           | own part of all N                                      |
| all-gather      | 1      | Z                     | N · Z                                                  |
| broadcast       | 1      | Z at the root         | Z                                                      |
| reduce          | 2      | (N-1)/N · Z           | own part of all N; then, at the root, all parts' sums  |
| gather          | 1      | Z                     | N · Z at the root                                      |
| scatter         | 1      | Z at the root         | own part of the root's                                 |
| all-to-all      | 2      | Z                     | own part of all N; the first round is that of lengths  |

There are two sets of slots, taken in turn. A rank that comes to barrier k+1 has read what was written before barrier k,
so two sets are enough, and one barrier per round. Tensors larger than a slot go in pieces. A tensor that lies in shared
memory itself (`Arena`) is not copied at all: the owner of a part adds it up where it lies and writes the sum to every
rank's tensor. Where there is C, an all-reduce of fp32 sums is one call of it (`AllReduceInC`).

Sums run along the canonical tree over ranks, in fp32 for bf16 and fp16. Gradient buckets are added along the canonical
tree over lanes (`BucketSums`).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.collectives.canonical_sum import Scatter, ScatterPlan, SumPlan, owner_ranges, scatter_plan_of_roots
from paceline.collectives.canonical_sum import merges as canonical_merges
from paceline.collectives.shared_memory.barrier import DONE, Barrier, Call
from paceline.collectives.shared_memory.kernels import STREAM_FROM, Kernels, Merges, merge_table
from paceline.collectives.shared_memory.segment import Arenas
from paceline.errors import CollectiveError

ALIGNED = 64  # elements: parts begin on cache lines
SMALL = 32 * 2**10  # bytes
MOST_TOLD = 40  # characters of a table of lengths: all of a call has to fit a rank's line
_HALVES = (torch.bfloat16, torch.float16)


@cache
def rank_merges(size: int) -> tuple[tuple[int, int], ...]:
    return tuple((merge.left, merge.right) for merge in canonical_merges(tuple(range(size))))


class Operations:
    """The collectives of one group, on flat contiguous tensors; calls must come in the same order on every rank."""

    def __init__(self, barrier: Barrier, slots: Tensor, arenas: Arenas, kernels: Kernels, rank: int, size: int) -> None:
        """`slots`: 2 sets × size ranks × slot bytes of shared memory."""
        self._barrier, self._slots, self._arenas, self.kernels = barrier, slots, arenas, kernels
        self._rank, self._size = rank, size
        self.slot_bytes = slots.shape[2]
        self._slot_views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self.timeout_s = 600.0
        self.all_reduce_in_c: AllReduceInC | None = None  # where there is C

    # -- the collectives -----------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        self.wait_for_all(Call("barrier"))

    def all_reduce(self, flat: Tensor, op: ReduceOp.RedOpType) -> None:
        reduction = _reduction("all_reduce", op, flat.dtype)
        call = Call("all_reduce", str(flat.dtype), flat.numel(), reduction)
        place = self._arenas.place_of(flat)
        if place is not None:
            call = Call("all_reduce", str(flat.dtype), flat.numel(), f"{reduction}, shared memory {place}")
            return self._all_reduce_in_place(flat, op, call)
        if self.all_reduce_in_c is not None and op == ReduceOp.SUM and flat.dtype == torch.float32 and flat.numel():
            return self.all_reduce_in_c.run(flat, call.packed(), self.timeout_s)
        if 0 < flat.nbytes <= min(SMALL, self.slot_bytes):
            return self._all_reduce_small(flat, op, call)
        for piece in self._pieces(flat, call):
            parts = owner_ranges(piece.numel(), self._size, ALIGNED)
            self._write_others(piece, parts)
            self.wait_for_all(call)
            low, high = parts[self._rank]
            sums = self.slot(self._rank, piece.dtype, high)[low:high]
            self._reduce([piece[low:high], sums], self._rows(piece, low, high), op)
            self.wait_for_all(call)
            for rank, (begin, end) in enumerate(parts):
                if rank != self._rank and end > begin:
                    self.copy(piece[begin:end], self.read(rank, piece.dtype, end)[begin:end])
        return None

    def all_reduce_sparse(self, tensors: Sequence[Tensor]) -> None:
        """Of embeddings' gradients, say: every rank gathers all ranks' entries and adds them up.

        counts of all ─► indices of all, padded to the longest ─► values likewise ─► one tensor, equal indices added

        Bytes read per rank: N times the longest rank's entries, not the dense size.
        """
        totals = []
        for tensor in tensors:
            mine = tensor.detach().coalesce()
            counts = [int(count) for count in self._gathered(torch.tensor([mine._nnz()]))]
            longest = max(counts)
            indices = self._gathered(_padded(mine.indices().t(), longest))
            values = self._gathered(_padded(mine.values(), longest))
            total = torch.sparse_coo_tensor(
                torch.cat([rows[:count] for rows, count in zip(indices, counts, strict=True)]).t(),
                torch.cat([rows[:count] for rows, count in zip(values, counts, strict=True)]),
                mine.shape,
            )
            totals.append(total.coalesce())
        for tensor, total in zip(tensors, totals, strict=True):  # at the end: one may be in the list twice
            tensor.copy_(total)

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        every = [torch.empty_like(mine) for _ in range(self._size)]
        self.all_gather([rows.view(-1) for rows in every], mine.view(-1))
        return every

    def reduce(self, flat: Tensor, root: int, op: ReduceOp.RedOpType) -> None:
        reduction = _reduction("reduce", op, flat.dtype)
        call = Call("reduce", str(flat.dtype), flat.numel(), f"{reduction} to rank {root}")
        for piece in self._pieces(flat, call):
            parts = owner_ranges(piece.numel(), self._size, ALIGNED)
            self._write_others(piece, parts)
            self.wait_for_all(call)
            low, high = parts[self._rank]
            self._reduce([self.slot(self._rank, piece.dtype, high)[low:high]], self._rows(piece, low, high), op)
            self.wait_for_all(call)
            if self._rank == root:
                for rank, (begin, end) in enumerate(parts):
                    self.copy(piece[begin:end], self.read(rank, piece.dtype, end)[begin:end])

    def reduce_scatter(self, out: Tensor, parts: Sequence[Tensor], op: ReduceOp.RedOpType) -> None:
        """Part r of every rank is added up on rank r; the parts of one rank may be of several lengths."""
        reduction = _reduction("reduce_scatter", op, out.dtype)
        lengths = [part.numel() for part in parts]
        longest = max(lengths)
        call = Call("reduce_scatter", str(out.dtype), longest, reduction)
        if min(lengths) < longest:
            table = ", ".join(map(str, lengths))
            told = table if len(table) < MOST_TOLD else f"table {zlib.crc32(table.encode()):08x}"
            call = Call("reduce_scatter", str(out.dtype), sum(lengths), f"{reduction}, parts {told}")
        for low, high in self._ranges(longest, out.element_size() * self._size, call):
            width = high - low
            for rank, part in enumerate(parts):
                if rank != self._rank:
                    given, at = part[low:high], rank * width
                    self.copy(self.slot(self._rank, out.dtype, at + given.numel())[at:], given)
            self.wait_for_all(call)
            mine = out[low:high]
            begin = self._rank * width
            end = begin + mine.numel()
            rows = [
                parts[rank][low:high] if rank == self._rank else self.read(rank, out.dtype, end)[begin:]
                for rank in range(self._size)
            ]
            self._reduce([mine], rows, op)

    def all_gather(self, outs: Sequence[Tensor], mine: Tensor, call: Call | None = None) -> None:
        call = call or Call("all_gather", str(mine.dtype), mine.numel())
        large = mine.nbytes * self._size >= STREAM_FROM
        for low, high in self._ranges(mine.numel(), mine.element_size(), call):
            self.copy(self.slot(self._rank, mine.dtype, high - low), mine[low:high])
            self.wait_for_all(call)
            for rank, out in enumerate(outs):
                given = mine[low:high] if rank == self._rank else self.read(rank, mine.dtype, high - low)
                if out.data_ptr() != mine.data_ptr():
                    self.copy(out[low:high], given, past_caches=large)

    def broadcast(self, flat: Tensor, root: int) -> None:
        call = Call("broadcast", str(flat.dtype), flat.numel(), f"from rank {root}")
        for low, high in self._ranges(flat.numel(), flat.element_size(), call):
            if self._rank == root:
                self.copy(self.slot(root, flat.dtype, high - low), flat[low:high])
            self.wait_for_all(call)
            if self._rank != root:
                self.copy(flat[low:high], self.read(root, flat.dtype, high - low))

    def gather(self, outs: Sequence[Tensor], mine: Tensor, root: int) -> None:
        call = Call("gather", str(mine.dtype), mine.numel(), f"to rank {root}")
        for low, high in self._ranges(mine.numel(), mine.element_size(), call):
            self.copy(self.slot(self._rank, mine.dtype, high - low), mine[low:high])
            self.wait_for_all(call)
            if self._rank == root:
                for rank, out in enumerate(outs):
                    self.copy(out[low:high], self.read(rank, mine.dtype, high - low))

    def scatter(self, out: Tensor, parts: Sequence[Tensor], root: int) -> None:
        call = Call("scatter", str(out.dtype), out.numel(), f"from rank {root}")
        for low, high in self._ranges(out.numel(), out.element_size() * self._size, call):
            width = high - low
            if self._rank == root:
                room = self.slot(root, out.dtype, self._size * width)
                for rank, part in enumerate(parts):
                    self.copy(room[rank * width : (rank + 1) * width], part[low:high])
            self.wait_for_all(call)
            begin = self._rank * width
            self.copy(out[low:high], self.read(root, out.dtype, begin + width)[begin:])

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Part r goes to rank r; parts may be of any length, so the ranks first tell each other how long theirs are."""
        if len(outs) != self._size or len(parts) != self._size:
            raise CollectiveError(f"all_to_all: {len(outs)} outputs and {len(parts)} inputs for {self._size} ranks")
        if len(dtypes := {tensor.dtype for tensor in (*outs, *parts)}) > 1:
            raise CollectiveError(f"all_to_all of several dtypes: {', '.join(sorted(map(str, dtypes)))}")
        call = Call("all_to_all", str(parts[0].dtype))
        lengths = torch.tensor([[part.numel() for part in parts], [out.numel() for out in outs]])
        table = [torch.empty_like(lengths) for _ in range(self._size)]
        self.all_gather([row.view(-1) for row in table], lengths.view(-1), call)
        sent, expected = torch.stack(table).unbind(1)
        for source, to in (sent != expected.t()).nonzero()[:1].tolist():  # all ranks see it: none goes on alone
            raise CollectiveError(
                f"all_to_all: rank {source} sends {sent[source, to]:,} elements to rank {to}, "
                f"which expects {expected[to, source]:,}"
            )
        most = int(sent.max())
        for low, high in self._ranges(most, parts[0].element_size() * self._size, call):
            width = high - low
            for rank, part in enumerate(parts):
                given = part[low:high]
                self.copy(self.slot(self._rank, part.dtype, rank * width + given.numel())[rank * width :], given)
            self.wait_for_all(call)
            for rank, out in enumerate(outs):
                wanted = out[low:high]
                begin = self._rank * width
                self.copy(wanted, self.read(rank, out.dtype, begin + wanted.numel())[begin:])

    # -- parts -------------------------------------------------------------------------------------------------------

    def _all_reduce_small(self, flat: Tensor, op: ReduceOp.RedOpType, call: Call) -> None:
        """Every rank adds up everything: one barrier less, where barriers cost more than adding."""
        self.copy(self.slot(self._rank, flat.dtype, flat.numel()), flat)
        self.wait_for_all(call)
        self._reduce([flat], [self.read(rank, flat.dtype, flat.numel()) for rank in range(self._size)], op)

    def _all_reduce_in_place(self, flat: Tensor, op: ReduceOp.RedOpType, call: Call) -> None:
        rows = self._arenas.everyones(flat)
        if op == ReduceOp.SUM and flat.dtype == torch.float32:
            return self.sum_in_place(rows, rank_merges(self._size), call)
        self.wait_for_all(call)
        low, high = owner_ranges(flat.numel(), self._size, ALIGNED)[self._rank]
        parts = [row[low:high] for row in rows]
        self._reduce(parts, parts, op)
        return self.wait_for_all(call)

    def sum_in_place(self, rows: Sequence[Tensor], merges: Merges, call: Call) -> None:
        """Of rows in shared memory, one of each rank, every rank adds up its own part and writes the sum to all."""
        if self.all_reduce_in_c is not None and rows[0].dtype == torch.float32:
            return self.all_reduce_in_c.run_in_place(rows, merges, call.packed(), self.timeout_s)
        self.wait_for_all(call)
        low, high = owner_ranges(rows[0].numel(), self._size, ALIGNED)[self._rank]
        if low < high:
            parts = [row[low:high] for row in rows]
            if parts[0].dtype == torch.float32:
                self.kernels.sum_into(parts, parts, merges)
            else:
                total = combined(parts, merges)
                for part in parts:
                    part.copy_(total)
        return self.wait_for_all(call)

    def _write_others(self, piece: Tensor, parts: Sequence[tuple[int, int]]) -> None:
        """What the others add up; this rank's own part is read where it is."""
        room = self.slot(self._rank, piece.dtype, piece.numel())
        low, high = parts[self._rank]
        for begin, end in ((0, low), (high, piece.numel())):
            if end > begin:
                self.copy(room[begin:end], piece[begin:end])

    def _rows(self, piece: Tensor, low: int, high: int) -> list[Tensor]:
        return [
            piece[low:high] if rank == self._rank else self.read(rank, piece.dtype, high)[low:high]
            for rank in range(self._size)
        ]

    def _reduce(self, outs: Sequence[Tensor], rows: Sequence[Tensor], op: ReduceOp.RedOpType) -> None:
        if not rows[0].numel():
            return
        if op == ReduceOp.SUM and rows[0].dtype == torch.float32:
            self.kernels.sum_into(outs, rows, rank_merges(len(rows)))
            return
        total = reduced(rows, op)
        for out in outs:
            out.copy_(total)

    def copy(self, to: Tensor, source: Tensor, *, past_caches: bool = False) -> None:
        if to.numel():
            given = source[: to.numel()] if source.numel() > to.numel() else source
            self.kernels.copy(to, given, past_caches=past_caches)

    def wait_for_all(self, call: Call) -> None:
        self._barrier.wait(call.packed(), self.timeout_s)

    def slot(self, rank: int, dtype: torch.dtype, elements: int) -> Tensor:
        """This rank's slot for the next barrier, or another's."""
        return self._view(self._barrier.count & 1, rank, dtype, elements)

    def read(self, rank: int, dtype: torch.dtype, elements: int) -> Tensor:
        """What `rank` wrote for the barrier that has just been passed."""
        return self._view(self._barrier.count - 1 & 1, rank, dtype, elements)

    def _view(self, which: int, rank: int, dtype: torch.dtype, elements: int) -> Tensor:
        key = (which, rank, dtype)
        view = self._slot_views.get(key)
        if view is None:
            whole = self.slot_bytes // dtype.itemsize * dtype.itemsize
            view = self._slot_views[key] = self._slots[which, rank, :whole].view(dtype)
        return view[:elements]

    def _pieces(self, flat: Tensor, call: Call) -> Iterator[Tensor]:
        for low, high in self._ranges(flat.numel(), flat.element_size(), call):
            yield flat[low:high]

    def _ranges(self, elements: int, bytes_each: int, call: Call) -> Iterator[tuple[int, int]]:
        """Ranges that fit a slot; none for an empty tensor, whose ranks still wait for all and compare."""
        if elements == 0:
            self.wait_for_all(call)
        step = max(1, self.slot_bytes // bytes_each)
        for low in range(0, elements, step):
            yield low, min(low + step, elements)


def _padded(rows: Tensor, length: int) -> Tensor:
    out = rows.new_zeros(length, *rows.shape[1:])
    out[: len(rows)] = rows
    return out


_FUNCTIONS: dict[ReduceOp.RedOpType, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


@cache
def _reduction(operation: str, op: ReduceOp.RedOpType, dtype: torch.dtype) -> str:
    """The reduction's name, if there is such a one for the dtype."""
    name = str(op).rpartition(".")[2].lower()
    if op not in _FUNCTIONS or (op in _BITWISE and (dtype.is_floating_point or dtype.is_complex)):
        raise CollectiveError(f"{operation}: the paceline backend can't reduce {dtype} by {name}")
    return name


def reduced(rows: Sequence[Tensor], op: ReduceOp.RedOpType) -> Tensor:
    """The rows combined along the canonical tree, in any dtype; halves in fp32."""
    function = _FUNCTIONS[op]
    dtype = rows[0].dtype
    wide = [row.float() for row in rows] if dtype in _HALVES else list(rows)
    if dtype == torch.bool:  # gloo counts a bool as a byte and what comes out as true or false
        wide = [row.to(torch.uint8) for row in rows]
    total = combined(wide, rank_merges(len(rows)), function)
    if op == ReduceOp.AVG:
        total = total / len(rows) if total.is_floating_point() or total.is_complex() else total // len(rows)
    return total.to(dtype)


def combined(
    rows: Sequence[Tensor], merges: Merges, function: Callable[[Tensor, Tensor], Tensor] = torch.add
) -> Tensor:
    """The rows combined along `merges`, in memory of their own."""
    sums = dict(enumerate(rows))
    for left, right in merges:
        sums[left] = function(sums[left], sums.pop(right))
    (total,) = sums.values()
    return total


# -- a whole all-reduce in C -------------------------------------------------------------------------------------------


ALIGNED_BYTES = 4 * ALIGNED  # of floats, as in kernels.c
# Up to here every rank adds up everything, which costs a barrier less. Two ranks read no more for it, only add more.
WHOLE_BYTES, WHOLE_BYTES_OF_TWO = 32 * 2**10, 512 * 2**10
PIECE_BYTES = 2**20  # less stays in the cache of the core that wrote it, from where another reads it slowly


class _AllReduce(ctypes.Structure):
    """`struct all_reduce` of kernels.c."""

    _fields_ = (
        ("tensor", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("call", ctypes.c_char_p),
        ("merges", ctypes.c_void_p),
        ("elements", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("begun", ctypes.c_uint64),
        ("merge_count", ctypes.c_int32),
        ("whole", ctypes.c_int32),
    )


class AllReduceInC:
    """All-reduce of fp32 sums in one call into C: many small pieces, which stay in the caches of their cores.

        before barrier k     what others need of piece k ─► my slot      my sums of my part of piece k-1 ─► behind it
        after barrier k      their sums of piece k-1 ─► my tensor        all numbers for my part of piece k ─► sums

    The sums are those of `Operations.all_reduce`, whose steps take a dozen calls for a piece and two barriers; here a
    piece costs one barrier, and nothing is left to Python but barriers that don't end at once.

    `slots`: 2 sets × size ranks × slot bytes of shared memory. `merges`: the order of additions over ranks.
    """

    def __init__(self, library: ctypes.CDLL, barrier: Barrier, slots: Tensor, merges: Merges) -> None:
        self._program, self._program_in_place = library.paceline_all_reduce, library.paceline_all_reduce_in_place
        for program in (self._program, self._program_in_place):
            program.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._barrier, self._slots, self._merges = barrier, slots, merges
        _, self._size, self._slot_bytes = slots.shape
        self._whole_bytes = WHOLE_BYTES_OF_TWO if self._size == 2 else WHOLE_BYTES

    def run(self, flat: Tensor, call: bytes, timeout_s: float) -> None:
        """Add up all ranks' `flat`: fp32, contiguous, not empty."""
        whole = flat.nbytes <= self._whole_bytes
        step = self._step(flat.numel(), whole)
        work = _AllReduce(flat.data_ptr(), self._slots.data_ptr(), call, None, flat.numel(), self._slot_bytes, step)
        work.whole = whole
        self._run(self._program, work, self._merges, call, timeout_s)

    def run_in_place(self, rows: Sequence[Tensor], merges: Merges, call: bytes, timeout_s: float) -> None:
        """Add up all `rows`, one of each rank, which are fp32 and lie in shared memory at equal distances."""
        first = rows[0].data_ptr()
        distance = rows[1].data_ptr() - first if self._size > 1 else 0
        work = _AllReduce(None, first, call, None, rows[0].numel(), distance)
        self._run(self._program_in_place, work, merges, call, timeout_s)

    def _run(self, program: Any, work: _AllReduce, merges: Merges, call: bytes, timeout_s: float) -> None:
        table = merge_table(tuple(merges))
        work.merges, work.merge_count = ctypes.addressof(table), len(merges)
        state, about = ctypes.addressof(self._barrier.state), ctypes.addressof(work)
        said = self._barrier.run(lambda patience_ns: program(state, about, patience_ns), call, timeout_s)
        if said != DONE:
            raise MemoryError("no room for blocks of sums")

    def _step(self, elements: int, whole: bool) -> int:
        """Elements of a piece: equal ones, as few as fit."""
        room = self._slot_bytes // ALIGNED_BYTES
        if not whole:  # the sums of a part lie behind a piece; this leaves enough for the largest part
            room = room * self._size // (self._size + 1)
        most = min(room, PIECE_BYTES // ALIGNED_BYTES) * ALIGNED
        pieces = -(-elements // most)
        return -(-elements // (pieces * ALIGNED)) * ALIGNED


# -- the canonical sum of gradient buckets: exact mode, on any number of workers and roots -----------------------------


class BucketSums:
    """`sum` and `scatter` are collectives of the group; each set of buckets has totals of its own.

    | sum                  | barriers | copied in, per rank   | read, per rank                                 |
    |----------------------|----------|-----------------------|------------------------------------------------|
    | roots in totals      | 2        | nothing               | own range of all N; the sum is written to all N|
    | k roots a worker     | 1 + 1    | k · (N-1)/N · Z       | own range of all roots; written to all N       |

    | scatter              |          |                       |                                                |
    |----------------------|----------|-----------------------|------------------------------------------------|
    | roots in totals      | 1        | nothing               | own range of all N                             |
    | k nodes a worker     | 1        | k · (N-1)/N · Z       | own range of all nodes                         |

    Totals lie in shared memory, one for each bucket and worker, and are that worker's gradients as they stand: nothing
    is copied out. A worker that has one root may make it in its total: then nothing is copied in either. Each total has
    one owner at a time: between the barriers its ranges belong to the workers that write them, and otherwise to the
    worker itself. Roots and nodes that lie elsewhere go through slots, a piece of every range at a time.

    In a scatter only the owner of a range gets its sum, and there is no barrier at the end. A total may still be read
    when the scatter is over, but no worker comes to a later barrier before it has read it: a worker that has passed
    one, such as the step vote's, may write to its total again.
    """

    def __init__(self, operations: Operations, arenas: Arenas, rank: int, size: int) -> None:
        self._operations, self._arenas, self._rank, self._size = operations, arenas, rank, size
        self._totals: dict[tuple[int, int], list[Tensor]] = {}  # by set and bucket: those of all ranks, in order

    def buffer(self, bucket_set: int, bucket: int, elements: int, dtype: torch.dtype) -> Tensor:
        """This worker's total, for its root to be made in. All workers ask for the same ones in the same order."""
        return self._totals_of((bucket_set, bucket), elements, dtype)[self._rank]

    def sum(
        self,
        bucket_set: int,
        bucket: int,
        plan: SumPlan,
        roots: Mapping[int, Tensor],
        elements: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """The sum of all workers' roots (by lane) of one bucket, in this worker's total."""
        totals = self._totals_of((bucket_set, bucket), elements, dtype)
        call = Call(f"bucket {bucket}", str(dtype), elements)
        if all(len(plan.roots(worker)) == 1 for worker in range(self._size)):
            return self._sum_in_totals(totals, plan, roots, call)
        sending = scatter_plan_of_roots(plan)
        (total,) = sending.sums
        ranges = owner_ranges(elements, self._size, ALIGNED)
        start, stop = ranges[self._rank]
        outs = {total.node: [each[start:stop] for each in totals]}
        self._sum_by_slots(sending, ranges, roots, {}, outs, dtype, call)
        self._operations.wait_for_all(call)
        return totals[self._rank]

    def _sum_in_totals(self, totals: list[Tensor], plan: SumPlan, roots: Mapping[int, Tensor], call: Call) -> Tensor:
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

    def scatter(self, bucket_set: int, scatter: Scatter) -> None:
        """Add a bucket up at the owners of its ranges. Roots that are one each belong in their totals."""
        elements = scatter.ranges[-1][1]
        call = Call(f"bucket {scatter.bucket}", str(scatter.dtype), elements, "scattered")
        totals = self._totals.get((bucket_set, scatter.bucket))
        if totals is not None and scatter.plan.one_each:
            self._scatter_in_totals(totals, scatter, call)
        else:
            start, stop = scatter.ranges[self._rank]
            outs = scatter.outs() if start < stop else {}
            where = {node: [out] for node, out in outs.items()}
            self._sum_by_slots(scatter.plan, scatter.ranges, scatter.nodes, scatter.held, where, scatter.dtype, call)
            if start < stop:
                scatter.keep(outs)

    def _scatter_in_totals(self, totals: list[Tensor], scatter: Scatter, call: Call) -> None:
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

    def forget(self, bucket_set: int) -> None:
        """The buckets of that set are cut anew: their totals are not needed any more."""
        for key in [key for key in self._totals if key[0] == bucket_set]:
            self._arenas.release(self._totals.pop(key)[self._rank])

    def _totals_of(self, key: tuple[int, int], elements: int, dtype: torch.dtype) -> list[Tensor]:
        if key not in self._totals:
            self._totals[key] = self._arenas.everyones(self._arenas.allocate(elements, dtype))
        return self._totals[key]


def _by_row(plan: SumPlan, lanes: list[int]) -> Merges:
    """The merges between workers, in rows of the table of all roots."""
    row = {lane: number for number, lane in enumerate(lanes)}
    return tuple((row[merge.left], row[merge.right]) for merge in plan.between_workers)


# -- tensors as operations take them -----------------------------------------------------------------------------------


# Contiguous: a view, written to in place; anything else: a copy, which is copied back at the end. Complex numbers are
# pairs of reals, which can be moved and added as such.


def flat_of(tensor: Tensor) -> Tensor:
    if tensor.is_sparse or tensor.device.type != "cpu":
        raise CollectiveError(f"the paceline backend moves dense CPU tensors, not {tensor.layout} on {tensor.device}")
    flat = tensor.detach().contiguous().view(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


@contextlib.contextmanager
def flat_outs(tensors: Sequence[Tensor], *, filled: bool = False, apart: bool = False) -> Iterator[list[Tensor]]:
    """Flat tensors to write to; those that are not contiguous are copied back at the end, and `apart` all of them."""
    flats = [
        flat_of(tensor if filled or tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype))
        for tensor in tensors
    ]
    if apart:
        flats = [flat.clone() for flat in flats]
    yield flats
    for tensor, flat in zip(tensors, flats, strict=True):
        if apart or not tensor.is_contiguous():
            whole = torch.view_as_complex(flat.view(-1, 2)) if tensor.is_complex() else flat
            tensor.detach().copy_(whole.view(tensor.shape))


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether one of several tensors lies over another: what is done to one would be done to both."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)) for tensor in tensors if tensor.numel())
    return any(begin < end for (_, end), (begin, _) in itertools.pairwise(spans))


def _extent(tensor: Tensor) -> int:
    """Bytes from its first element to behind its last."""
    steps = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
