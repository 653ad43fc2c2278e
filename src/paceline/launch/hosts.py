"""Several hosts: every supervisor joins the coordinator (host 0), which keeps the keys and makes the decisions.

    host 1                                           host 0 (coordinator)
    supervisor ════ both prove the secret: `sealed_link` ═════ supervisor
               ──── host rank, workers, settings ───▶
               ◀─── first rank, size, settings ─────  once all hosts are there

Ranks follow the host ranks, and hosts may have unequal numbers of workers. Servers run on host 0; their ranks come
after those of all workers. Here is what they tell each other, and the side of the one that joins; the coordinator's
is `door`. In an elastic job a host may join later, or again (`latecomers`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.elastic.decisions import Rules
from paceline.errors import LaunchError, WorldError
from paceline.launch.control_channel import NONSENSE, Body, Link
from paceline.launch.sealed_link import HungUpError, SealedLink, prove_as_host
from paceline.world.unauthenticated import PROOF_S
from paceline.world.world import ControlSocket, Elasticity, LaunchSettings, World

RETRY_EVERY_S = 0.25
CROWDED_S = 30.0
"""A coordinator that ends the connection before we have proved ourselves may be crowded by strangers: we try again."""
LONGEST_ADDRESS = 100
SILENT_PEER_S = 10
"""A host that is cut off without a word is given up after this long."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        host, colon, port = text.rpartition(":")
        try:
            host.encode("idna")  # what the resolver does, whose error nobody expects
            if not colon or not host or not port.isdecimal() or not 0 < int(port[:9]) < 65536:
                raise ValueError
        except ValueError:
            shown = text if len(text) <= LONGEST_ADDRESS else f"{text[:LONGEST_ADDRESS]}…"
            raise LaunchError(f"--coordinator {shown!r} is not ADDRESS:PORT, such as 10.0.0.1:29400") from None
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Seat:
    """What a host is given once all have met: its place and what holds for the whole job."""

    host_rank: int
    hosts: int
    first_rank: int
    workers: int
    size: int
    settings: LaunchSettings
    host_address: str
    master_address: str
    master_port: int
    servers: int = 0
    """Of the whole job."""
    elastic: Rules | None = None
    grows: bool = False
    """Further hosts may come, also where this one is alone yet."""
    late: bool = False
    """The job runs already: whoever decides says which workers start, once this host can start them."""

    @property
    def spans_hosts(self) -> bool:
        return self.hosts > 1 or self.grows

    @property
    def processes(self) -> int:
        """How many this host starts: its workers, and on the first host the servers after them."""
        return self.workers + (self.servers if self.host_rank == 0 else 0)

    def local_rank_of(self, rank: int) -> int:
        """Of one of this host's processes."""
        return rank - self.first_rank if rank < self.size else rank - self.size + self.workers

    def world(self, local_rank: int, control: str, elastic: Elasticity | None = None) -> World:
        """The place of one of this host's processes."""
        is_server = local_rank >= self.workers
        return World(
            rank=(self.size - self.workers if is_server else self.first_rank) + local_rank,
            size=self.size,
            local_rank=local_rank,
            local_size=self.workers,
            host_rank=self.host_rank,
            hosts=self.hosts,
            source="paceline run",
            rendezvous=ControlSocket(control),
            host_address=self.host_address,
            settings=self.settings,
            servers=self.servers,
            elastic=elastic,
        )

    def as_message(self) -> Body:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Seat:
        return cls(**{**message, **_values_of(message)})


@dataclass(frozen=True)
class Arrival:
    """What a host brings; None for `hosts` leaves their number to the coordinator."""

    host_rank: int
    hosts: int | None
    workers: int
    settings: LaunchSettings
    servers: int = 0
    elastic: Rules | None = None

    def as_message(self) -> Body:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Arrival:
        arrival = cls(**{**message, **_values_of(message)})
        counts = [arrival.host_rank, arrival.workers - 1, arrival.servers, arrival.hosts or 0]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"host {arrival.host_rank} of {arrival.hosts} with {arrival.workers} workers")
        return arrival


@dataclass(frozen=True)
class Guest:
    """A host that the coordinator has let in."""

    workers: int
    link: SealedLink


def _values_of(message: Mapping[str, Any]) -> Body:
    """The fields that are values of their own."""
    rules = message.get("elastic")
    return {
        "settings": LaunchSettings(**message["settings"]),
        "elastic": None if rules is None else Rules(**rules),
    }


async def join(address: Address, arrival: Arrival, secret: bytes, timeout_s: float) -> tuple[Seat, SealedLink]:
    """Join the coordinator, which may start later than we do, and wait for our seat."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    sealed = await _prove(address, secret, deadline, timeout_s)
    try:
        sealed.send(arrival.as_message())
        answer = await asyncio.wait_for(sealed.receive(), max(0.1, deadline - loop.time()) + PROOF_S)
        if answer is None:
            raise WorldError(f"the coordinator at {address} went away before the job began; its own output says why")
        if "refused" in answer:
            raise WorldError(f"the coordinator at {address} refused this host: {answer['refused']}")
        return Seat.from_message({**answer["seat"], "host_address": sealed.local_address}), sealed
    except TimeoutError:
        await sealed.close()
        raise WorldError(
            f"the coordinator at {address} took the connection but gave no seat; do all hosts run?"
        ) from None
    except WorldError:
        await sealed.close()
        raise
    except NONSENSE as error:
        await sealed.close()
        raise WorldError(
            f"the seat that the coordinator at {address} gave makes no sense ({type(error).__name__}: {error}); "
            "use one version of paceline on all hosts"
        ) from error


async def _prove(address: Address, secret: bytes, deadline: float, timeout_s: float) -> SealedLink:
    """A connection on which both have proved the secret."""
    loop = asyncio.get_running_loop()
    crowded_until = None
    while True:
        link = await _connect(address, deadline, timeout_s)
        try:
            return await prove_as_host(link, secret)
        except HungUpError as error:
            link.abort()
            crowded_until = crowded_until or min(deadline, loop.time() + CROWDED_S)
            if loop.time() + RETRY_EVERY_S >= crowded_until:
                raise WorldError(f"{address}: {error}") from error
            await asyncio.sleep(RETRY_EVERY_S)
        except TimeoutError:
            link.abort()
            raise WorldError(
                f"{address} took the connection but said nothing for {PROOF_S:g} s; is that a paceline coordinator?"
            ) from None
        except WorldError:
            await link.close()
            raise


async def _connect(address: Address, deadline: float, timeout_s: float) -> Link:
    loop = asyncio.get_running_loop()
    while True:
        try:
            _, link = await asyncio.wait_for(
                loop.create_connection(Link, address.host, address.port), max(0.1, deadline - loop.time())
            )
        except (OSError, TimeoutError) as error:
            if loop.time() + RETRY_EVERY_S >= deadline:
                raise WorldError(
                    f"no coordinator answered at {address} within {timeout_s:g} s ({error or 'timed out'}); "
                    "start `paceline run --host-rank 0` there first, and check the address"
                ) from error
            await asyncio.sleep(RETRY_EVERY_S)
            continue
        link.watch_for_silence(SILENT_PEER_S)
        return link


def free_port(address: str) -> int:
    """A port that is free now, for scripts that call `init_process_group()` themselves; nobody holds it until then."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
