"""What readers and servers of vaults say to each other: texts, raw bytes, and the proof that both are of one job.

    text     length (4 bytes) │ JSON object
    bytes    as many as the text before them said

    reader   nonce r                       ───▶   server
             ◀─── nonce s, HMAC(token, "server", r, s)             it knows the token
             HMAC(token, "reader", r, s)   ───▶                    so does the reader

The token comes from the job's store and is never sent. Before the proof nothing is read but a nonce and the proof.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from paceline.world.unauthenticated import PROOF_S

MOST_TEXT = 2**16
CHUNK = 64 * 2**20  # bytes that must move within one timeout
_NONCE, _PROOF = 16, 32


def new_token() -> str:
    """What all servers and readers of a job know."""
    return secrets.token_hex(32)


class Wire:
    """Texts and bytes on a socket that has a timeout."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline: float | None = None
        """For all that is received, however it trickles in; None: each piece has the socket's timeout."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, text: Mapping[str, Any]) -> None:
        encoded = json.dumps(text).encode()
        self.connection.sendall(len(encoded).to_bytes(4, "little") + encoded)

    def hear(self) -> dict[str, Any]:
        length = bytearray(4)
        self.receive(memoryview(length))
        size = int.from_bytes(length, "little")
        if size > MOST_TEXT:
            raise ValueError(f"a text of {size} bytes")
        text = bytearray(size)
        self.receive(memoryview(text))
        try:
            found = json.loads(text)
        except RecursionError as error:
            raise ValueError("a text that is nested too deeply") from error
        if not isinstance(found, dict):
            raise ValueError("a text that is no request and no answer")
        return found

    def send(self, data: memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            self.connection.sendall(data[start : start + CHUNK])

    def receive(self, room: memoryview) -> None:
        while room:
            if self.deadline is not None:
                self.connection.settimeout(max(1e-3, self.deadline - time.monotonic()))
            got = self.connection.recv_into(room)
            if not got:
                raise EOFError("the connection ended")
            room = room[got:]


def _proof(token: str, who: str, reader: bytes, server: bytes) -> bytes:
    return hmac.new(token.encode(), who.encode() + reader + server, hashlib.sha256).digest()


def proved_to_server(wire: Wire, token: str) -> bool:
    """The server's side: both know the token."""
    wire.deadline = time.monotonic() + PROOF_S
    told, mine = bytearray(_NONCE), secrets.token_bytes(_NONCE)
    wire.receive(memoryview(told))
    wire.connection.sendall(mine + _proof(token, "server", bytes(told), mine))
    proof = bytearray(_PROOF)
    wire.receive(memoryview(proof))
    wire.deadline = None
    return hmac.compare_digest(bytes(proof), _proof(token, "reader", bytes(told), mine))


def prove_to_server(wire: Wire, token: str) -> None:
    mine, told = secrets.token_bytes(_NONCE), bytearray(_NONCE + _PROOF)
    wire.connection.sendall(mine)
    wire.receive(memoryview(told))
    server, proof = bytes(told[:_NONCE]), bytes(told[_NONCE:])
    if not hmac.compare_digest(proof, _proof(token, "server", mine, server)):
        raise ValueError("it does not know this job's token: another job's server")
    wire.connection.sendall(_proof(token, "reader", mine, server))
