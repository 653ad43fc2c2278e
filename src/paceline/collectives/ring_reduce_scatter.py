"""Ring reduce-scatter: after N-1 hops, rank r holds the finished chunk r.      steps: N-1   bytes sent: (N-1)/N · Z

    3 ranks      chunk 0     chunk 1     chunk 2          A hop sends one chunk right while receiving one from the left,
    hop 0        1 ─► 2      2 ─► 0      0 ─► 1           and adds what it receives: a chunk starts at its owner's right
    hop 1        2 ─► 0      0 ─► 1      1 ─► 2           neighbour and grows on its way round, until it is home.

Rank r sends every chunk but its own, Z - |r|, and receives every chunk but its left neighbour's, Z - |r-1|. Every rank
does the same, so there is no busiest node; the other chunks are left as partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives.schedule import Hop, How, Receive, Schedule, Send, one, one_per_rank


def hops(rank: int, size: int) -> Iterator[Hop]:
    right, left = (rank + 1) % size, (rank - 1) % size
    for hop in range(size - 1):
        sent, received = (rank - hop - 1) % size, (rank - hop - 2) % size
        yield Hop(sends=(Send(right, one(sent)),), receives=(Receive(left, one(received), How.ADD),))


RING_REDUCE_SCATTER = Schedule("ring-reduce-scatter", chunks=one_per_rank, hops=hops)
