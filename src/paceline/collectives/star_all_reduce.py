"""Star: rank 0 gathers all tensors, adds them in rank order, and sends the sum back.      steps: 2

    1 ─┐     ┌─► 1        bytes    rank 0             others      all ranks together
    2 ─┼─ 0 ─┼─► 2        sent     (N-1)·Z            Z           2·(N-1)·Z
    3 ─┘     └─► 3        received (N-1)·Z            Z           2·(N-1)·Z

In all it moves what the ring moves, but everything passes one node, so its time grows with N. Rank 0 doubles as a
worker here. A dedicated server is a star of N+1 ranks whose rank 0 brings zeros: N·Z each way.

The *canonical* sum takes this way too (`strategy="star"`): rank 0 gets all roots and adds along the canonical tree. A
worker with k roots sends k·Z.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator, Handle, wait_all
from paceline.collectives.executor import Scratch
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


def canonical_star(
    comm: Communicator, plan: SumPlan, roots: Mapping[int, Tensor], out: Tensor, *, tag: int, scratch: Scratch
) -> None:
    """Finish the canonical sum of all workers' roots into `out`, which may be one of the roots. Takes two tags."""
    if not out.numel():
        return
    if not comm.sends(out.device):
        here = {root: tensor.cpu() for root, tensor in roots.items()}
        total = torch.empty_like(out, device="cpu")
        canonical_star(comm, plan, here, total, tag=tag, scratch=scratch)
        out.copy_(total)
    elif comm.rank == CENTRE:
        _sum_at_the_centre(comm, plan, roots, out, tag, scratch)
    else:
        wait_all(_start(comm, tag, sends=[(roots[root], CENTRE) for root in plan.roots(comm.rank)]))
        wait_all(_start(comm, tag + 1, receives=[(out, CENTRE)]))


def _sum_at_the_centre(
    comm: Communicator, plan: SumPlan, roots: Mapping[int, Tensor], out: Tensor, tag: int, scratch: Scratch
) -> None:
    others = [peer for peer in range(comm.size) if peer != CENTRE]
    foreign = [(peer, root) for peer in others for root in plan.roots(peer)]
    rows = scratch.take(out, out.numel() * len(foreign)).view(len(foreign), out.numel())
    wait_all(_start(comm, tag, receives=[(row, peer) for (peer, _), row in zip(foreign, rows, strict=True)]))
    parts = {root: roots[root] for root in plan.roots(CENTRE)}
    parts |= {root: row for (_, root), row in zip(foreign, rows, strict=True)}
    for merge in plan.between_workers:
        parts[merge.left].add_(parts.pop(merge.right))
    (total,) = parts.values()
    if total.data_ptr() != out.data_ptr():
        out.copy_(total)
    wait_all(_start(comm, tag + 1, sends=[(out, peer) for peer in others]))


def _start(
    comm: Communicator,
    tag: int,
    *,
    sends: Sequence[tuple[Tensor, int]] = (),
    receives: Sequence[tuple[Tensor, int]] = (),
) -> list[Handle]:
    tensors = [tensor for tensor, _ in (*sends, *receives)]
    if tensors and comm.batches(tensors[0].device):
        return comm.send_and_receive(sends, receives, operation=STAR.name)
    handles: list[Handle] = [comm.receive(t, source=peer, tag=tag, operation=STAR.name) for t, peer in receives]
    handles += [comm.send(t, to=peer, tag=tag, operation=STAR.name) for t, peer in sends]
    return handles
