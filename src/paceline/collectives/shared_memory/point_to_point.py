"""Point-to-point queues: a small ring of chunks for each pair of ranks and direction, and a thread that moves them.

    pair (from, to)     written · read · [ tag, bytes of the message, bytes here | data ] × 2

Sends don't wait for their receiver: the thread pushes chunks as room appears, of every pending message in turn, so that
one slow receiver does not hold up the others. A message that was not asked for yet by its tag is put aside.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline.collectives.shared_memory.barrier import LOOK_EVERY_S, Barrier
from paceline.errors import CollectiveError

CHUNK = 64 * 2**10
CHUNKS = 2
_HEAD = struct.Struct("<qqq")  # tag, bytes of the whole message, bytes in this chunk
_CONTROL = 128  # written at 0, read at 64
_CHUNK_BYTES = 64 + CHUNK
CHANNEL_BYTES = _CONTROL + CHUNKS * _CHUNK_BYTES
ANY = -1
_NAP_S, _LONGEST_NAP_S = 20e-6, 500e-6
_IDLE_S, _IDLE_NAP_S = 1.0, 5e-3  # nothing for so long: the next message may find its reader that much later


class Finishing(Protocol):
    """What is told when a message is through: a c10d work."""

    source: int

    def finish(self, error: BaseException | None = None) -> None: ...


@dataclass(eq=False)
class _Sending:
    to: int
    tag: int
    data: Tensor
    work: Finishing
    timeout_s: float
    deadline: float
    sent: int = 0
    began: bool = False


@dataclass(eq=False)
class _Receiving:
    source: int
    tag: int
    into: Tensor
    work: Finishing
    timeout_s: float
    deadline: float


@dataclass
class _Arriving:
    """A message on its way in from one rank."""

    tag: int
    data: Tensor
    filled: int = 0


@dataclass
class _Queues:
    sends: deque[_Sending] = field(default_factory=deque)
    receives: list[_Receiving] = field(default_factory=list)


class PointToPointQueues:
    def __init__(self, channels: Tensor, barrier: Barrier, rank: int, size: int) -> None:
        """`channels`: size × size × CHANNEL_BYTES of shared memory, zeros at first; [from, to]."""
        self._rank, self._size, self._barrier = rank, size, barrier
        self._channels = channels
        self._bytes = [[_view_of(channels[a, b]) for b in range(size)] for a in range(size)]
        self._words = [[channel.cast("I") for channel in row] for row in self._bytes]
        self._pending = _Queues()
        self._here: dict[int, list[_Arriving]] = {source: [] for source in range(size)}
        self._arriving: dict[int, _Arriving] = {}
        self._change = threading.Condition()
        self._closed = self._stopped = False
        self._thread: threading.Thread | None = None

    def send(self, data: Tensor, to: int, tag: int, timeout_s: float, work: Finishing) -> None:
        flat = (
            data.detach().contiguous().view(-1).view(torch.uint8) if data.numel() else torch.empty(0, dtype=torch.uint8)
        )
        self._add(self._pending.sends, _Sending(to, tag, flat, work, timeout_s, time.monotonic() + timeout_s))

    def receive(self, into: Tensor, source: int, tag: int, timeout_s: float, work: Finishing) -> None:
        """`source` may be ANY."""
        self._add(
            self._pending.receives,
            _Receiving(source, tag, into.detach(), work, timeout_s, time.monotonic() + timeout_s),
        )

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()

    def stop(self) -> None:
        """Give up what is under way."""
        self._stopped = True

    def join(self, seconds: float) -> bool:
        """Whether the thread, if there was one, has ended."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _add(self, queue, job) -> None:  # type: ignore[no-untyped-def]
        with self._change:
            if self._closed:
                raise CollectiveError("the group has been shut down")
            queue.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="paceline-point-to-point", daemon=True)
                self._thread.start()
            self._change.notify_all()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        nap, looked = _NAP_S, time.monotonic()
        moved_last = looked
        while True:
            with self._change:
                while not self._closed and not (self._pending.sends or self._pending.receives):
                    self._change.wait()
                    looked = moved_last = time.monotonic()
                sends, receives = list(self._pending.sends), list(self._pending.receives)
                if not sends and not receives:
                    return
            if self._stopped or (self._closed and not sends):
                self._shut_down([*sends, *receives])
                continue
            moved = self._push(sends) | self._pull(receives)
            if moved:
                nap, looked = _NAP_S, time.monotonic()
                moved_last = looked
                continue
            now = time.monotonic()
            if now - looked > LOOK_EVERY_S:
                looked = now
                self._look_at_peers([*sends, *receives], now)
            time.sleep(nap)
            nap = min(_LONGEST_NAP_S if now - moved_last < _IDLE_S else _IDLE_NAP_S, nap * 1.5)

    def _push(self, sends: list[_Sending]) -> bool:
        moved = False
        first: set[int] = set()
        for job in sends:
            if job.to in first:
                continue  # an earlier message to the same rank is not through yet
            first.add(job.to)
            words, channel = self._words[self._rank][job.to], self._bytes[self._rank][job.to]
            while not job.began or job.sent < job.data.numel():
                written = words[0]
                if (written - words[16]) & 0xFFFF_FFFF >= CHUNKS:
                    break
                begin = _CONTROL + written % CHUNKS * _CHUNK_BYTES
                part = job.data[job.sent : job.sent + CHUNK]
                _HEAD.pack_into(channel, begin, job.tag, job.data.numel(), part.numel())
                if part.numel():
                    there = self._channels[self._rank, job.to, begin + 64 : begin + 64 + part.numel()]
                    there.copy_(part)
                words[0] = (written + 1) & 0xFFFF_FFFF
                job.sent += part.numel()
                job.began = moved = True
            if job.began and job.sent == job.data.numel():
                self._done(job)
        return moved

    def _pull(self, receives: list[_Receiving]) -> bool:
        sources = {job.source for job in receives}
        moved = False
        for source in range(self._size) if ANY in sources else sources:
            moved |= self._pull_from(source)
        for job in receives:
            moved |= self._deliver(job)
        return moved

    def _pull_from(self, source: int) -> bool:
        words, channel = self._words[source][self._rank], self._bytes[source][self._rank]
        moved = False
        while words[0] != words[16]:
            begin = _CONTROL + words[16] % CHUNKS * _CHUNK_BYTES
            tag, total, here = _HEAD.unpack_from(channel, begin)
            message = self._arriving.get(source)
            if message is None:
                message = self._arriving[source] = _Arriving(tag, torch.empty(total, dtype=torch.uint8))
            if here:
                data = self._channels[source, self._rank, begin + 64 : begin + 64 + here]
                message.data[message.filled : message.filled + here].copy_(data)
                message.filled += here
            words[16] = (words[16] + 1) & 0xFFFF_FFFF
            if message.filled == total:
                self._here[source].append(self._arriving.pop(source))
            moved = True
        return moved

    def _deliver(self, job: _Receiving) -> bool:
        for source in range(self._size) if job.source == ANY else [job.source]:
            for number, message in enumerate(self._here[source]):
                if message.tag == job.tag:
                    del self._here[source][number]
                    job.work.source = source
                    if message.data.numel() != job.into.nbytes:
                        problem = CollectiveError(
                            f"rank {source} sent {message.data.numel():,} bytes to rank {self._rank} (tag {job.tag}), "
                            f"which expects {job.into.nbytes:,}"
                        )
                        self._done(job, problem)
                    else:
                        if job.into.numel():
                            job.into.copy_(message.data.view(job.into.dtype).view(job.into.shape))
                        self._done(job)
                    return True
        return False

    def _done(self, job: _Sending | _Receiving, error: BaseException | None = None) -> None:
        with self._change:
            queue = self._pending.sends if isinstance(job, _Sending) else self._pending.receives
            queue.remove(job)  # type: ignore[arg-type]
        job.work.finish(error)

    def _shut_down(self, jobs: list[_Sending | _Receiving]) -> None:
        for job in jobs:
            what = "to take" if isinstance(job, _Sending) else "to send"
            self._done(job, CollectiveError(f"the group was shut down before {_whom(job)} came {what} a message"))

    def _look_at_peers(self, jobs: list[_Sending | _Receiving], now: float) -> None:
        for job in jobs:
            try:
                self._check_peers(job.to if isinstance(job, _Sending) else job.source)
                if now > job.deadline:
                    what = "to take" if isinstance(job, _Sending) else "to send"
                    raise CollectiveError(
                        f"rank {self._rank}: the timeout of {job.timeout_s:g} s ended while it waited for {_whom(job)} "
                        f"{what} a message (tag {job.tag})"
                    )
            except CollectiveError as error:
                self._done(job, error)

    def _check_peers(self, peer: int) -> None:
        """What is wanted from ANY may come from every rank that is left."""
        gone = []
        peers = [peer] if peer != ANY else [rank for rank in range(self._size) if rank != self._rank]
        for rank in peers:
            try:
                if rank != self._rank:
                    self._barrier.check_alive(rank)
            except CollectiveError as error:
                gone.append(error)
        if gone and len(gone) == len(peers):
            raise gone[0]


def _view_of(channel: Tensor) -> memoryview:
    return memoryview(channel.numpy())  # type: ignore[arg-type]


def _whom(job: _Sending | _Receiving) -> str:
    peer = job.to if isinstance(job, _Sending) else job.source
    return "any rank" if peer == ANY else f"rank {peer}"
