"""Channels between workers and servers: a header, then at most one tensor, in the order in which they were sent.

    payload lies in                  travels as
    shared memory of the group       its place, in the header's last field: the reader sees it where it lies
    other memory                     a second message
    the same process                 itself (worker 0 that doubles as the server)

`send` starts at once and does not wait; what it gives back is waited for before the payload is written to again. A
payload that was named belongs to its reader until a later message of that reader says that it is done with it: only a
clock that makes the writer wait for such a message lets it live in shared memory.

Every wait ends. c10d's timeout would end that for a peer with nothing to say, so an idle process sends a PING before
it; a peer that is lost fails the one thread that waits for it. In an elastic job the group may be over at any moment:
then every `send` and `receive` says `GenerationEnded`.

Over gloo a channel is read ahead: the receives of the next messages are posted while one is still on its way.

    one by one      ready ► header ► ready ► tensor ► ready ► header ► …     two waits for every key
    ahead           ready × 16 ► headers ► ready × 4 ► tensor tensor …       a wait for every burst of keys

gloo sends a tensor when its reader has signalled that it is ready, and on a slow link that signal waits behind what
goes the other way: at 100 Mbit/s a round of two servers took 1.6 times as long as a ring that moves the same bytes,
and takes 1.16 times as long now.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.collectives.communicator import Communicator, Handle
from paceline.errors import GenerationEnded, PeerLostError
from paceline.parameter_server.wire import FIELDS, Header, Kind, pack, unpack

GONE = (PeerLostError, GenerationEnded)  # no peer is there any more
PINGS_PER_TIMEOUT = 4
LONGEST_SILENCE_S = 30.0
HEADERS, TENSORS = 16, 4  # whose receives may be posted at a time
ABANDONED_S = 2.0  # its waits have ended by then
_PLACE = FIELDS - 1  # the header's spare field: 0, or one more than a number of `Communicator.number_of`

Message = tuple[Header, Tensor | None]


def keepalive_s(timeout_s: float) -> float:
    """How long a process may say nothing to a peer that waits for it."""
    return min(LONGEST_SILENCE_S, timeout_s / PINGS_PER_TIMEOUT)


def listen(
    channel: Channel,
    hear: Callable[[Header, Tensor | None], bool],
    *,
    lost: Callable[[str], None],
    over: Callable[[GenerationEnded], None],
    failed: Callable[[Exception], None],
) -> None:
    """A thread's whole life: `hear` what comes until it says that there is no more, or until one of three ends."""
    try:
        while hear(*channel.receive()):
            pass
    except PeerLostError as error:
        lost(str(error))
    except GenerationEnded as error:
        over(error)
    except Exception as error:
        failed(error)


class Sent:
    """A message under way; it keeps what it carries alive."""

    def __init__(self, works: Sequence[Handle] = (), carried: Tensor | None = None) -> None:
        self._works, self._carried = works, carried
        self._waiting = threading.Lock()

    def wait(self) -> None:
        """Until the payload may be written to, unless it was named: then its reader still looks at it."""
        with self._waiting:
            for work in self._works:
                work.wait()
            self._works, self._carried = (), None


class Channel(Protocol):
    """Both ways between two processes. Any thread may send; one receives."""

    def send(self, header: Header, payload: Tensor | None = None) -> Sent: ...

    def receive(self) -> Message: ...

    def abandon(self, why: str) -> None:
        """The group is over, and so is this: what waits here ends. Any thread may say so, again and again."""
        ...


@dataclass(frozen=True)
class Coming:
    """A message whose header is here."""

    header: Header
    payload: Tensor | None
    under_way: Handle | None  # the payload


