"""Low precision under every strategy that takes it: fp32 masters are what is trained, hashed, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, Precision, World
from paceline.errors import CheckpointError, ConfigError
from paceline.strategies.registry import STRATEGIES
from tests.bits.programs import gpt, wide
from tests.strategies.test_zero import CountingLion, freezes_and_thaws, loads_by_itself, saves_twice, trains
from tests.workers import hashes, run_workers

LOW = [name for name, entry in STRATEGIES.items() if entry.takes_low_precision]


def in_bf16(program: Callable[..., Any], workers: int, **job: Any) -> Any:
    return run_workers(program, workers, precision="bf16", **job)


# -- what is trained ---------------------------------------------------------------------------------------------------


def by_hand(steps: int) -> tuple[Tensor, Tensor]:
    """Masters and bf16 weights of a linear model after some steps of SGD, as anyone would write it."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    master = torch.randn(4, 16)
    low = nn.Parameter(master.bfloat16())
    for _ in range(steps):
        low.grad = None
        F.mse_loss(F.linear(x.bfloat16(), low).float(), y).backward()
        assert low.grad is not None
        master.add_(low.grad.float(), alpha=-0.01)
        low.data = master.bfloat16()
    return master, low.detach()


@pytest.mark.parametrize("strategy", LOW)
def test_the_update_is_that_of_the_fp32_master_and_the_model_holds_it_rounded(strategy: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    weight = torch.randn(4, 16)
    with Engine(world=World(), strategy=strategy, precision="bf16", device="cpu") as engine:
        model = nn.Linear(16, 4, bias=False)
        with torch.no_grad():
            model.weight.copy_(weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=8))
        for _ in range(5):
            for a, b in loader:
                engine.backward(F.mse_loss(model(a), b))
                optimizer.step()
        master, low = by_hand(5)
        whole = engine._training().strategies.full_tensor(model.weight)
        assert whole.dtype == torch.float32
        assert torch.equal(whole, master)
        assert torch.equal(model.weight.detach(), low)


def test_small_updates_add_up_that_bf16_alone_would_lose() -> None:
    with Engine(world=World(), precision="bf16", device="cpu") as engine:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        data = TensorDataset(torch.ones(100, 1), torch.zeros(100, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=1))
        for x, _ in loader:
            engine.backward(model(x).sum())
            optimizer.step()
        assert float(model.weight.detach()) == pytest.approx(0.99, abs=0.004)


@pytest.mark.workers
@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 2), ("zero1", 3), ("zero2", 4)])
def test_any_optimizer_with_groups_and_clipping_gives_one_hash(strategy: str, workers: int) -> None:
    for made, settings in (
        (torch.optim.AdamW, {"fused": True}), (torch.optim.Adagrad, {}), (CountingLion, {}),
    ):  # fmt: skip
        job: dict[str, Any] = {"lanes": 4, "clip": 0.1, "optimizer": made, "settings": settings, "bucket_mib": 0.05}
        alone = hashes(in_bf16(wide, 1, **job))
        assert hashes(in_bf16(wide, workers, strategy=strategy, **job)) == alone


@pytest.mark.workers
@pytest.mark.parametrize("strategy", LOW)
def test_lanes_rounded_for_the_wire_give_one_hash_and_another_than_unrounded_ones(strategy: str) -> None:
    job: dict[str, Any] = {"lanes": 5, "accumulate": 2, "epochs": 1, "bucket_mib": 0.01}
    rounded = Precision("bf16", reduction="bf16")
    (alone,) = hashes(run_workers(gpt, 1, precision=rounded, **job))
    for backend in ("paceline", "gloo"):
        assert hashes(run_workers(gpt, 3, strategy=strategy, precision=rounded, backend=backend, **job)) == {alone}
    if strategy == "ddp":
        assert hashes(in_bf16(gpt, 1, **job)) != {alone}


@pytest.mark.workers
def test_modules_kept_in_fp32_give_one_hash() -> None:
    kept = Precision("bf16", keep_fp32=(nn.LayerNorm,))
    job: dict[str, Any] = {"lanes": 4, "epochs": 1, "precision": kept}
    alone = hashes(run_workers(gpt, 1, **job))
    assert hashes(run_workers(gpt, 3, strategy="zero2", **job)) == alone
    assert hashes(run_workers(gpt, 2, strategy="ddp", **job)) == alone
    assert hashes(run_workers(gpt, 3, strategy="fsdp", **job)) == alone
    assert hashes(run_workers(gpt, 2, strategy="zero3", backend="gloo", **job)) == alone


# -- saved, loaded, changed --------------------------------------------------------------------------------------------


