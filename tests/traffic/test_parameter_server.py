"""Training over servers moves the formula's bytes on every worker and server; headers are counted by themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.collectives.byte_count import Traffic
from paceline.collectives.canonical_sum import sum_plan
from paceline.collectives.communicator import Communicator
from paceline.parameter_server import handshake
from paceline.parameter_server.wire import FIELDS
from paceline.strategies.server import ParameterServer
from paceline.strategies.server.space import plan_spaces
from paceline.world.world import TcpRendezvous
from tests.benchmarks import script
from tests.workers import free_port, run_workers

pytestmark = pytest.mark.workers

theory = script("traffic_theory")
Moved = theory.Moved

STEPS = 3
HEADER_BYTES = 8 * FIELDS
BUCKET_MIB = 0.02  # several buckets even here

Mode = Literal["update", "aggregate"]
ANSWER: dict[Mode, str] = {"update": "weights", "aggregate": "sum"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 900), nn.Tanh(), nn.Linear(900, 12))


@dataclass(frozen=True)
class Counted:
    """Of one process in the whole run: bytes of tensors, all messages, and what was sent besides."""

    sent: int
    received: int
    traffic: Traffic


def trains_in_both_modes(world: World, *, ports: list[int], **options: Any) -> dict[Mode, Counted | None]:
    meetings = [TcpRendezvous("127.0.0.1", port) for port in ports]  # every engine opens a store of its own
    return {
        mode: train(
            world if world.size == 1 and not world.servers else replace(world, rendezvous=meeting), mode, **options
        )
        for mode, meeting in zip(ANSWER, meetings, strict=True)
    }


def train(world: World, mode: Mode, *, lanes: int, backend: str, dtype: torch.dtype) -> Counted | None:
    """What this process sent and received in all steps; None: it is alone."""
    groups: list[Communicator | None] = []
    connect = handshake.connect
    handshake.connect = lambda *args, **options: groups.append(connect(*args, **options)) or groups[-1]  # type: ignore[func-returns-value]
    try:
        _train(world, ParameterServer(mode=mode), lanes, backend, dtype)
    except SystemExit:  # a server's way out of `prepare`
        assert world.is_server
    finally:
        handshake.connect = connect
    (comm,) = groups
    return None if comm is None else counted(comm.traffic, mode)


def _train(world: World, strategy: ParameterServer, lanes: int, backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 2 * lanes * STEPS
    data = TensorDataset(*(torch.randn(rows, 12, generator=generator).to(dtype) for _ in range(2)))
    options: dict[str, Any] = {"strategy": strategy, "lanes": lanes, "backend": backend, "bucket_mib": BUCKET_MIB}
    with Engine(world=world, seed=5, **options) as engine:
        network = model().to(dtype)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network, optimizer, loader = engine.prepare(network, optimizer, DataLoader(data, batch_size=2))
        for x, y in loader:
            engine.backward(F.mse_loss(network(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert engine.step == STEPS


def counted(traffic: Traffic, mode: Mode) -> Counted:
    tensors = [traffic.of(operation) for operation in ("push", ANSWER[mode])]
    return Counted(sum(t.sent_bytes for t in tensors), sum(t.received_bytes for t in tensors), traffic)


def held_by(servers: int, workers: int, lanes: int, dtype: torch.dtype) -> tuple[list[int], list[int]]:
    """Elements and keys that each server holds."""
    network = model().to(dtype)
    (space,) = plan_spaces(
        [torch.optim.SGD(network.parameters())],
        {id(parameter): name for name, parameter in network.named_parameters()},
        workers=workers,
        servers=servers,
        lanes=lanes,
        bucket_bytes=int(BUCKET_MIB * 2**20),
        key_bytes=None,
    )
    keys = [space.table.of_server(server) for server in range(servers)]
    return [sum(key.elements for key in own) for own in keys], [len(own) for own in keys]


def in_bytes(moved: Moved, *, is_server: bool, mode: Mode, dtype: torch.dtype) -> tuple[int, int]:
    """Sent and received: gradients and sums are fp32, weights of the model's type."""
    push, answer = 4, dtype.itemsize if mode == "update" else 4
    return (moved.sent * answer, moved.received * push) if is_server else (moved.sent * push, moved.received * answer)


