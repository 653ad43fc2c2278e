"""Parameters that no optimizer holds, as the base of adapters: in shards with the weights, to ddp's bits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.strategies.fsdp.fsdp import FsdpConfig
from paceline.strategies.fsdp.hybrid import HybridConfig
from paceline.strategies.fsdp.unmaterialised import is_unmaterialised
from paceline.strategies.zero.zero3 import Zero3Config
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers

WIDTH = 96
STEPS = 4
SHARDED: list[dict[str, Any]] = [
    {"strategy": FsdpConfig()},
    {"strategy": Zero3Config(weights="in shards")},
    {"strategy": HybridConfig(shard_over=3), "backend": "gloo"},  # over shared memory weights are once per host
]


class Adapted(nn.Module):
    """Frozen layers with a trained one beside each; a frozen embedding and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.bases = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.low = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(4))
        self.high = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(4))
        for frozen in (self.embedding, self.bases):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).mean(1)
        for base, low, high in zip(self.bases, self.low, self.high, strict=True):
            x = torch.tanh(base(x) + high(low(x)))
        return self.norm(x).square().mean()


def held(model: nn.Module) -> tuple[int, int]:
    """Bytes of frozen weights that are whole here, and of all."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return sum(p.nbytes for p in frozen if not is_unmaterialised(p)), sum(p.nbytes for p in frozen)


def trains(world: World, *, folder: str | None = None, resumed: bool = False, **job: Any) -> str:
    with Engine(world=world, lanes=4, threads=1, bucket_mib=0.05, **job) as engine:
        model, more = Adapted(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        data = TensorDataset(torch.randint(11, (STEPS * 8 - 2, 5), generator=more))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=2))
        if resumed and folder is not None:
            engine.load_state(folder)
        for (x,) in loader:
            engine.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()
            if engine.stepped and engine.step == 2 and folder is not None and not resumed:
                engine.save_state(folder)
        return engine.weights_hash()


@cache
def alone(precision: str | None = None) -> frozenset[str]:
    return frozenset(hashes(run_workers(trains, 1, precision=precision)))


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("job", [*SHARDED, {"strategy": FsdpConfig(shard_frozen=False)}], ids=str)
def test_a_frozen_base_changes_no_bit(job: dict[str, Any], precision: str | None) -> None:
    assert hashes(run_workers(trains, 3, precision=precision, **job)) == alone(precision)


@pytest.mark.parametrize("strategies", [("fsdp", "ddp"), ("ddp", "fsdp"), ("fsdp", "zero2")])
def test_a_checkpoint_with_a_frozen_base_goes_on_under_another_strategy(
    strategies: tuple[str, str], tmp_path: Path
) -> None:
    first, then = strategies
    folder = str(tmp_path / "state")
    assert hashes(run_workers(trains, 3, strategy=first, folder=folder)) == alone()
    assert hashes(run_workers(trains, 2, strategy=then, folder=folder, resumed=True)) == alone()


def measures(world: World, **job: Any) -> tuple[int, int, int, int]:
    """Frozen bytes that are whole, of all; those of this worker's shards; the whole model's."""
    with Engine(world=world, lanes=4, threads=1, bucket_mib=0.05, **job) as engine:
        model = Adapted()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        data = TensorDataset(torch.randint(11, (16, 5)))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=2))
        for (x,) in loader:
            engine.backward(model(x))
            optimizer.step()
        shards = engine._objects.step.strategies.local_shard  # type: ignore[union-attr]
        frozen = [shards(p) for p in model.parameters() if not p.requires_grad]
        mine = sum(part.nbytes for shard in frozen for _, part in getattr(shard, "parts", [(0, shard)]))
        return *held(model), mine, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("job", SHARDED, ids=str)
def test_a_worker_holds_its_part_of_a_frozen_base(job: dict[str, Any]) -> None:
    found = [result.value for result in run_workers(measures, 3, **job)]
    assert [whole for whole, *_ in found] == [0, 0, 0]
    assert sum(mine for _, _, mine, _ in found) == found[0][1]
    assert max(mine for _, _, mine, _ in found) < 0.4 * found[0][1]


def test_a_frozen_base_can_stay_whole() -> None:
    found = [result.value for result in run_workers(measures, 2, strategy=FsdpConfig(shard_frozen=False))]
    assert all(whole == frozen for whole, frozen, _, _ in found)


def moves(world: World, **job: Any) -> str:
    """A part that is no optimizer's follows the trained one, as a teacher does."""
    with Engine(world=world, lanes=4, threads=1, **job) as engine:
        model = nn.ModuleDict({"student": nn.Linear(8, 8), "teacher": nn.Linear(8, 8).requires_grad_(False)})
        optimizer = torch.optim.SGD(model["student"].parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.arange(128.0).view(16, 8) / 99), batch_size=2)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        for (x,) in loader:
            engine.backward((model["student"](x) - model["teacher"](x)).square().mean())
            optimizer.step()
            if engine.stepped:
                with torch.no_grad():
                    for there, here in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                        there.mul_(0.9).add_(here.detach().clone(), alpha=0.1)
        return engine.weights_hash()


def test_a_frozen_part_that_the_script_changes_is_refused_with_what_to_write() -> None:
    for result in run_workers(moves, 2, strategy="fsdp"):
        assert result.error is not None
        assert "mul_() on a parameter whose weights are in shards" in result.error or "PeerLost" in result.error
        assert "shard_frozen=False" in result.error or "PeerLost" in result.error
    whole = hashes(run_workers(moves, 2, strategy=FsdpConfig(shard_frozen=False)))
    assert whole == hashes(run_workers(moves, 1))


def builds_empty(world: World, **job: Any) -> str:
    with Engine(world=world, lanes=4, threads=1, **job) as engine:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        model[:3].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        loader = DataLoader(TensorDataset(torch.arange(1024.0).view(16, 64) / 999), batch_size=2)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        return engine.weights_hash()


def test_a_frozen_base_on_the_meta_device_is_filled_in_shards() -> None:
    assert hashes(run_workers(builds_empty, 3, strategy="fsdp")) == hashes(run_workers(builds_empty, 1))


def shares_memory(world: World, **job: Any) -> str:
    """Two frozen parameters over the same memory, one with gaps, and one of whole numbers stay as they are."""
    with Engine(world=world, lanes=4, threads=1, **job) as engine:
        model = nn.Linear(8, 8)
        table = torch.arange(64.0).view(8, 8) / 99
        model.same = nn.Parameter(table, requires_grad=False)
        model.again = nn.Parameter(table, requires_grad=False)
        model.gaps = nn.Parameter(torch.ones(8, 16)[:, ::2], requires_grad=False)
        model.counts = nn.Parameter(torch.arange(8), requires_grad=False)
        optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
        loader = DataLoader(TensorDataset(torch.arange(128.0).view(16, 8) / 99), batch_size=2)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        for (x,) in loader:
            y = model(x) @ model.same + x @ model.again * model.counts + x @ model.gaps
            engine.backward(y.square().mean())
            optimizer.step()
        return engine.weights_hash()


def test_frozen_parameters_that_cannot_be_cut_stay_whole() -> None:
    assert hashes(run_workers(shares_memory, 2, strategy="fsdp")) == hashes(run_workers(shares_memory, 1))
