"""Direct all-reduce: every chunk has an owner, who gets all parts of it at once.   steps: 2   bytes sent: 2·(N-1)/N · Z

    scatter    every rank sends each owner its part of the owner's chunk
    finish     the owner adds the N parts
    gather     the owner sends the finished chunk to all

Rank r sends and receives Z + (N-2)·|r| bytes: the ring's bytes in 2 steps of N-1 messages instead of 2·(N-1) of one.

The *canonical* sum between workers takes this way too, and the owner adds along the canonical tree. It works for any
number of workers and of roots, none included: a worker with k roots sends k times as much in the first phase, which is
the price of a number of workers that does not divide the lanes.

Without the gather it is the *canonical reduce-scatter*: owners keep what they finished. (N-1)/N · Z bytes for a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paceline.collectives.canonical_sum import Scatter, SumPlan, owner_ranges
from paceline.collectives.communicator import Communicator, Work, wait_all
from paceline.collectives.executor import Scratch
from paceline.collectives.rounds import Everyone, Round, all_ranks
from paceline.collectives.schedule import Hop, How, Receive, Schedule, Send, one, one_per_rank

CANONICAL = "canonical"
CANONICAL_SCATTER = "canonical reduce-scatter"


def hops(rank: int, size: int) -> Iterator[Hop]:
    others = [peer for peer in range(size) if peer != rank]
    yield Hop(
        sends=tuple(Send(peer, one(peer)) for peer in others),
        receives=tuple(Receive(peer, one(rank), How.ADD) for peer in others),
    )
    yield Hop(
        sends=tuple(Send(peer, one(rank)) for peer in others),
        receives=tuple(Receive(peer, one(peer), How.COPY) for peer in others),
    )


def rounds(size: int) -> Iterator[Round]:
    yield Round(Everyone(all_ranks(size)), times=2)


DIRECT = Schedule("direct", chunks=one_per_rank, hops=hops, rounds=rounds)


def canonical_schedule(plan: SumPlan) -> Schedule:
    """What `direct_all_reduce` below sends, for counting and simulating; `part` is a root. It adds along the tree."""

    def hops(rank: int, size: int) -> Iterator[Hop]:
        others = [peer for peer in range(size) if peer != rank]
        yield Hop(
            sends=tuple(Send(peer, one(peer), part=root) for peer in others for root in plan.roots(rank)),
            receives=tuple(
                Receive(peer, one(rank), How.ADD, part=root) for peer in others for root in plan.roots(peer)
            ),
        )
        yield Hop(
            sends=tuple(Send(peer, one(rank)) for peer in others),
            receives=tuple(Receive(peer, one(peer), How.COPY) for peer in others),
        )

    return Schedule(CANONICAL, chunks=one_per_rank, hops=hops, cut=owner_ranges)


def direct_all_reduce(
    comm: Communicator, plan: SumPlan, roots: Mapping[int, Tensor], out: Tensor, *, tag: int, scratch: Scratch
) -> None:
    """Finish the canonical sum of all workers' roots into `out`, which may be one of the roots. Takes two tags."""
    sum_at_owners(comm, plan, owner_ranges(out.numel(), comm.size), roots, out, CANONICAL, tag=tag, scratch=scratch)


def sum_at_owners(
    comm: Communicator,
    plan: SumPlan,
    ranges: Sequence[tuple[int, int]],
    roots: Mapping[int, Tensor],
    out: Tensor,
    operation: str,
    *,
    tag: int,
    scratch: Scratch,
) -> None:
    """The same with any owners of ranges: a star has one owner of all."""
    own = slice(*ranges[comm.rank])
    width = own.stop - own.start
    others = [(comm.rank + hop) % comm.size for hop in range(1, comm.size)]
    owners = [peer for peer in others if ranges[peer][0] < ranges[peer][1]]
    foreign = [(peer, root) for peer in others for root in plan.roots(peer)] if width else []
    received = scratch.take(out, width * len(foreign)).view(len(foreign), width)
    outgoing, incoming = start_messages(
        comm,
        sends=[(roots[root][slice(*ranges[peer])], peer) for peer in owners for root in plan.roots(comm.rank)],
        receives=[(row, peer) for (peer, _), row in zip(foreign, received, strict=True)],
        tag=tag,
        operation=operation,
    )
    wait_all(incoming)
    if width:
        parts = {root: tensor[own] for root, tensor in roots.items()}
        parts |= {root: row for (_, root), row in zip(foreign, received, strict=True)}
        for merge in plan.between_workers:
            parts[merge.left].add_(parts.pop(merge.right))
        (total,) = parts.values()
        if total.data_ptr() != out[own].data_ptr():
            out[own].copy_(total)
    wait_all(outgoing)
    outgoing, incoming = start_messages(
        comm,
        sends=[(out[own], peer) for peer in others] if width else [],
        receives=[(out[slice(*ranges[peer])], peer) for peer in owners],
        tag=tag + 1,
        operation=operation,
        own=False,
    )
    wait_all([*incoming, *outgoing])


