"""A worker's items of one step: its lanes one after another, or in rounds that all workers run together.

    five lanes, three workers,       worker 0     worker 1     worker 2
    accumulate 2, a short step
    turn 0                           0a           1a           (2a)           brackets: a *shadow*, which is run
                                     0b           1b           2a             like any other and dropped
    turn 1                           3a           4a           (2a)

Where weights are gathered in forward, every worker has to run forward as often as the others. *Turn* t is the t-th lane
with samples of each worker, and lasts as long as the longest of these. Who has less to do runs shadows first, so that
all lanes of a turn end in the same round: what follows from a lane's end (its gradients leave) happens on all at once.
A shadow repeats a micro-batch that the worker has anyway; who has none takes the first one of the lowest lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Rides = tuple[tuple[int, ...], ...]


class Slot(NamedTuple):
    """One item's place. `last_of_lane` of a shadow: the lanes of others end here, in a turn without one of its own."""

    lane: int
    micro_batch: int
    shadow: bool
    last_of_lane: bool


def slots_of(counts: Mapping[int, int], ride: Sequence[int], rides: Rides | None = None) -> list[Slot]:
    """What a worker that rides these lanes does, of `counts` micro-batches per present lane.

    With the `rides` of all workers it is in rounds. Without, a worker whose lanes are all absent gets one shadow, so
    that its loop body runs as often as a step needs: a collective that the user placed there would otherwise hang.
    """
    if rides is not None:
        return _rounds(counts, ride, rides)
    mine = [slot for lane in ride for slot in _of_lane(lane, counts.get(lane, 0))]
    return mine or [Slot(min(counts), 0, shadow=True, last_of_lane=True)]


def _rounds(counts: Mapping[int, int], ride: Sequence[int], rides: Rides) -> list[Slot]:
    ride, rides = _present(counts, ride), tuple(_present(counts, lanes) for lanes in rides)
    own = [slot for lane in ride for slot in _of_lane(lane, counts.get(lane, 0))]
    coming = [*own, own[-1] if own else Slot(min(counts), 0, shadow=True, last_of_lane=True)]
    done = 0
    slots: list[Slot] = []
    for turn in range(max(map(len, rides))):
        rounds = max(counts[lanes[turn]] for lanes in rides if turn < len(lanes))
        real = counts[ride[turn]] if turn < len(ride) else 0
        for number in range(rounds - real):
            ends = not real and number + 1 == rounds
            slots.append(coming[done]._replace(shadow=True, last_of_lane=ends))
        slots += own[done : done + real]
        done += real
    return slots


def _present(counts: Mapping[int, int], ride: Sequence[int]) -> tuple[int, ...]:
    return tuple(lane for lane in ride if counts.get(lane))


def _of_lane(lane: int, micro_batches: int) -> list[Slot]:
    return [Slot(lane, number, False, number + 1 == micro_batches) for number in range(micro_batches)]
