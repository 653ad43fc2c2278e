"""strategy="auto": the choice follows the workers, their memory and the optimizers, and never the bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.engine import memory_check
from paceline.errors import ConfigError
from paceline.world.host_limits import MemoryLimit
from tests.workers import run_workers

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


def trains(world: World, *, optimizer: str = "AdamW", limit: int | None = None, **options: Any) -> tuple[str, ...]:
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
