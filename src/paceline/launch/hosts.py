"""Several hosts: every supervisor joins the coordinator (host 0), which keeps the keys and makes the decisions.

    host 1                                           host 0 (coordinator)
    supervisor ════ both prove the secret: `sealed_link` ═════ supervisor
               ──── host rank, workers, settings ───▶
               ◀─── first rank, size, settings ─────  once all hosts are there

Ranks follow the host ranks, and hosts may have unequal numbers of workers. Servers run on host 0; their ranks come
after those of all workers.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.elastic.decisions import Rules
from paceline.errors import LaunchError, WorldError
from paceline.launch.control_channel import Body, Link
from paceline.launch.sealed_link import HANDSHAKE_TIMEOUT_S, SealedLink, prove_as_coordinator, prove_as_host
from paceline.world.world import ControlSocket, Elasticity, LaunchSettings, World

RETRY_EVERY_S = 0.25
HOST_LINE_LIMIT = 8 * 2**20
SILENT_PEER_S = 10
"""A host that is cut off without a word is given up after this long."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise LaunchError(f"--coordinator {text!r} is not ADDRESS:PORT, such as 10.0.0.1:29400")
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
    """What a host brings."""

    host_rank: int
    hosts: int
    workers: int
    settings: LaunchSettings
    servers: int = 0
    elastic: Rules | None = None

    def as_message(self) -> Body:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Arrival:
        return cls(**{**message, **_values_of(message)})


def _values_of(message: Mapping[str, Any]) -> Body:
    """The fields that are values of their own."""
    rules = message.get("elastic")
    return {
        "settings": LaunchSettings(**message["settings"]),
        "elastic": None if rules is None else Rules(**rules),
    }


# ---- the coordinator's side --------------------------------------------------------------------------------


