"""Training over each algorithm: the losses of exact ddp, and the formula's bytes in every step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.collectives.byte_count import Traffic
from paceline.collectives.choice import ALGORITHMS, AUTO, FLAT, HIERARCHICAL
from paceline.errors import ConfigError
from paceline.world.world import TcpRendezvous, Topology
from tests.benchmarks import script
from tests.workers import free_port, run_workers

theory = script("traffic_theory")
Moved = theory.Moved

NAMED = [name for name in ALGORITHMS if name != AUTO]
STEPS = 3
SIXTEENTH = 0.0005  # MiB: several buckets even here


def model() -> nn.Module:
    """Every parameter's length divides by 12: whatever the buckets, the bytes of 2, 3, 4 workers are the formula's."""
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))


ELEMENTS = sum(parameter.numel() for parameter in model().parameters())


def hosts_of(size: int) -> list[int]:
    return [rank // 2 for rank in range(size)] if size == 4 else [0] * size


def train(world: World, **options: Any) -> tuple[list[float], Traffic]:
    """The losses, and the traffic of the last step."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(24 * STEPS, 12, generator=generator), torch.randn(24 * STEPS, 12, generator=generator)
    )
    losses = []
    with Engine(world=world, seed=5, bucket_mib=SIXTEENTH, **options) as engine:
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        loader = DataLoader(data, batch_size=24 // world.size)
        network, optimizer, loader = engine.prepare(network, optimizer, loader)
        for x, y in loader:
            loss = F.mse_loss(network(x), y)
            engine.mean("loss", loss)
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(engine.means["loss"])
        engine.weights_hash()  # raises where the workers' weights differ
        return losses, engine.traffic


def trains_over_all(world: World, *, ports: list[int]) -> dict[str, tuple[list[float], Traffic]]:
    host = hosts_of(world.size)
    place = replace(
        world,
        host_rank=host[world.rank],
        hosts=max(host) + 1,
        local_rank=host[: world.rank].count(host[world.rank]),
        local_size=host.count(host[world.rank]),
    )
    ways: dict[str, dict[str, Any]] = {name: {"reduction": "fast", "algorithm": name} for name in ALGORITHMS}
    ways |= {"exact": {"reduction": "exact"}, "native": {"reduction": "fast"}}
    meetings = [TcpRendezvous("127.0.0.1", port) for port in ports]  # every engine opens a store of its own
    return {
        name: train(replace(place, rendezvous=meeting), **way)
        for (name, way), meeting in zip(ways.items(), meetings, strict=True)
    }


def moved_by(name: str, size: int) -> Sequence[Moved]:
    if name == HIERARCHICAL:
        return theory.hierarchical(ELEMENTS, Topology.of(hosts_of(size)))
    forms: dict[str, Callable[[int, int], list[Moved]]] = {
        "ring": theory.ring,
        "halving-doubling": theory.halving_doubling,
        "direct": theory.direct,
        "tree": theory.tree,
        "star": theory.star,
        "unsplit-ring": theory.unsplit_ring,
    }
    return forms[name](ELEMENTS, size)


@pytest.mark.workers
@pytest.mark.parametrize("size", [2, 3, 4])
def test_over_each_algorithm_the_losses_are_exact_ddps_and_a_step_moves_the_formulas_bytes(size: int) -> None:
    results = run_workers(trains_over_all, size, ports=[free_port() for _ in range(len(ALGORITHMS) + 2)])
    for result in results:
        assert result.error is None, result.traceback
    exact = results[0].value["exact"][0]
    assert len(exact) == STEPS
    for rank, result in enumerate(results):
        for name in ALGORITHMS:
            assert result.value[name][0] == pytest.approx(exact, rel=1e-5), name
        for name in NAMED:
            step = result.value[name][1]
            assert (step.sent_bytes, step.received_bytes) == (
                4 * moved_by(name, size)[rank].sent,
                4 * moved_by(name, size)[rank].received,
            ), f"{name}, rank {rank}"
            assert step.operations == {name}
            assert step.native == {"all_gather": 1}  # the vote
        assert result.value[AUTO][1].operations <= {*FLAT, HIERARCHICAL}
        assert result.value["native"][1].sent_bytes == 0
        assert result.value["native"][1].native["all_reduce"] > 1


# -- what is asked for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_alone_any_algorithm_does_nothing(algorithm: str) -> None:
    losses, traffic = train(World(), reduction="fast", algorithm=algorithm)
    assert losses == train(World(), reduction="fast")[0]
    assert traffic == Traffic()


def test_an_algorithm_that_does_not_exist_is_refused_with_the_list() -> None:
    with pytest.raises(
        ConfigError, match=r"^algorithm='rong' is not known; choose one of ring, .*, hierarchical, auto$"
    ):
        Engine(world=World(), reduction="fast", algorithm="rong")


def test_an_algorithm_for_the_exact_sum_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm='ring' with reduction='exact'.*choose reduction='fast'"):
        Engine(world=World(), algorithm="ring")


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", Path(__file__).parents[2] / "examples" / "train_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_hands_its_algorithm_to_the_engine(example: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="algorithm='rong' is not known"):
        example.main(["--run-dir", str(tmp_path), "--reduction", "fast", "--algorithm", "rong"])
