"""Predicted bytes are the counted ones, on every worker, for random models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.planner.model_profile import ModelProfile, PassRecorder, Variant
from paceline.planner.model_source import Source, profile_source
from paceline.planner.traffic import Sizes, step_traffic
from tests.planner.random_models import loss_of, random_model
from tests.workers import run_workers

BUCKET_MIB = 0.01  # several buckets, and units, even here
STEPS = 5


def trains(world: World, *, seed: int, strategy: str, lanes: int, accumulate: int) -> int:
    """Bytes that this worker sends in a step."""
    with Engine(
        world=world, strategy=strategy, backend="gloo", bucket_mib=BUCKET_MIB, lanes=lanes, accumulate=accumulate
    ) as engine:
        model, batch = random_model(seed)
        rows = len(batch[0])
        data = TensorDataset(*(torch.cat([t] * lanes * accumulate * STEPS) for t in batch))
        optimizer: Any = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=rows))
        sent, first = 0, None
        for one in loader:
            engine.backward(loss_of(model, one))
            optimizer.step()
            optimizer.zero_grad()
            sent = engine.traffic.sent_bytes
            if engine.stepped and first is None:  # it gathers units whose order is not known yet
                engine.barrier()
                first = engine._group.comm.traffic.sent_bytes
                engine.barrier()  # none asks for weights of the next step before all have looked
        if strategy != "fsdp":
            return sent
        # Who asks for weights early is answered before our own step begins: all steps together are exact.
        engine.barrier()
        assert first is not None
        total, rest = divmod(engine._group.comm.traffic.sent_bytes - first, STEPS - 1)
        assert rest == 0
        return total


def profiled(seed: int) -> ModelProfile:
    source = Source("random", lambda: (*random_model(seed), loss_of))
    bucket_bytes = int(BUCKET_MIB * 2**20)
    return profile_source(
        source, lambda samples: [Variant(samples)], blocks=lambda model: [], bucket_bytes=bucket_bytes
    )


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["ddp", "star", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize(
    ("workers", "lanes", "accumulate", "seed"), [(2, 2, 1, 1), (3, 3, 2, 2), (4, 4, 1, 12), (3, 5, 1, 7)]
)
def test_a_step_sends_what_was_predicted(strategy: str, workers: int, lanes: int, accumulate: int, seed: int) -> None:
    profile = profiled(seed)
    (step,) = profile.passes.values()
    sizes = Sizes(workers, lanes, accumulate, bucket_bytes=int(BUCKET_MIB * 2**20))
    predicted = step_traffic(strategy, profile, step, sizes)
    results = run_workers(
        trains, workers, seed=seed, strategy=strategy, lanes=lanes, accumulate=accumulate, timeout_s=100
    )
    for result in results:
        assert result.error is None, result.traceback
    counted = tuple(result.value for result in results)
    if predicted.counted:
        assert predicted.sent == counted
    else:
        assert (strategy, workers) == ("ddp", 2)
        assert counted == (0, 0)  # gloo's own all-reduce


def test_alone_nothing_is_sent() -> None:
    profile = profiled(1)
    (step,) = profile.passes.values()
    assert step_traffic("fsdp", profile, step, Sizes(1, 4)).sent == (0,)


def test_the_order_of_buckets_is_backwards() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    batch = torch.randn(4, 3), torch.randn(4, 2)
    trained = list(model.parameters())
    with PassRecorder([model], trained, None) as recorder:
        found = recorder.backward(loss_of(model, recorder.took(batch)), 4)
    assert sorted(found.order) == list(range(len(trained)))
    assert found.order[0] > found.order[-1]
