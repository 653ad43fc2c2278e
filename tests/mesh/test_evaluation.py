"""Evaluation by workers that share sequences: the numbers of one process, each token once, the same bits for any dp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import Mesh
from paceline.errors import LoopError
from paceline.world.world import World
from tests.mesh.small_llama import LENGTH, PLAN, VOCABULARY, SmallLlama, loss_of, tokens
from tests.mesh.training import runs

pytestmark = pytest.mark.workers

IGNORED = -100


@dataclass
class Evaluated:
    losses: list[float]  # of each batch
    mean: float  # over all batches, by `reduce` round by round
    loss_of_tokens: float
    tokens: int
    predicted: list[Any]
    targets: list[Any]
    numbers: list[int]


def held_out(samples: int) -> TensorDataset:
    """Targets are left out at random; the second batch has none in the middle of its sequences, which one worker has
    alone, and the third in all but there."""
    draw = torch.Generator().manual_seed(5)
    drawn = torch.randint(VOCABULARY, (samples, LENGTH), generator=draw)
    targets = drawn.roll(-1, 1).masked_fill(torch.rand(drawn.shape, generator=draw) < 0.4, IGNORED)
    middle = slice(LENGTH // 4, -LENGTH // 4)
    targets[2:4, middle] = IGNORED
    targets[4:6, : LENGTH // 4] = targets[4:6, -LENGTH // 4 :] = IGNORED
    return TensorDataset(drawn, targets, torch.arange(samples)[:, None].expand(-1, LENGTH))


def evaluated(
    world: World, mesh: Mesh | None = None, trains: bool = False, samples: int = 9, stream: bool = False, **options: Any
) -> Evaluated:
    """`trains`: one step before it."""
    engine = paceline.Engine(world=world, mesh=mesh, lanes=2, threads=1, seed=3, timeout_s=30, **options)
    llama = SmallLlama(blocks=1)
    optimizer = torch.optim.SGD(llama.parameters(), 0.1)
    plan = PLAN if mesh is not None and mesh.tp > 1 else None
    loader: Any = DataLoader(tokens(4), batch_size=2, shuffle=True)
    rows: Any = Stream(held_out(samples)) if stream else held_out(samples)
    held: Any = DataLoader(rows, batch_size=2, collate_fn=without_numbers_last)
    llama, optimizer, loader, held = engine.prepare(llama, optimizer, loader, held, plan=plan)
    if trains:
        for batch, targets in loader:
            engine.backward(loss_of(llama(batch, engine.positions(batch)), targets))
            optimizer.step()
    found = Evaluated([], 0.0, 0.0, 0, [], [], [])
    for batch, numbers, targets in held:
        with torch.no_grad():
            logits = llama(batch, engine.positions(batch))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        each = functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum")
        found.losses += engine.gather_for_metrics(loss).tolist()
        found.mean = float(engine.reduce(loss, "mean"))
        found.loss_of_tokens += float(engine.reduce(each))
        found.tokens += int(engine.reduce((targets != IGNORED).sum()))
        predicted, known = engine.gather_for_metrics((logits.argmax(-1), targets))
        found.predicted += predicted.tolist()
        found.targets += known.tolist()
        found.numbers += engine.gather_for_metrics(numbers[:, 0], whole=True).tolist()
    engine.close()
    return found


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rows: TensorDataset) -> None:
        self._rows = rows

    def __iter__(self) -> Any:
        return iter(self._rows[place] for place in range(len(self._rows)))


def without_numbers_last(rows: list[Any]) -> tuple[torch.Tensor, ...]:
    """Tokens, numbers of samples, targets: the last tensor says how many targets there are."""
    drawn, targets, numbers = (torch.stack(column) for column in zip(*rows, strict=True))
    return drawn, numbers, targets


@pytest.fixture(scope="module")
def alone() -> Evaluated:
    (found,) = runs(1, evaluated)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param(Mesh(cp=2), {}, marks=pytest.mark.smoke),
        (Mesh(cp=4), {"strategy": "zero2"}),
        (Mesh(dp=2, cp=2), {"strategy": "fsdp"}),
        (Mesh(dp=2, cp=2), {"stream": True}),
        (Mesh(cp=2, tp=2), {}),
    ],
    ids=str,
)
def test_evaluation_has_the_numbers_of_one_process(alone: Evaluated, mesh: Mesh, options: dict[str, Any]) -> None:
    for one in runs(mesh.model * (mesh.dp or 1), evaluated, mesh=mesh, **options):
        found: Any = one
        np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-6)
        np.testing.assert_allclose(found.mean, alone.mean, rtol=1e-6)  # the last round has one batch
        np.testing.assert_allclose(found.loss_of_tokens, alone.loss_of_tokens, rtol=1e-6)
        for name in ("tokens", "predicted", "targets", "numbers"):
            assert getattr(found, name) == getattr(alone, name), name


def test_bits_are_the_same_for_any_dp_and_strategy() -> None:
    reference: Any = runs(2, evaluated, mesh=Mesh(cp=2), trains=True)[0]
    for strategy in ("ddp", "fsdp"):
        for one in runs(4, evaluated, mesh=Mesh(dp=2, cp=2), trains=True, strategy=strategy):
            found: Any = one
            assert found.losses == reference.losses
            assert found.predicted == reference.predicted


def refused(world: World) -> list[str]:
    """What each way to lose count of tokens is told."""
    engine = paceline.Engine(world=world, mesh=Mesh(cp=2), lanes=1, threads=1, timeout_s=20)
    model, other = SmallLlama(blocks=1), SmallLlama(blocks=1)
    model, loader = engine.prepare(model, DataLoader(held_out(2), batch_size=2, collate_fn=without_numbers_last))
    texts = []
    for batch, _, targets in loader:
        ours = model(batch, engine.positions(batch))
        for values in (targets[:, 0], torch.tensor(2), ours.mean(1), torch.ones(3)):
            with pytest.raises(LoopError) as error:
                engine.gather_for_metrics(values)
            texts.append(str(error.value))
    for batch, _, targets in loader:
        loss = loss_of(other(batch), targets)
        for gather in (engine.gather_for_metrics, lambda value: engine.reduce(value, "mean")):
            with pytest.raises(LoopError) as error:
                gather(loss)
            texts.append(str(error.value))
    total = 0.0
    for batch, _, targets in loader:
        total += float(loss_of(model(batch, engine.positions(batch)), targets).detach())
    with pytest.raises(LoopError) as error:
        engine.reduce(torch.tensor(total))
    return [*texts, str(error.value)]


def test_what_can_not_be_put_together_again_is_refused_at_the_call() -> None:
    for texts in runs(2, refused):
        *shapes, first, second, by_hand = texts  # type: ignore[misc]
        assert all("of which workers that share sequences have parts" in text for text in shapes), shapes
        assert "give the model to engine.prepare()" in first
        assert first == second
        assert "whose body has gathered nothing" in by_hand
        assert not any("\n" in text for text in texts)  # type: ignore[attr-defined]
