"""Spans of memory: which bytes of which memory somebody holds, so that nothing is counted twice.

a tensor        private memory            its whole allocation: that is what it keeps from being freed
                memory that is shared     its own bytes there, named by the file that all workers map
a role          parameters, gradients …   the union of its tensors' spans, less what an earlier role has
a worker        bytes of memory that k workers hold count 1/k for each, as in the kernel's PSS
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

Memory = str  # a mapped file that workers share, or one worker's private memory
Spans = Mapping[Memory, Sequence[tuple[int, int]]]  # by memory: (start, stop), in order and apart from each other


def union(spans: Iterable[tuple[Memory, int, int]]) -> Spans:
    by_memory: dict[Memory, list[tuple[int, int]]] = defaultdict(list)
    for memory, start, stop in sorted(spans):
        known = by_memory[memory]
        if known and start <= known[-1][1]:
            known[-1] = known[-1][0], max(stop, known[-1][1])
        elif start < stop:
            known.append((start, stop))
    return {memory: found for memory, found in by_memory.items() if found}


def without(spans: Spans, others: Spans) -> Spans:
    """What of `spans` is not in `others`."""
    left: list[tuple[Memory, int, int]] = []
    for memory, mine in spans.items():
        for low, stop in mine:
            start = low
            for begin, end in others.get(memory, ()):
                if end <= start or begin >= stop:
                    continue
                left.append((memory, start, begin))
                start = end
            left.append((memory, start, stop))
    return union((memory, start, stop) for memory, start, stop in left if start < stop)


def joined(*many: Spans) -> Spans:
    return union((memory, start, stop) for spans in many for memory, found in spans.items() for start, stop in found)


def size(spans: Spans) -> int:
    return sum(stop - start for found in spans.values() for start, stop in found)


def shares(workers: Sequence[Spans]) -> list[float]:
    """Bytes of each worker; what k of them hold is divided by k."""
    out = [0.0] * len(workers)
    for memory in {memory for spans in workers for memory in spans}:
        edges = sorted({edge for spans in workers for span in spans.get(memory, ()) for edge in span})
        for start, stop in pairwise(edges):
            holders = [place for place, spans in enumerate(workers) if _covers(spans.get(memory, ()), start)]
            for place in holders:
                out[place] += (stop - start) / len(holders)
    return out


def _covers(found: Sequence[tuple[int, int]], byte: int) -> bool:
    return any(start <= byte < stop for start, stop in found)
