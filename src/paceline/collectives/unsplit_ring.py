"""Unsplit ring: every rank's whole tensor travels all the way round.      steps: N-1   bytes sent: (N-1) · Z

    hop 0    0 ─(0)─► 1 ─(1)─► 2 ─(2)─► 0        (r): the tensor that rank r began with
    hop 1    0 ─(2)─► 1 ─(0)─► 2 ─(1)─► 0

Half as many steps as the ring of chunks, N/2 times its bytes, and every rank receives (N-1)·Z as well: here to compare.

Each rank sees the tensors in another order. Were they added as they come, the ranks' sums would differ in the last bit
and so would their weights; so they are kept, (N-1)·Z of memory, and added in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives.schedule import Hop, How, Receive, Schedule, Send, one, whole_tensor


def hops(rank: int, size: int) -> Iterator[Hop]:
    whole = one(0)
    right, left = (rank + 1) % size, (rank - 1) % size
    for hop in range(size - 1):
        mine, theirs = (rank - hop) % size, (rank - hop - 1) % size
        yield Hop(sends=(Send(right, whole, part=mine),), receives=(Receive(left, whole, How.KEEP, part=theirs),))


UNSPLIT_RING = Schedule("unsplit-ring", chunks=whole_tensor, hops=hops)
