"""Rendezvous of several hosts: every supervisor joins the coordinator (host 0), which gives each its slots.

    host 1                                           host 0 (coordinator)
    supervisor ════ both prove the secret: `host_link` ═══════ supervisor
               ──── `JoinRequest`: host rank, workers, settings ───▶  `HostRendezvous`: refused with the reason, or
               ◀─── `HostAssignment`: first rank, size, settings ───  once all hosts are there

Ranks follow the host ranks, and hosts may have unequal numbers of workers. Servers run on host 0; their ranks come
after those of all workers. In an elastic job the coordinator goes on listening: a host that joins later, or again, is
put into `late`, for `elastic_job.LateHosts` to assign slots to.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.elastic.decisions import Rules
from paceline.errors import LaunchError, WorldError
from paceline.launch.control import MALFORMED, Body, stop_accepting
from paceline.launch.host_link import ConnectionClosedError, Link, SealedLink, prove_as_coordinator, prove_as_host
from paceline.world import unauthenticated
from paceline.world.unauthenticated import PROOF_S
from paceline.world.world import ControlSocket, Elasticity, LaunchSettings, World

RETRY_EVERY_S = 0.25
CROWDED_S = 30.0
"""A coordinator that closes the connection before our proof may have too many unauthenticated ones: we try again."""
LONGEST_ADDRESS = 100
SILENT_PEER_S = 10
"""The kernel gives up a host that is cut off after this long."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        host, colon, port = text.rpartition(":")
        try:
            host.encode("idna")  # what the resolver does; its own error is a UnicodeError, which is a ValueError
            if not colon or not host or not port.isdecimal() or not 0 < int(port[:9]) < 65536:
                raise ValueError
        except ValueError:
            shown = text if len(text) <= LONGEST_ADDRESS else f"{text[:LONGEST_ADDRESS]}…"
            raise LaunchError(f"--coordinator {shown!r} is not ADDRESS:PORT, such as 10.0.0.1:29400") from None
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class HostAssignment:
    """What the coordinator gives a host: its slots, and what holds for the whole job."""

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
    """Further hosts may join, also where this one is alone yet."""
    late: bool = False
    """The job runs already: the coordinator says which workers start, once this host can start them."""

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
        """The world of one of this host's processes."""
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
    def from_message(cls, message: Mapping[str, Any]) -> HostAssignment:
        return cls(**{**message, **_values_of(message)})


@dataclass(frozen=True)
class JoinRequest:
    """What a host was started with; None for `hosts` leaves their number to the coordinator."""

    host_rank: int
    hosts: int | None
    workers: int
    settings: LaunchSettings
    servers: int = 0
    elastic: Rules | None = None

    def as_message(self) -> Body:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> JoinRequest:
        request = cls(**{**message, **_values_of(message)})
        counts = [request.host_rank, request.workers - 1, request.servers, request.hosts or 0]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"host {request.host_rank} of {request.hosts} with {request.workers} workers")
        return request


@dataclass(frozen=True)
class JoinedHost:
    """A host that the coordinator has admitted."""

    request: JoinRequest
    link: SealedLink

    @property
    def workers(self) -> int:
        return self.request.workers

    async def refuse(self, why: str) -> None:
        self.link.send({"refused": why})
        await self.link.close()


def _values_of(message: Mapping[str, Any]) -> Body:
    """The fields that are values of their own."""
    rules = message.get("elastic")
    return {
        "settings": LaunchSettings(**message["settings"]),
        "elastic": None if rules is None else Rules(**rules),
    }


# ---- the coordinator's side ------------------------------------------------------------------------------------


