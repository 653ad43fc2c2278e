"""What whoever decides does to the processes of this host: start, kill, ask to stop, say something to them.

Coordinator, Member ──▶ OwnHands ──▶ stable: fork, signal
                                 ──▶ control channel: push
                                 ──▶ vault: empty
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.launch.control_channel import Body, ControlServer
from paceline.launch.folders import empty
from paceline.launch.hands import Members
from paceline.launch.hosts import Seat
from paceline.launch.output import Stream
from paceline.launch.stable_process import StableProcess
from paceline.launch.worker_place import worker_variables
from paceline.world.world import Elasticity, World


class OwnHands:
    """`listen_to` shows what a new process writes."""

    def __init__(
        self,
        listen_to: Callable[[World, Mapping[Stream, int]], None],
        stable: StableProcess,
        server: ControlServer,
        seat: Seat,
        vault: Path | None,
    ) -> None:
        self._listen_to, self._stable, self._server = listen_to, stable, server
        self._seat, self._vault = seat, vault

    @property
    def is_late(self) -> bool:
        """Whoever decides says what starts, once we can."""
        return self._seat.late

    def start_all(self) -> None:
        for local_rank in range(self._seat.processes):
            self._start(local_rank, 0, None)

    def push(self, ranks: Sequence[int], kind: str, body: Body) -> None:
        self._server.push(ranks, kind, body)

    def fence(self, rank: int) -> None:
        self._stable.signal_worker(rank, signal.SIGKILL)

    def ask(self, rank: int, number: signal.Signals) -> None:
        """To stop: workers alone. Their loader processes and the servers must live until they have saved."""
        if rank < self._seat.size:
            self._stable.signal_worker(rank, number)

    def start(self, rank: int, incarnation: int, members: Members) -> None:
        self._start(self._seat.local_rank_of(rank), incarnation, members)

    def empty_vault(self) -> None:
        if self._vault is not None:
            empty(self._vault)

    def _start(self, local_rank: int, incarnation: int, members: Members) -> None:
        rules, vault = self._seat.elastic, None if self._vault is None else str(self._vault)
        elastic = None
        if rules is not None:
            elastic = Elasticity(incarnation, vault, rules.copies, tuple(members or ()), self._seat.spans_hosts)
        control = str(self._server.path)
        world = self._seat.world(local_rank, control, elastic)
        pipes = {stream: os.pipe() for stream in Stream}
        outputs = [writing for _, writing in pipes.values()]
        self._stable.start_worker(world.rank, control, worker_variables(world, self._seat), outputs)
        for writing in outputs:
            os.close(writing)
        self._listen_to(world, {stream: reading for stream, (reading, _) in pipes.items()})