def run(workers: int, servers: int, **options: Any) -> dict[Mode, list[Counted | None]]:
    ports = [free_port() for _ in ANSWER]
    results = run_workers(trains_in_both_modes, workers, servers=servers, ports=ports, **options)
    for result in sorted(results, key=lambda result: str(result.error).startswith("PeerLostError")):
        assert result.error is None, f"{result.name}: {result.traceback}"
    return {mode: [result.value[mode] for result in results] for mode in ANSWER}


# -- servers of their own ----------------------------------------------------------------------------------------------


def check(workers: int, servers: int, lanes: int, dtype: torch.dtype = torch.float32) -> None:
    """In both modes, every worker and server, over all steps."""
    held, keys = held_by(servers, workers, lanes, dtype)
    plan = sum_plan(lanes, workers, tuple(range(lanes)))
    for mode, found in run(workers, servers, lanes=lanes, backend="gloo", dtype=dtype).items():
        for rank, (moved, each) in enumerate(zip(theory.parameter_server(held, plan), found, strict=True)):
            assert each is not None
            sent, received = in_bytes(moved, is_server=rank >= workers, mode=mode, dtype=dtype)
            assert (each.sent, each.received) == (STEPS * sent, STEPS * received), f"{mode}, rank {rank}"
        for worker in range(workers):
            check_headers(found[worker], len(plan.roots(worker)), servers, sum(keys), mode)


def check_headers(found: Counted | None, roots: int, servers: int, keys: int, mode: Mode) -> None:
    """A step: OPEN, CLOSE and PULL to each server, a PUSH for each root and key; in the end a PING and a BYE."""
    assert found is not None
    headers = found.traffic.of("header")
    sent, received = (sum(flow.messages for flow in way.values()) for way in (headers.sent, headers.received))
    assert sent == STEPS * (3 * servers + roots * keys) + 2 * servers
    assert received == STEPS * keys + servers  # answers, and those to the PINGs
    assert (headers.sent_bytes, headers.received_bytes) == (HEADER_BYTES * sent, HEADER_BYTES * received)
    assert found.traffic.operations == {"header", "push", ANSWER[mode], "open", "close"}


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_worker_and_server_moves_the_bytes_of_the_formula(workers: int, servers: int) -> None:
    check(workers, servers, lanes=4)


def test_each_root_is_pushed_where_lanes_do_not_divide() -> None:
    assert [len(sum_plan(5, 2, tuple(range(5))).roots(worker)) for worker in range(2)] == [1, 2]
    check(2, 3, lanes=5)


def test_gradients_and_sums_of_half_precision_travel_in_fp32_and_weights_as_they_are() -> None:
    check(2, 1, lanes=2, dtype=torch.bfloat16)


# -- worker 0 doubles as the server ------------------------------------------------------------------------------------


def check_fp32(found: dict[Mode, list[Counted | None]], moved: list[Moved]) -> None:
    for mode, ranks in found.items():
        for rank, (each, expected) in enumerate(zip(ranks, moved, strict=True)):
            assert each is not None
            wanted = (4 * STEPS * expected.sent, 4 * STEPS * expected.received)
            assert (each.sent, each.received) == wanted, f"{mode}, rank {rank}"


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_worker_that_doubles_as_the_server_moves_the_bytes_of_the_others(workers: int) -> None:
    (held,), _ = held_by(1, workers, workers, torch.float32)
    moved = theory.parameter_server_inside(held, sum_plan(workers, workers, tuple(range(workers))))
    assert moved == [Moved((workers - 1) * held, (workers - 1) * held), *[Moved(held, held)] * (workers - 1)]
    check_fp32(run(workers, 0, lanes=workers, backend="gloo", dtype=torch.float32), moved)


def test_a_worker_alone_is_its_own_server_and_moves_nothing() -> None:
    assert run(1, 0, lanes=2, backend="gloo", dtype=torch.float32) == {"update": [None], "aggregate": [None]}


# -- shared memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("servers", "lanes"), [(1, 2), (3, 5), (0, 2), (0, 5)])
def test_in_shared_memory_only_headers_and_further_roots_are_sent(servers: int, lanes: int) -> None:
    held, _ = held_by(max(1, servers), 2, lanes, torch.float32)
    plan = sum_plan(lanes, 2, tuple(range(lanes)))
    moved = (
        theory.parameter_server(held, plan, named=True)
        if servers
        else theory.parameter_server_inside(sum(held), plan, named=True)
    )
    assert (lanes == 2) == all(each == Moved(0, 0) for each in moved)
    check_fp32(run(2, servers, lanes=lanes, backend="paceline", dtype=torch.float32), moved)
