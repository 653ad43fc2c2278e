"""A server process in an elastic job: it serves one generation of workers after the other, and keeps nothing.

    generation 3    meet the workers ─► the first of them loads what is committed ─► serve, round by round
    a death         GENERATION ─► the group is abandoned ─► generation 4: the same, with those who are left
    somebody joins  GENERATION ─► serve until all workers stand where generation 4 meets
    a replacement   the script up to `prepare`, alone ─► JOIN ─► GENERATION, after a step: the same

It neither says READY nor hears COMMIT. What it made of a round is in the in-memory checkpoint before the workers are
ready, kept by the first of them, and comes back from there; so nothing has to be undone here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.collectives.communicator import Communicator
from paceline.elastic.decisions import Generation
from paceline.elastic.faults import fault_point
from paceline.elastic.worker_agent import WorkerAgent
from paceline.errors import WorldError
from paceline.parameter_server.handshake import await_ranks
from paceline.torch_compat import Store
from paceline.world.world import World

LOOK_EVERY_S = 0.1


class Serving:
    """`seat` is the place that the launcher gave; `store_of` has the keys of a generation."""

    def __init__(self, agent: WorkerAgent, seat: World, store_of: Callable[[int], Store], timeout_s: float) -> None:
        self._agent, self._seat, self._store_of, self._timeout_s = agent, seat, store_of, timeout_s
        self._abandon: Callable[[str], None] = lambda why: None
        self.now_in = agent.now.number
        agent.on_joining = self._watch_meeting

    @property
    def joins(self) -> bool:
        return self._agent.joins

    def join(self, facts: Mapping[str, str | int]) -> None:
        """A process that comes later stands here until the workers take it in."""
        fault_point("join")
        self._agent.ask_to_join(0, facts)

    def next_world(self, why: str) -> World:
        """This server's place in a newer generation, as soon as there is one; `why` the last is over."""
        generation = self._agent.next_generation(self.now_in, why)
        self.now_in = generation.number
        self._agent.grouped(generation)
        workers, servers = generation.members, generation.servers
        return server_among(self._seat, len(workers), len(servers), servers.index(self._agent.slot))

    def adopt(self, comm: Communicator) -> None:
        """The group of this generation, which ends with it."""
        self._abandon = comm.abandon
        self._agent.watch(comm, self.now_in)

    def _watch_meeting(self, generation: Generation) -> None:
        """On the thread that hears the coordinator, so another one waits."""
        watch = threading.Thread(
            target=self._leave_with_workers,
            args=(generation, self._abandon),
            name="paceline-server-awaits-generation",
            daemon=True,
        )
        watch.start()

    def _leave_with_workers(self, generation: Generation, abandon: Callable[[str], None]) -> None:
        """Between two steps the workers may still want something of this group: a state to save."""
        while not self._agent.is_newer_than(generation.number):
            try:
                await_ranks(self._store_of(generation.number), len(generation.members), self._timeout_s)
            except (RuntimeError, WorldError):  # they take their time, or there is a newer generation
                time.sleep(LOOK_EVERY_S)
                continue
            abandon(generation.why)
            return


def server_among(seat: World, workers: int, servers: int, index: int) -> World:
    """The place of a server process beside so many workers; they count as on its host, unless tensors go over TCP."""
    rank = workers + index
    place = {"rank": rank, "size": workers, "local_rank": rank, "local_size": workers, "servers": servers}
    return replace(seat, **place, host_rank=0, hosts=1)  # type: ignore[arg-type]
