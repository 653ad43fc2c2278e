"""Recursive halving, then doubling: partners at distance 1, 2, 4, …      steps: 2·log2 N   bytes sent: 2·(N-1)/N · Z

    halving    at each distance a worker keeps one half of its range, sends the other half to its partner
               and adds what it receives: after log2 N steps it owns 1/N of the buffer, finished
    doubling   the same partners in reverse order exchange finished ranges

At distance 1 worker 2i adds to worker 2i+1, at distance 2 pairs add to pairs: that *is* the canonical tree, and since
an addition of two numbers commutes, both partners get its bits. Needs N to be a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from paceline.collectives.communicator import Communicator
from paceline.collectives.scratch import Scratch


@dataclass(frozen=True)
class Halving:
    """One step of the first phase: element ranges kept and sent, as (low, high)."""

    partner: int
    keep: tuple[int, int]
    send: tuple[int, int]


def halvings(rank: int, size: int, elements: int, block: int = 64) -> Iterator[Halving]:
    """The schedule; doubling walks it backwards with `keep` and `send` exchanged."""
    low, high = 0, elements
    distance = 1
    while distance < size:
        middle = min(high, low + -(-(high - low) // 2 // block) * block) if high - low > block else high
        lower, upper = (low, middle), (middle, high)
        keep, send = (lower, upper) if rank & distance == 0 else (upper, lower)
        yield Halving(partner=rank ^ distance, keep=keep, send=send)
        low, high = keep
        distance *= 2


def halving_doubling(comm: Communicator, buffer: Tensor, *, tag: int, scratch: Scratch) -> None:
    """All-reduce `buffer` in place, in canonical order."""
    steps = list(halvings(comm.rank, comm.size, buffer.numel()))
    for number, step in enumerate(steps):
        kept = buffer[slice(*step.keep)]
        received = scratch.take(kept)
        incoming = comm.receive(received, source=step.partner, tag=tag + number) if kept.numel() else None
        if step.send[0] < step.send[1]:
            comm.send(buffer[slice(*step.send)], to=step.partner, tag=tag + number).wait()
        if incoming is not None:
            incoming.wait()
            kept.add_(received)
    for number, step in reversed(list(enumerate(steps))):
        finished, missing = buffer[slice(*step.keep)], buffer[slice(*step.send)]
        incoming = comm.receive(missing, source=step.partner, tag=tag + number) if missing.numel() else None
        if finished.numel():
            comm.send(finished, to=step.partner, tag=tag + number).wait()
        if incoming is not None:
            incoming.wait()