class ReadAhead:
    """A thread hears headers and posts the receives of their tensors; the reader waits for the tensors, in that order.

    `post` starts to receive a header and `begin` the tensor of one that has come; nothing follows the `last`.
    """

    def __init__(
        self,
        post: Callable[[], tuple[Tensor, Handle]],
        begin: Callable[[Tensor], Coming],
        last: Callable[[Header], bool],
        *,
        name: str,
        timeout_s: float,
    ) -> None:
        self._post, self._begin, self._last, self._timeout_s = post, begin, last, timeout_s
        self._coming: queue.Queue[Coming | Exception] = queue.Queue(TENSORS - 1)  # one more is with the reader
        # Kept until the group has gone: when receives that gloo knew of were dropped after a loss, the process hung.
        self._posted: deque[tuple[Tensor, Handle]] = deque()
        self._thread = threading.Thread(target=self._hear, name=name, daemon=True)

    def receive(self) -> tuple[Header, Tensor | None]:
        if self._thread.ident is None:
            self._thread.start()
        # The thread waits for a header no longer than the group does, and says so.
        found = self._coming.get(timeout=2 * self._timeout_s)
        if isinstance(found, Exception):
            raise found
        if found.under_way is not None:
            found.under_way.wait()
        return found.header, found.payload

    def abandon(self, why: str) -> None:
        """The group is over: what has come is dropped, so that the thread sees it too, and `receive` raises."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._coming.get_nowait()
        if self._thread.ident is not None:
            self._thread.join(ABANDONED_S)
        with contextlib.suppress(queue.Full):
            self._coming.put_nowait(GenerationEnded(why))

    def _hear(self) -> None:
        try:
            self._posted.extend(self._post() for _ in range(HEADERS))
            while True:
                packed, work = self._posted.popleft()
                work.wait()
                coming = self._begin(packed)
                self._coming.put(coming, timeout=self._timeout_s)
                if self._last(coming.header):
                    return
                self._posted.append(self._post())
        except queue.Full:
            return  # the reader has gone
        except Exception as error:
            with contextlib.suppress(queue.Full):
                self._coming.put(error, timeout=self._timeout_s)


class GroupChannel:
    """Over the messages of a group of all workers and servers."""

    def __init__(
        self,
        comm: Communicator,
        peer: int,
        *,
        named: int,
        outgoing: tuple[int, int],
        incoming: tuple[int, int],
        check: Callable[[Header], object],
        buffers: BufferPool | None = None,
        last: Callable[[Header], bool] | None = None,
        most_under_way: int = 256,
    ) -> None:
        """`peer` is its rank in the group and `named` the one in headers; tags are those of header and payload.

        Payloads are received in memory of `buffers`; `check` has seen their headers by then. A peer that takes nothing
        for so long that more than `most_under_way` messages wait makes `send` wait too. `last` knows the message that
        ends the channel; where there is such, and tensors travel by gloo, it is read ahead.
        """
        self._comm, self._peer, self._named = comm, peer, named
        self._outgoing, self._incoming = outgoing, incoming
        self._check, self._buffers = check, buffers or BufferPool()
        self._sending = threading.Lock()  # a header and its payload go in one breath
        self._under_way: deque[Sent] = deque()  # gloo forgets a message whose work is not kept
        self._most_under_way = most_under_way
        self._ahead: ReadAhead | None = None
        if last is not None and comm.backend == "gloo":
            name = f"paceline-reads-ahead-of-{named}"
            self._ahead = ReadAhead(self._post, self._begin, last, name=name, timeout_s=comm.timeout_s)

    def send(self, header: Header, payload: Tensor | None = None) -> Sent:
        packed, operation = pack(header), header.kind.name.lower()
        place = None if payload is None else self._comm.number_of(payload)
        if place is not None:
            packed[_PLACE] = place + 1
        tag, payload_tag = self._outgoing
        with self._sending:
            while len(self._under_way) >= self._most_under_way:
                self._under_way.popleft().wait()
            works = [self._comm.send(packed, to=self._peer, tag=tag, operation="header")]
            if payload is not None and place is None:
                works.append(self._comm.send(payload, to=self._peer, tag=payload_tag, operation=operation))
            sent = Sent(works, payload)
            self._under_way.append(sent)
        return sent

    def receive(self) -> Message:
        if self._ahead is not None:
            return self._ahead.receive()
        packed, work = self._post()
        work.wait()
        coming = self._begin(packed)
        if coming.under_way is not None:
            coming.under_way.wait()
        return coming.header, coming.payload

    def abandon(self, why: str) -> None:
        """Waits for the group's messages end with the group; here is what waits to be read."""
        if self._ahead is not None:
            self._ahead.abandon(why)

    def _post(self) -> tuple[Tensor, Handle]:
        packed = torch.empty(FIELDS, dtype=torch.int64)
        return packed, self._comm.receive(packed, source=self._peer, tag=self._incoming[0], operation="header")

    def _begin(self, packed: Tensor) -> Coming:
        """A header has come: its payload lies somewhere, or is received from now on."""
        header = unpack(packed, self._named)
        self._check(header)
        if not header.elements:
            return Coming(header, None, None)
        place = int(packed[_PLACE])
        if place:
            return Coming(header, self._comm.there(self._peer, place - 1, header.elements, header.dtype), None)
        payload, operation = self._buffers.take(header), header.kind.name.lower()
        work = self._comm.receive(payload, source=self._peer, tag=self._incoming[1], operation=operation)
        return Coming(header, payload, work)


