"""Compressed gradients in a loop: what is refused, what a step that does not count leaves, who goes on from what."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, LossScale, World
from paceline.compression import Compression, PowerSgd, TopK
from paceline.errors import CheckpointError, ConfigError
from paceline.sharding.local_shard import LocalShard
from paceline.strategies import BoundedDelay, BoundedStaleness, ParameterServer

WAYS: dict[str, Any] = {
    "int8": "int8",
    "sign": "sign",
    "topk": TopK(share=0.1, momentum=0.5),
    "powersgd": PowerSgd(rank=2),
}
STRATEGIES: list[Any] = ["ddp", ParameterServer(), ParameterServer(mode="aggregate")]
WAYS_OF_STRATEGIES = [(way, strategy) for way in WAYS for strategy in STRATEGIES[: 1 if way == "powersgd" else 3]]
any_way = pytest.mark.parametrize(("way", "strategy"), WAYS_OF_STRATEGIES, ids=str)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)
        self.used = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if self.used else out


def residuals(engine: Engine) -> dict[str, list[Tensor]]:
    """Copies of everything that compression keeps, by parameter."""
    state = engine._training().strategies.compression_state()
    return {
        name: [
            tensor.clone()
            for kept in kinds.values()
            for tensor in ([values for _, values in kept.parts] if isinstance(kept, LocalShard) else [kept])
        ]
        for name, kinds in state.items()
    }


def alike(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def prepared(engine: Engine, samples: int = 48) -> tuple[Sometimes, Any, Any]:
    model = Sometimes()
    x = torch.randn(samples, 8)
    loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=4)
    return engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)  # type: ignore[no-any-return]


@any_way
def test_a_step_that_is_left_out_leaves_residuals_as_they_were(way: str, strategy: Any, recwarn: Any) -> None:
    job = {"compression": WAYS[way], "on_nonfinite": "skip", "strategy": strategy}
    with Engine(world=World(), lanes=2, device="cpu", **job) as engine:
        model, optimizer, loader = prepared(engine)
        seen = []
        for number, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y)
            engine.backward(loss * math.nan if number // 2 == 2 else loss)  # of both lanes of step 3
            optimizer.step()
            optimizer.zero_grad()
            if number % 2:
                seen.append(residuals(engine))
    before, left_out, after = seen[1:4]
    assert all(alike(before[name], left_out[name]) for name in before)
    assert not any(alike(left_out[name], after[name]) for name in ("always.weight", "sometimes.weight"))
    assert all(tensor.isfinite().all() for tensors in after.values() for tensor in tensors)


@pytest.mark.parametrize("way", WAYS)
def test_an_overflow_of_scaled_gradients_leaves_residuals_as_they_were(way: str) -> None:
    scale = LossScale(initial=2.0**10, growth=2.0**8, growth_every=2, backoff=2.0**-8)
    job: dict[str, Any] = {"precision": "fp16", "loss_scale": scale, "device": "cpu"}
    with Engine(world=World(), lanes=2, compression=WAYS[way], **job) as engine:
        model, optimizer, loader = prepared(engine, samples=96)
        seen = []
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if engine.sync_gradients:
                seen.append((engine.stepped, residuals(engine)))
    pairs = [(before, after) for (_, before), (stepped, after) in pairwise(seen) if not stepped and before]
    assert pairs, "no step overflowed"
    assert any(stepped for stepped, _ in seen)
    for before, after in pairs:
        assert all(alike(before[name], after[name]) for name in before)


@any_way
def test_a_parameter_that_no_lane_used_keeps_its_residual(way: str, strategy: Any) -> None:
    with Engine(world=World(), lanes=2, compression=WAYS[way], strategy=strategy, device="cpu") as engine:
        model, optimizer, loader = prepared(engine)
        seen = []
        for number, (x, y) in enumerate(loader):
            model.used = number // 2 != 2
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if number % 2:
                seen.append(residuals(engine))
    before, unused, after = seen[1:4]
    assert alike(before["sometimes.weight"], unused["sometimes.weight"])
    assert not alike(before["always.weight"], unused["always.weight"])
    assert not alike(unused["sometimes.weight"], after["sometimes.weight"])


def test_a_state_of_another_compressor_is_another_jobs_unless_it_is_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "saved"

    def train(compression: Any, *, load: bool = False, accept: tuple[str, ...] = ()) -> dict[str, list[Tensor]]:
        with Engine(world=World(), lanes=2, compression=compression, device="cpu") as engine:
            model, optimizer, loader = prepared(engine)
            if load:
                engine.load_state(folder, accept=list(accept))
                return residuals(engine)
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            engine.save_state(folder)
            return residuals(engine)

    saved = train("int8")
    assert all(alike(saved[name], kept) for name, kept in train("int8", load=True).items())
    with pytest.raises(CheckpointError, match=r"compression was .\*: Int8.*, is .\*: Sign"):
        train("sign", load=True)
    assert train("sign", load=True, accept=("compression",)) == {}
    assert train(None, load=True, accept=("compression",)) == {}


@pytest.mark.parametrize("strategy", ["star", "zero3", "fsdp", "hybrid"])
def test_a_strategy_that_cant_take_it_is_refused_with_those_that_can(strategy: str) -> None:
    with pytest.raises(ConfigError, match=rf"strategy='{strategy}'.*choose one of ddp, parameter_server, zero1, zero2"):
        Engine(world=World(), strategy=strategy, compression="int8")


@pytest.mark.parametrize(
    ("strategy", "compression", "text"),
    [
        (ParameterServer(), "powersgd", r"compression='powersgd' with strategy='parameter_server': .* choose bf16"),
        (ParameterServer(), {"*.bias": None, "*": PowerSgd(rank=2)}, "servers add once in a round"),
        (ParameterServer(clock=BoundedStaleness(2)), "int8", r"clock=s=2.*: residuals are .* BoundedStaleness\(0\)"),
        (ParameterServer(clock=BoundedDelay(1)), "int8", r"clock=d=1\): residuals are kept for rounds"),
    ],
    ids=str,
)
def test_what_servers_cant_add_up_is_refused(strategy: ParameterServer, compression: Any, text: str) -> None:
    with Engine(world=World(), strategy=strategy, compression=compression) as engine:
        with pytest.raises(ConfigError, match=text) as refused:
            prepared(engine)
        assert "\n" not in str(refused.value)


def test_fast_sums_second_opinions_and_several_updates_are_refused() -> None:
    with pytest.raises(ConfigError, match="reduction='fast'"):
        Engine(world=World(), reduction="fast", compression="int8")
    with (
        Engine(world=World(), second_opinion=2, compression="int8") as engine,
        pytest.raises(ConfigError, match="second_opinion"),
    ):
        prepared(engine)
    with Engine(world=World(), compression="int8") as engine:
        one, two = nn.Linear(8, 8), nn.Linear(8, 8)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
        x = TensorDataset(torch.randn(8, 8))
        *_, loader = engine.prepare(one, two, *optimizers, DataLoader(x, batch_size=4))
        with pytest.raises(ConfigError, match=r"engine.update\(\) with Engine\(compression=…\)"):
            for _ in loader:
                engine.update(optimizers[0], lambda batch: one(batch[0]).square().mean())


def test_a_rank_larger_than_a_matrix_is_refused_before_training() -> None:
    refused = pytest.raises(ConfigError, match=r"PowerSgd\(rank=9\) for 'always.weight', a matrix of 8 × 8")
    with Engine(world=World(), compression=PowerSgd(rank=9)) as engine, refused:
        prepared(engine)


def test_the_first_line_says_what_is_compressed(capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(world=World(), compression=Compression("int8", start_after=5)) as engine:
        prepared(engine)
    assert "compressed (*: Int8(block=128, rounding='nearest'), start_after=5)" in capsys.readouterr().out
