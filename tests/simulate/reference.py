"""One collective, message by message, with a queue of events: slow, and simple enough to be believed.

It asks the schedule's own hops rank by rank and the executor's own pipeline for the beats; nothing is shared with
paceline.simulate but the description of the network.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict

from paceline.collectives.executor import SKEW
from paceline.collectives.schedule import Schedule
from paceline.simulate.network import Placed

Message = tuple[int, int, int, float]  # beat, source, target, bytes


def messages_of(schedule: Schedule, size: int, nbytes: float, segment_bytes: float | None) -> list[Message]:
    chunk = nbytes / schedule.chunks(size)
    segments = 1 if segment_bytes is None else max(1, int(-(-chunk // segment_bytes)))
    return [
        (segment + SKEW * number, rank, send.to, len(send.chunks) * chunk / segments)
        for rank in range(size)
        for number, hop in enumerate(schedule.hops(rank, size))
        for send in hop.sends
        for segment in range(segments)
    ]


def path(placed: Placed, source: int, target: int) -> list[tuple[int, int, int]]:
    """(level, link out, link in) of what a message passes."""
    a, b = int(placed.places[source]), int(placed.places[target])
    return [(level, a // below, b // below) for level, below in enumerate(placed.below) if a // below != b // below]


def durations(messages: list[Message], placed: Placed) -> list[tuple[float, float]]:
    """Latency, and what it takes from then on."""
    carried: dict[tuple[int, int, str, int], float] = defaultdict(float)
    ends: Counter[tuple[int, int, str]] = Counter()
    for beat, source, target, nbytes in messages:
        ends[beat, source, "out"] += 1
        ends[beat, target, "in"] += 1
        for level, out, into in path(placed, source, target):
            carried[beat, level, "out", out] += nbytes
            carried[beat, level, "in", into] += nbytes
    found = []
    for beat, source, target, _ in messages:
        passed = path(placed, source, target)
        if not passed:
            found.append((0.0, 0.0))
            continue
        queued = max(
            max(carried[beat, level, "out", out], carried[beat, level, "in", into])
            / (placed.levels[level].bandwidth * placed.network.payload)
            for level, out, into in passed
        )
        top = placed.levels[passed[-1][0]]
        further = max(ends[beat, source, "out"], ends[beat, target, "in"]) - 1
        found.append((top.latency_s, further * top.message_s + queued))
    return found


def run(messages: list[Message], placed: Placed, clocks: list[float], *, cut: bool) -> list[float]:
    """When each rank is done. A rank does its beats in order; each ends with the last event that it waits for."""
    takes = [(latency / (SKEW if cut else 1), comes) for latency, comes in durations(messages, placed)]
    beats = sorted({message[0] for message in messages})
    waits: Counter[tuple[int, int]] = Counter()
    mine: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (beat, source, target, _) in enumerate(messages):
        mine[beat, source].append(number)
        mine[beat, target].append(number)
        waits[beat, source] += 1
        waits[beat, target] += 1
    reached = dict.fromkeys(range(len(clocks)), 0)  # index of the beat that a rank is in
    entered = {(rank, 0): clock for rank, clock in enumerate(clocks)}
    leaves = dict(entered)
    queue: list[tuple[float, int, int, int]] = []  # time, rank, beat's index, message
    here: Counter[int] = Counter()  # ends of a message that have come to its beat

    def enter(rank: int, index: int, clock: float) -> None:
        while index < len(beats) and not waits[beats[index], rank]:
            index += 1
        reached[rank] = index
        entered[rank, index] = leaves[rank, index] = clock
        if index == len(beats):
            return
        for number in mine[beats[index], rank]:
            _, source, target, _ = messages[number]
            if rank == source:  # its link is busy for so long, whenever the other is ready
                heapq.heappush(queue, (clock + takes[number][1], rank, index, number))
            here[number] += 1
            if here[number] == 2:
                latency, comes = takes[number]
                begins = max(entered[source, index] + latency, entered[target, index])
                heapq.heappush(queue, (begins + comes, target, index, number))

    for rank, clock in enumerate(clocks):
        enter(rank, 0, clock)
    while queue:
        clock, rank, index, _ = heapq.heappop(queue)
        beat = beats[index]
        leaves[rank, index] = max(leaves[rank, index], clock)
        waits[beat, rank] -= 1
        if not waits[beat, rank]:
            enter(rank, index + 1, leaves[rank, index])
    assert all(index == len(beats) for index in reached.values()), "some rank waits for ever"
    return [leaves[rank, len(beats)] for rank in range(len(clocks))]
