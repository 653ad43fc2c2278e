"""The same promise on a GPU. NCCL refuses two workers on one device, so they share it through gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline import Engine, World
from paceline.strategies.zero.zero3 import Zero3Config
from tests.bits.programs import clipped, convnet, gpt, lstm
from tests.bits.test_compression import WAYS
from tests.engine.loops import prepared
from tests.strategies.test_hybrid import on_hosts
from tests.workers import hashes, run_workers

SHARDS = Zero3Config(weights="in shards")
pytestmark = [pytest.mark.workers, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


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


@pytest.mark.parametrize(("strategy", "workers"), [("zero1", 2), ("zero2", 3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_shards_of_workers_sharing_a_gpu_give_the_bits_of_one(strategy: str, workers: int, precision: str) -> None:
    job = {"lanes": 4, "device": "cuda:0", "backend": "gloo", "precision": precision}
    alone = hashes(run_workers(clipped, 1, **job))
    assert hashes(run_workers(clipped, workers, strategy=strategy, bucket_mib=0.01, **job)) == alone


@pytest.mark.parametrize(
    ("strategy", "workers", "hosts"),
    [
        (SHARDS, 2, 1),
        (SHARDS, 3, 1),
        (SHARDS, 4, 1),
        ("fsdp", 1, 1),
        ("fsdp", 3, 1),
        ("hybrid", 2, 1),
        ("hybrid", 4, 2),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_in_shards_of_workers_sharing_a_gpu_give_the_bits_of_one(
    strategy: str, workers: int, hosts: int, precision: str
) -> None:
    job = {"lanes": 4, "device": "cuda:0", "backend": "gloo", "precision": precision}
    alone = hashes(run_workers(gpt, 1, **job))
    found = run_workers(on_hosts, workers, run=gpt, hosts=hosts, strategy=strategy, bucket_mib=0.01, **job)
    assert hashes(found) == alone


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_on_the_host_have_one_result_at_any_number_of_workers(precision: str) -> None:
    job = {"lanes": 4, "device": "cuda:0", "backend": "gloo", "precision": precision}
    alone = hashes(run_workers(gpt, 1, strategy="zero3", offload="parameters", **job))
    job |= {"strategy": "zero3", "bucket_mib": 0.01}
    for workers, offload, again in ((2, "parameters", None), (3, "parameters", "blocks"), (2, "optimizer", "blocks")):
        found = run_workers(gpt, workers, offload=offload, activation_checkpointing=again, **job)
        assert hashes(found) == alone, (workers, offload, again)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_on_the_host_has_one_result_at_any_number_of_workers(precision: str) -> None:
    job = {"lanes": 4, "device": "cuda:0", "backend": "gloo", "precision": precision, "offload": "optimizer"}
    alone = hashes(run_workers(gpt, 1, strategy="zero1", **job))
    assert hashes(run_workers(gpt, 2, strategy="zero2", bucket_mib=0.01, **job)) == alone


def where(world: World) -> tuple[str, str]:
    with Engine(world=world) as engine:
        model, _, loader = prepared(engine)
        (x, _) = next(iter(loader))
        return str(model.weight.device), str(x.device)


def test_the_device_is_found_and_model_and_batches_are_there() -> None:
    (result,) = run_workers(where, 1)
    assert result.value == ("cuda:0", "cuda:0"), result.traceback


@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 2), ("zero2", 3)])
@pytest.mark.parametrize("way", ["int8", "int8 stochastic", "sign", "topk momentum", "powersgd", "mixed"])
def test_compressed_gradients_of_workers_sharing_a_gpu_give_the_bits_of_one(
    way: str, strategy: str, workers: int
) -> None:
    """Payloads go through the host."""
    job = {"lanes": 4, "device": "cuda:0", "backend": "gloo", "compression": WAYS[way]}
    alone = hashes(run_workers(clipped, 1, **job))
    assert hashes(run_workers(clipped, workers, strategy=strategy, bucket_mib=0.01, **job)) == alone
