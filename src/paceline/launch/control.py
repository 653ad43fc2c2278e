"""The supervisor's end of the control channel: one Unix socket per host, many workers, one table of keys.

    worker 0 ──┐                                          ┌─ report(rank, kind, body)
    worker 1 ──┼── run folder (0700) / control.sock ──▶ Listener
    worker 2 ──┘                                          └─ answer(rank, kind, body, timeout_s) ──▶ reply
               ◀── push(ranks, kind, body): to the connections of workers that sent `elastic.here`

A report is handled in order and at once. A question may have to wait (for a key that another worker will set), so each
one is a task of its own and the connection goes on being read. The keys live in the coordinator; the
`HostAgent` of another host passes questions on to it.

In an elastic job a rank is a slot, and processes follow each other in it. A connection belongs to the process that
sent hello: when that has died, what may still lie unread in its socket is not taken for messages of the next.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import stat
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import WorldError
from paceline.world import unauthenticated
from paceline.world.control import peer_user

Body = dict[str, Any]

LINE_LIMIT = 64 * 2**20
"""A line longer than this is not one of ours."""

CLOSE_TIMEOUT_S = 1.0

GENERATION_OF_KEY = re.compile(r"elastic/(\d+)/")

MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
"""What reading a message of the wrong form raises; it must not take the connection, and so the worker, with it."""


class Listener(Protocol):
    """What handles the messages of workers: a `Decider`."""

    def report(self, rank: int, kind: str, body: Body) -> None: ...
    async def answer(self, rank: int, kind: str, body: Body, timeout_s: float) -> Body: ...


class ControlServer:
    """Accepts this host's workers and hands their messages to a `Listener`."""

    def __init__(self, path: Path, listener: Listener, warn: Callable[[str], None]) -> None:
        self.path = path
        self.listener = listener
        self.warn = unauthenticated.RateLimitedLog(warn)
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()
        self._retired: set[int] = set()
        self.listening: dict[int, _Connection] = {}
        """By rank: where a worker takes what is pushed."""
        self.heartbeats: dict[int, float] = {}
        """By process id: when the last one came, or the process was started."""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), path=str(self.path))
        self.path.chmod(stat.S_IRUSR | stat.S_IWUSR)

    async def close(self) -> None:
        if self._server is not None:
            await stop_accepting(self._server)
        for connection in self.connections:
            connection.close()
        await self._until_gone(set(self.connections), CLOSE_TIMEOUT_S)
        for connection in self.connections:
            connection.abort()
        await self._until_gone(set(self.connections), CLOSE_TIMEOUT_S)

    def push(self, ranks: Sequence[int], kind: str, body: Body) -> None:
        """Send a message unasked; dropped where the worker does not listen yet, or has ended."""
        line = encoded({"kind": kind, "body": body})
        for rank in ranks:
            if rank in self.listening:
                self.listening[rank].write(line)

    def register(self, pid: int) -> None:
        """A process was started; its number may have belonged to one that was retired."""
        self._retired.discard(pid)
        self.heartbeats[pid] = time.monotonic()

    def retire(self, pid: int) -> None:
        """A process has died, or is about to: none of its messages counts from now on."""
        self._retired.add(pid)
        self.listening = {rank: one for rank, one in self.listening.items() if one.pid != pid}

    def is_retired(self, pid: int) -> bool:
        return pid in self._retired

    def silence_s(self, pid: int) -> float:
        """Since its last heartbeat, or its start."""
        return time.monotonic() - self.heartbeats[pid]

    async def drain(self, pid: int, timeout_s: float) -> None:
        """Wait until all messages of an ended process were read; a child of its own may keep its connections open."""
        await self._until_gone({one for one in self.connections if one.pid == pid}, timeout_s)

    async def _until_gone(self, connections: set[_Connection], timeout_s: float) -> None:
        if connections:
            await asyncio.wait([connection.gone for connection in connections], timeout=timeout_s)


