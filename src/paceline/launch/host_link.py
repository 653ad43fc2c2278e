"""The connection between two supervisors: JSON lines over TCP, authenticated, and watched for silence.

    host 1                                           host 0 (coordinator)
    supervisor ──── nonce h ───────────────────────▶ supervisor
               ◀─── nonce c, HMAC(secret, "coordinator", h, c)       it knows the secret
               ──── HMAC(secret, "host", h, c) ───────────────────▶  so do we
               ════ every later line carries HMAC(session key, direction, count, line)

Both sides prove the secret without sending it, with messages that can't be reflected, and lines can't be forged,
repeated or reordered afterwards. They can be read: the channel carries keys, steps and error texts, no tensors and no
secret. `Link` is the plain connection, `SealedLink` the authenticated one.

In an elastic job a `Keepalive` sends a ping every second in both directions; too long a silence ends the link:

    coordinator ── ping ─▶ host 1          host 1 is silent: its workers count as dead, the others go on
                ◀─ ping ──                 the coordinator is silent: host 1 stops its own workers

So of two sides that are cut from each other only the one with the coordinator trains on. A check of our own that comes
late (this process was stopped, or starved) proves nothing about the other side, and the deadline is counted anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Callable

from paceline.errors import WorldError
from paceline.launch.control import CLOSE_TIMEOUT_S, Body, decoded, encoded
from paceline.world import unauthenticated
from paceline.world.unauthenticated import PROOF_S

ROOM = 64 * 2**10
"""Bytes that a link with nothing under way keeps for what comes next."""

HOST_LINE_LIMIT = 8 * 2**20
"""Of a line between supervisors that have proved the secret to each other."""

PING_EVERY_S = 1.0


class Link(asyncio.BufferedProtocol):
    """JSON lines in both directions over one TCP connection.

    Until the other side is trusted its lines are short, and it is read into a buffer of that size: a
    connection that is not authenticated takes no more of our memory than that.
    """

    def __init__(self, on_connect: Callable[[Link], None] = lambda link: None) -> None:
        self.local_address = self.remote_address = "an unknown address"
        self._on_connect = on_connect
        self._limit = unauthenticated.LINE_LIMIT
        self._room = bytearray(self._limit)
        self._begin = self._end = 0  # of what was received and not read
        self._paused = False
        self._news, self._lost = asyncio.Event(), asyncio.Event()

    def trust(self, limit: int) -> None:
        """The other side has proved the secret: its lines may be longer."""
        self._limit = limit
        self._make_room()

    def watch_for_silence(self, silent_s: int) -> None:
        """Have the kernel notice a peer that is cut off, whose connection would otherwise look open for hours."""
        connection: socket.socket = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", silent_s // 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_s * 1000)

    def send(self, message: Body) -> None:
        """Queue a message; a peer that has gone is noticed by `receive`, not here."""
        if not self._transport.is_closing():
            self._transport.write(encoded(message))

    async def receive(self) -> Body | None:
        """The next message; None when the other side has gone."""
        while (stop := self._room.find(b"\n", self._begin, self._end)) < 0:
            if self._end - self._begin == self._limit:
                raise WorldError(f"a message of more than {self._limit:,} bytes on the control channel")
            if self._lost.is_set():
                return None
            self._news.clear()
            await self._news.wait()
        line = self._room[self._begin : stop]
        self._begin = stop + 1
        self._make_room()
        return decoded(line)

    def abort(self) -> None:
        """End it at once, without sending what is queued: the other side does not answer."""
        self._transport.abort()

    async def close(self) -> None:
        self._transport.close()
        try:
            await asyncio.wait_for(self._lost.wait(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            self._transport.abort()

    # ---- what the event loop calls ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        here, there = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        if here and there:  # otherwise it was cut off before we looked
            self.local_address, self.remote_address = str(here[0]), str(there[0])
        self._on_connect(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._room)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self._make_room()
        self._news.set()

    def connection_lost(self, exception: Exception | None) -> None:
        self._lost.set()
        self._news.set()

    def _make_room(self) -> None:
        """For more to be received; where there can't be, the other side waits until some was read."""
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._room) > ROOM:
                self._room = bytearray(ROOM)
        if self._end == len(self._room):
            held = self._room[self._begin : self._end]
            size = len(self._room) if self._begin else min(2 * len(self._room), self._limit)
            self._room = held + bytes(size - len(held))  # a new one: the event loop still holds the old
            self._begin, self._end = 0, len(held)
        full = self._end == len(self._room)
        if full != self._paused and not self._transport.is_closing():
            self._paused = full
            (self._transport.pause_reading if full else self._transport.resume_reading)()


class ConnectionClosedError(WorldError):
    """The other side ended the connection during the handshake."""