class HostRendezvous:
    """The coordinator's side: accepts hosts that know the secret until all are there; in an elastic job, to its end."""

    def __init__(self, address: Address, request: JoinRequest, secret: bytes, log: Callable[[str], None]) -> None:
        self._address = address
        self._own = request
        self._secret = secret
        self._log = log
        self._joined: dict[int, JoinedHost] = {}
        self._hosts = request.hosts or 1
        self._full = asyncio.Event()
        self._begun = False
        self.late: asyncio.Queue[JoinedHost] = asyncio.Queue()
        """Hosts that have proved the secret and ask to join a job that runs."""
        self._server: asyncio.Server | None = None
        self._unproved: dict[Link, str] = {}
        """Connections that have not proved the secret, the oldest first, and their addresses."""
        self._warn = unauthenticated.RateLimitedLog(log)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def meet(
        self, timeout_s: float, settings_for: Callable[[int], LaunchSettings]
    ) -> tuple[HostAssignment, dict[int, JoinedHost]]:
        """Wait for all hosts and assign slots to each; our own assignment, and the others by host rank.

        `settings_for` gives the settings of a job of so many workers, or raises what is wrong with them.
        """
        await self._open()
        try:
            await self._wait(timeout_s)
            assignment, joined = self._assign_all(settings_for)
        except (LaunchError, WorldError) as error:
            for host in self._joined.values():
                await host.refuse(str(error))
            await self.close()
            raise
        except asyncio.CancelledError:
            await self.close()
            raise
        self._begun = True
        if self._own.elastic is None:
            await self.close()
        return assignment, joined

    async def close(self) -> None:
        self._closed = True
        if self._server is not None:
            await stop_accepting(self._server)
        for link in self._unproved:
            link.abort()
        while not self.late.empty():
            self.late.get_nowait().link.abort()

    async def _wait(self, timeout_s: float) -> None:
        if self._hosts == 1:
            return
        try:
            await asyncio.wait_for(self._full.wait(), timeout_s)
        except TimeoutError:
            missing = [str(rank) for rank in range(1, self._hosts) if rank not in self._joined]
            raise WorldError(
                f"waited {timeout_s:g} s at {self._address} for {self._hosts} hosts, but host "
                f"{', '.join(missing)} did not come; start `paceline run --host-rank {missing[0]}` there, "
                "with the same --coordinator and secret"
            ) from None

    async def _open(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(
                lambda: Link(self._on_connect), self._address.host, self._address.port
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

    def _on_connect(self, link: Link) -> None:
        if self._closed:
            link.abort()
            return
        self._unproved[link] = link.remote_address
        if len(self._unproved) > unauthenticated.MOST_CONNECTIONS:
            self._refuse(unauthenticated.to_drop(self._unproved), "too many connections have not proved the secret")
        self._spawn(self._accept(link))

    async def _accept(self, link: Link) -> None:
        proved = False
        try:
            async with asyncio.timeout(unauthenticated.PROOF_S):
                link.watch_for_silence(SILENT_PEER_S)
                sealed = await prove_as_coordinator(link, self._secret)
                proved = self._unproved.pop(link, None) is not None
                message = await sealed.receive()
            if message is None:
                raise WorldError("the host closed the connection before joining")
            await self._admit(JoinedHost(_read(message), sealed), link.remote_address)
        except (WorldError, TimeoutError, OSError) as error:
            if proved or link in self._unproved:  # and not refused already
                self._refuse(link, str(error) or f"it did not prove the secret within {unauthenticated.PROOF_S:g} s")
        except asyncio.CancelledError:
            link.abort()  # the job has ended
            raise

    def _refuse(self, link: Link, why: str) -> None:
        self._unproved.pop(link, None)
        if not self._closed:
            address = link.remote_address
            self._warn(address, f"paceline: refused a connection from {address}: {why}")
        link.abort()

    async def _admit(self, host: JoinedHost, address: str) -> None:
        rank = host.request.host_rank
        problem = self._objection(host.request)
        if problem is not None:
            await host.refuse(problem)
            self._log(f"paceline: refused host {rank} from {address}: {problem}")
            return
        if self._begun or rank >= self._hosts:
            self.late.put_nowait(host)
            return
        self._joined[rank] = host
        if len(self._joined) == self._hosts - 1:
            self._full.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _objection(self, request: JoinRequest) -> str | None:
        if request.hosts not in (None, self._hosts):
            further = "; a further host leaves --hosts out" if request.host_rank >= self._hosts else ""
            return f"it was started with --hosts {request.hosts}, the coordinator with --hosts {self._hosts}{further}"
        taken = request.host_rank in self._joined and not self._begun
        if request.host_rank == 0 or taken:
            return f"host rank {request.host_rank} is taken; give every host its own --host-rank"
        if request.host_rank >= self._hosts and self._own.elastic is None:
            return f"there is no host {request.host_rank} in a job of --hosts {self._hosts}; ranks count from 0"
        if request.servers not in (0, self._own.servers):
            return (
                f"it was started with --servers {request.servers}, the coordinator with --servers {self._own.servers}; "
                "servers run on host 0 only: leave the flag out on the others, or repeat it"
            )
        if request.elastic not in (None, self._own.elastic):
            if self._own.elastic is None:
                return "it was started with --elastic, the coordinator without; give it to both, or to neither"
            return "its flags of elastic jobs are not the coordinator's; leave them out there, or repeat them"
        for name, value in asdict(request.settings).items():
            ours = getattr(self._own.settings, name)
            if value is not None and value != ours:
                return f"it was started with --{name} {value}, the coordinator with {ours or 'none'}; use the same"
        return None

    def _assign_all(
        self, settings_for: Callable[[int], LaunchSettings]
    ) -> tuple[HostAssignment, dict[int, JoinedHost]]:
        joined = dict(sorted(self._joined.items()))
        workers = [self._own.workers, *(host.workers for host in joined.values())]
        own_address = joined[1].link.local_address if joined else self._listening_at()
        assignment = HostAssignment(
            host_rank=0,
            hosts=self._hosts,
            first_rank=0,
            workers=workers[0],
            size=sum(workers),
            settings=settings_for(sum(workers)),
            host_address=own_address,
            master_address=own_address,
            master_port=free_port(own_address),
            servers=self._own.servers,
            elastic=self._own.elastic,
            grows=self._own.elastic is not None,
        )
        for rank, host in joined.items():
            theirs = replace(assignment, host_rank=rank, first_rank=sum(workers[:rank]), workers=workers[rank])
            host.link.send({"assignment": theirs.as_message()})
        return assignment, joined

    def _listening_at(self) -> str:
        """Where late hosts reach this one, which is alone yet."""
        assert self._server is not None
        address = str(self._server.sockets[0].getsockname()[0])
        if address in ("0.0.0.0", "::"):
            raise LaunchError(f"--coordinator {self._address}; give the address at which other hosts reach this one")
        return address


def _read(message: Body) -> JoinRequest:
    try:
        return JoinRequest.from_message(message)
    except MALFORMED as error:
        raise WorldError(
            f"its join request is malformed ({type(error).__name__}: {str(error)[:200]}); use one version of paceline "
            "on all hosts"
        ) from error


# ---- the side of a host that joins -----------------------------------------------------------------------------


async def join(
    address: Address, request: JoinRequest, secret: bytes, timeout_s: float
) -> tuple[HostAssignment, SealedLink]:
    """Join the coordinator, which may start later than this host, and wait for the slot assignment."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    sealed = await _prove(address, secret, deadline, timeout_s)
    try:
        sealed.send(request.as_message())
        answer = await asyncio.wait_for(sealed.receive(), max(0.1, deadline - loop.time()) + PROOF_S)
        if answer is None:
            raise WorldError(f"the coordinator at {address} ended before the job began; its own output says why")
        if "refused" in answer:
            raise WorldError(f"the coordinator at {address} refused this host: {answer['refused']}")
        return HostAssignment.from_message({**answer["assignment"], "host_address": sealed.local_address}), sealed
    except TimeoutError:
        await sealed.close()
        raise WorldError(
            f"the coordinator at {address} accepted the connection but sent no slot assignment; do all hosts run?"
        ) from None
    except WorldError:
        await sealed.close()
        raise
    except MALFORMED as error:
        await sealed.close()
        raise WorldError(
            f"the slot assignment from the coordinator at {address} is malformed ({type(error).__name__}: {error}); "
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
        except ConnectionClosedError as error:
            link.abort()
            crowded_until = crowded_until or min(deadline, loop.time() + CROWDED_S)
            if loop.time() + RETRY_EVERY_S >= crowded_until:
                raise WorldError(f"{address}: {error}") from error
            await asyncio.sleep(RETRY_EVERY_S)
        except TimeoutError:
            link.abort()
            raise WorldError(
                f"{address} accepted the connection but sent nothing for {PROOF_S:g} s; is that a paceline coordinator?"
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
    """A port that is free now, for scripts that call `init_process_group()` themselves; it is not reserved for them."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
