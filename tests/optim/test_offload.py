"""CPU offload: the update in turns has the bits of the update at once, and what can't be offloaded is refused."""

from __future__ import annotations

from collections.abc import Callable
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
from paceline.optim import offload as offloading
from paceline.optim.offload import HostMemory, Offload, check_offload
from tests.bits.programs import gan, gpt, wide
from tests.strategies.test_zero import CountingLion, trains
from tests.workers import hashes, run_workers


def offloaded(world: World, *, run: Callable[..., Any], offload: str = "optimizer", **job: Any) -> Any:
    """On the CPU there is nothing to gain, so it is refused; it can be done all the same, to compare bits."""
    arguments.check_offload = lambda *_: None
    return run(world, offload=offload, **job)


@pytest.mark.workers
@pytest.mark.parametrize(("strategy", "workers"), [("zero1", 1), ("zero2", 3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_in_turns_gives_the_bits_of_one_at_once(strategy: str, workers: int, precision: str) -> None:
    for program, settings in (
        (wide, {"optimizer": CountingLion, "clip": 0.1}), (gan, {}), (gpt, {"epochs": 1}),
    ):  # fmt: skip
        job: dict[str, Any] = {"lanes": 4, "bucket_mib": 0.02, "precision": precision, **settings}
        plain = hashes(run_workers(program, 1, **job))
        assert hashes(run_workers(offloaded, workers, run=program, strategy=strategy, **job)) == plain


@pytest.mark.workers
def test_a_state_saved_with_offload_goes_on_with_it_to_the_same_bits(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    job: dict[str, Any] = {"run": trains, "precision": "bf16"}
    straight = hashes(run_workers(trains, 1, until=6, precision="bf16"))
    hashes(run_workers(offloaded, 2, until=3, folder=folder, strategy="zero1", **job))
    assert hashes(run_workers(offloaded, 3, until=6, folder=folder, resume=True, strategy="zero2", **job)) == straight


def test_on_the_cpu_it_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^offload='optimizer' on the CPU: everything is on the CPU already; leave"):
        Engine(world=World(), strategy="zero1", offload="optimizer", device="cpu")


def test_what_is_not_known_and_who_can_not_are_refused_with_what_can() -> None:
    cuda = torch.device("cuda", 0)
    check_offload(None, cuda, "ddp", ["zero1"])
    check_offload("optimizer", cuda, "zero1", ["zero1"])
    with pytest.raises(ConfigError, match="offload='weights' is not known; choose 'optimizer' or 'parameters'"):
        check_offload("weights", cuda, "zero1", ["zero1"])
    with pytest.raises(
        ConfigError, match="with strategy='ddp', which updates weights where they are; choose one of zero1"
    ):
        check_offload("optimizer", cuda, "ddp", ["zero1", "zero2"])
    check_offload("parameters", cuda, "zero3", ["zero3"])
    with pytest.raises(
        ConfigError,
        match="'parameters' with strategy='zero2', which has all weights on the device; choose strategy='zero3'",
    ):
        check_offload("parameters", cuda, "zero2", ["zero2", "zero3"])


# -- on a device -------------------------------------------------------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def moments(world: World, **job: Any) -> tuple[list[str], int, list[float]]:
    """Devices of what the optimizer on pieces keeps, the most bytes that were on the GPU, and losses."""
    torch.cuda.reset_peak_memory_stats()
    with Engine(world=world, strategy="zero2", device="cuda:0", seed=1, **job) as engine:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)), nn.Linear(1024, 1))
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
        active: Any = engine._training().active
        on_pieces = active._parts.optimizers.of(optimizer)._on_pieces
        kept = [v.device.type for state in on_pieces.state.values() for v in state.values()]
        return sorted(set(kept)), torch.cuda.max_memory_allocated(), losses


@pytest.mark.workers
@on_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_and_masters_are_on_the_host_and_training_is_the_same(precision: str) -> None:
    elements = 8 * 1024 * 1025 + 1025
    plain, offload = (run_workers(moments, 1, precision=precision, **job)[0] for job in ({}, {"offload": "optimizer"}))
    assert offload.error is None, offload.traceback
    assert offload.value[0] == ["cpu"]
    saved = (8 if precision == "fp32" else 12) * elements
    assert plain.value[1] - offload.value[1] > 0.9 * saved
    assert offload.value[2] == pytest.approx(plain.value[2], rel=1e-2)


@on_cuda
def test_a_gradient_lands_and_a_master_goes_back_rounded() -> None:
    way = Offload(torch.device("cuda", 0))
    total = torch.randn(100_000, device="cuda")
    here = way.land(0, total)
    way.wait(0)
    assert here.is_pinned()
    assert torch.equal(here, total.cpu())
    part = torch.empty(100_000, dtype=torch.bfloat16, device="cuda")
    way.give([part], [here])
    way.finish()
    assert torch.equal(part.cpu(), here.bfloat16())


@pytest.mark.parametrize("seed", range(5))
def test_pinned_memory_is_cut_from_slabs_and_little_of_it_is_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs are powers of two, which torch's allocator does not round up; no tensor lies in another."""
    asked: list[int] = []

    def plain(size: int) -> torch.Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(offloading, "_pinned_bytes", plain)
    monkeypatch.setattr(offloading, "LARGEST_SLAB", 2**16)
    random, memory = torch.Generator().manual_seed(seed), HostMemory(pinned=True)
    sizes = torch.randint(1, 4096, (60,), generator=random).tolist()
    dtypes = [(torch.float32, torch.bfloat16)[number % 2] for number in range(60)]
    tensors = [memory.empty(size, dtype).fill_(n) for n, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))]
    for number, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert tensor.shape == (size,)
        assert tensor.data_ptr() % 16 == 0
        assert (tensor == number).all()
    assert all(size & (size - 1) == 0 for size in asked)
    used = sum(size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True))
    assert sum(asked) <= 1.1 * used + 2**16
