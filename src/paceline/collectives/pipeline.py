"""From hops to messages: chunks longer than a segment are cut, and the segments follow each other through the hops.

    beat            0        1        2        3        4        5         SKEW = 2
    segment 0     hop 0             hop 1             hop 2
    segment 1              hop 0             hop 1             hop 2       while segment 0 is added and sent on,
    segment 2                       hop 0             hop 1                the others are on the wire

Segments never touch each other's elements, so a message waits only for messages of its own segment in earlier hops. The
beat of a message is a pure function of its segment and hop: the same for sender and receiver. A rank works through its
messages beat by beat and waits only for messages of earlier beats, which is why no set of ranks can wait in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from paceline.collectives.schedule import How, Ranges, Receive, Schedule, Send

# Beats between the hops of one segment. Measured for 25 MiB on 4 ranks of 16 cores: 1, 2 and 4 are alike, all of a hop
# before the next one takes the tree a fifth longer.
SKEW = 2
SLOTS = 8


@dataclass(frozen=True)
class Message:
    """One message of one rank. `after` lists its own earlier messages that use the same elements, by number."""

    beat: int
    peer: int
    low: int
    high: int
    part: int | None
    how: How | None = None  # None: it is sent
    after: tuple[int, ...] = ()

    @property
    def is_sent(self) -> bool:
        return self.how is None


@dataclass(frozen=True)
class PartSum:
    """Elements whose kept parts are added once the messages `after` are done."""

    low: int
    high: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class Beat:
    """Numbers of messages; receives are posted before sends."""

    receives: tuple[int, ...]
    sends: tuple[int, ...]


@dataclass(frozen=True)
class Pipeline:
    """All that one rank does for one tensor, ready to be run again and again."""

    messages: tuple[Message, ...]
    beats: tuple[Beat, ...]
    part_sums: tuple[PartSum, ...]
    parts: tuple[int, ...]  # names of the kept parts
    longest_addend: int  # in elements
    slots: int  # addends that may wait to be added


@lru_cache(maxsize=512)
def pipeline(schedule: Schedule, rank: int, size: int, elements: int, most_per_message: int) -> Pipeline:
    """The messages of `rank`, none of them longer than `most_per_message` elements where chunks had to be cut."""
    ranges = schedule.ranges(elements, size)
    longest = max((high - low for low, high in ranges), default=0)
    segments = max(1, -(-longest // most_per_message))
    hops = list(schedule.hops(rank, size))
    found: list[tuple[tuple[int, int, bool], int, Message]] = []
    for segment in range(segments):
        pieces = [
            (low + (high - low) * segment // segments, low + (high - low) * (segment + 1) // segments)
            for low, high in ranges
        ]
        for number, hop in enumerate(hops):
            beat = segment + SKEW * number
            transfers: list[Send | Receive] = [*hop.receives, *hop.sends]
            for transfer in transfers:
                order = (beat, number, isinstance(transfer, Send))
                found += [(order, segment, message) for message in _messages(transfer, pieces, beat)]
    found.sort(key=lambda entry: entry[0])  # stable: inside a hop messages keep the order of the schedule
    messages = _with_dependencies([(segment, message) for _, segment, message in found], rank)
    return Pipeline(
        messages=messages,
        beats=tuple(_beats(messages)),
        part_sums=tuple(_part_sums(messages)),
        parts=tuple(sorted({m.part for m in messages if m.how is How.KEEP and m.part is not None})),
        slots=_slots(messages),
        longest_addend=max((m.high - m.low for m in messages if m.how is How.ADD), default=0),
    )


def _messages(transfer: Send | Receive, pieces: Ranges, beat: int) -> Iterator[Message]:
    """One per run of neighbouring pieces; an empty piece is no message."""
    peer, how = (transfer.to, None) if isinstance(transfer, Send) else (transfer.source, transfer.how)
    for low, high in _runs(pieces[chunk] for chunk in transfer.chunks):
        yield Message(beat, peer, low, high, transfer.part, how)


def _runs(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for low, high in pieces:
        if runs and runs[-1][1] == low:
            runs[-1] = (runs[-1][0], high)
        else:
            runs.append((low, high))
    return [(low, high) for low, high in runs if low < high]


def _with_dependencies(messages: list[tuple[int, Message]], rank: int) -> tuple[Message, ...]:
    """Of (segment, message). A rank's own part is the tensor itself; other parts have memory of their own."""
    out: list[Message] = []
    users: dict[tuple[int, int | None], list[int]] = {}
    for number, (segment, message) in enumerate(messages):
        here = users.setdefault((segment, None if message.part == rank else message.part), [])
        after = tuple(earlier for earlier in here if _in_order(out[earlier], message))
        out.append(replace(message, after=after))
        here.append(number)
    return tuple(out)


def _in_order(first: Message, second: Message) -> bool:
    """Whether the second must wait for the first: they share elements, and not both only read them."""
    return first.low < second.high and second.low < first.high and not (first.is_sent and second.is_sent)


def _beats(messages: tuple[Message, ...]) -> Iterator[Beat]:
    """The beats in which something happens."""
    by_beat: dict[int, tuple[list[int], list[int]]] = {}
    for number, message in enumerate(messages):
        by_beat.setdefault(message.beat, ([], []))[message.is_sent].append(number)
    for _, (receives, sends) in sorted(by_beat.items()):
        yield Beat(tuple(receives), tuple(sends))


def _slots(messages: tuple[Message, ...]) -> int:
    """At least as many as one beat brings: where a beat's messages start as a group, none can be added before."""
    by_beat = Counter(message.beat for message in messages if message.how is How.ADD)
    return min(by_beat.total(), max(SLOTS, *by_beat.values(), 0))


def _part_sums(messages: tuple[Message, ...]) -> Iterator[PartSum]:
    ranges = sorted({(m.low, m.high) for m in messages if m.how is How.KEEP})
    for low, high in ranges:
        yield PartSum(low, high, tuple(n for n, m in enumerate(messages) if m.low < high and low < m.high))
