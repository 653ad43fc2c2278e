"""The coordinator's door: where hosts that know the secret come in, at the start and, in an elastic job, later.

connection ─▶ proves the secret ─▶ says what it brings ─▶ objection? refused in words
                                                       ─▶ of the start: waits until all are there, then all get seats
                                                       ─▶ later: `later`, for `latecomers` to find it a seat
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from typing import Any

from paceline.errors import LaunchError, WorldError
from paceline.launch.control_channel import NONSENSE, Body, Link, stop_accepting
from paceline.launch.hosts import SILENT_PEER_S, Address, Arrival, Guest, Seat, free_port
from paceline.launch.sealed_link import SealedLink, prove_as_coordinator
from paceline.world import unauthenticated
from paceline.world.world import LaunchSettings


class Door:
    """Accepts hosts that know the secret until every seat is taken; and after that, where the job is elastic."""

    def __init__(self, address: Address, arrival: Arrival, secret: bytes, say: Callable[[str], None]) -> None:
        self._address = address
        self._own = arrival
        self._secret = secret
        self._say = say
        self._guests: dict[int, tuple[Arrival, SealedLink]] = {}
        self._hosts = arrival.hosts or 1
        self._full = asyncio.Event()
        self._begun = False
        self.later: asyncio.Queue[tuple[Arrival, SealedLink]] = asyncio.Queue()
        """Who has come for a job that runs, and has proved the secret."""
        self._server: asyncio.Server | None = None
        self._unproved: dict[Link, str] = {}
        """Connections that have not proved the secret, the oldest first, and their addresses."""
        self._complain = unauthenticated.RateLimitedLog(say)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def meet(self, timeout_s: float, settle: Callable[[int], LaunchSettings]) -> tuple[Seat, dict[int, Guest]]:
        """Wait for all hosts and give each its seat: ours, and the others by host rank.

        `settle` turns the number of workers into the job's settings, or raises what is wrong with them.
        """
        await self._open()
        try:
            await self._wait(timeout_s)
            seat, guests = self._seat_everyone(settle)
        except (LaunchError, WorldError) as error:
            await self._send_away(str(error))
            await self.close()
            raise
        except asyncio.CancelledError:
            await self.close()
            raise
        self._begun = True
        if self._own.elastic is None:
            await self.close()
        return seat, guests

    async def close(self) -> None:
        self._closed = True
        if self._server is not None:
            await stop_accepting(self._server)
        for stranger in self._unproved:
            stranger.abort()
        while not self.later.empty():
            _, link = self.later.get_nowait()
            link.abort()

    async def _wait(self, timeout_s: float) -> None:
        if self._hosts == 1:
            return
        try:
            await asyncio.wait_for(self._full.wait(), timeout_s)
        except TimeoutError:
            missing = [str(rank) for rank in range(1, self._hosts) if rank not in self._guests]
            raise WorldError(
                f"waited {timeout_s:g} s at {self._address} for {self._hosts} hosts, but host "
                f"{', '.join(missing)} did not come; start `paceline run --host-rank {missing[0]}` there, "
                "with the same --coordinator and secret"
            ) from None

    async def _open(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: Link(self._came), self._address.host, self._address.port)
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

    def _came(self, link: Link) -> None:
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
                joined = await sealed.receive()
            if joined is None:
                raise WorldError("it hung up before it joined")
            await self._let_in(_read(joined), sealed, link.remote_address)
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
            self._complain(address, f"paceline: refused a connection from {address}: {why}")
        link.abort()

    async def _let_in(self, arrival: Arrival, sealed: SealedLink, address: str) -> None:
        problem = self._objection(arrival)
        if problem is not None:
            sealed.send({"refused": problem})
            await sealed.close()
            self._say(f"paceline: refused host {arrival.host_rank} from {address}: {problem}")
            return
        if self._begun or arrival.host_rank >= self._hosts:
            self.later.put_nowait((arrival, sealed))
            return
        self._guests[arrival.host_rank] = (arrival, sealed)
        if len(self._guests) == self._hosts - 1:
            self._full.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _objection(self, arrival: Arrival) -> str | None:
        if arrival.hosts not in (None, self._hosts):
            further = "; a further host leaves --hosts out" if arrival.host_rank >= self._hosts else ""
            return f"it was started with --hosts {arrival.hosts}, the coordinator with --hosts {self._hosts}{further}"
        taken = arrival.host_rank in self._guests and not self._begun
        if arrival.host_rank == 0 or taken:
            return f"host rank {arrival.host_rank} is taken; give every host its own --host-rank"
        if arrival.host_rank >= self._hosts and self._own.elastic is None:
            return f"there is no host {arrival.host_rank} in a job of --hosts {self._hosts}; ranks count from 0"
        if arrival.servers not in (0, self._own.servers):
            return (
                f"it was started with --servers {arrival.servers}, the coordinator with --servers {self._own.servers}; "
                "servers run on host 0 only: leave the flag out on the others, or repeat it"
            )
        if arrival.elastic not in (None, self._own.elastic):
            if self._own.elastic is None:
                return "it was started with --elastic, the coordinator without; give it to both, or to neither"
            return "its flags of elastic jobs are not the coordinator's; leave them out there, or repeat them"
        for name, value in asdict(arrival.settings).items():
            ours = getattr(self._own.settings, name)
            if value is not None and value != ours:
                return f"it was started with --{name} {value}, the coordinator with {ours or 'none'}; use the same"
        return None

    def _seat_everyone(self, settle: Callable[[int], LaunchSettings]) -> tuple[Seat, dict[int, Guest]]:
        guests = {rank: Guest(arrival.workers, link) for rank, (arrival, link) in sorted(self._guests.items())}
        workers = [self._own.workers, *(guest.workers for guest in guests.values())]
        own_address = guests[1].link.local_address if guests else self._listening_at()
        seat = Seat(
            host_rank=0,
            hosts=self._hosts,
            first_rank=0,
            workers=workers[0],
            size=sum(workers),
            settings=settle(sum(workers)),
            host_address=own_address,
            master_address=own_address,
            master_port=free_port(own_address),
            servers=self._own.servers,
            elastic=self._own.elastic,
            grows=self._own.elastic is not None,
        )
        for rank, guest in guests.items():
            theirs = replace(seat, host_rank=rank, first_rank=sum(workers[:rank]), workers=workers[rank])
            guest.link.send({"seat": theirs.as_message()})
        return seat, guests

    def _listening_at(self) -> str:
        """Where hosts that come later reach this one, which is alone yet."""
        assert self._server is not None
        address = str(self._server.sockets[0].getsockname()[0])
        if address in ("0.0.0.0", "::"):
            raise LaunchError(f"--coordinator {self._address}; give the address at which other hosts reach this one")
        return address

    async def _send_away(self, why: str) -> None:
        for _, link in self._guests.values():
            link.send({"refused": why})
            await link.close()


def _read(joined: Body) -> Arrival:
    try:
        return Arrival.from_message(joined)
    except NONSENSE as error:
        raise WorldError(
            f"what it brings makes no sense ({type(error).__name__}: {str(error)[:200]}); use one version of paceline "
            "on all hosts"
        ) from error