def start_messages(
    comm: Communicator,
    *,
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    tag: int,
    operation: str,
    own: bool = True,
) -> tuple[list[Work], list[Work]]:
    """Handles of the sends, and of the receives; as one group where messages between two ranks run in line.

    `own`: what is received is the sender's alone, so that it is late only by its own doing, or its link's.
    """
    tensors = [tensor for tensor, _ in (*sends, *receives)]
    if tensors and comm.batches(tensors[0].device):
        handles = comm.send_and_receive(sends, receives, operation=operation)
        return handles[: len(sends)], handles[len(sends) :]
    incoming = [comm.receive(t, source=peer, tag=tag, operation=operation) for t, peer in receives]
    for work, (_, peer) in zip(incoming if own else (), receives, strict=False):
        work.source = peer
    outgoing = [comm.send(t, to=peer, tag=tag, operation=operation) for t, peer in sends]
    return outgoing, incoming


def direct_all_reduce_by_collectives(
    comm: Communicator, plan: SumPlan, roots: Mapping[int, Tensor], out: Tensor
) -> None:
    """The same sum for backends whose point-to-point can't take this device's tensors: all-to-all, then all-gather."""
    blocks = -(-out.numel() // comm.size)
    width = -(-blocks // 64) * 64
    mine = list(plan.roots(comm.rank))
    sent = torch.zeros((comm.size, len(mine), width), dtype=out.dtype, device=out.device)
    for peer in range(comm.size):
        low, high = min(peer * width, out.numel()), min((peer + 1) * width, out.numel())
        for row, root in enumerate(mine):
            sent[peer, row, : high - low] = roots[root][low:high]
    per_peer = [len(plan.roots(peer)) for peer in range(comm.size)]
    received = torch.empty(sum(per_peer) * width, dtype=out.dtype, device=out.device)
    comm.all_to_all(
        received, sent.view(-1), [count * width for count in per_peer], [len(mine) * width] * comm.size
    ).wait()
    names = [root for peer in range(comm.size) for root in plan.roots(peer)]
    parts = dict(zip(names, received.view(len(names), width).unbind(0), strict=True))
    for merge in plan.between_workers:
        parts[merge.left].add_(parts.pop(merge.right))
    (total,) = parts.values()
    gathered, handle = comm.all_gather(total)
    handle.wait()
    out.copy_(gathered.view(-1)[: out.numel()])


# -- without the gather ------------------------------------------------------------------------------------------------


def direct_reduce_scatter(comm: Communicator, scatter: Scatter, *, tag: int, scratch: Scratch) -> None:
    """Send the slices of this worker's nodes to their owners, and add up those of the range that it owns itself."""
    start, stop = scatter.ranges[comm.rank]
    others = [(comm.rank + hop) % comm.size for hop in range(1, comm.size)]
    owners = [peer for peer in others if scatter.ranges[peer][0] < scatter.ranges[peer][1]]
    wire = scatter.wire or scatter.dtype
    parting = [scatter.nodes[node].to(wire) for node in scatter.plan.sent[comm.rank]]
    foreign = [(peer, node) for peer in others for node in scatter.plan.sent[peer]] if start < stop else []
    outs = scatter.outs() if start < stop else {}
    like = next(iter(outs.values())) if outs else torch.empty(0)
    received = scratch.take(like.new_empty(0, dtype=wire), (stop - start) * len(foreign)).view(
        len(foreign), stop - start
    )
    outgoing, incoming = start_messages(
        comm,
        sends=[(tensor[slice(*scatter.ranges[peer])], peer) for peer in owners for tensor in parting],
        receives=[(row, peer) for (peer, _), row in zip(foreign, received, strict=True)],
        tag=tag,
        operation=CANONICAL_SCATTER,
    )
    wait_all(incoming)
    if start < stop:
        arrived = {node: row for (_, node), row in zip(foreign, received.to(scatter.dtype), strict=True)}
        scatter.finish(arrived, outs, start, stop)
    wait_all(outgoing)


def direct_reduce_scatter_by_collectives(comm: Communicator, scatter: Scatter, like: Tensor) -> None:
    """The same for devices whose tensors can't be sent one by one: an all-to-all of slices."""
    sent, mine = scatter.plan.sent, scatter.plan.sent[comm.rank]
    widths = [high - low for low, high in scatter.ranges]
    start, stop = scatter.ranges[comm.rank]
    slices = [scatter.nodes[node][low:high] for low, high in scatter.ranges for node in mine]
    wire = scatter.wire or scatter.dtype
    parting = (torch.cat(slices) if slices else like.new_empty(0)).to(wire)
    own = widths[comm.rank]
    arriving = like.new_empty(own * sum(map(len, sent)), dtype=wire)
    comm.all_to_all(
        arriving, parting, [own * len(nodes) for nodes in sent], [width * len(mine) for width in widths]
    ).wait()
    if own:
        names = [node for nodes in sent for node in nodes]
        rows = arriving.to(scatter.dtype).view(-1, own).unbind(0)
        scatter.finish(dict(zip(names, rows, strict=True)), scatter.outs(), start, stop)
