"""The compressors under torch's own DistributedDataParallel: the same losses, and a state that can be saved."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import World
from paceline.compression import Compression, Int8, PowerSgd, Sign, TopK
from paceline.errors import CheckpointError, ConfigError
from paceline.hooks import CompressionState, compress
from paceline.world.world import TcpRendezvous
from tests.workers import run_workers

WIDTH, STEPS = 24, 60
WAYS: dict[str, Any] = {
    "int8": "int8",
    "int8 stochastic": Int8(rounding="stochastic"),
    "bf16": "bf16",
    "sign": Sign(block=64),
    "topk": TopK(share=0.2, warmup=5),
    "topk momentum": TopK(share=0.2, momentum=0.5),
    "powersgd": PowerSgd(rank=3),
    "mixed": Compression({"*.bias": None, "0.*": "powersgd", "*": "int8"}, start_after=2),
}


def meets(world: World) -> None:
    store: Any = dist.HashStore()
    if world.size > 1:
        assert isinstance(world.rendezvous, TcpRendezvous)
        store = dist.TCPStore(world.rendezvous.address, world.rendezvous.port, world.size, world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=30))


def network(bucket_mib: float = 0.002) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH))
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mib)


def step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, number: int, world: World) -> None:
    generator = torch.Generator().manual_seed(1000 * number + world.rank)
    x = torch.randn(8, WIDTH, generator=generator)
    F.mse_loss(model(x), x.flip(1) * 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model: nn.Module) -> float:
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(5))
    return float(F.mse_loss(model(x), x.flip(1) * 2).detach())


def flat(model: nn.Module) -> list[float]:
    found: list[float] = torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist()
    return found


def trains(world: World, *, ways: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Of each way the loss at the end, and how far the weights of the ranks are apart."""
    meets(world)
    found = {}
    for name, way in ways.items():
        model = network()
        if way is not None:
            compress(model, way)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(STEPS):
            step(model, optimizer, number, world)
        largest = torch.tensor(flat(model))
        smallest = largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        found[name] = loss_of(model.module), float((largest - smallest).abs().max())
    dist.destroy_process_group()
    return found


@pytest.mark.workers
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_compressor_trains_as_ddp_does_and_all_ranks_alike(ranks: int) -> None:
    without = {f"{name} without feedback": Compression(WAYS[name], feedback=False) for name in ("sign", "powersgd")}
    results = run_workers(trains, ranks, ways={"ddp": None, **WAYS, **without})
    for result in results:
        assert result.error is None, result.traceback
    losses = {name: loss for name, (loss, _) in results[0].value.items()}
    assert all(apart == 0 for _, apart in results[0].value.values())
    for name in set(WAYS) - {"topk momentum"}:
        assert abs(losses[name] / losses["ddp"] - 1) < 0.05, losses
    assert losses["topk momentum"] < losses["ddp"]  # it goes faster, as momentum does
    for name in without:
        assert losses[name] / losses["ddp"] - 1 > 0.1, losses


def stops_and_goes_on(world: World, *, way: Any) -> tuple[list[float], list[float], list[str]]:
    """Weights of a run that was saved in the middle and goes on elsewhere, and of one that never stopped."""
    meets(world)

    def begun() -> tuple[DistributedDataParallel, torch.optim.Optimizer, CompressionState]:
        model = network(bucket_mib=10.0)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), compress(model, way)

    model, optimizer, state = begun()
    for number in range(8):
        if number == 4:
            saved, weights = state.state_dict(), {k: v.clone() for k, v in model.module.state_dict().items()}
        step(model, optimizer, number, world)
    straight = flat(model)
    model, optimizer, state = begun()
    model.module.load_state_dict(weights)
    state.load_state_dict(saved)
    for number in range(4, 8):
        step(model, optimizer, number, world)
    refused = []
    for changed in ({"rank": 7}, {"ranks": 9}, {"compression": "*: Sign(block=64)x"}):
        try:
            state.load_state_dict(saved | changed)
        except CheckpointError as error:
            refused.append(str(error))
    dist.destroy_process_group()
    return straight, flat(model), refused


@pytest.mark.workers
@pytest.mark.parametrize("way", WAYS)
def test_a_saved_state_goes_on_to_the_same_weights(way: str) -> None:
    for result in run_workers(stops_and_goes_on, 2, way=WAYS[way]):
        assert result.error is None, result.traceback
        straight, again, refused = result.value
        assert straight == again
        assert len(refused) == 3


def test_what_is_no_ddp_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a DistributedDataParallel, not Linear"):
        compress(nn.Linear(2, 2), "int8")  # type: ignore[arg-type]
