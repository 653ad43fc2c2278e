"""Lane assignment: a job has L lanes for life, shared by the workers that are there.

L = 8, N = 3        neighbouring     worker 0: 0 1          worker 1: 2 3 4        worker 2: 5 6 7
                    strided          worker 0: 0 3 6        worker 1: 1 4 7        worker 2: 2 5

Neighbours merge inside a worker. Where owners sum lanes as they arrive, strided ones arrive next to each other.
"""

from __future__ import annotations

import itertools


def neighbouring_lanes(lanes: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """The lanes of each worker: worker i of N has i·L//N up to (i+1)·L//N."""
    cuts = [worker * lanes // workers for worker in range(workers + 1)]
    return tuple(tuple(range(low, high)) for low, high in itertools.pairwise(cuts))


def strided_lanes(lanes: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Worker i of N has i, i+N, i+2N, …"""
    return tuple(tuple(range(worker, lanes, workers)) for worker in range(workers))


def lanes_of_parts(assignment: tuple[tuple[int, ...], ...], parts: int) -> tuple[tuple[int, ...], ...]:
    """Where `parts` workers share each sample, and each has lanes of its own: from the lanes of the data."""
    return tuple(tuple(lane * parts + part for lane in lanes) for lanes in assignment for part in range(parts))
