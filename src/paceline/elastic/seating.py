"""Which slots the hosts of an elastic job have, and whether one that comes later gets some.

    host 0   slots 0 1      there
    host 1   slots 2 3      lost: it may come back to them
    host 2   slots 4 5      a further one: at the end, while --max-workers and the lanes allow it

Every host has neighbouring slots. One that comes back with fewer workers leaves the last of its slots empty, and one
that comes back with more gets new ones. Numbers are never given to another host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.elastic.slots import workers as counted
from paceline.errors import LaunchError


@dataclass(frozen=True)
class HostSlots:
    first: int
    workers: int
    room: int
    """How many slots are its own, from the first on."""
    is_there: bool = True

    @property
    def slots(self) -> range:
        return range(self.first, self.first + self.workers)


class Seating:
    """`workers` that each host began with, host 0 first; `most` of them may be there at a time."""

    def __init__(self, workers: Sequence[int], *, most: int, lanes: int, servers: int = 0) -> None:
        self._most, self._lanes, self._servers = most, lanes, servers
        self.size = 0
        """Slots in all, empty ones too."""
        self._hosts: dict[int, HostSlots] = {}
        for host, number in enumerate(workers):
            self._hosts[host] = HostSlots(self._add(number), number, number)

    def _add(self, number: int) -> int:
        first, self.size = self.size, self.size + number
        return first

    @property
    def workers_there(self) -> int:
        return sum(host.workers for host in self._hosts.values() if host.is_there)

    @property
    def most_hosts(self) -> int:
        """More than the highest number that any has had."""
        return max(self._hosts) + 1

    def is_there(self, host: int) -> bool:
        return host in self._hosts and self._hosts[host].is_there

    def was_there(self, host: int) -> bool:
        return host in self._hosts

    def slots_of(self, host: int) -> range:
        return self._hosts[host].slots

    def host_of(self, slot: int) -> int:
        for number, host in self._hosts.items():
            if host.first <= slot < host.first + host.room:
                return number
        raise LookupError(f"slot {slot} is no host's")

    def leave(self, host: int) -> None:
        left = self._hosts[host]
        self._hosts[host] = HostSlots(left.first, left.workers, left.room, is_there=False)

    def take(self, host: int, workers: int) -> HostSlots:
        """The slots of a host that comes with so many workers; `LaunchError` where it can't be let in."""
        if workers < 1:
            raise LaunchError(f"host {host} brings no worker")
        self._check_room(workers)
        known = self._hosts.get(host)
        if known is not None and workers <= known.room:
            seated = HostSlots(known.first, workers, known.room)
        elif self._servers:
            raise LaunchError(
                f"a job with server processes gets no further workers; {self._at_most(known)}, or start it "
                "without --servers: a worker doubles as the server then"
            )
        else:
            seated = HostSlots(self._add(workers), workers, workers)
        self._hosts[host] = seated
        return seated

    def _at_most(self, known: HostSlots | None) -> str:
        return "only its own hosts may come back" if known is None else f"come back with {counted(known.room)} at most"

    def _check_room(self, workers: int) -> None:
        there = self.workers_there
        brings = f"it brings {counted(workers)}, and {there} {'is' if there == 1 else 'are'} there"
        if there + workers > self._most:
            raise LaunchError(f"{brings}: the job has at most {self._most} (--max-workers of host 0; if not given, "
                              "those that it began with)")  # fmt: skip
        if there + workers > self._lanes:
            lanes = f"{self._lanes} lane{'s' if self._lanes > 1 else ''}"
            raise LaunchError(
                f"{brings}, but the job has {lanes}, fixed since its start; every worker rides one or more"
            )