@pytest.mark.workers
@pytest.mark.parametrize("strategy", LOW)
def test_a_state_saved_and_loaded_in_the_same_run_repeats_the_run(strategy: str, tmp_path: Path) -> None:
    """Before the first step, when masters have not been dealt yet, and after."""
    (result, _) = in_bf16(saves_twice, 2, folder=str(tmp_path / "state"), strategy=strategy)
    assert result.error is None, result.traceback
    assert len(set(result.value)) == 1


@pytest.mark.workers
def test_a_state_of_another_precision_is_refused_and_can_be_accepted(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    hashes(run_workers(trains, 1, until=3, folder=folder))
    (result,) = in_bf16(trains, 1, until=6, folder=folder, resume=True)
    assert result.error is not None
    assert result.error.startswith(CheckpointError.__name__)
    assert "precision was 'fp32', is 'bf16'" in result.error


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_parameters_that_are_frozen_thawed_or_added_give_the_bits_of_ddp(strategy: str) -> None:
    ddp = hashes(in_bf16(freezes_and_thaws, 1, strategy="ddp"))
    assert hashes(in_bf16(freezes_and_thaws, 3, strategy=strategy)) == ddp


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_state_dict_loaded_by_the_script_keeps_its_precision(strategy: str) -> None:
    ddp = hashes(in_bf16(loads_by_itself, 1, strategy="ddp"))
    assert hashes(in_bf16(loads_by_itself, 2, strategy=strategy)) == ddp


def states(world: World) -> list[torch.dtype]:
    with Engine(world=world, precision="bf16") as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.Adam(model.parameters())
        data = TensorDataset(torch.ones(16, 8), torch.ones(16, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return [v.dtype for state in optimizer.state.values() for v in state.values()]


@pytest.mark.workers
def test_optimizer_state_is_in_fp32_also_after_torch_has_loaded_it() -> None:
    (result,) = run_workers(states, 1)
    assert set(result.value) == {torch.float32}, result.traceback


def changes_weights(world: World, **job: Any) -> str:
    """The script halves a weight between two steps, as someone who prunes or loads would."""
    with Engine(world=world, lanes=4, precision="bf16", **job) as engine:
        model = nn.Sequential(nn.Linear(8, 90), nn.Tanh(), nn.Linear(90, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        data = TensorDataset(*torch.randn(80, 9, generator=torch.Generator().manual_seed(0)).split([8, 1], dim=1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped and engine.step == 2:
                with torch.no_grad():
                    model[0].weight[::2] *= 0.5
                whole = engine._training().strategies.full_tensor(model[0].weight)
                assert torch.equal(whole.bfloat16(), model[0].weight.detach())
        return engine.weights_hash()


@pytest.mark.workers
def test_what_the_script_writes_to_weights_between_steps_is_trained_on() -> None:
    alone = hashes(run_workers(changes_weights, 1))
    for strategy, workers in (("ddp", 2), ("zero1", 3), ("zero2", 2)):
        assert hashes(run_workers(changes_weights, workers, strategy=strategy, backend="gloo")) == alone


# -- who holds what ----------------------------------------------------------------------------------------------------


def holds(world: World, *, strategy: str) -> tuple[int, int, int]:
    """Bytes of the model's parameters, of the masters here, and of this worker's optimizer state."""
    with Engine(world=world, strategy=strategy, precision="bf16", bucket_mib=0.1) as engine:
        model = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 300), nn.Tanh(), nn.Linear(300, 1))
        optimizer = torch.optim.Adam(model.parameters())
        data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        active: Any = engine._training().active
        if strategy == "ddp":
            masters, on_pieces = list(active._masters._masters.values()), optimizer
        else:
            assert not active._parts.masters._lowered.originals
            masters, on_pieces = (
                list(active._pieces.tensors.values()),
                active._parts.optimizers.of(optimizer)._on_pieces,
            )
        kept = [v for state in on_pieces.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim()]
        return sum(p.nbytes for p in model.parameters()), sum(m.nbytes for m in masters), sum(v.nbytes for v in kept)


@pytest.mark.workers
@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 2), ("zero1", 2), ("zero2", 3)])
def test_a_worker_has_bf16_weights_and_its_share_of_masters_and_state(strategy: str, workers: int) -> None:
    results = run_workers(holds, workers, strategy=strategy)
    share = 1 if strategy == "ddp" else workers
    for result in results:
        assert result.error is None, result.traceback
        weights, masters, state = result.value
        elements = weights // 2
        assert abs(masters - 4 * elements / share) <= 4 * 2 * 4096
        assert state == 2 * masters
    assert sum(result.value[1] for result in results) == 4 * elements * workers // share


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_strategy_without_masters_refuses_low_precision_with_those_that_have_them() -> None:
    without = next(entry for entry in STRATEGIES.values() if not entry.takes_low_precision)
    with pytest.raises(ConfigError, match=rf"'bf16' with strategy='{without.name}', which keeps no fp32 masters.*ddp"):
        Engine(world=World(), strategy=without.config(), precision="bf16")
