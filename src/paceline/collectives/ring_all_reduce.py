"""Ring all-reduce: reduce-scatter, then all-gather, neighbours only.      steps: 2·(N-1)   bytes sent: 2·(N-1)/N · Z

    reduce-scatter   rank r ends with the sum of chunk r
    all-gather       the sums go round once more

Rank r sends 2Z - |r| - |r+1| bytes and receives 2Z - |r-1| - |r|. However many ranks there are, nobody sends or
receives more than 2Z, and only to and from a neighbour: on links of a given speed the time tends to a constant.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives import ring_all_gather, ring_reduce_scatter
from paceline.collectives.schedule import Hop, Schedule, one_per_rank


def hops(rank: int, size: int) -> Iterator[Hop]:
    yield from ring_reduce_scatter.hops(rank, size)
    yield from ring_all_gather.hops(rank, size)


RING = Schedule("ring", chunks=one_per_rank, hops=hops)
