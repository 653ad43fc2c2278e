"""A link between supervisors that know the same secret.

    host 1                                           host 0 (coordinator)
    supervisor ──── nonce h ───────────────────────▶ supervisor
               ◀─── nonce c, HMAC(secret, "coordinator", h, c)       it knows the secret
               ──── HMAC(secret, "host", h, c) ───────────────────▶  so do we
               ════ every later line carries HMAC(session key, direction, count, line)

Both sides prove the secret without sending it, with words that can't be reflected, and lines can't be forged,
repeated or reordered afterwards. They can be read: the channel carries keys, steps and error texts, no tensors and no
secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets

from paceline.errors import WorldError
from paceline.launch.control_channel import Body, Link, decoded
from paceline.world.unauthenticated import PROOF_S

HOST_LINE_LIMIT = 8 * 2**20
"""Of a line between supervisors that have proved the secret to each other."""


class HungUpError(WorldError):
    """The other side ended the connection during the handshake."""


class SealedLink:
    """A link on which both sides have proved the secret; every line is sealed with the session's key."""

    def __init__(self, link: Link, key: bytes, *, speaks_as: str, hears: str) -> None:
        self._link = link
        self._key = key
        self._speaks_as, self._hears = speaks_as, hears
        self._sent = self._received = 0

    @property
    def local_address(self) -> str:
        return self._link.local_address

    def send(self, message: Body) -> None:
        line = json.dumps(message, separators=(",", ":"))
        self._link.send({"line": line, "seal": _prove(self._key, self._speaks_as, str(self._sent), line)})
        self._sent += 1

    async def receive(self) -> Body | None:
        sealed = await self._link.receive()
        if sealed is None:
            return None
        line = _word(sealed, "line")
        if not _proved(sealed.get("seal"), self._key, self._hears, str(self._received), line):
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
    theirs = _word(challenge, "nonce")
    if not _proved(challenge.get("proof"), secret, "coordinator", mine, theirs):
        raise WorldError("the coordinator has another secret than this host; give every host the same --secret-file")
    link.send({"proof": _prove(secret, "host", mine, theirs)})
    verdict = await _expect(link)
    if verdict.get("welcome") is not True:
        raise WorldError("the coordinator refused this job's secret; give every host the same --secret-file")
    link.trust(HOST_LINE_LIMIT)
    return SealedLink(link, _session(secret, mine, theirs), speaks_as="from host", hears="from coordinator")


async def prove_as_coordinator(link: Link, secret: bytes) -> SealedLink:
    """The accepting side of the handshake; `WorldError` when the other side does not know the secret."""
    hello = await _expect(link)
    theirs, mine = _word(hello, "nonce"), secrets.token_hex(16)
    link.send({"nonce": mine, "proof": _prove(secret, "coordinator", theirs, mine)})
    answer = await _expect(link)
    if not _proved(answer.get("proof"), secret, "host", theirs, mine):
        link.send({"welcome": False})
        raise WorldError("it does not know this job's secret")
    link.send({"welcome": True})
    link.trust(HOST_LINE_LIMIT)
    return SealedLink(link, _session(secret, theirs, mine), speaks_as="from coordinator", hears="from host")


async def _expect(link: Link) -> Body:
    message = await asyncio.wait_for(link.receive(), PROOF_S)
    if message is None:
        raise HungUpError("the other side hung up during the handshake; do both know the same secret?")
    return message


def _word(message: Body, name: str) -> str:
    word = message.get(name)
    if not isinstance(word, str):
        raise WorldError(f"a message without its {name}")
    return word


def _prove(key: bytes, *words: str) -> str:
    return hmac.new(key, json.dumps(words).encode(), hashlib.sha256).hexdigest()


def _proved(proof: object, key: bytes, *words: str) -> bool:
    if not isinstance(proof, str):
        return False
    return hmac.compare_digest(proof.encode(errors="replace"), _prove(key, *words).encode())


def _session(secret: bytes, host_nonce: str, coordinator_nonce: str) -> bytes:
    return bytes.fromhex(_prove(secret, "session", host_nonce, coordinator_nonce))