class SealedLink:
    """A link on which both sides have proved the secret; every line is sealed with the session's key."""

    def __init__(self, link: Link, key: bytes, *, sends_as: str, receives_as: str) -> None:
        self._link = link
        self._key = key
        self._sends_as, self._receives_as = sends_as, receives_as
        self._sent = self._received = 0

    @property
    def local_address(self) -> str:
        return self._link.local_address

    def send(self, message: Body) -> None:
        line = json.dumps(message, separators=(",", ":"))
        self._link.send({"line": line, "seal": _prove(self._key, self._sends_as, str(self._sent), line)})
        self._sent += 1

    async def receive(self) -> Body | None:
        sealed = await self._link.receive()
        if sealed is None:
            return None
        line = _text_field(sealed, "line")
        if not _proved(sealed.get("seal"), self._key, self._receives_as, str(self._received), line):
            raise WorldError("a line between supervisors was forged or repeated on the way; the connection is dropped")
        self._received += 1
        return decoded(line)

    def abort(self) -> None:
        self._link.abort()

    async def close(self) -> None:
        await self._link.close()


async def prove_as_host(link: Link, secret: bytes) -> SealedLink:
    """The joining side of the handshake; `WorldError` when the other side does not know the secret."""
    mine = secrets.token_hex(16)
    link.send({"paceline": 1, "nonce": mine})
    challenge = await _expect(link)
    theirs = _text_field(challenge, "nonce")
    if not _proved(challenge.get("proof"), secret, "coordinator", mine, theirs):
        raise WorldError("the coordinator has another secret than this host; give every host the same --secret-file")
    link.send({"proof": _prove(secret, "host", mine, theirs)})
    answer = await _expect(link)
    if answer.get("welcome") is not True:
        raise WorldError("the coordinator refused this job's secret; give every host the same --secret-file")
    link.trust(HOST_LINE_LIMIT)
    return SealedLink(link, _session(secret, mine, theirs), sends_as="from host", receives_as="from coordinator")


async def prove_as_coordinator(link: Link, secret: bytes) -> SealedLink:
    """The accepting side of the handshake; `WorldError` when the other side does not know the secret."""
    hello = await _expect(link)
    theirs, mine = _text_field(hello, "nonce"), secrets.token_hex(16)
    link.send({"nonce": mine, "proof": _prove(secret, "coordinator", theirs, mine)})
    answer = await _expect(link)
    if not _proved(answer.get("proof"), secret, "host", theirs, mine):
        link.send({"welcome": False})
        raise WorldError("the host does not know this job's secret")
    link.send({"welcome": True})
    link.trust(HOST_LINE_LIMIT)
    return SealedLink(link, _session(secret, theirs, mine), sends_as="from coordinator", receives_as="from host")


async def _expect(link: Link) -> Body:
    message = await asyncio.wait_for(link.receive(), PROOF_S)
    if message is None:
        raise ConnectionClosedError(
            "the other side closed the connection during the handshake; do both know the same secret?"
        )
    return message


def _text_field(message: Body, name: str) -> str:
    text = message.get(name)
    if not isinstance(text, str):
        raise WorldError(f"a message of the handshake has no text {name!r}")
    return text


def _prove(key: bytes, *words: str) -> str:
    return hmac.new(key, json.dumps(words).encode(), hashlib.sha256).hexdigest()


def _proved(proof: object, key: bytes, *words: str) -> bool:
    if not isinstance(proof, str):
        return False
    return hmac.compare_digest(proof.encode(errors="replace"), _prove(key, *words).encode())


def _session(secret: bytes, host_nonce: str, coordinator_nonce: str) -> bytes:
    return bytes.fromhex(_prove(secret, "session", host_nonce, coordinator_nonce))


class Keepalive:
    """Pings the other supervisor and closes the link when nothing has come from it for `timeout_s`."""

    def __init__(self, link: SealedLink, timeout_s: float, clock: Callable[[], float]) -> None:
        self.silence = ""
        """Why the link was closed, once it was."""
        self._link = link
        self._timeout_s = timeout_s
        self._every_s = min(PING_EVERY_S, timeout_s / 4)
        self._clock = clock
        self._heard_at = self._checked_at = clock()

    def heard(self) -> None:
        self._heard_at = self._clock()

    @property
    def is_late(self) -> bool:
        """One or two pings are missing; not enough to give the other side up."""
        return self._clock() - self._heard_at > 1.5 * self._every_s

    def check(self) -> bool:
        """Whether the other side has been silent for too long."""
        now = self._clock()
        late, self._checked_at = now - self._checked_at > self._every_s + 1.0, now
        if late:
            self._heard_at = now
        return now - self._heard_at > self._timeout_s

    async def run(self) -> None:
        """Ping until the other side falls silent; then the link is closed, and its reader sees the end."""
        while not self.check():
            self._link.send({"kind": "ping"})
            await asyncio.sleep(self._every_s)
        self.silence = f"no message came from it for {self._timeout_s:g} s"
        self._link.abort()


class NoKeepalive:
    """Of a job that is not elastic, where the kernel alone notices a host that is cut off."""

    silence = ""
    is_late = False

    def heard(self) -> None:
        pass

    async def run(self) -> None:
        pass