class _Queue:
    """One way inside a process; once it is over no one reads what is still in it."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._over: str | None = None

    def put(self, message: Message) -> None:
        self._check()
        self._messages.put(message)

    def get(self, timeout_s: float) -> Message:
        self._check()
        message = self._messages.get(timeout=timeout_s)
        self._check()
        assert message is not None
        return message

    def end(self, why: str) -> None:
        self._over = self._over or why
        self._messages.put(None)

    def _check(self) -> None:
        if self._over is not None:
            raise GenerationEnded(self._over)


class LocalChannel:
    """Inside one process."""

    def __init__(self, outgoing: _Queue, incoming: _Queue, *, timeout_s: float, copies_pushes: bool) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._timeout_s, self._copies_pushes = timeout_s, copies_pushes

    def send(self, header: Header, payload: Tensor | None = None) -> Sent:
        if payload is not None and self._copies_pushes and header.kind is Kind.PUSH:
            payload = payload.clone()
        self._outgoing.put((header, payload))
        return Sent()

    def receive(self) -> Message:
        try:
            return self._incoming.get(self._timeout_s)
        except queue.Empty:
            raise PeerLostError(f"no message came for {self._timeout_s:g} s inside worker 0") from None

    def abandon(self, why: str) -> None:
        """Both ends of it, in both directions."""
        self._outgoing.end(why)
        self._incoming.end(why)


def local_channels(*, timeout_s: float, copies_pushes: bool) -> tuple[LocalChannel, LocalChannel]:
    """The worker's and the server's end. Without `copies_pushes` what is pushed must not be written to."""
    there, back = _Queue(), _Queue()
    return (
        LocalChannel(there, back, timeout_s=timeout_s, copies_pushes=copies_pushes),
        LocalChannel(back, there, timeout_s=timeout_s, copies_pushes=copies_pushes),
    )


class BufferPool:
    """Memory for payloads, used again; what was not lent here is left alone (it lies in a peer's memory)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._lent: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by address

    def take(self, header: Header) -> Tensor:
        with self._lock:
            free = self._free.get((header.elements, header.dtype))
            buffer = free.pop() if free else torch.empty(header.elements, dtype=header.dtype)
            self._lent[buffer.data_ptr()] = buffer
        return buffer

    def give_back(self, payload: Tensor) -> None:
        with self._lock:
            buffer = self._lent.pop(payload.data_ptr(), None)
            if buffer is not None:
                self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)


def end_of(why: str) -> str:
    """How a peer was lost, for people: a group counts workers and servers through, and calls all of them workers."""
    reason = why.lower()
    if any(word in reason for word in ("died", "closed", "reset", "broken pipe")):
        return "its process has ended"
    return "it sent nothing in time" if "timed out" in reason or "timeout" in reason else why
