"""What a loop's body adds up by hand over its items, and reduces behind the loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline import Engine, World
from tests.engine.loops import prepared
from tests.workers import run_workers

SAMPLES = 36  # two whole steps of four lanes, and one with samples for the first alone: worker 1 of 2 has none


def samples_counted(world: World, strategy: str, *, leaves_out: bool) -> tuple[float, list[bool], bool]:
    with Engine(world=world, strategy=strategy, lanes=4, threads=1) as engine:
        model, optimizer, loader = prepared(engine, samples=SAMPLES)
        counted, shadows = torch.zeros(()), []
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            shadows.append(loader.shadow)
            counted += 0 if leaves_out and loader.shadow else len(x)
        return float(engine.reduce(counted)), shadows, loader.shadow


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp"])
def test_a_sum_that_leaves_shadows_out_counts_every_sample_once(strategy: str) -> None:
    first, second = (found.value for found in run_workers(_leaves_out, 2, strategy=strategy))
    assert first == (SAMPLES, [False] * 5, False)
    assert second == (SAMPLES, [False] * 4 + [True], False)
    (counted, _, _), _ = (found.value for found in run_workers(_counts_all, 2, strategy=strategy))
    assert counted == SAMPLES + 4, "the shadow's batch, once more"


def test_one_worker_has_no_shadows() -> None:
    assert samples_counted(World(), "ddp", leaves_out=True) == (SAMPLES, [False] * 9, False)


def _leaves_out(world: World, strategy: str) -> tuple[float, list[bool], bool]:
    return samples_counted(world, strategy, leaves_out=True)


def _counts_all(world: World, strategy: str) -> tuple[float, list[bool], bool]:
    return samples_counted(world, strategy, leaves_out=False)
