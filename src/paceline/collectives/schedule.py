"""A schedule: who sends which chunk to whom at which hop. Pure, so that one plan serves executor, chooser and tests.

    ring reduce-scatter, 3 ranks
             hop 0                                        hop 1
    rank 0   sends chunk 2 to 1, adds chunk 1 from 2      sends chunk 1 to 1, adds chunk 0 from 2
    rank 1   sends chunk 0 to 2, adds chunk 2 from 0      sends chunk 2 to 2, adds chunk 1 from 0
    rank 2   sends chunk 1 to 0, adds chunk 0 from 1      sends chunk 0 to 0, adds chunk 2 from 1

A *chunk* is a range of the flat tensor, which is cut into as many as the algorithm wants; |c| is the size of chunk c.
A *hop* is what a rank does at once: what is sent in hop h is received in hop h, so a rank with nothing to do has an
empty hop there. What a hop sends was finished in the hops before it; what it receives is added or copied in the order
in which it is listed, never in the order of arrival, so all runs give the same bits.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.collectives.rounds import Round

Ranges = Sequence[tuple[int, int]]


class How(enum.Enum):
    """What becomes of a chunk that arrives."""

    ADD = "added to what is here"
    COPY = "takes the place of what is here"
    KEEP = "kept apart: after the last hop all parts are added in the order of their names"


@dataclass(frozen=True)
class Send:
    """`part` names a tensor that is sent as its owner had it; None: what is here now."""

    to: int
    chunks: range
    part: int | None = None


@dataclass(frozen=True)
class Receive:
    source: int
    chunks: range
    how: How
    part: int | None = None


@dataclass(frozen=True)
class Hop:
    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()

    def among(self, members: Sequence[int], *, first: int = 0, width: int = 1) -> Hop:
        """The same hop played by `members`, each of its chunks being `width` chunks of a finer cut from `first` on."""

        def finer(chunks: range) -> range:
            return range(first + chunks.start * width, first + chunks.stop * width)

        return Hop(
            sends=tuple(Send(members[send.to], finer(send.chunks), send.part) for send in self.sends),
            receives=tuple(Receive(members[r.source], finer(r.chunks), r.how, r.part) for r in self.receives),
        )


def one(chunk: int) -> range:
    return range(chunk, chunk + 1)


def cut_evenly(elements: int, chunks: int) -> Ranges:
    """Chunk i gets ⌈(elements - i) / chunks⌉ elements: the first ones get what division leaves over."""
    lengths = (-(-(elements - chunk) // chunks) for chunk in range(chunks))
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


@dataclass(frozen=True)
class Schedule:
    """One algorithm: into how many chunks `size` ranks cut a tensor, and the hops of each rank."""

    name: str
    chunks: Callable[[int], int]
    hops: Callable[[int, int], Iterable[Hop]]  # of (rank, size)
    cut: Callable[[int, int], Ranges] = cut_evenly  # of (elements, chunks)
    rounds: Callable[[int], Iterable[Round]] | None = None  # of size: the hops of all ranks at once, as arrays

    def ranges(self, elements: int, size: int) -> Ranges:
        return self.cut(elements, self.chunks(size))

    def most_sent(self, elements: int, size: int) -> int:
        """Elements that the busiest rank sends."""
        lengths = [high - low for low, high in self.ranges(elements, size)]
        return max(
            sum(lengths[chunk] for hop in self.hops(rank, size) for send in hop.sends for chunk in send.chunks)
            for rank in range(size)
        )


def whole_tensor(size: int) -> int:
    """The number of chunks of an algorithm that does not cut."""
    return 1


def one_per_rank(size: int) -> int:
    return size
