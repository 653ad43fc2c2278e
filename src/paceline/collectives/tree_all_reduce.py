"""Tree all-reduce: neighbours add, then pairs of pairs, up to rank 0; the sum comes down.      steps: 2·⌈log2 N⌉

    0 ◄─ 1    2 ◄─ 3    4        hop 0, distance 1      bytes      rank 0                all ranks together
    0 ◄────── 2         4        hop 1, distance 2      sent       ⌈log2 N⌉ · Z          2·(N-1)·Z
    0 ◄──────────────── 4        hop 2, distance 4      received   ⌈log2 N⌉ · Z          2·(N-1)·Z
    and back in reverse order

A rank with k children sends and receives (k+1)·Z, rank 0 k·Z. Few steps but whole tensors: for small ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives.rounds import Pairs, Round, span
from paceline.collectives.schedule import Hop, How, Receive, Schedule, Send, one, whole_tensor


def reduce_hops(rank: int, size: int) -> Iterator[Hop]:
    """Up to rank 0, in ⌈log2 size⌉ hops."""
    distance = 1
    while distance < size:
        place = rank % (2 * distance)
        if place == distance:
            yield Hop(sends=(Send(rank - distance, one(0)),))
        elif place == 0 and rank + distance < size:
            yield Hop(receives=(Receive(rank + distance, one(0), How.ADD),))
        else:
            yield Hop()
        distance *= 2


def broadcast_hops(rank: int, size: int) -> Iterator[Hop]:
    """Down again: the same messages backwards."""
    for hop in reversed(list(reduce_hops(rank, size))):
        yield Hop(
            sends=tuple(Send(receive.source, receive.chunks) for receive in hop.receives),
            receives=tuple(Receive(send.to, send.chunks, How.COPY) for send in hop.sends),
        )


def hops(rank: int, size: int) -> Iterator[Hop]:
    yield from reduce_hops(rank, size)
    yield from broadcast_hops(rank, size)


def rounds(size: int) -> Iterator[Round]:
    children = [span(1 << level, size, 2 << level) for level in range((size - 1).bit_length())]
    up = [Round(Pairs(ranks, ranks - (1 << level))) for level, ranks in enumerate(children)]
    down = [Round(Pairs(ranks - (1 << level), ranks)) for level, ranks in enumerate(children)]
    yield from [*up, *reversed(down)]


TREE = Schedule("tree", chunks=whole_tensor, hops=hops, rounds=rounds)
