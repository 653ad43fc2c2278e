"""An exception in backward that the loop catches: the item counts as empty, or the next operation says why it can't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline import Engine, World
from paceline.errors import LoopError
from paceline.strategies.registry import synchronous_strategies
from paceline.strategies.zero.zero3 import Zero3Config
from tests.engine.loops import vectors
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.filterwarnings("ignore:lane .* counts as empty")
WHOLE = [way for way in synchronous_strategies() if not way.entry.uses_servers]


class _Bomb(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if _Bomb.armed:
            raise RuntimeError("out of memory, say")
        return gradients[0]


class Layers(nn.Module):
    """The bomb goes off when the last layer has its gradients and the first has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        bomb: Any = _Bomb.apply
        return self.last(bomb(torch.tanh(self.first(x)))).square().mean()  # type: ignore[no-any-return]


def trains(
    world: World | None = None, *, fails: tuple[int, ...] = (), leaves_out: tuple[int, ...] = (), **job: Any
) -> str:
    """The hash after steps in which the items with these numbers fail in backward, or have none."""
    _Bomb.armed = False
    with Engine(world=world, **{"lanes": 3} | job) as engine:
        model = Layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(vectors(48), batch_size=2))
        for number, (x, _) in enumerate(loader):
            if number in leaves_out:
                continue
            loss = model(x)
            _Bomb.armed = number in fails
            try:
                engine.backward(loss)
            except RuntimeError as error:
                if isinstance(error, LoopError):
                    raise
                continue
            optimizer.step()
            optimizer.zero_grad()
        return engine.weights_hash()


@pytest.mark.parametrize("way", WHOLE, ids=str)
def test_an_item_whose_backward_failed_counts_as_empty(way: Any) -> None:
    """In the first lane of a step, in its last, and in two of three."""
    failed = (3, 8, 12, 13)
    assert trains(fails=failed, strategy=way.config) == trains(leaves_out=failed, strategy=way.config)


def test_it_is_told_in_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"lane 1 of step 2 had an exception in engine.backward\(\); it counts as empty"
    ):
        trains(fails=(4,))


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_low_precision_keeps_its_micro_batches_apart_and_can_leave_one_out(strategy: str) -> None:
    job: dict[str, Any] = {"lanes": 2, "accumulate": 2, "precision": "bf16", "strategy": strategy}
    assert trains(fails=(1, 2), **job) == trains(leaves_out=(1, 2), **job)


def test_a_failed_micro_batch_that_was_added_to_another_is_an_error() -> None:
    with pytest.raises(
        LoopError, match=r"lane 0 was left in the middle of its backward.*added to those of other micro"
    ):
        trains(lanes=2, accumulate=2, fails=(1,))


@pytest.mark.parametrize(("strategy", "item"), [("ddp", 2), ("zero1", 2), ("zero2", 0), ("zero3", 0)])
def test_a_bucket_that_had_left_is_an_error(strategy: str, item: int) -> None:
    """A bucket for each parameter: the last layer's are on their way when the first layer's backward fails."""
    with pytest.raises(LoopError, match=r"can't be taken back, and the step would be wrong\. Let an exception"):
        trains(strategy=strategy, bucket_mib=1e-5, fails=(item,))


@pytest.mark.workers
def test_the_others_hear_of_a_worker_that_can_not_go_on() -> None:
    errors = {str(result.error) for result in run_workers(_fails_on_worker_0, 2, lanes=2, bucket_mib=1e-5)}
    assert any("LoopError: lane 0 was left in the middle" in error for error in errors), errors
    assert any(error.startswith("PeerLostError") for error in errors), errors


def _fails_on_worker_0(world: World, item: int = 1, **job: Any) -> str:
    return trains(world, fails=(item,) if world.rank == 0 else (), **job)


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", Zero3Config(weights="in shards")], ids=str)
@pytest.mark.parametrize("item", [0, 2])
def test_an_item_that_fails_on_one_worker_is_empty_for_all(strategy: Any, item: int) -> None:
    """Lane 0 of the first step, in which the order of gradients is learned, and of a later one."""
    found = run_workers(_fails_on_worker_0, 2, lanes=2, strategy=strategy, item=item)
    assert hashes(found) == {trains(lanes=2, leaves_out=(2 * item,))}


def test_a_step_or_another_backward_after_a_failed_one_is_an_error() -> None:
    for then in ("step", "backward"):
        with Engine() as engine:
            model, optimizer, loader = _prepared(engine)
            for x, _ in loader:
                loss = model(x)
                _Bomb.armed = True
                with pytest.raises(RuntimeError, match="out of memory"):
                    engine.backward(loss)
                with pytest.raises(LoopError, match=r"ended with an exception in lane 0 of step 1.*`continue`"):
                    optimizer.step() if then == "step" else engine.backward(model(x))
                break


def test_an_item_left_between_two_backwards_counts_as_empty() -> None:
    def train(*, half: bool) -> str:
        with Engine(lanes=2) as engine:
            model, optimizer, loader = _prepared(engine)
            for number, (x, _) in enumerate(loader):
                if number == 2:
                    if half:
                        engine.backward(model(x), last=False)
                    continue
                engine.backward(model(x))
                optimizer.step()
            return engine.weights_hash()

    assert train(half=True) == train(half=False)


@pytest.mark.parametrize("again", [False, True])
def test_an_update_that_failed_and_was_caught_is_an_error(again: bool) -> None:
    with Engine(lanes=2) as engine:
        model, optimizer, loader = _prepared(engine)

        def update() -> None:
            engine.update(optimizer, lambda batch: model(batch[0]))

        with pytest.raises(LoopError, match=r"an exception in step 1 ended engine.update\(\), and the loop caught it"):
            for _ in loader:
                _Bomb.armed = engine.step == 0
                with pytest.raises(RuntimeError, match="out of memory"):
                    update()
                if again:
                    update()


def _prepared(engine: Engine) -> Any:
    _Bomb.armed = False
    model = Layers()
    return engine.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(vectors(24), batch_size=2))


class _FailingSgd(torch.optim.SGD):
    """Fails when the first of its two groups has been updated, once it is told to."""

    armed = False

    def step(self, closure: Any = None) -> Any:
        if not self.armed:
            return super().step(closure)
        self.param_groups, rest = self.param_groups[:1], self.param_groups[1:]
        super().step(closure)
        self.param_groups += rest
        raise RuntimeError("out of memory, say")


@pytest.mark.parametrize("then", ["goes on", "leaves", "hashes"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_step_whose_update_failed_never_counts(strategy: str, then: str) -> None:
    """The body catches the exception, and then has the next step, leaves the loop, or looks at the weights."""
    _FailingSgd.armed = _Bomb.armed = False
    with Engine(strategy=strategy) as engine:
        model = Layers()
        groups = [{"params": model.first.parameters()}, {"params": model.last.parameters()}]
        optimizer = _FailingSgd(groups, lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(vectors(8), batch_size=2))
        with pytest.raises(LoopError, match=r"the update of step 2 ended with RuntimeError on this worker"):
            for x, _ in loader:
                engine.backward(model(x))
                _FailingSgd.armed = engine.step == 1
                try:
                    optimizer.step()
                except RuntimeError as error:
                    if isinstance(error, LoopError):
                        raise
                    _FailingSgd.armed = False
                    if then != "goes on":
                        break
            assert then != "goes on"
            if then == "hashes":
                engine.weights_hash()
            for _ in loader:
                pytest.fail("a loop began after half an update")
        assert engine.step == 1
