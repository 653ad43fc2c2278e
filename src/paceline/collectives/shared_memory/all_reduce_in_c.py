"""A whole all-reduce of fp32 sums in one call into C: many small pieces, which stay in the caches of their cores.

    before meeting k     what others need of piece k ─► my slot      my sums of my part of piece k-1 ─► behind it
    after meeting k      their sums of piece k-1 ─► my tensor        everybody's numbers for my part of piece k ─► sums

The sums are those of `Operations.all_reduce`, whose steps take a dozen calls for a piece and two meetings; here a piece
costs one meeting, and nothing is left to Python but meetings that don't end at once.
"""

from __future__ import annotations

import ctypes

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
    """`slots`: 2 sets × size ranks × slot bytes. `crowded`: more ranks than cores, so that meetings should be few."""

    def __init__(
        self, library: ctypes.CDLL, meeting: Meeting, slots: Tensor, merges: Merges, *, crowded: bool = False
    ) -> None:
        self._program = library.paceline_all_reduce
        self._program.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._meeting, self._slots = meeting, slots
        self._table, self._merge_count = merge_table(tuple(merges)), len(merges)
        _, self._size, self._slot_bytes = slots.shape
        self._piece_bytes = self._slot_bytes if crowded else PIECE_BYTES
        self._whole_bytes = WHOLE_BYTES_OF_TWO if self._size == 2 else WHOLE_BYTES

    def run(self, flat: Tensor, call: bytes, timeout_s: float) -> None:
        """Add up everybody's `flat`: fp32, contiguous, not empty."""
        whole = flat.nbytes <= self._whole_bytes
        work = _AllReduce(
            flat.data_ptr(),
            self._slots.data_ptr(),
            call,
            ctypes.addressof(self._table),
            flat.numel(),
            self._slot_bytes,
            self._step(flat.numel(), whole),
            0,
            self._merge_count,
            whole,
        )
        state, about = ctypes.addressof(self._meeting.state), ctypes.addressof(work)
        said = self._meeting.run(lambda patience_ns: self._program(state, about, patience_ns), call, timeout_s)
        if said != DONE:
            raise MemoryError("no room for blocks of sums")

    def _step(self, elements: int, whole: bool) -> int:
        """Elements of a piece: equal ones, as few as fit."""
        room = self._slot_bytes // ALIGNED_BYTES
        if not whole:  # the sums of a part lie behind a piece; this leaves enough for the largest part
            room = room * self._size // (self._size + 1)
        most = min(room, self._piece_bytes // ALIGNED_BYTES) * ALIGNED
        pieces = -(-elements // most)
        return -(-elements // (pieces * ALIGNED)) * ALIGNED
