"""A whole all-reduce of fp32 sums in one call into C: many small pieces, which stay in the caches of their cores.

    before meeting k     what others need of piece k ─► my slot      my sums of my part of piece k-1 ─► behind it
    after meeting k      their sums of piece k-1 ─► my tensor        everybody's numbers for my part of piece k ─► sums

The sums are those of `Operations.all_reduce`, whose steps take a dozen calls for a piece and two meetings; here a piece
costs one meeting, and nothing is left to Python but meetings that don't end at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.collectives.shared_memory.kernels import Merges, merge_table
from paceline.collectives.shared_memory.meeting import DONE, Meeting

ALIGNED, ALIGNED_BYTES = 64, 256  # floats, as in kernels.c
# Up to here everybody adds up everything, which costs a meeting less. Two ranks read no more for it, only add more.
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
    """`slots`: 2 sets × size ranks × slot bytes of shared memory. `merges`: the order of additions over ranks."""

    def __init__(self, library: ctypes.CDLL, meeting: Meeting, slots: Tensor, merges: Merges) -> None:
        self._program, self._program_in_place = library.paceline_all_reduce, library.paceline_all_reduce_in_place
        for program in (self._program, self._program_in_place):
            program.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._meeting, self._slots, self._merges = meeting, slots, merges
        _, self._size, self._slot_bytes = slots.shape
        self._whole_bytes = WHOLE_BYTES_OF_TWO if self._size == 2 else WHOLE_BYTES

    def run(self, flat: Tensor, call: bytes, timeout_s: float) -> None:
        """Add up everybody's `flat`: fp32, contiguous, not empty."""
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
        state, about = ctypes.addressof(self._meeting.state), ctypes.addressof(work)
        said = self._meeting.run(lambda patience_ns: program(state, about, patience_ns), call, timeout_s)
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
