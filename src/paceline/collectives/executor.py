"""The executor: runs any schedule over point-to-point messages, adding what has come while the rest is on its way.

    for each beat:   post its receives, and some of later beats     who finds a receive posted sends at once
                     for each send: finish what it depends on       wait, then add or copy
                                    send

Chunks longer than a segment are cut first, and the segments follow each other through the hops:

    beat            0        1        2        3        4        5         SKEW = 2
    segment 0     hop 0             hop 1             hop 2
    segment 1              hop 0             hop 1             hop 2       while segment 0 is added and sent on,
    segment 2                       hop 0             hop 1                the others are on the wire

Segments never touch each other's elements, so a message waits only for messages of its own segment in earlier hops. The
beat of a message is a pure function of its segment and hop: the same for sender and receiver. A rank works through its
messages beat by beat and waits only for messages of earlier beats, which is why no set of ranks can wait in a circle.

Sums are made in the tensor's own type, which is also what travels: one addition of bf16 or fp16 is done in fp32 and
rounded, as torch does it. Tensors whose device the backend's messages can't take are staged through the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from paceline.collectives.communicator import Communicator, Handle
from paceline.collectives.schedule import How, Ranges, Receive, Schedule, Send

# -- from hops to messages ---------------------------------------------------------------------------------------------


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


# -- memory ------------------------------------------------------------------------------------------------------------


class Scratch:
    """One thread's reusable buffer per dtype and device; what `take` returns is valid until the next `take`.

    A fresh 12 MiB tensor costs more in page faults than in copying.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, like: Tensor, elements: int | None = None) -> Tensor:
        wanted = like.numel() if elements is None else elements
        key = (like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < wanted:
            buffer = self._buffers[key] = torch.empty(wanted, dtype=like.dtype, device=like.device)
        return buffer[:wanted]


# -- running -----------------------------------------------------------------------------------------------------------


# Measured over loopback, 25 MiB on 4 and 8 ranks of 16 cores: with 1 or 2 MiB a tree takes 0.65 of its time uncut, a
# star 0.75, rings as long as uncut; 256 KiB costs 1.4 times as much: a message of gloo's costs 100 µs and more.
SEGMENT_BYTES = 2**20
POSTED_AHEAD = 4  # receives of later beats; more were no faster


def run_schedule(
    comm: Communicator,
    schedule: Schedule,
    tensor: Tensor,
    *,
    tag: int = 0,
    scratch: Scratch | None = None,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Run `schedule` on `tensor`, in place; all ranks call it with the same shape, dtype and tag."""
    if comm.size == 1 or not tensor.numel():
        return
    in_place = tensor.is_contiguous() and comm.sends(tensor.device)
    flat = tensor.view(-1) if in_place else tensor.reshape(-1).to("cpu", copy=True)
    most = max(1, segment_bytes // tensor.element_size())
    plan = pipeline(schedule, comm.rank, comm.size, flat.numel(), most)
    with torch.no_grad():
        _Run(comm, plan, flat, tag, scratch or Scratch(), schedule.name).run()
        if not in_place:
            tensor.copy_(flat.view(tensor.shape))


class _Run:
    """One tensor under way."""

    def __init__(
        self, comm: Communicator, plan: Pipeline, held: Tensor, tag: int, scratch: Scratch, operation: str
    ) -> None:
        self._comm, self._plan, self._held = comm, plan, held
        self._tag, self._operation = tag, operation
        self._handles: dict[int, Handle] = {}  # of messages that were started and not yet waited for
        self._done = [False] * len(plan.messages)
        self._receives = [number for beat in plan.beats for number in beat.receives]
        self._posted = 0
        self._addends: dict[int, Tensor] = {}  # by message; in the order of posting
        slots, width = plan.slots, plan.longest_addend
        memory = scratch.take(held, slots * width + len(plan.parts) * held.numel())
        self._free = list(memory[: slots * width].view(slots, width)) if width else []
        kept = memory[slots * width :].view(len(plan.parts), -1) if plan.parts else memory[:0]
        self._parts: dict[int, Tensor] = dict(zip(plan.parts, kept, strict=True)) | {comm.rank: held}

    def run(self) -> None:
        batched = self._comm.batches(self._held.device)
        started = 0
        for beat in self._plan.beats:
            started += len(beat.receives)
            if batched:
                self._start_together(beat.receives, beat.sends)
                continue
            while self._posted < started:
                self._post(self._receives[self._posted])
            self._post_ahead(started + POSTED_AHEAD)
            for number in beat.sends:
                self._settle_all(number)
                self._send(number)
        for total in self._plan.part_sums:
            for number in total.after:
                self._settle(number)
            self._add_parts(total.low, total.high)
        for number in range(len(self._plan.messages)):
            self._settle(number)

    # -- starting --------------------------------------------------------------------------------------------------

    def _post(self, number: int) -> None:
        target = self._target(number)
        message = self._plan.messages[number]
        self._handles[number] = self._comm.receive(
            target, source=message.peer, tag=self._tag, operation=self._operation
        )
        self._posted += 1

    def _post_ahead(self, until: int) -> None:
        """In order, and only where nothing has to be waited for that is not under way yet."""
        while self._posted < min(until, len(self._receives)):
            number = self._receives[self._posted]
            message = self._plan.messages[number]
            if message.how is How.ADD and not self._free:
                return
            if message.how is How.COPY and not all(self._done[n] or self._is_sending(n) for n in message.after):
                return
            self._post(number)

    def _send(self, number: int) -> None:
        message = self._plan.messages[number]
        self._handles[number] = self._comm.send(
            self._source(message), to=message.peer, tag=self._tag, operation=self._operation
        )

    def _start_together(self, receives: tuple[int, ...], sends: tuple[int, ...]) -> None:
        """For backends whose messages between two ranks run in line: all of a beat as one group."""
        messages = self._plan.messages
        for number in sends:
            self._settle_all(number)
        targets = [(self._target(number), messages[number].peer) for number in receives]
        sources = [(self._source(messages[number]), messages[number].peer) for number in sends]
        handles = self._comm.send_and_receive(sources, targets, operation=self._operation)
        self._handles |= dict(zip((*sends, *receives), handles, strict=True))

    def _target(self, number: int) -> Tensor:
        """Where a message may be written; waits until that is so."""
        message = self._plan.messages[number]
        if message.how is How.KEEP:
            assert message.part is not None
            return self._parts[message.part][message.low : message.high]
        if message.how is How.COPY:
            self._settle_all(number)
            return self._held[message.low : message.high]
        if not self._free:
            self._settle(next(iter(self._addends)))
        self._addends[number] = self._free.pop()
        return self._addends[number][: message.high - message.low]

    def _source(self, message: Message) -> Tensor:
        if message.part is None:
            return self._held[message.low : message.high]
        return self._parts[message.part][message.low : message.high]

    def _is_sending(self, number: int) -> bool:
        return self._plan.messages[number].is_sent and number in self._handles

    # -- finishing -------------------------------------------------------------------------------------------------

    def _settle_all(self, number: int) -> None:
        for earlier in self._plan.messages[number].after:
            self._settle(earlier)

    def _settle(self, number: int) -> None:
        """The message has left, or has come and been added."""
        if self._done[number]:
            return
        self._handles.pop(number).wait()
        message = self._plan.messages[number]
        if message.how is How.ADD:
            self._settle_all(number)
            addend = self._addends.pop(number)
            self._held[message.low : message.high].add_(addend[: message.high - message.low])
            self._free.append(addend)
        self._done[number] = True

    def _add_parts(self, low: int, high: int) -> None:
        """In the order of their names on every rank, so that all get the same bits."""
        total: Tensor | None = None
        own = self._held[low:high]
        for name in sorted(self._parts):
            part = self._parts[name][low:high]
            if total is None:
                total = part
            elif name == self._comm.rank:
                total = torch.add(total, own, out=own)
            else:
                total.add_(part)
