"""The same promise on a GPU. NCCL refuses two workers on one device, so they share it through gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline import Engine, World
from tests.bits.programs import clipped, convnet, gpt, lstm
from tests.engine.loops import prepared
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("program", [gpt, convnet, lstm, clipped])
@pytest.mark.parametrize(("workers", "lanes", "bucket_mib"), [(2, 4, 4.0), (3, 4, 0.01), (4, 4, 0.001), (2, 5, 4.0)])
def test_workers_sharing_a_gpu_give_the_bits_of_one(
    program: Callable[..., str], workers: int, lanes: int, bucket_mib: float
) -> None:
    job = {"lanes": lanes, "device": "cuda:0", "backend": "gloo"}
    alone = hashes(run_workers(program, 1, **job))
    assert hashes(run_workers(program, workers, bucket_mib=bucket_mib, **job)) == alone


@pytest.mark.parametrize(("workers", "lanes"), [(2, 4), (3, 5)])
def test_a_star_of_workers_sharing_a_gpu_gives_the_bits_of_one(workers: int, lanes: int) -> None:
    job = {"lanes": lanes, "device": "cuda:0", "backend": "gloo"}
    alone = hashes(run_workers(convnet, 1, **job))
    assert hashes(run_workers(convnet, workers, strategy="star", bucket_mib=0.01, **job)) == alone


def where(world: World) -> tuple[str, str]:
    with Engine(world=world) as engine:
        model, _, loader = prepared(engine)
        (x, _) = next(iter(loader))
        return str(model.weight.device), str(x.device)


def test_the_device_is_found_and_model_and_batches_are_there() -> None:
    (result,) = run_workers(where, 1)
    assert result.value == ("cuda:0", "cuda:0"), result.traceback
