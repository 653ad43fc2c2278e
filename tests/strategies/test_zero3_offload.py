"""zero3 with its optimizer on the host, or its weights too: the bits of zero3 without, as the CPU shows as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.engine import config as arguments
from paceline.errors import ConfigError
from paceline.optim.offload import HOST, Lift
from paceline.strategies.fsdp.fsdp import Fsdp
from paceline.strategies.fsdp.shard_pulls import NoPeers
from paceline.strategies.fsdp.unmaterialised import is_unmaterialised
from paceline.strategies.zero.zero3 import Zero3Config
from tests.bits.programs import gan, gpt, wide
from tests.optim.test_offload import offloaded as offload_any
from tests.strategies.test_meta_weights import trains_from_meta
from tests.strategies.test_zero import CountingLion, trains
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers

SHARDS = Zero3Config(weights="in shards")


@pytest.mark.parametrize(("offload", "workers"), [("optimizer", 2), ("parameters", 1), ("parameters", 3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_gives_the_bits_of_one_process(offload: str, workers: int, precision: str) -> None:
    for program, settings in (
        (wide, {"optimizer": CountingLion, "clip": 0.1}), (gan, {}),
    ):  # fmt: skip
        job: dict[str, Any] = {"lanes": 4, "bucket_mib": 0.02, "precision": precision, **settings}
        plain = hashes(run_workers(program, 1, **job))
        made = run_workers(offload_any, workers, run=program, strategy=SHARDS, offload=offload, **job)
        assert hashes(made) == plain, program


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_saved_state_goes_on_at_another_number_of_workers(precision: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    job: dict[str, Any] = {"run": trains, "precision": precision, "strategy": "zero3", "offload": "parameters"}
    straight = hashes(run_workers(trains, 1, until=6, precision=precision))
    hashes(run_workers(offload_any, 3, until=3, folder=folder, **job))
    assert hashes(run_workers(offload_any, 1, until=6, folder=folder, resume=True, **job)) == straight


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_of_the_meta_device_is_filled_on_its_way_to_the_host(precision: str) -> None:
    straight = hashes(run_workers(trains_from_meta, 1, precision=precision))
    job: dict[str, Any] = {"run": trains_from_meta, "precision": precision, "strategy": "zero3"}
    for workers in (1, 2):
        assert hashes(run_workers(offload_any, workers, offload="parameters", **job)) == straight


# -- where weights are -------------------------------------------------------------------------------------------------


def looks(world: World, *, precision: str) -> dict[str, Any]:
    """What lies where between two steps, and a change by load_state_dict."""
    arguments.check_offload = lambda *_: None
    with Engine(world=world, strategy="zero3", offload="parameters", bucket_mib=0.01, precision=precision) as engine:
        model: nn.Module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = TensorDataset(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        strategy: Any = engine._training().active
        assert isinstance(strategy, Fsdp)
        shards = [part for of_unit in strategy._weights[0]._shards for part in of_unit]
        addresses = {part.untyped_storage().data_ptr() for part in shards}
        tensors = strategy._parts.optimizers.of(optimizer).pieces.tensors.values()
        facts = {
            "released": all(is_unmaterialised(p) for p in model.parameters()),
            "shards": sum(part.numel() for part in shards),
            "in_place": sum(t.untyped_storage().data_ptr() in addresses for t in tensors) == len(tensors),
        }
        model.load_state_dict({name: torch.full_like(p, 0.5) for name, p in model.state_dict().items()})
        return facts | {"loaded": {float(p.detach().unique()) for p in model.parameters()}}


@pytest.mark.parametrize(("precision", "in_place"), [("fp32", True), ("bf16", False)])
def test_a_shard_in_fp32_is_its_own_master_and_weights_can_be_loaded(precision: str, in_place: bool) -> None:
    for workers in (1, 2):
        for result in run_workers(looks, workers, precision=precision):
            assert result.error is None, result.traceback
            expected = {"released": True, "shards": 4 * 65 * 64 // workers, "in_place": in_place, "loaded": {0.5}}
            assert result.value == expected


def test_weights_once_per_host_and_on_the_host_of_each_worker_exclude_each_other() -> None:
    (result,) = run_workers(
        offload_any, 1, run=gpt, strategy=Zero3Config(weights="per host"), offload="parameters", lanes=1
    )
    assert result.error is not None
    assert "offload='parameters' with weights='per host': each worker has a shard of its own" in result.error
    assert ConfigError.__name__ in result.error


def test_without_streams_a_lift_copies_at_once() -> None:
    lift, flat = Lift(HOST), torch.zeros(4)
    room = lift.host_buffer(4, torch.float32).fill_(3.0)
    lift.arrive(lift.start([(room, flat)]))
    lift.finish()
    assert flat.tolist() == [3.0] * 4
    assert NoPeers().start(0, {}) == []


def lands(world: World, *, lanes: int) -> tuple[int, int, int, list[int]]:
    """Buckets, those that had left for the host when backward was nearly done, all that did, what the device keeps."""
    arguments.check_offload = lambda *_: None
    with Engine(world=world, strategy=SHARDS, offload="optimizer", bucket_mib=0.01, lanes=lanes) as engine:
        model: nn.Module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(
            model, optimizer, DataLoader(torch.randn(8 * lanes, 64), batch_size=4)
        )
        in_backward: list[int] = []
        landed: set[int] = set()
        for x in loader:
            strategy: Any = engine._training().active
            land = strategy._parts.offload.land
            strategy._parts.offload.land = lambda number, total, land=land: (landed.add(number), land(number, total))[1]
            x.requires_grad_().register_hook(lambda _: in_backward.append(len(landed)))
            engine.backward(model(x).square().mean())
            optimizer.step()
        sums = [total.numel() for total in strategy._sums]
        return len(sums), in_backward[0], len(landed), sums


@pytest.mark.parametrize(("workers", "lanes", "early"), [(2, 2, True), (2, 4, False)])
def test_a_sum_leaves_for_the_host_during_backward_when_its_last_lane_has_come(
    workers: int, lanes: int, early: bool
) -> None:
    for result in run_workers(lands, workers, lanes=lanes):
        assert result.error is None, result.traceback
        buckets, in_first_backward, in_all, kept = result.value
        assert (in_first_backward > 0) == early
        assert buckets // 2 <= in_all <= buckets  # of small ones a worker may own nothing
        assert not any(kept)


# -- on a device -------------------------------------------------------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def trains_on_cuda(world: World, **job: Any) -> tuple[int, list[float], list[str]]:
    """The most bytes that were on the GPU in later steps, losses, and where shards are."""
    with Engine(world=world, strategy="zero3", device="cuda:0", seed=1, **job) as engine:
        model: nn.Module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)), nn.Linear(1024, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = TensorDataset(*torch.randn(64, 1025, generator=torch.Generator().manual_seed(0)).split([1024, 1], dim=1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=8))
        losses = []
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            engine.backward(loss)
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            if engine.step == 2:
                torch.cuda.reset_peak_memory_stats()
        active: Any = engine._training().active
        shards = [p for some in getattr(active, "_weights", ()) for unit in some._shards for p in unit]
        return torch.cuda.max_memory_allocated(), losses, sorted({f"{p.device.type} {p.is_pinned()}" for p in shards})


@on_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_are_in_pinned_memory_and_training_is_the_same(precision: str) -> None:
    elements = 8 * 1024 * 1025 + 1025
    plain, offload = (
        run_workers(trains_on_cuda, 1, precision=precision, **job)[0] for job in ({}, {"offload": "parameters"})
    )
    assert offload.error is None, offload.traceback
    assert offload.value[2] == ["cpu True"]
    state = (8 if precision == "fp32" else 12) * elements
    weights = (4 if precision == "fp32" else 2) * elements
    assert plain.value[0] - offload.value[0] > 0.9 * state + 0.5 * weights
    assert offload.value[1] == pytest.approx(plain.value[1], rel=1e-2)