class _Connection(asyncio.Protocol):
    """One worker's; a message is handled where it is read, since all workers wait for the last one's READY."""

    def __init__(self, server: ControlServer) -> None:
        self.pid: int | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server, self._rank = server, 0
        self._begun = bytearray()
        self._questions: set[asyncio.Task[None]] = set()

    # ---- what the event loop calls ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(self)
        if (user := peer_user(transport.get_extra_info("socket"))) != os.geteuid():
            self._drop(f"it belongs to user {user}, and this job to user {os.geteuid()}")

    def connection_lost(self, exception: Exception | None) -> None:
        for question in self._questions:
            question.cancel()
        self._server.connections.discard(self)
        self.gone.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._begun += data
        if b"\n" not in data and len(self._begun) <= self._limit:
            return
        *lines, rest = self._begun.split(b"\n")
        self._begun = rest
        try:
            for line in lines:
                if self._transport.is_closing():
                    return
                self._refuse_longer(line)
                self._handle(decoded(line))
            self._refuse_longer(rest)
        except WorldError as error:
            self._drop(str(error))

    @property
    def _limit(self) -> int:
        return unauthenticated.LINE_LIMIT if self.pid is None else LINE_LIMIT

    def _refuse_longer(self, line: bytearray) -> None:
        if len(line) > self._limit:
            raise WorldError(f"a message of more than {self._limit:,} bytes on the control channel")

    def _drop(self, why: str) -> None:
        who = "a process" if self.pid is None else f"worker {self._rank}"
        self._server.warn(who, f"paceline: the connection of {who} was dropped: {why}")
        self._begun.clear()
        self.close()

    # ---- messages from the worker -------------------------------------------------------------------------

    def _handle(self, message: Body) -> None:
        if self.pid is None:
            self._identify(message)
        elif self._server.is_retired(self.pid):
            self.close()
        elif "id" in message:
            question = asyncio.create_task(reply(self, message, self._ask))
            self._questions.add(question)
            question.add_done_callback(self._questions.discard)
        else:
            if message.get("kind") == "elastic.here":
                self._server.listening[self._rank] = self
            elif message.get("kind") == "heartbeat":
                self._server.heartbeats[self.pid] = time.monotonic()
            self._report(message)

    def _identify(self, hello: Body) -> None:
        if hello.get("kind") != "hello":
            raise WorldError(f"its first message was {str(hello.get('kind'))[:80]!r} and not 'hello'")
        try:
            rank, pid = int(hello["body"]["rank"]), int(hello["body"]["pid"])
        except MALFORMED as error:
            raise WorldError(f"its hello is malformed: {_error_text(error)}") from error
        if rank < 0:
            raise WorldError(f"its hello is malformed: rank {rank}")
        self._rank, self.pid = rank, pid
        if not self._server.is_retired(self.pid):
            self._report(hello)

    def _report(self, message: Body) -> None:
        try:
            self._server.listener.report(self._rank, message["kind"], message["body"])
        except MALFORMED as error:
            kind = str(message.get("kind"))[:80]
            line = f"paceline: worker {self._rank} sent a malformed message {kind!r}: {str(error)[:200]}"
            self._server.warn(line, line)

    async def _ask(self, kind: str, body: Body, timeout_s: float) -> Body:
        return await self._server.listener.answer(self._rank, kind, body, timeout_s)

    # ---- messages to the worker ---------------------------------------------------------------------------

    def send(self, message: Body) -> None:
        self.write(encoded(message))

    def write(self, line: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(line)

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


async def stop_accepting(server: asyncio.Server) -> None:
    """Close a server; what it accepted just now has become a connection when this returns, and so can be closed too.

    A server that is closed at once loses such a socket: asyncio refuses to make a transport for a closed server.
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening.fileno())
    for _ in range(3):  # turns of the loop that asyncio takes from accepting a socket to `connection_made`
        await asyncio.sleep(0)
    server.close()


def encoded(message: Body) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decoded(line: bytes | bytearray | str) -> Body:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorldError(f"not a control message: {line[:80]!r}") from error
    if not isinstance(message, dict):
        raise WorldError(f"not a control message: {line[:80]!r}")
    return message


class Sender(Protocol):
    def send(self, message: Body) -> None: ...


async def reply(link: Sender, message: Body, ask: Callable[[str, Body, float], Awaitable[Body]]) -> None:
    """Answer one question over the link it came from; an error of ours travels back as its text."""
    number = message["id"] if isinstance(message["id"], int) else None  # anything else could not be sent back for sure
    try:
        timeout_s = float(message["timeout_s"])
        if not math.isfinite(timeout_s):
            raise ValueError(f"a timeout of {timeout_s} s")
        body = await ask(message["kind"], message["body"], timeout_s)
    except WorldError as error:
        link.send({"id": number, "error": str(error)})
    except MALFORMED as error:
        text = f"the question {str(message.get('kind'))[:80]!r} is malformed: {_error_text(error)}"
        link.send({"id": number, "error": text})
    else:
        link.send({"id": number, "body": body})


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


class KeyValueStore:
    """The table behind the store: strings to bytes, with waiting.

    Keys with `elastic/<g>/` in them belong to generation g of an elastic job; when it is over no worker waits for them.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self._oldest = 0  # generation that workers may be in

    def forget_before(self, generation: int) -> None:
        """Keys of older generations are deleted, and a worker that waits for one gets an error at once."""
        self._oldest = generation
        self._values = {key: value for key, value in self._values.items() if not self._is_old(key)}
        self._wake()

    def clear(self) -> None:
        """All workers start anew."""
        self._oldest = 0
        self._values.clear()

    def _is_old(self, key: str) -> bool:
        found = GENERATION_OF_KEY.search(key)
        return found is not None and int(found[1]) < self._oldest

    def _refuse_old(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self._is_old(key):
                raise WorldError(f"key {key!r} is of a generation that is over; generation {self._oldest} has begun")

    async def answer(self, kind: str, body: Body, timeout_s: float, connected: Callable[[], str]) -> Body:
        keys: list[str] = body["keys"]
        values = [b64decode(value) for value in body.get("values", [])]
        match kind:
            case "store.set":
                for key, value in zip(keys, values, strict=True):
                    if not self._is_old(key):  # else set by a worker that does not know yet that its generation is over
                        self._put(key, value)
                return {}
            case "store.get" | "store.wait":
                missing = await self._wait(keys, timeout_s)
                if missing:
                    return {"late": _late(missing, timeout_s, connected())}
                return {} if kind == "store.wait" else {"values": [_pack(self._values[key]) for key in keys]}
            case "store.check":
                self._refuse_old(keys)
                return {"value": all(key in self._values for key in keys)}
            case "store.add":
                total = int(self._values.get(keys[0], b"0")) + int(body["amount"])
                self._put(keys[0], str(total).encode())
                return {"value": total}
            case "store.append":
                self._put(keys[0], self._values.get(keys[0], b"") + values[0])
                return {}
            case "store.compare_set":
                return {"value": _pack(self._compare_set(keys[0], *values))}
            case "store.delete":
                return {"value": self._values.pop(keys[0], None) is not None}
            case "store.count":
                return {"value": len(self._values)}
        raise WorldError(f"the supervisor has no answer to {kind!r}; worker and supervisor are of different versions")

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._wake()

    def _wake(self) -> None:
        self._changed.set()  # wakes all who wait now;
        self._changed = asyncio.Event()  # a later one waits for the next change

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """TCPStore's rule: an absent key matches only an empty expectation, and then `expected` comes back."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._put(key, desired)
            return desired
        return expected if present is None else present

    async def _wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Wait until every key is there; the keys still missing when time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self._refuse_old(keys)
        while missing := [key for key in keys if key not in self._values]:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout=max(0.0, deadline - loop.time()))
            except TimeoutError:
                return missing
            self._refuse_old(keys)
        return []


def _late(missing: Sequence[str], timeout_s: float, connected: str) -> str:
    named = ", ".join(repr(key) for key in missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return f"waited {timeout_s:g} s for key {named}, which no worker has set; {connected}"


def _pack(value: bytes) -> str:
    return b64encode(value).decode()
