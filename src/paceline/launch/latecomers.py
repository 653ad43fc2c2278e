"""Hosts that come into an elastic job while it runs: one that was lost and is back, or a further one.

host 1                        coordinator
──── proved, what it brings ─▶ `door`: the same objections as at the start
                               waits until the job runs, and until it has noticed that the old host 1 is lost
◀─── its seat, or why not ──── `SlotAssignment`
──── ready: torch is imported, workers can be forked ─▶ `Membership.host_came`
◀─── start slot 2, slot 3 ───  they prepare alone and join after a step, as any replacement
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from paceline.errors import LaunchError
from paceline.launch.door import Door
from paceline.launch.elastic_job import ElasticJob
from paceline.launch.far_hosts import FarHosts
from paceline.launch.hosts import Arrival, Seat
from paceline.launch.sealed_link import SealedLink

LOOK_EVERY_S = 0.1
NOTICED_S = 2.0
"""On top of the heartbeat's deadline: for us to notice that a host is lost, whose supervisor noticed it first."""


class Chief(Protocol):
    """What is needed of the coordinator."""

    @property
    def is_over(self) -> bool: ...
    def clock(self) -> float: ...
    def listen_to(self, host: int) -> None: ...


class Latecomers:
    def __init__(
        self, seat: Seat, far: FarHosts, elastic: ElasticJob, chief: Chief, say: Callable[[str], None]
    ) -> None:
        assert seat.elastic is not None
        self._seat, self._far, self._elastic, self._chief, self._say = seat, far, elastic, chief, say
        self._patience_s = seat.elastic.heartbeat_timeout_s + NOTICED_S
        self._new: set[int] = set()

    async def welcome(self, door: Door) -> None:
        """For as long as the job lasts."""
        async with asyncio.TaskGroup() as waiting:
            while True:
                arrival, link = await door.later.get()
                waiting.create_task(self._receive(arrival, link))

    def ready(self, host: int) -> None:
        """It can start workers."""
        self._elastic.host_came(host, self._far.seating.slots_of(host), is_new=host in self._new)
        self._new.discard(host)

    async def _receive(self, arrival: Arrival, link: SealedLink) -> None:
        try:
            await self._wait_for(arrival.host_rank)
            self._seat_at(arrival, link)
        except LaunchError as error:
            self._say(f"paceline: refused host {arrival.host_rank}: {error}")
            link.send({"refused": str(error)})
            await link.close()
        except asyncio.CancelledError:
            link.abort()
            raise

    async def _wait_for(self, host: int) -> None:
        """Until there may be a seat; who waits has its own deadline."""
        since = self._chief.clock()
        while not self._elastic.membership.running or self._far.seating.is_there(host):
            if not self._elastic.membership.running:
                since = self._chief.clock()
            elif self._chief.clock() - since > self._patience_s:
                raise LaunchError(f"host {host} is there, and alive; give every host its own --host-rank")
            await asyncio.sleep(LOOK_EVERY_S)
        if self._elastic.membership.stopping or self._chief.is_over:
            raise LaunchError("the job is about to end")

    def _seat_at(self, arrival: Arrival, link: SealedLink) -> None:
        host, seating = arrival.host_rank, self._far.seating
        is_new = not seating.was_there(host)
        place = seating.take(host, arrival.workers)
        if is_new:
            self._new.add(host)
        self._elastic.make_room(seating.size)
        hosts = max(seating.most_hosts, self._seat.hosts)
        seat = replace(
            self._seat,
            host_rank=host,
            hosts=hosts,
            first_rank=place.first,
            workers=place.workers,
            size=max(seating.size, hosts),  # empty numbers of hosts count as workers, as far as a world has to add up
            late=True,
        )
        link.send({"seat": seat.as_message()})
        self._far.add(host, link)
        self._chief.listen_to(host)
