"""Star: rank 0 gathers all tensors, adds them in rank order, and sends the sum back.      steps: 2

    1 ─┐     ┌─► 1        bytes    rank 0             others      all ranks together
    2 ─┼─ 0 ─┼─► 2        sent     (N-1)·Z            Z           2·(N-1)·Z
    3 ─┘     └─► 3        received (N-1)·Z            Z           2·(N-1)·Z

In all it moves what the ring moves, but everything passes one node, so its time grows with N. Rank 0 doubles as a
worker here. A dedicated server is a star of N+1 ranks whose rank 0 brings zeros: N·Z each way.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives.schedule import Hop, How, Receive, Schedule, Send, one, whole_tensor

CENTRE = 0


def hops(rank: int, size: int) -> Iterator[Hop]:
    others = [peer for peer in range(size) if peer != CENTRE]
    whole = one(0)
    if rank == CENTRE:
        yield Hop(receives=tuple(Receive(peer, whole, How.ADD) for peer in others))
        yield Hop(sends=tuple(Send(peer, whole) for peer in others))
    else:
        yield Hop(sends=(Send(CENTRE, whole),))
        yield Hop(receives=(Receive(CENTRE, whole, How.COPY),))


STAR = Schedule("star", chunks=whole_tensor, hops=hops)
