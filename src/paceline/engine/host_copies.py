"""Elastic jobs on several hosts: every worker serves its host's vault, and keeps a copy of its part on another host.

    host 0   vault: slots 0 1 │ copies of 4       host 1   vault: slots 2 3 │ copies of 0 1       host 2   …
               0 ─── before each READY, `keep` ──────────────▶ 2
               1 ────────────────────────────────────────────▶ 3

    lost        what is left of it                           what those who are left do
    a worker    its files, served by the others of its host  read them, here or over TCP
    a host      copies=2: its files, on the next host        the same
                copies=1: nothing                            `StateLostError`: all start anew, from a checkpoint

Addresses are those of one generation: workers tell each other theirs whenever they have met. A copy counts only as part
of the state that its writers made together, so one that an older generation left on a third host is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from paceline.elastic.member import Member
from paceline.elastic.peer_copy import PeerServer, RemoteVault, push_copy
from paceline.elastic.peer_wire import new_token
from paceline.elastic.state_number import said
from paceline.elastic.vault import MappedSlot, SlotSource, Vault, VaultState, steps_of
from paceline.errors import GenerationEnded, PeerLostError, StateLostError
from paceline.world.environment import tensor_address
from paceline.world.world import World

Offer = tuple[int, str, str]
"""Host, address and token of a worker's server."""


class HostCopies:
    """`seat` is the place that the launcher gave; `copies` of each part are kept, on so many hosts."""

    def __init__(self, seat: World, vault: Vault, copies: int) -> None:
        self._seat, self._vault, self._copies = seat, vault, copies
        self._token = new_token()
        self._server: PeerServer | None = None
        self._keepers: list[RemoteVault] = []
        self._peers: list[RemoteVault] = []
        self.met = False

    @property
    def count(self) -> int:
        """Of each part, on the hosts that are left."""
        return 1 + len(self._keepers)

    def offer(self) -> Offer:
        """What the others need to know of this worker."""
        if self._server is None:
            self._server = PeerServer(tensor_address(self._seat), self._vault.folder, self._token)
        return self._seat.host_rank, self._server.address, self._token

    def meet(self, offers: Sequence[Offer], member: Member, generation: int) -> None:
        """The workers of a generation, in rank order: from now on it is their vaults that are read and kept in."""
        for peer in {*self._peers, *self._keepers}:
            peer.close()
        assert self._server is not None
        mine, on = self._seat.host_rank, hosts_of([host for host, _, _ in offers])
        place = on[mine].index([address for _, address, _ in offers].index(self._server.address))
        after = sorted(on, key=lambda host: (host <= mine, host))[:-1]  # all others, the next one first
        chosen = {host: on[host][place % len(on[host])] for host in after}
        self._peers = [
            RemoteVault(offers[there][1], offers[there][2], name=f"host {host}") for host, there in chosen.items()
        ]
        self._keepers = self._peers[: self._copies - 1]
        self.met = True
        self._end_with(member, generation)

    def _end_with(self, member: Member, generation: int) -> None:
        """When the workers change nothing is waited for, as in their group."""
        before, peers = member.on_change, self._peers

        def change(why: str) -> None:
            before(why)
            for peer in peers:
                peer.abandon()

        member.on_change = change
        if member.is_newer_than(generation):
            for peer in peers:
                peer.abandon()

    def keep(self, number: int) -> None:
        """A copy of what was just written, on other hosts; they are whole when this returns."""
        for keeper in self._keepers:
            push_copy(self._vault, number, keeper)

    def renew(self, number: int) -> None:
        """The same where hosts have come or gone since it was written."""
        for keeper in self._keepers:
            if number not in keeper.steps_of(self._vault.slot):
                push_copy(self._vault, number, keeper)

    def read(self, number: int, writers: Sequence[int]) -> VaultState:
        """The state that these slots made together, from wherever it is."""
        found = {slot: self._found(number, slot, rank, len(writers)) for rank, slot in enumerate(writers)}
        return VaultState(self._vault.folder, number, found)

    def _found(self, number: int, slot: int, rank: int, size: int) -> SlotSource:
        folder = self._vault.folder
        if number in steps_of(folder, slot) and _is_part(here := MappedSlot(folder, slot, number), rank, size):
            return here
        for peer in self._peers:
            if number in peer.steps_of(slot) and _is_part(there := _There(peer.slot(slot, number)), rank, size):
                return there
        where = f"this host has no copy of it, nor {'have' if len(self._peers) > 1 else 'has'} " + " and ".join(
            peer.name for peer in self._peers
        )
        more = "" if self._copies > 1 else "; --copies 2 keeps every part on a second host"
        raise StateLostError(
            f"worker {slot}'s part of the state of {said(number)} is lost with its host "
            f"({where if self._peers else 'no other is left'}){more}"
        )

    def close(self) -> None:
        for peer in {*self._peers, *self._keepers}:
            peer.close()
        if self._server is not None:
            self._server.close()
            self._server = None


class _There:
    """A part on another host. A strategy may read it as late as in its next step, and with the host its group ends."""

    def __init__(self, source: SlotSource) -> None:
        self._source = source

    def about(self) -> tuple[dict[str, Any], list[Any]]:
        with _ending_group():
            return self._source.about()

    def read_into(self, offset: int, room: memoryview) -> None:
        with _ending_group():
            self._source.read_into(offset, room)


@contextmanager
def _ending_group() -> Iterator[None]:
    try:
        yield
    except PeerLostError as error:
        raise GenerationEnded(str(error)) from error


def _is_part(source: SlotSource, rank: int, size: int) -> bool:
    table, _ = source.about()
    return (table["rank"], table["size"]) == (rank, size)


def hosts_of(hosts: Sequence[int]) -> dict[int, list[int]]:
    """The ranks on each host, which is told by rank."""
    return {host: [rank for rank, on in enumerate(hosts) if on == host] for host in sorted(set(hosts))}


def on_hosts(world: World, hosts: Sequence[int]) -> World:
    """This worker's place on its host and among the hosts that are left; the host of each rank is told."""
    on, mine = hosts_of(hosts), hosts[world.rank]
    here = on[mine]
    return replace(
        world,
        local_rank=here.index(world.rank),
        local_size=len(here),
        host_rank=list(on).index(mine),
        hosts=len(on),
    )
