"""What a coordinator does to the workers of an elastic job, on whichever host they are.

Coordinator ── push, fence, start, empty_vault ──▶ this host's supervisor
            └─ the same as lines ═══ sealed link ═══▶ Member ──▶ that host's supervisor
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from paceline.launch.control_channel import Body, Speaker

Members: TypeAlias = Sequence[tuple[int, int]] | None
"""Slots and their hosts that start together, where these are not all that there are."""


class Hands(Protocol):
    def push(self, ranks: Sequence[int], kind: str, body: Body) -> None:
        """Say something unasked to the workers in these slots."""

    def fence(self, rank: int) -> None:
        """SIGKILL, whatever state it is in; its exit is reported as any other."""

    def start(self, rank: int, incarnation: int, members: Members) -> None:
        """A fresh process in a slot whose last one has ended."""

    def empty_vault(self) -> None:
        """Forget what dead workers left; nobody reads it."""


class FarHands:
    """Those of another host, at the end of a link."""

    def __init__(self, link: Speaker) -> None:
        self._link = link

    def push(self, ranks: Sequence[int], kind: str, body: Body) -> None:
        self._link.send({"kind": "push", "ranks": list(ranks), "what": kind, "body": body})

    def fence(self, rank: int) -> None:
        self._link.send({"kind": "fence", "rank": rank})

    def start(self, rank: int, incarnation: int, members: Members) -> None:
        self._link.send({"kind": "start", "rank": rank, "incarnation": incarnation, "members": members})

    def empty_vault(self) -> None:
        self._link.send({"kind": "empty_vault"})


def lend(hands: Hands | None, message: Body) -> bool:
    """Do what a line of `FarHands` says; False where it is another's."""
    if hands is None or message.get("kind") not in ("push", "fence", "start", "empty_vault"):
        return False
    match message["kind"]:
        case "push":
            hands.push(message["ranks"], message["what"], message["body"])
        case "fence":
            hands.fence(message["rank"])
        case "start":
            members = message["members"]
            among = None if members is None else [(slot, host) for slot, host in members]
            hands.start(message["rank"], message["incarnation"], among)
        case "empty_vault":
            hands.empty_vault()
    return True
