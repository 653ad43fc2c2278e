"""A parameter server over the hosts of a shaped network: worker r is on host r, and its servers on any of them.

    1 server       host 0: worker 0     host 1: worker 1     …     host N: server 0
    N servers      host 0: worker 0     host 1: worker 1     …
                           server 0             server 1

The channels, clients and servers are those of training (`server_round.py`). Servers run in threads of their
host's process; what they say to the worker beside them does not leave the host and is not counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from server_round import TENSORS, ServerJob
from shaped_links import interface_bytes
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.collectives.byte_count import Flow
from paceline.collectives.communicator import Communicator
from paceline.world.control import NoSupervisor
from paceline.world.rendezvous_store import open_store
from paceline.world.world import World

TIMEOUT_S = 120.0


class Served:
    """One host's part in a job of `workers`, whose server s is on host `hosts[s]`."""

    def __init__(self, here: World, store: Store, name: str, workers: int, hosts: Sequence[int], elements: int) -> None:
        self._host, self._workers, self._elements = here.rank, workers, elements
        self._host_of = [*range(workers), *hosts]  # by rank: workers first, then servers
        self._jobs: list[ServerJob] = []
        self._threads: list[threading.Thread] = []
        for rank in range(workers, len(self._host_of)):
            if self._host_of[rank] == here.rank:
                # A store answers one question at a time, so a server that its worker waits for has one of its own.
                own = PrefixStore(
                    name, open_store(replace(here, rank=1), NoSupervisor(), TIMEOUT_S)
                )  # rank 0 would listen
                args = (self._world(here, rank), own)
                self._threads.append(threading.Thread(target=self._serve, args=args, daemon=True))
                self._threads[-1].start()
        self._job: ServerJob | None = None
        if here.rank < workers:
            self._job = ServerJob(self._world(here, here.rank), PrefixStore(name, store), elements)
            self._jobs.append(self._job)

    def _world(self, here: World, rank: int) -> World:
        """Servers belong to the first host, whatever their address."""
        servers = len(self._host_of) - self._workers
        host, local = (here.rank, 0) if rank < self._workers else (0, 1 + rank - self._workers)
        place = {"rank": rank, "local_rank": local, "host_rank": host}
        return replace(here, size=self._workers, hosts=self._workers, servers=servers, **place)

    def _serve(self, world: World, store: Store) -> None:
        job = ServerJob(world, store, self._elements)
        self._jobs.append(job)
        job.serve()

    # -- one round ---------------------------------------------------------------------------------------------------

    def round(self, all_hosts: Communicator) -> dict[str, Any]:
        """Seconds of the slowest worker; bytes of the busiest host: tensors as counted, and what its interface saw."""
        before, wire = self._moved(), interface_bytes()
        all_hosts.barrier()
        started = time.perf_counter()
        if self._job is not None:
            self._job.round()
        seconds = time.perf_counter() - started
        all_hosts.barrier()
        moved = [now - then for now, then in zip(self._moved(), before, strict=True)]
        seen = [now - then for now, then in zip(interface_bytes(), wire, strict=True)]
        if self._job is not None:
            self._job.check()
        every = all_hosts.gather_json([seconds if self._job is not None else 0.0, max(moved), max(seen)])
        return dict(zip(("seconds", "busiest_bytes", "wire_bytes"), map(max, zip(*every, strict=True)), strict=True))

    def _moved(self) -> list[int]:
        """Sent to and received from other hosts so far."""
        counts = [job.traffic.of(operation) for job in self._jobs for operation in TENSORS]
        return [
            sum(self._abroad(count.sent) for count in counts),
            sum(self._abroad(count.received) for count in counts),
        ]

    def _abroad(self, flows: Mapping[int, Flow]) -> int:
        return sum(flow.bytes for peer, flow in flows.items() if self._host_of[peer] != self._host)

    def close(self) -> None:
        if self._job is not None:
            self._job.close()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
