"""A worker's items of one step: its lanes one after another, each with its micro-batches in order.

In a short last step all lanes of a worker may be without samples. It then gets a *shadow*: the first micro-batch of the
lowest lane once more, of which loss, gradient and buffers are dropped. Its loop body runs all the same, so that a
collective that the user placed there meets everybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Slot(NamedTuple):
    """One item's place."""

    lane: int
    micro_batch: int
    shadow: bool
    last_of_lane: bool


def slots_of(counts: Mapping[int, int], ride: Sequence[int]) -> list[Slot]:
    """What a worker that rides these lanes does, of `counts` micro-batches per present lane."""
    mine = [
        Slot(lane, number, shadow=False, last_of_lane=number + 1 == counts[lane])
        for lane in ride
        for number in range(counts.get(lane, 0))
    ]
    return mine or [Slot(min(counts), 0, shadow=True, last_of_lane=True)]
