"""Loss scaling in fp16: an overflow in one lane is everybody's, and the scale moves alike on any number of workers."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, LossScale, Precision, World
from paceline.errors import ConfigError, NonFiniteLossError
from paceline.optim.gradient_norm import all_finite
from paceline.optim.loss_scale import MovingScale, loss_scale_of
from tests.bits.programs import convnet, gan, gpt
from tests.workers import hashes, run_workers

LARGE = 5, 37, 38  # samples whose gradients are too large, in a dataset that is not shuffled: one lane of two steps

# -- the rule ----------------------------------------------------------------------------------------------------------


def test_the_scale_backs_off_at_once_and_grows_after_good_steps_in_a_row() -> None:
    scale = MovingScale(LossScale(initial=8.0, growth_every=3, largest=16.0))
    seen = []
    for finite in (False, True, True, False, True, True, True, True, True, True, True, True, True):
        assert scale.drops(finite, "stop", 0) is not finite
        seen.append(scale.value)
    assert seen == [4, 4, 4, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16]


def test_the_scale_stays_inside_its_bounds() -> None:
    scale = MovingScale(LossScale(initial=2.0, growth_every=1, largest=4.0))
    for _ in range(5):
        assert not scale.drops(True, "stop", 0)
    assert scale.value == 4
    for _ in range(2):
        assert scale.drops(False, "stop", 0)
    assert scale.value == 1
    with pytest.raises(NonFiniteLossError, match=r"gradient of step 8 is not finite with a loss scale of 1, the small"):
        scale.drops(False, "stop", 7)
    with pytest.warns(UserWarning, match="the step is skipped"):
        assert scale.drops(False, "skip", 7)


def test_a_static_scale_never_moves() -> None:
    scale = MovingScale(LossScale.static(1000))
    for _ in range(5000):
        assert not scale.drops(True, "stop", 0)
    assert (scale.value, str(scale.rule)) == (1000, "1000")
    with pytest.raises(NonFiniteLossError, match="with a loss scale of 1000"):
        scale.drops(False, "stop", 0)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"initial": math.inf}, "initial=inf: expected a number, and a finite one"),
        ({"growth": 1.0}, "growth=1.0 would not grow"),
        ({"backoff": 2.0}, "backoff=2.0 would not back off"),
        ({"growth_every": 0}, "growth_every=0: give 1 or more"),
        ({"initial": 0.5}, "initial=0.5 is not between smallest=1.0"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LossScale(**fields)


def test_only_fp16_has_a_scale() -> None:
    assert loss_scale_of(None, Precision("fp16")) == LossScale()
    assert loss_scale_of(128, Precision("fp16")) == LossScale.static(128)
    assert loss_scale_of(None, Precision("bf16")) is None
    with pytest.raises(
        ConfigError, match=r"loss_scale=128 with precision='bf16': its gradients have the range of fp32"
    ):
        loss_scale_of(128, Precision("bf16"))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_found_wherever_it_is(bad: float) -> None:
    gradients = [torch.randn(70_001), torch.randn(3, 5), torch.empty(0)]
    assert all_finite(gradients)
    assert all_finite([])
    for gradient in gradients[:2]:
        for place in (0, gradient.numel() // 2, -1):
            kept = float(gradient.view(-1)[place])
            gradient.view(-1)[place] = bad
            assert not all_finite(gradients)
            gradient.view(-1)[place] = kept


# -- in training -------------------------------------------------------------------------------------------------------


def vectors() -> TensorDataset:
    x, y = torch.randn(80, 9, generator=torch.Generator().manual_seed(0)).split([8, 1], dim=1)
    factor = torch.ones(80)
    factor[list(LARGE)] = 2000
    return TensorDataset(x, y, factor)


def overflows(world: World, *, folder: str | None = None, resume: bool = False, **job: Any) -> tuple[str, list[Any]]:
    """Few samples overflow fp16 until the scale is low enough; steps, scale and norm are told after every step."""
    rule = LossScale(initial=2.0**10, growth_every=2)
    with Engine(
        world=world, **{"lanes": 4, "precision": "fp16", "loss_scale": rule, "bucket_mib": 0.01} | job
    ) as engine:
        model = nn.Sequential(nn.Linear(8, 90), nn.Tanh(), nn.Linear(90, 90), nn.LayerNorm(90), nn.Linear(90, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
        model, optimizer, loader, schedule = engine.prepare(
            model, optimizer, DataLoader(vectors(), batch_size=4), schedule
        )
        told: list[Any] = []
        if resume:
            assert folder is not None
            engine.load_state(folder)
        for epoch in range(resume, 2):
            for x, y, factor in loader:
                out = model(x)
                out.register_hook(partial(torch.mul, factor[:, None]))
                engine.backward(F.mse_loss(out, y))
                norm = engine.clip_grad_norm_(1.0)
                optimizer.step()
                schedule.step()
                if engine._training().now.item.last_of_step:  # type: ignore[union-attr]
                    told.append((engine.step, engine.stepped, engine.loss_scale, round(norm, 6)))
                    dtypes = {p.dtype for p in model.parameters() if type(p.data) is Tensor}  # fsdp's rows are masters
                    dtypes = dtypes or {torch.float16}
                    assert dtypes == {torch.float16}, dtypes
            if folder is not None and epoch == 0:
                engine.save_state(folder)
        assert schedule.last_epoch == engine.step
        return engine.weights_hash(), told


def results(*, workers: int, **job: Any) -> tuple[str, list[Any]]:
    found = run_workers(overflows, workers, **job)
    for result in found:
        assert result.error is None, result.traceback
        assert result.value == found[0].value
    value: tuple[str, list[Any]] = found[0].value
    return value


@pytest.mark.workers
def test_an_overflow_in_one_lane_is_skipped_by_all_and_the_scale_recovers() -> None:
    weights, told = results(workers=1)
    steps, stepped, scales, norms = zip(*told, strict=True)
    assert not all(stepped)
    assert [math.isinf(norm) for norm in norms] == [not acted for acted in stepped]
    assert {later > earlier for earlier, later in pairwise(scales) if later != earlier} == {True, False}
    assert steps[-1] == sum(stepped)
    for strategy, workers in (
        ("ddp", 2),
        ("ddp", 3),
        ("star", 2),
        ("zero1", 4),
        ("zero2", 2),
        ("zero2", 3),
        ("zero3", 2),
        ("fsdp", 3),
        ("hybrid", 2),
    ):
        assert results(workers=workers, strategy=strategy) == (weights, told), (strategy, workers)


@pytest.mark.workers
def test_the_scale_is_saved_and_goes_on(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    straight = results(workers=1, folder=folder, strategy="zero1")
    resumed = results(workers=3, folder=folder, resume=True, strategy="zero2")
    assert resumed == (straight[0], straight[1][len(straight[1]) - len(resumed[1]) :])


@pytest.mark.workers
@pytest.mark.parametrize("program", [gpt, convnet, gan])
def test_fp16_gives_one_hash(program: Any) -> None:
    job: dict[str, Any] = {"lanes": 4, "precision": "fp16", "bucket_mib": 0.01}
    alone = hashes(run_workers(program, 1, **job))
    assert hashes(run_workers(program, 3, strategy="zero2", **job)) == alone
    assert hashes(run_workers(program, 2, strategy="ddp", **job)) == alone


def scaled_by(scale: float) -> Tensor:
    with Engine(world=World(), precision="fp16", loss_scale=scale, device="cpu") as engine:
        model = nn.Linear(8, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = DataLoader(TensorDataset(torch.full((4, 8), 1e-4), torch.zeros(4, 1)), batch_size=4)
        model, optimizer, loader = engine.prepare(model, optimizer, data)
        (before,) = [engine._training().strategies.full_tensor(p).clone() for p in model.parameters()]
        for x, _ in loader:
            engine.backward(model(x).mean() * 1e-4)
            optimizer.step()
        return engine._training().strategies.full_tensor(model.weight) - before


def test_gradients_below_fp16_survive_with_a_scale_and_have_their_own_size() -> None:
    assert scaled_by(1.0).abs().max() == 0
    assert torch.allclose(scaled_by(2.0**12), torch.full((1, 8), -1e-8), rtol=0.3)


def never_finite(world: World, *, on_nonfinite: Any) -> None:
    with Engine(world=world, lanes=2, strategy="zero1", precision="fp16", on_nonfinite=on_nonfinite) as engine:
        model = nn.Linear(8, 1)
        data = DataLoader(TensorDataset(torch.ones(160, 8)), batch_size=4)
        model, optimizer, loader = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        for (x,) in loader:
            out = model(x)
            out.register_hook(lambda gradient: gradient * math.inf)
            engine.backward(out.mean())
            optimizer.step()


@pytest.mark.workers
def test_a_gradient_that_no_scale_makes_finite_ends_training_on_all_workers() -> None:
    for result in run_workers(never_finite, 2, on_nonfinite="stop"):
        assert result.error is not None
        assert result.error.startswith(
            "NonFiniteLossError: the gradient of step 1 is not finite with a loss scale of 1"
        )
