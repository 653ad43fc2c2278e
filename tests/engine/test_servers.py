"""Processes that serve: they run the script up to `prepare`, and are no part of what workers do among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline import Engine, World
from paceline.collectives.communicator import Communicator
from paceline.engine.config import find_device
from paceline.engine.group import Group
from paceline.errors import ConfigError, PeerLostError
from paceline.parameter_server.clock import BoundedStaleness
from paceline.strategies.registry import Job, Maker, Registered, choose, register
from paceline.strategies.server import ParameterServer
from paceline.world.control import ControlClient
from paceline.world.world import Elasticity, TcpRendezvous
from tests.engine.local_training import LocalTraining, Strategy
from tests.engine.loops import prepared
from tests.workers import free_port, run_workers


@dataclass(frozen=True)
class Served:
    """Every worker trains alone; the servers only wait until all workers have said goodbye."""


class LocalMaker(Maker):
    def __init__(self, job: Job, joint: Communicator) -> None:
        self._job, self._joint = job, joint

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Strategy:
        return Strategy(LocalTraining(), self._job, named)

    def close(self) -> None:
        world = self._job.world
        for server in range(world.size, world.size + world.servers):
            self._joint.send(torch.ones(1), to=server, tag=0).wait()
        self._joint.close()


def open_served(config: Served, job: Job) -> LocalMaker:
    assert job.store is not None
    joint = Communicator.connect(
        job.world.joint(),
        PrefixStore("served", job.store),
        backend="gloo",
        device=torch.device("cpu"),
        timeout_s=job.timeout_s,
    )
    if not job.world.is_server:
        return LocalMaker(job, joint)
    assert job.comm.size == 1
    for worker in range(job.world.size):
        joint.receive(torch.zeros(1), source=worker, tag=0).wait()
    joint.close()
    raise SystemExit(0)


register(Registered("served", Served, open_served, bits_of_one_process=lambda config: False, uses_servers=True))


def trains(world: World, *, folder: str) -> tuple[int, int, list[str]]:
    with Engine(world=world, strategy="served", timeout_s=20) as engine:
        (Path(folder) / world.name).touch()
        engine.barrier()
        there = sorted(path.name for path in Path(folder).iterdir())
        model, optimizer, loader = prepared(engine)
        for x, _ in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        engine.barrier()
        return engine.step, engine.world.size, there


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2)])
def test_servers_leave_in_prepare_when_the_workers_are_done(workers: int, servers: int, tmp_path: Path) -> None:
    results = run_workers(trains, workers, servers=servers, folder=str(tmp_path))
    everybody = sorted([f"worker {rank}" for rank in range(workers)] + [f"server {rank}" for rank in range(servers)])
    for result in results[:workers]:
        assert result.error is None, result.traceback
        assert result.value == (8 // workers, workers, everybody)
    for result in results[workers:]:
        assert (result.value, result.error) == (None, None), result.traceback


def test_servers_beside_a_strategy_without_use_for_them_are_refused() -> None:
    world = World(servers=2, rendezvous=TcpRendezvous("127.0.0.1", free_port()))
    with pytest.raises(ConfigError, match=r"^2 servers and strategy='ddp', which has no use for them; start without"):
        Engine(world=world)


def waits_for_a_server_that_does_not_come(world: World) -> None:
    if world.is_server:
        return
    with Engine(world=world, strategy="served", timeout_s=1) as engine:
        engine.barrier()


@pytest.mark.workers
def test_a_barrier_that_a_server_does_not_reach_says_who_was_waited_for() -> None:
    worker, _ = run_workers(waits_for_a_server_that_does_not_come, 1, servers=1)
    assert worker.error is not None
    assert worker.error.startswith(
        f"{PeerLostError.__name__}: worker 0 waited 1 s in engine.barrier() for 1 worker and 1 server, but 1 came"
    ), worker.error


def test_a_server_holds_its_weights_in_the_hosts_memory() -> None:
    server = World(rank=1, size=1, local_rank=1, servers=1, rendezvous=TcpRendezvous("127.0.0.1", 1))
    assert find_device(server, "cuda:0") == torch.device("cpu")


def test_an_asynchronous_clock_with_elastic_is_refused_and_what_to_do_instead_is_said() -> None:
    group = object.__new__(Group)
    group.seat, group.supervisor = World(elastic=Elasticity()), object.__new__(ControlClient)
    group._config = SimpleNamespace(strategy=choose(ParameterServer(clock=BoundedStaleness(2))))  # type: ignore[assignment]
    told = (
        r"--elastic can't be combined with strategy parameter_server clock=s=2,from=100: its workers do not make every "
        r"step together, .* Start it without --elastic; under an asynchronous clock losing a worker that is no server"
    )
    with pytest.raises(ConfigError, match=told):
        group._join_elastic_job(None)  # type: ignore[arg-type]
