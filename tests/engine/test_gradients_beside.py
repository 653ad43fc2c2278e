"""Gradients that are there before `engine.backward`: refused where they would be mixed in, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline import Engine, World
from paceline.errors import LoopError
from tests.engine.loops import vectors
from tests.workers import run_workers

STRATEGIES = ["ddp", "zero2", "fsdp", "local_sgd"]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main, self.aux = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.main(x)

    def aux_loss(self, x: Tensor) -> Any:
        return self.aux(x).square().mean() + self.main(x).abs().mean()


Body = Callable[[Engine, Any, Any, Tensor, Tensor, int], None]


def train(body: Body, *, world: World | None = None, samples: int = 24, **job: Any) -> list[Tensor]:
    """`body` is the loop's before `optimizer.step()`; its last argument counts items."""
    with Engine(world=world or World(), threads=1, **job) as engine:
        model = TwoHeads()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(vectors(samples), batch_size=4))
        for number, (x, y) in enumerate(loader):
            body(engine, model, optimizer, x, y, number)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in engine.state_dict().values()]


def plain(engine: Engine, model: Any, optimizer: Any, x: Tensor, y: Tensor, number: int) -> None:
    model.aux_loss(x).backward()
    engine.backward(F.mse_loss(model(x), y))


def held_back(engine: Engine, model: Any, optimizer: Any, x: Tensor, y: Tensor, number: int) -> None:
    engine.backward(model.aux_loss(x), last=False)
    engine.backward(F.mse_loss(model(x), y))


def summed(engine: Engine, model: Any, optimizer: Any, x: Tensor, y: Tensor, number: int) -> None:
    engine.backward(model.aux_loss(x) + F.mse_loss(model(x), y))


def only(engine: Engine, model: Any, optimizer: Any, x: Tensor, y: Tensor, number: int) -> None:
    engine.backward(F.mse_loss(model(x), y))


TOLD = (
    r"'main.weight' has a \.grad before engine\.backward\(\) in step 1, lane 0, .*\(loss, last=False\) for all losses"
)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_of_torchs_own_before_ours_is_refused(strategy: str, accumulate: int) -> None:
    with pytest.raises(LoopError, match=TOLD):
        train(plain, lanes=2, accumulate=accumulate, strategy=strategy)


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd"])
def test_one_in_a_later_micro_batch_is_refused_too(strategy: str) -> None:
    def late(engine: Engine, model: Any, optimizer: Any, x: Tensor, y: Tensor, number: int) -> None:
        (plain if number == 1 else only)(engine, model, optimizer, x, y, number)

    with pytest.raises(LoopError, match=TOLD):
        train(late, lanes=2, accumulate=2, strategy=strategy)


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_every_worker_says_so(strategy: str) -> None:
    errors = [str(found.error) for found in run_workers(_plain_in_job, 2, strategy=strategy)]
    assert any("has a .grad before engine.backward() in step 1" in error for error in errors), errors
    assert all("has a .grad before" in error or error.startswith("PeerLostError") for error in errors), errors


def _plain_in_job(world: World, strategy: str) -> list[Tensor]:
    return train(plain, world=world, lanes=2, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_an_item_is_the_whole_step_of_one_worker_it_is_as_in_torch(strategy: str) -> None:
    found, wanted = (train(body, lanes=1, samples=8, strategy=strategy) for body in (plain, summed))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("sometimes", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "diloco"])
def test_what_to_write_instead_gives_the_gradient_of_the_sum(strategy: str, accumulate: int, sometimes: bool) -> None:
    """`sometimes`: in the later micro-batches alone, so that a parameter gets its first gradient in one of these."""

    def in_some(body: Body) -> Body:
        def run(engine: Engine, model: Any, optimizer: Any, x: Tensor, y: Tensor, number: int) -> None:
            (body if number % 2 or not sometimes else only)(engine, model, optimizer, x, y, number)

        return run

    found, wanted = (
        train(in_some(body), lanes=2, accumulate=accumulate, samples=48, strategy=strategy)
        for body in (held_back, summed)
    )
    torch.testing.assert_close(found, wanted)


# -- gradients that are only looked at ---------------------------------------------------------------------------------


def zeroed(engine: Engine, model: Any, optimizer: Any, x: Tensor, y: Tensor, number: int) -> None:
    """Adversarial samples: a backward of torch's own, for the gradient of the input."""
    x = x.clone().requires_grad_()
    F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    engine.backward(F.mse_loss(model(x.detach()), y))


def by_grad(engine: Engine, model: Any, optimizer: Any, x: Tensor, y: Tensor, number: int) -> None:
    x = x.clone().requires_grad_()
    torch.autograd.grad(model.aux_loss(x), [x, *model.parameters()])
    engine.backward(F.mse_loss(model(x.detach()), y))


def zeros_set(engine: Engine, model: Any, optimizer: Any, x: Tensor, y: Tensor, number: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.backward(F.mse_loss(model(x), y))


def zeroed_behind(engine: Engine, model: Any, optimizer: Any, x: Tensor, y: Tensor, number: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    engine.backward(F.mse_loss(model(x), y))


def probed(engine: Engine, model: Any, optimizer: Any, x: Tensor, y: Tensor, number: int) -> None:
    """A step's gradients are looked at before the step, by the loop's own backward."""
    if number % 4 == 0:
        model.aux_loss(x).backward()
        model.zero_grad()
    engine.backward(F.mse_loss(model(x), y))


@pytest.mark.parametrize("body", [zeroed, by_grad, zeros_set, zeroed_behind, probed])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "local_sgd"])
def test_a_gradient_that_is_only_looked_at_is_not_refused(strategy: str, accumulate: int, body: Body) -> None:
    found, wanted = (train(one, lanes=2, accumulate=accumulate, strategy=strategy) for one in (body, only))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd"])
def test_a_backward_between_two_steps_is_none_of_the_next_one(strategy: str) -> None:
    def train_and_probe(*, probes: bool) -> list[Tensor]:
        with Engine(world=World(), threads=1, lanes=2, strategy=strategy) as engine:
            model = TwoHeads()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(vectors(), batch_size=4))
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if probes and engine.stepped:
                    model.aux_loss(x).backward()
            return list(engine.state_dict().values())

    found, wanted = (train_and_probe(probes=probes) for probes in (True, False))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "local_sgd"])
def test_a_backward_of_torchs_own_in_an_item_that_is_left_is_no_part_of_it(strategy: str, accumulate: int) -> None:
    def train_without(*, probes: bool) -> list[Tensor]:
        with Engine(world=World(), threads=1, lanes=2, accumulate=accumulate, strategy=strategy) as engine:
            model = TwoHeads()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(vectors(), batch_size=4))
            for number, (x, y) in enumerate(loader):
                if number == 1:
                    if probes:
                        model.aux_loss(x).backward()
                    continue
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
            return list(engine.state_dict().values())

    with pytest.warns(UserWarning, match="it counts as empty"):
        found, wanted = (train_without(probes=probes) for probes in (True, False))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_gan_whose_losses_reach_both_models_is_not_refused() -> None:
    with Engine(world=World(), threads=1, lanes=2) as engine:
        first, second = nn.Linear(8, 8), nn.Linear(8, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
        first, second, one, two, loader = engine.prepare(
            first, second, *optimizers, DataLoader(vectors(), batch_size=4)
        )
        for _ in loader:
            for optimizer in (two, one):
                engine.update(optimizer, lambda batch: F.mse_loss(second(first(batch[0])), batch[1]))
        assert engine.step == 4
