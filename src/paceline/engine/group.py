"""The workers that this one is with: how it reaches them, and what ends when they change.

seat      the place that the launcher gave; in an elastic job its rank is the slot
world     the place among those who are there now
among     the same, less the workers that an asynchronous strategy goes on without
client    the line to the supervisor, where one has started this process
store     where processes meet by names; comm is how tensors and words go between the workers
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.collectives.communicator import Communicator
from paceline.elastic.decisions import Generation
from paceline.elastic.recovery import Parts, Recovery
from paceline.elastic.worker_agent import WorkerAgent
from paceline.engine.config import EngineConfig
from paceline.engine.serving import Serving
from paceline.engine.surroundings import among_members, call_supervisor, connect_workers, open_meeting
from paceline.errors import ConfigError
from paceline.world.waiting import WaitWatch
from paceline.world.world import World


class Group:
    def __init__(self, seat: World, config: EngineConfig, device: torch.device) -> None:
        self.seat, self._config, self.device = seat, config, device
        self.world = self.among = among_members(seat)
        config.check_against(self.world)
        self.client = call_supervisor(seat)
        self._opened_store, self.store = open_meeting(seat, self.client, config.timeout_s)
        self._watch = WaitWatch(self.client, seat.name) if self.store is not None else None
        self.comm: Communicator | None = None
        self.elastic: Recovery | None = None
        self.serving: Serving | None = None
        self.lost: Set[int] = frozenset()  # as the strategy knows them
        self.on_change: Callable[[], None] = lambda: None  # besides what waits in `comm`

    @property
    def timeout_s(self) -> float:
        return self._config.timeout_s

    @property
    def is_main(self) -> bool:
        """One of all workers: the first, or when that one is lost the first of the others."""
        return self.among.is_main if self.elastic is None else self.elastic.is_main

    @property
    def admitted(self) -> bool:
        """Not a worker that has yet to join the others of an elastic job."""
        return self.elastic is None or self.elastic.admitted

    def tell(self, kind: str, **fields: Any) -> None:
        """The supervisor, if there is one."""
        if self.client is not None:
            self.client.tell(kind, **fields)

    def print(self, *values: object, **options: Any) -> None:
        if self.is_main:
            print(*values, **({"flush": True} | options))

    # -- meeting -----------------------------------------------------------------------------------------------------

    def connect(self, parts: Parts) -> None:
        """Meet the others; `parts` are what changes with them, in an elastic job."""
        self._join_elastic_job(parts)
        self.comm = connect_workers(
            self.world, self.store, backend=self._config.backend, device=self.device, timeout_s=self.timeout_s
        )
        if self.elastic is not None and self.comm is not None:
            self.elastic.watch(self)

    def _join_elastic_job(self, parts: Parts) -> None:
        """In an elastic job workers come and go: who commits steps, and how those that are left go on."""
        seat, config = self.seat, self._config
        if seat.elastic is None or self.client is None:
            return
        if not config.strategy.is_synchronous:
            raise ConfigError(
                f"--elastic with strategy {config.strategy}: its workers don't wait for each other: there is no "
                "step that all could do again; it goes on without lost workers by itself: start it without --elastic"
            )
        members = tuple(slot for slot, _ in seat.elastic.members) or tuple(range(seat.size))
        servers = tuple(range(seat.size, seat.size + seat.servers))
        first = Generation(0 if seat.elastic.joins else 1, members, main=members[0], servers=servers)
        agent = WorkerAgent(self.client, seat.rank, seat.elastic.incarnation, first, self.timeout_s)
        if seat.is_server:
            self.serving = Serving(agent, seat, self._store_of, self.timeout_s)
        else:
            self.elastic = Recovery(agent, seat, parts, self.print)

    def meet(self, world: World) -> Communicator | None:
        """The workers of a new generation."""
        if world.size == 1:
            return None
        place = self.store_of_generation()
        assert place is not None
        self.comm = Communicator.connect(
            world, place, backend=self._config.backend, device=self.device, timeout_s=self.timeout_s
        )
        self.elastic_parts().watch(self)
        return self.comm

    def go_on_without(self, lost: Set[int]) -> str:
        """Where the strategy goes on without a worker, so does everything that workers do together; names of them."""
        if len(lost) == self.world.size - self.among.size or self.comm is None or self.store is None:
            return ""
        self.among = self.world.without(lost)
        named = ", ".join(map(str, sorted(lost)))
        self.comm.reconnect(self.among, PrefixStore(f"without/{named}", self.store))
        return named

    # -- generations of an elastic job -------------------------------------------------------------------------------

    @property
    def generation(self) -> int | None:
        """The one that this process is in, or is about to be."""
        part = self.elastic or self.serving
        return None if part is None else part.now_in

    def store_of_generation(self) -> Store | None:
        """In an elastic job keys are those of one generation: nobody finds what an older one left there."""
        if self.generation is None or self.store is None:
            return self.store
        return self._store_of(self.generation)

    def _store_of(self, generation: int) -> Store:
        assert self.store is not None
        return PrefixStore(f"elastic/{generation}", self.store)

    def elastic_parts(self) -> Recovery:
        assert self.elastic is not None
        return self.elastic

    def abandon(self, why: str) -> None:
        """The workers have changed: from this moment on nothing waits for those that are gone."""
        if self.comm is not None:
            self.comm.abandon(why)
        self.on_change()

    def adopt(self, comm: Communicator) -> None:
        """A group of a strategy's own ends with the generation, where the workers have none that it could end with."""
        if self.serving is not None:
            self.serving.adopt(comm)
        else:
            self.elastic_parts().watch(comm)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self.comm is not None:
            self.comm.close()
        if self.elastic is not None:
            self.elastic.close()
        if self.client is not None:
            self.client.close()
