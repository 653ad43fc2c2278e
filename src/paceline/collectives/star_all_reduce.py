"""Star: rank 0 gathers all tensors, adds them in rank order, and sends the sum back.      steps: 2

    1 ─┐     ┌─► 1        bytes    rank 0             others      all ranks together
    2 ─┼─ 0 ─┼─► 2        sent     (N-1)·Z            Z           2·(N-1)·Z
    3 ─┘     └─► 3        received (N-1)·Z            Z           2·(N-1)·Z

In all it moves what the ring moves, but everything passes one node, so its time grows with N. Rank 0 doubles as a
worker here. A dedicated server is a star of N+1 ranks whose rank 0 brings zeros: N·Z each way.

The *canonical* sum takes this way too (`strategy="star"`), as the direct algorithm with one owner of all: rank 0 gets
all roots and adds along the canonical tree. A worker with k roots sends k·Z.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.collectives.direct_all_reduce import sum_at_owners
from paceline.collectives.executor import Scratch
from paceline.collectives.rounds import Pairs, Round, span
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


def rounds(size: int) -> Iterator[Round]:
    others = span(1, size)
    centre = others * CENTRE
    yield Round(Pairs(others, centre))
    yield Round(Pairs(centre, others))


STAR = Schedule("star", chunks=whole_tensor, hops=hops, rounds=rounds)


def canonical_star(
    comm: Communicator, plan: SumPlan, roots: Mapping[int, Tensor], out: Tensor, *, tag: int, scratch: Scratch
) -> None:
    """Finish the canonical sum of all workers' roots into `out`, which may be one of the roots. Takes two tags."""
    elements = out.numel()
    if not elements:
        return
    if not comm.sends(out.device):
        here = {root: tensor.cpu() for root, tensor in roots.items()}
        total = torch.empty_like(out, device="cpu")
        canonical_star(comm, plan, here, total, tag=tag, scratch=scratch)
        out.copy_(total)
        return
    ranges = [(0, elements) if rank == CENTRE else (elements, elements) for rank in range(comm.size)]
    sum_at_owners(comm, plan, ranges, roots, out, STAR.name, tag=tag, scratch=scratch)
