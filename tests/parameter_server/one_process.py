"""A whole job of workers and servers in one process, over channels that are queues.

    with Cluster(workers=2, servers=1, clock=BoundedStaleness(0)) as cluster:
        cluster.say_round(0)                 every worker's gradients of a round are on their way
        cluster.clients[1].start(1, put)     worker 1 waits for the weights of the next

The threads are real; only the processes are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.parameter_server.channel import Channel, local_channels
from paceline.parameter_server.client import Client, Put, ServerConnections
from paceline.parameter_server.clock import Clock
from paceline.parameter_server.key_ranges import Key
from paceline.parameter_server.server import CoreMaker, Server
from paceline.parameter_server.server_core import ServerCore
from paceline.parameter_server.server_key import hold_keys
from paceline.parameter_server.staleness_stats import StalenessCounter
from paceline.parameter_server.wire import Close
from paceline.sharding.flat_layout import BLOCK
from paceline.strategies.server.space import ModelWeights, Space, plan_spaces


def space_of(workers: int, servers: int) -> Space:
    """A weight of three keys and a bias, trained by SGD with a learning rate of 1."""
    parameters = [Parameter(torch.zeros(3, BLOCK)), Parameter(torch.zeros(5))]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    names = {id(parameters[0]): "weight", id(parameters[1]): "bias"}
    (space,) = plan_spaces(
        [optimizer], names, workers=workers, servers=servers, lanes=workers, bucket_bytes=2**20, key_bytes=4 * BLOCK
    )
    return space


class Cluster:
    """Worker w has lane w. A gradient of `value` in every lane moves every weight by minus their mean."""

    def __init__(
        self, *, workers: int, servers: int = 1, clock: Clock, mode: Any = "update", timeout_s: float = 5.0
    ) -> None:
        self.space, self.clock = space_of(workers, servers), clock
        self.table, self.lanes = self.space.table, workers
        ends: dict[tuple[int, int], tuple[Channel, Channel]] = {
            (one, workers + server): local_channels(timeout_s=timeout_s, copies_pushes=True)
            for server in range(servers)
            for one in range(workers + server)
        }
        self.servers = []
        for server in range(servers):
            rank = workers + server
            channels = {one: pair[1] for (one, other), pair in ends.items() if other == rank}
            channels |= {other: pair[0] for (one, other), pair in ends.items() if one == rank}
            stats = StalenessCounter(len(self.table.of_server(server)))
            maker = CoreMaker(self.space.protocol, lambda server=server, stats=stats: self._core(server, mode, stats))
            self.servers.append(Server(server, [maker], channels, stats, timeout_s=timeout_s))
        self.lines = [
            ServerConnections(
                worker,
                [ends[worker, workers + server][0] for server in range(servers)],
                StalenessCounter(),
                timeout_s=timeout_s,
            )
            for worker in range(workers)
        ]
        self.clients = [Client(lines, self.space.protocol, clock) for lines in self.lines]
        self.read = [[parameter.detach().clone() for parameter in self.space.parameters] for _ in range(workers)]

    def _core(self, server: int, mode: Any, stats: StalenessCounter) -> ServerCore:
        space = self.space
        keys = space.table.of_server(server) if mode == "update" else ()
        held = hold_keys(keys, space.parameters, space.optimizers, space.settings)
        return ServerCore(space.protocol, server, held, space.settings, self.clock, mode=mode, stats=stats)

    def __enter__(self) -> Cluster:
        for server in self.servers:
            server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for lines in self.lines:
            lines.close()
        if error is None:
            for server in self.servers:
                server.join()

    # -- what workers do ---------------------------------------------------------------------------------------------

    def say_round(self, round: int, workers: Sequence[int] | None = None, value: float = 1.0, **close: Any) -> None:
        for worker in range(self.lanes) if workers is None else workers:
            client = self.clients[worker]
            client.open(round, [worker])
            for key in self.table.keys:
                self.push(worker, key, round, value)
            client.close(round, Close(((worker, 1.0),), float(self.lanes), **close))

    def push(self, worker: int, key: Key, round: int, value: float = 1.0) -> None:
        used = (1 << len(key.pieces)) - 1
        gradient = torch.full((key.elements,), value / self.lanes)
        self.clients[worker].push(key, gradient, round=round, lane=worker, used=used).wait()

    def start(self, worker: int, round: int) -> list[Tensor]:
        """The weights that the worker reads in this round."""
        self.clients[worker].start(round, self.putting(worker))
        return self.read[worker]

    def putting(self, worker: int) -> Put:
        return ModelWeights([Parameter(tensor) for tensor in self.read[worker]]).put
