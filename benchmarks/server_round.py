"""Rounds of a parameter server without a training loop: every worker pushes one tensor and reads the result back.

    a worker     job = ServerJob(world, store, elements); job.round(); …; job.close()
    a server     job = ServerJob(world, store, elements); job.serve()                    until all workers have closed
    neither      held_by_servers(elements, servers)                                      who holds how much of it

The tensor is cut into `PARTS` keys, so that what 1, 2, 3, 4, 6 or 8 servers hold is equal where Z divides by `PARTS`.
Channels, client and server are those of training, and so is what they send; the optimizer is plain SGD.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.nn import Parameter

from paceline.collectives.byte_count import Traffic
from paceline.collectives.communicator import SingleWorker
from paceline.optim.group_settings import GroupSettings
from paceline.parameter_server.channel import LocalChannel
from paceline.parameter_server.client import Client
from paceline.parameter_server.key_ranges import Key
from paceline.parameter_server.round_by_round import Mode
from paceline.parameter_server.server import Server
from paceline.parameter_server.wire import Close
from paceline.strategies.registry import Job
from paceline.strategies.server.parameter_server import Assembly, ParameterServer
from paceline.strategies.server.space import plan_spaces
from paceline.world.control import NoSupervisor
from paceline.world.world import World

PARTS = 24
BUCKET_BYTES = 16 << 20
TENSORS = ("push", "weights", "sum")  # the messages that carry gradients or weights


class ServerJob:
    """One process of a synchronous job over gloo, each worker with one lane."""

    def __init__(
        self, world: World, store: Store, elements: int, *, mode: Mode = "update", timeout_s: float = 120.0
    ) -> None:
        self._world = world
        parameters, optimizer = _model(elements)
        job = Job(
            world=world,
            comm=SingleWorker(),
            store=store,
            supervisor=NoSupervisor(),
            device=torch.device("cpu"),
            models=(),
            names=_names(parameters),
            optimizers=[optimizer],
            lanes=world.size,
            reduction="exact",
            algorithm=None,
            backend="gloo",
            bucket_bytes=BUCKET_BYTES,
            overlap=False,
            timeout_s=timeout_s,
        )
        self._mode: Mode = mode
        self._assembly = Assembly(ParameterServer(mode=mode, key_mib=_key_bytes(elements) / 2**20), job)
        self._server: Server | None = None
        if world.is_server:
            return
        inside: LocalChannel | None = None
        if not world.servers and world.is_main:
            self._server, inside = self._assembly.server_inside()
        self._connections = self._assembly.connections(inside)
        space = self._assembly.spaces[0]
        self._client = Client(
            self._connections, space.protocol, self._assembly.config.clock, recycle=self._assembly.buffers.give_back
        )
        self._settings = GroupSettings(space.optimizers)
        self._gradients = [torch.full((bucket.elements,), float(world.rank + 1)) for bucket in space.buckets]
        self._read = [torch.zeros(bucket.elements) for bucket in space.buckets]
        self._round = 0

    @property
    def traffic(self) -> Traffic:
        """What this process has sent and received so far, worker and server in it together."""
        return Traffic() if self._assembly.comm is None else self._assembly.comm.traffic

    def serve(self) -> None:
        self._assembly.serve()

    # -- a worker ----------------------------------------------------------------------------------------------------

    def round(self) -> None:
        """Push, and read when all workers have pushed: returns with the new weights, or with the sum of this round."""
        lane, round, client = self._world.rank, self._round, self._client
        client.start(round, self._put)
        client.open(round, [lane])
        sent = [
            client.push(key, key.of_bucket(gradient), round=round, lane=lane, used=(1 << len(key.pieces)) - 1)
            for number, gradient in enumerate(self._gradients)
            for key in client.table.of_bucket(number)
        ]
        client.close(round, Close(((lane, 1.0),), self._world.size, settings=tuple(self._settings.read())))
        self._round += 1
        if self._mode == "aggregate":
            client.sums(round, self._put)
        else:
            client.start(self._round, self._put)
        for each in sent:
            each.wait()

    def check(self) -> None:
        """Worker r brings r + 1 everywhere; a server that updates subtracts the sum from its weights in each round."""
        total = sum(range(self._world.size + 1))
        expected = total if self._mode == "aggregate" else -self._round * total
        if not all(bool((read == expected).all()) for read in self._read):
            raise AssertionError(f"{self._world.name} read something else than {expected} after round {self._round}")

    def _put(self, key: Key, values: Tensor) -> None:
        key.of_bucket(self._read[key.bucket]).copy_(values)

    def close(self) -> None:
        self._connections.close()
        if self._server is not None:
            self._server.join()
        self._assembly.close()


def held_by_servers(elements: int, servers: int) -> list[int]:
    """Elements of the tensor on each server."""
    parameters, optimizer = _model(elements)
    (space,) = plan_spaces(
        [optimizer],
        _names(parameters),
        workers=1,
        servers=servers,
        lanes=1,
        bucket_bytes=BUCKET_BYTES,
        key_bytes=_key_bytes(elements),
    )
    return [sum(key.elements for key in space.table.of_server(server)) for server in range(servers)]


def _model(elements: int) -> tuple[list[Parameter], torch.optim.Optimizer]:
    parameters = [Parameter(part.clone()) for part in torch.zeros(elements).tensor_split(PARTS)]
    return parameters, torch.optim.SGD(parameters, lr=1.0)


def _names(parameters: list[Parameter]) -> dict[int, str]:
    return {id(parameter): f"part {number}" for number, parameter in enumerate(parameters)}


def _key_bytes(elements: int) -> int:
    """No two parts fit into one key."""
    return -(-elements // PARTS) * torch.float32.itemsize
