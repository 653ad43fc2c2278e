"""strategy="auto": the choice follows the workers, their memory and the optimizers, and never the bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.engine import auto_strategy, memory_check
from paceline.errors import ConfigError
from paceline.planner.hardware import Exchange
from paceline.world import environment
from paceline.world.host_limits import MemoryLimit
from tests.planner.test_hardware import machine
from tests.workers import run_workers

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


def trains(
    world: World, *, optimizer: str = "AdamW", limit: int | None = None, files: tuple[str, ...] = (), **options: Any
) -> tuple[str, ...]:
    """`files`: what PACELINE_HARDWARE says on each worker."""
    if files:
        auto_strategy.hardware_profile = lambda: Path(files[world.rank]) if files[world.rank] else None  # type: ignore[attr-defined]
    if limit is not None:
        memory_check.memory_limit = lambda: MemoryLimit(limit, "a test")  # type: ignore[assignment]
    torch.manual_seed(0)
    with Engine(world=world, lanes=4, timeout_s=60, **options) as engine:
        model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
        acting = OPTIMIZERS[optimizer](model.parameters())
        drawn = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(64, 16, generator=drawn), torch.randint(0, 4, (64,), generator=drawn))
        model, acting, loader = engine.prepare(model, acting, DataLoader(data, batch_size=4))
        for x, y in loader:
            engine.backward(F.cross_entropy(model(x), y))
            engine.clip_grad_norm_(0.5)
            acting.step()
            acting.zero_grad()
        return engine.config.strategy.name, engine.config.chosen_because, engine.weights_hash()


def on_two(**options: Any) -> tuple[str, ...]:
    found = {result.value or result.error for result in run_workers(trains, 2, strategy="auto", **options)}
    assert len(found) == 1, found
    return found.pop()


@pytest.mark.workers
def test_workers_that_share_memory_train_with_zero2_and_the_bits_of_ddp() -> None:
    alone = trains(World(), strategy="auto")
    assert alone[:2] == ("ddp", "auto: one worker")
    assert on_two() == ("zero2", "auto: workers share the host's memory", alone[2])


@pytest.mark.workers
def test_what_only_ddp_takes_is_trained_with_ddp() -> None:
    assert on_two(optimizer="Adafactor") == (
        "ddp", "auto: Adafactor needs whole parameters", trains(World(), optimizer="Adafactor")[2],
    )  # fmt: skip
    assert on_two(reduction="fast")[:2] == ("ddp", "auto: reduction='fast'")


@pytest.mark.workers
@pytest.mark.parametrize(
    ("limit", "chosen"),
    [
        (10**9, ("ddp", "auto: it fits")),
        (34_000, ("zero2", "auto: ddp does not fit")),  # of both workers together
        (20_000, ("fsdp", "auto: neither ddp nor zero2 fits")),
    ],
)
def test_workers_with_memory_of_their_own_take_the_first_that_fits(limit: int, chosen: tuple[str, str]) -> None:
    hash = trains(World(), strategy="ddp")[2]
    assert on_two(backend="gloo", limit=limit) == (*chosen, hash)


def test_a_strategy_that_is_named_stays_and_a_wrong_one_is_refused() -> None:
    assert trains(World(), strategy="zero1")[:2] == ("zero1", "")
    with pytest.raises(ConfigError, match="is not known"):
        trains(World(), strategy="automatic")


# -- with a profile of the machine -------------------------------------------------------------------------------------

SLOW, FAST = Exchange(9e-3, 0.0, 0.0), Exchange(1e-3, 0.0, 0.0)


def profile(folder: Path, measured: Mapping[str, Exchange], *, backend: str = "paceline", workers: int = 2) -> str:
    file = folder / "here.json"
    file.write_text(machine(exchanges={backend: {workers: measured}}).to_json())
    return str(file)


@pytest.mark.workers
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
@pytest.mark.parametrize("fastest", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_a_measured_machine_chooses_what_is_fastest_there_with_the_bits_of_ddp(
    fastest: str, backend: str, tmp_path: Path
) -> None:
    names = ("ddp", "star", "zero1", "zero2", "zero3", "fsdp")
    file = profile(tmp_path, dict.fromkeys(names, SLOW) | {fastest: FAST}, backend=backend)
    name, why, weights = on_two(backend=backend, files=(file, file))
    assert name == fastest
    assert why.startswith("auto: by the planner from here.json, update and exchange take 1")
    assert "ms a step; next best zero1, 9" in why or "ms a step; next best zero2, 9" in why, why
    assert weights == trains(World(), strategy="ddp")[2]


@pytest.mark.workers
def test_the_plan_is_among_what_fits_on_every_worker(tmp_path: Path) -> None:
    """ddp and zero1 would be fastest, and 20,000 bytes for both workers hold neither."""
    file = profile(tmp_path, {"ddp": FAST, "zero1": FAST, "zero3": SLOW, "fsdp": SLOW}, backend="gloo")
    assert on_two(backend="gloo", limit=20_000, files=(file, file))[0] in ("zero3", "fsdp")


@pytest.mark.workers
def test_the_first_worker_s_profile_is_the_one_that_counts(tmp_path: Path) -> None:
    file = profile(tmp_path, {"zero1": FAST, "zero2": SLOW})
    assert on_two(files=(file, ""))[0] == "zero1"
    assert on_two(files=("", file))[:2] == ("zero2", "auto: workers share the host's memory")


@pytest.mark.workers
def test_where_so_many_workers_were_not_measured_the_rules_decide_and_say_so(tmp_path: Path) -> None:
    file = profile(tmp_path, {"ddp": FAST}, workers=4)
    assert on_two(files=(file, file))[:2] == (
        "zero2",
        "auto: workers share the host's memory (here.json has no measurement of 2 workers over paceline on one host)",
    )


@pytest.mark.workers
def test_gradients_that_are_compressed_were_not_measured_and_the_rules_decide(tmp_path: Path) -> None:
    file = profile(tmp_path, {"zero1": FAST}, backend="gloo")
    chosen = on_two(backend="gloo", compression="bf16", files=(file, file))
    assert chosen[:2] == ("ddp", "auto: it fits (here.json has no measurement of a job like this)")


@pytest.mark.workers
def test_what_only_ddp_takes_is_not_planned_and_a_file_that_can_t_be_read_is_refused_everywhere(tmp_path: Path) -> None:
    file = profile(tmp_path, {"zero1": FAST})
    assert on_two(optimizer="Adafactor", files=(file, file))[:2] == ("ddp", "auto: Adafactor needs whole parameters")
    assert "PACELINE_HARDWARE: hardware profile " in str(on_two(files=(str(tmp_path / "none.json"), "")))


def test_the_profile_is_named_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HARDWARE", "")
    assert environment.hardware_profile() is None
    monkeypatch.setenv("PACELINE_HARDWARE", "here.json")
    assert environment.hardware_profile() == Path("here.json")
