"""Ring all-reduce: reduce-scatter, then all-gather, neighbours only.      steps: 2·(N-1)   bytes sent: 2·(N-1)/N · Z

    reduce-scatter   steps: N-1   bytes sent: (N-1)/N · Z
    3 ranks      chunk 0     chunk 1     chunk 2          A hop sends one chunk right while receiving one from the left,
    hop 0        1 ─► 2      2 ─► 0      0 ─► 1           and adds what it receives: a chunk starts at its owner's right
    hop 1        2 ─► 0      0 ─► 1      1 ─► 2           neighbour and grows on its way round, until its owner has it.

    all-gather       steps: N-1   bytes sent: (N-1)/N · Z
    hop 0        0 ─► 1      1 ─► 2      2 ─► 0           Each rank passes to its right what came from its left.
    hop 1        1 ─► 2      2 ─► 0      0 ─► 1

With |r| for the size of chunk r, rank r sends Z - |r| and receives Z - |r-1| in the reduce-scatter, which leaves the
other chunks as partial sums; in the all-gather it sends Z - |r+1| and receives Z - |r|. However many ranks there are,
none sends or receives more than 2Z, and only to and from a neighbour: on links of a given speed the time tends to a
constant, and there is no busiest node.

The *unsplit ring* sends every rank's whole tensor all the way round.      steps: N-1   bytes sent: (N-1) · Z

    hop 0    0 ─(0)─► 1 ─(1)─► 2 ─(2)─► 0        (r): the tensor that rank r began with
    hop 1    0 ─(2)─► 1 ─(0)─► 2 ─(1)─► 0

Half as many steps as the ring of chunks, N/2 times its bytes, and every rank receives (N-1)·Z as well: here to compare.
Each rank sees the tensors in another order. Were they added as they come, the ranks' sums would differ in the last bit
and so would their weights; so they are kept, (N-1)·Z of memory, and added in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives.rounds import Ring, Round, all_ranks
from paceline.collectives.schedule import Hop, How, Receive, Schedule, Send, one, one_per_rank, whole_tensor


def reduce_scatter_hops(rank: int, size: int) -> Iterator[Hop]:
    """After these rank r holds the finished chunk r."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for hop in range(size - 1):
        sent, received = (rank - hop - 1) % size, (rank - hop - 2) % size
        yield Hop(sends=(Send(right, one(sent)),), receives=(Receive(left, one(received), How.ADD),))


def all_gather_hops(rank: int, size: int) -> Iterator[Hop]:
    """Rank r begins with chunk r, and in the end all have all."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for hop in range(size - 1):
        sent, received = (rank - hop) % size, (rank - hop - 1) % size
        yield Hop(sends=(Send(right, one(sent)),), receives=(Receive(left, one(received), How.COPY),))


def hops(rank: int, size: int) -> Iterator[Hop]:
    yield from reduce_scatter_hops(rank, size)
    yield from all_gather_hops(rank, size)


def unsplit_hops(rank: int, size: int) -> Iterator[Hop]:
    whole = one(0)
    right, left = (rank + 1) % size, (rank - 1) % size
    for hop in range(size - 1):
        mine, theirs = (rank - hop) % size, (rank - hop - 1) % size
        yield Hop(sends=(Send(right, whole, part=mine),), receives=(Receive(left, whole, How.KEEP, part=theirs),))


def rounds(size: int) -> Iterator[Round]:
    yield Round(Ring(all_ranks(size)), times=2 * (size - 1))


def half_rounds(size: int) -> Iterator[Round]:
    """Of a reduce-scatter, an all-gather or the unsplit ring."""
    yield Round(Ring(all_ranks(size)), times=size - 1)


RING = Schedule("ring", chunks=one_per_rank, hops=hops, rounds=rounds)
RING_REDUCE_SCATTER = Schedule("ring-reduce-scatter", chunks=one_per_rank, hops=reduce_scatter_hops, rounds=half_rounds)
RING_ALL_GATHER = Schedule("ring-all-gather", chunks=one_per_rank, hops=all_gather_hops, rounds=half_rounds)
UNSPLIT_RING = Schedule("unsplit-ring", chunks=whole_tensor, hops=unsplit_hops, rounds=half_rounds)
