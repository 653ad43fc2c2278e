"""Ring all-gather: rank r begins with chunk r, and N-1 hops later all have all.   steps: N-1   bytes sent: (N-1)/N · Z

    3 ranks      chunk 0     chunk 1     chunk 2
    hop 0        0 ─► 1      1 ─► 2      2 ─► 0           Each rank passes to its right what came from its left.
    hop 1        1 ─► 2      2 ─► 0      0 ─► 1

Rank r sends every chunk but its right neighbour's, Z - |r+1|, and receives every chunk but its own, Z - |r|.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives.schedule import Hop, How, Receive, Schedule, Send, one, one_per_rank


def hops(rank: int, size: int) -> Iterator[Hop]:
    right, left = (rank + 1) % size, (rank - 1) % size
    for hop in range(size - 1):
        sent, received = (rank - hop) % size, (rank - hop - 1) % size
        yield Hop(sends=(Send(right, one(sent)),), receives=(Receive(left, one(received), How.COPY),))


RING_ALL_GATHER = Schedule("ring-all-gather", chunks=one_per_rank, hops=hops)