class Gathering:
    """The coordinator's door: accepts hosts that know the secret until every seat is taken."""

    def __init__(self, address: Address, arrival: Arrival, secret: bytes, say: Callable[[str], None]) -> None:
        self._address = address
        self._own = arrival
        self._secret = secret
        self._say = say
        self._guests: dict[int, tuple[Arrival, SealedLink]] = {}
        self._full = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def meet(
        self, timeout_s: float, settle: Callable[[int], LaunchSettings]
    ) -> tuple[Seat, dict[int, SealedLink]]:
        """Wait for all hosts and give each its seat: ours, and the links to the others by host rank.

        `settle` turns the number of workers into the job's settings, or raises what is wrong with them.
        """
        await self._open()
        try:
            await asyncio.wait_for(self._full.wait(), timeout_s)
        except TimeoutError:
            missing = [str(rank) for rank in range(1, self._own.hosts) if rank not in self._guests]
            text = (
                f"waited {timeout_s:g} s at {self._address} for {self._own.hosts} hosts, but host "
                f"{', '.join(missing)} did not come; start `paceline run --host-rank {missing[0]}` there, "
                "with the same --coordinator and secret"
            )
            await self._send_away(text)
            raise WorldError(text) from None
        finally:
            await self._close()
        try:
            return self._seat_everyone(settle)
        except LaunchError as error:
            await self._send_away(str(error))
            raise

    async def _open(self) -> None:
        try:
            self._server = await asyncio.start_server(
                self._accept, self._address.host, self._address.port, limit=HOST_LINE_LIMIT
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise WorldError(
                    f"port {self._address.port} on {self._address.host} is in use, probably by another job; "
                    "choose another port in --coordinator, on every host"
                ) from error
            raise WorldError(
                f"host 0 can't listen at {self._address} ({error.strerror or error}); "
                "--coordinator must be an address of host 0"
            ) from error

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        try:
            _watch_for_silence(writer)
            sealed = await prove_as_coordinator(link, self._secret)
            joined = await asyncio.wait_for(sealed.receive(), HANDSHAKE_TIMEOUT_S)
            if joined is None:
                raise WorldError("it hung up before it joined")
        except (WorldError, TimeoutError, OSError) as error:
            self._say(f"paceline: refused a connection from {link.remote_address}: {error or 'it said nothing'}")
            await link.close()
            return
        arrival = Arrival.from_message(joined)
        problem = self._objection(arrival)
        if problem is not None:
            sealed.send({"refused": problem})
            await sealed.close()
            self._say(f"paceline: refused host {arrival.host_rank} from {link.remote_address}: {problem}")
            return
        self._guests[arrival.host_rank] = (arrival, sealed)
        if len(self._guests) == self._own.hosts - 1:
            self._full.set()

    def _objection(self, arrival: Arrival) -> str | None:
        if arrival.hosts != self._own.hosts:
            return f"it was started with --hosts {arrival.hosts}, the coordinator with --hosts {self._own.hosts}"
        if not 0 < arrival.host_rank < self._own.hosts or arrival.host_rank in self._guests:
            return f"host rank {arrival.host_rank} is taken; give every host its own --host-rank"
        if arrival.servers not in (0, self._own.servers):
            return (
                f"it was started with --servers {arrival.servers}, the coordinator with --servers {self._own.servers}; "
                "servers run on host 0 only: leave the flag out on the others, or repeat it"
            )
        if arrival.elastic not in (None, self._own.elastic):
            theirs, ours = ("elastic by other flags", "them") if self._own.elastic else ("with --elastic", "it not")
            return f"it was started {theirs}, the coordinator with {ours}; leave the flags out there, or repeat them"
        for name, value in asdict(arrival.settings).items():
            ours = getattr(self._own.settings, name)
            if value is not None and value != ours:
                return f"it was started with --{name} {value}, the coordinator with {ours or 'none'}; use the same"
        return None

    def _seat_everyone(self, settle: Callable[[int], LaunchSettings]) -> tuple[Seat, dict[int, SealedLink]]:
        workers = [self._own.workers, *(self._guests[rank][0].workers for rank in range(1, self._own.hosts))]
        links = {rank: link for rank, (_, link) in sorted(self._guests.items())}
        own_address = links[1].local_address
        seat = Seat(
            host_rank=0,
            hosts=self._own.hosts,
            first_rank=0,
            workers=workers[0],
            size=sum(workers),
            settings=settle(sum(workers)),
            host_address=own_address,
            master_address=own_address,
            master_port=free_port(own_address),
            servers=self._own.servers,
            elastic=self._own.elastic,
        )
        for rank, link in links.items():
            theirs = replace(seat, host_rank=rank, first_rank=sum(workers[:rank]), workers=workers[rank])
            link.send({"seat": theirs.as_message()})
        return seat, links

    async def _send_away(self, why: str) -> None:
        for _, link in self._guests.values():
            link.send({"refused": why})
            await link.close()


async def join(address: Address, arrival: Arrival, secret: bytes, timeout_s: float) -> tuple[Seat, SealedLink]:
    """Join the coordinator, which may start later than we do, and wait for our seat."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    link = await _connect(address, deadline, timeout_s)
    try:
        sealed = await prove_as_host(link, secret)
        sealed.send(arrival.as_message())
        answer = await asyncio.wait_for(sealed.receive(), max(0.1, deadline - loop.time()) + HANDSHAKE_TIMEOUT_S)
    except TimeoutError:
        await link.close()
        raise WorldError(
            f"the coordinator at {address} took the connection but gave no seat; do all hosts run?"
        ) from None
    except WorldError:
        await link.close()
        raise
    if answer is None:
        raise WorldError(f"the coordinator at {address} went away before the job began; its own output says why")
    if "refused" in answer:
        await sealed.close()
        raise WorldError(f"the coordinator at {address} refused this host: {answer['refused']}")
    return Seat.from_message({**answer["seat"], "host_address": sealed.local_address}), sealed


async def _connect(address: Address, deadline: float, timeout_s: float) -> Link:
    loop = asyncio.get_running_loop()
    while True:
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(address.host, address.port, limit=HOST_LINE_LIMIT),
                max(0.1, deadline - loop.time()),
            )
        except (OSError, TimeoutError) as error:
            if loop.time() + RETRY_EVERY_S >= deadline:
                raise WorldError(
                    f"no coordinator answered at {address} within {timeout_s:g} s ({error or 'timed out'}); "
                    "start `paceline run --host-rank 0` there first, and check the address"
                ) from error
            await asyncio.sleep(RETRY_EVERY_S)
            continue
        _watch_for_silence(writer)
        return Link(reader, writer)


def free_port(address: str) -> int:
    """A port that is free now, for scripts that call `init_process_group()` themselves; nobody holds it until then."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _watch_for_silence(writer: asyncio.StreamWriter) -> None:
    """Have the kernel notice a peer that is cut off, whose connection would otherwise look open for hours."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", SILENT_PEER_S // 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_PEER_S * 1000)
