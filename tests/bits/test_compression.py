"""Compressed gradients: the same bits on any number of workers, in any buckets, through checkpoints and other sizes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline import LossScale
from paceline.compression import Compression, Int8, PowerSgd, TopK, compression_of
from paceline.strategies.server import ParameterServer
from tests.bits.programs import PROGRAMS, gpt, short_last_step
from tests.bits.test_checkpoints import HALF, STEPS, states_differ, trains
from tests.smoke import first_of_each
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers

MIXED = Compression({"*.bias": None, "*norm*": Int8(block=16), "head*": "sign", "*": PowerSgd(rank=2)}, start_after=2)
WAYS: dict[str, Any] = {
    "int8": "int8",
    "int8 stochastic": Int8(rounding="stochastic"),
    "bf16": "bf16",
    "fp16": "fp16",
    "sign": "sign",
    "topk": TopK(share=0.05, warmup=3),
    "topk momentum": TopK(share=0.02, momentum=0.9),
    "powersgd": PowerSgd(rank=3),
    "without feedback": Compression({"*.weight": "powersgd", "*": "int8"}, feedback=False),
    "mixed": MIXED,
}
STRATEGIES = ("ddp", "zero2", "zero1")
SERVERS = (ParameterServer(), ParameterServer(mode="aggregate"))
WITH_SERVERS = {way: given for way, given in WAYS.items() if "powersgd" not in str(compression_of(given)).lower()} | {
    "int8 and sign without feedback": Compression({"*.weight": "sign", "*": "int8"}, feedback=False),
    "rules": Compression({"*.bias": None, "*norm*": Int8(block=16), "head*": "topk", "*": "sign"}, start_after=2),
}
# workers, bucket_mib, backend
PLACES = [(2, 0.01, "gloo"), (3, 0.001, "paceline"), (4, 0.05, "paceline"), (3, 0.002, "gloo")]


@cache
def hash_of_one(program: str, way: str, **job: Any) -> str:
    (found,) = hashes(run_workers(PROGRAMS[program], 1, lanes=4, compression=(WITH_SERVERS | WAYS)[way], **job))
    return found


ANY_WAY = [(way, strategy) for strategy in STRATEGIES for way in WAYS]


@pytest.mark.parametrize("case", first_of_each(ANY_WAY, lambda case: "any", "-".join))
def test_compressed_gradients_give_one_hash_on_1_2_3_and_4_workers(case: tuple[str, str]) -> None:
    way, strategy = case
    turn = list(WAYS).index(way) % 2
    for workers, bucket_mib, backend in PLACES if strategy == "ddp" else PLACES[turn::2]:
        job = {"bucket_mib": bucket_mib, "backend": backend, "strategy": strategy, "compression": WAYS[way]}
        assert hashes(run_workers(gpt, workers, lanes=4, **job)) == {hash_of_one("gpt", way)}, (workers, job)


# workers, servers (none: worker 0 is one), bucket_mib, backend
SERVED = [(1, 1, 0.01, "gloo"), (2, 2, 0.001, "paceline"), (3, 0, 0.05, "gloo"), (4, 1, 0.002, "gloo"),
          (1, 0, 0.05, "gloo"), (3, 2, 0.01, "gloo"), (2, 0, 0.01, "paceline"), (4, 2, 0.05, "paceline")]  # fmt: skip


@pytest.mark.parametrize("way", WITH_SERVERS)
def test_with_servers_they_give_the_hash_of_ddp(way: str) -> None:
    """On 1, 2, 3 and 4 workers, with and without servers of their own, whoever updates."""
    turn = list(WITH_SERVERS).index(way) % 2
    for place, (workers, servers, bucket_mib, backend) in enumerate(SERVED[4 * turn : 4 * turn + 4]):
        strategy = SERVERS[(place // 2 + turn) % 2]
        job = {"bucket_mib": bucket_mib, "backend": backend, "strategy": strategy, "compression": WITH_SERVERS[way]}
        found = hashes(run_workers(gpt, workers, servers=servers, lanes=4, **job))
        assert found == {hash_of_one("gpt", way)}, (workers, servers, job)


@pytest.mark.parametrize(("program", "way"), [
    ("wide", "int8 stochastic"), ("odd_parameters", "sign"), ("odd_parameters", "topk momentum"), ("clipped", "int8"),
    ("short_last_step", "topk"), ("convnet", "bf16"),
])  # fmt: skip
def test_with_servers_any_model_has_the_hash_of_ddp(program: str, way: str) -> None:
    turn = list(WITH_SERVERS).index(way)
    for place, (workers, servers, bucket_mib, backend) in enumerate(SERVED[turn % 2 : 4 : 2]):
        job = {"bucket_mib": bucket_mib, "backend": backend, "strategy": SERVERS[(turn + place) % 2]}
        found = hashes(run_workers(PROGRAMS[program], workers, servers=servers, lanes=4, compression=WAYS[way], **job))
        assert found == {hash_of_one(program, way)}, (workers, servers, job)


def test_with_servers_feedback_makes_a_difference() -> None:
    job = {"lanes": 4, "strategy": "parameter_server", "servers": 1}
    found = [
        hashes(run_workers(gpt, 2, compression=Compression("sign", feedback=feedback), **job))
        for feedback in (True, False)
    ]
    assert found[0] != found[1]


ANY_MODEL = [
    ("wide", "fp32"), ("wide", "bf16"), ("odd_parameters", "fp32"), ("odd_parameters", "bf16"),
    ("short_last_step", "fp16"), ("clipped", "fp32"), ("clipped", "fp16"), ("convnet", "bf16"), ("convnet", "fp16"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "precision"), ANY_MODEL)
def test_any_model_has_one_hash(program: str, precision: str) -> None:
    turn = ANY_MODEL.index((program, precision))
    way, strategy = list(WAYS)[turn % len(WAYS)], STRATEGIES[turn % len(STRATEGIES)]
    one = hash_of_one(program, way, precision=precision)
    for workers, bucket_mib, backend in PLACES[turn % 2 :: 2]:
        job = {"bucket_mib": bucket_mib, "backend": backend, "strategy": strategy, "compression": WAYS[way]}
        found = hashes(run_workers(PROGRAMS[program], workers, lanes=4, precision=precision, **job))
        assert found == {one}, (workers, job)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_worker_without_lanes_in_a_step_knows_its_loss_scale(strategy: str) -> None:
    """The last step of an epoch has fewer lanes than there are workers, and every step another scale."""
    job = {"lanes": 4, "precision": "fp16", "loss_scale": LossScale(2.0**8, growth_every=1), "compression": "int8"}
    one = hashes(run_workers(short_last_step, 1, **job))
    assert hashes(run_workers(short_last_step, 4, strategy=strategy, **job)) == one


def test_compression_changes_the_bits_only_after_the_steps_it_waits_for() -> None:
    """10 steps: compressed from the eleventh on it is the run without."""
    plain = hashes(run_workers(gpt, 1, lanes=4))
    late = hashes(run_workers(gpt, 2, lanes=4, compression=Compression("int8", start_after=10)))
    assert late == plain
    assert hashes(run_workers(gpt, 2, lanes=4, compression=Compression("int8", start_after=9))) != plain


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_residuals_goes_on_on_another_number_of_workers(way: str, tmp_path: Path) -> None:
    turn = list(WAYS).index(way)
    saving, loading = ((2, 3), (4, 1), (1, 4), (3, 2))[turn % 4]
    before, after = STRATEGIES[turn % len(STRATEGIES)], STRATEGIES[(turn + 1) % len(STRATEGIES)]
    straight = hashes(run_workers(trains, 1, until=STEPS, compression=WAYS[way]))
    run, again = str(tmp_path / "run"), tmp_path / "again"
    hashes(run_workers(trains, saving, until=HALF, run=run, compression=WAYS[way], strategy=before))
    job = {"until": STEPS, "run": run, "again": str(again), "compression": WAYS[way], "strategy": after}
    found = hashes(run_workers(trains, loading, **job))
    assert states_differ(tmp_path / "run" / f"checkpoint-{HALF}", again) == []
    assert found == straight


@pytest.mark.parametrize("way", WITH_SERVERS)
def test_residuals_go_from_servers_to_workers_and_back(way: str, tmp_path: Path) -> None:
    """Saved with servers and loaded without, or the other way round, and with other servers."""
    turn = list(WITH_SERVERS).index(way)
    places: list[tuple[int, int, Any]] = [(2, 2, SERVERS[0]), (3, 0, "zero2"), (4, 1, SERVERS[1]), (1, 0, SERVERS[0])]
    places += [(1, 0, "ddp"), (3, 1, SERVERS[0])]
    before, after = places[turn % len(places)], places[(turn + 1) % len(places)]
    straight = hashes(run_workers(trains, 1, until=STEPS, compression=WITH_SERVERS[way]))
    run, again = str(tmp_path / "run"), tmp_path / "again"
    job = {"run": run, "compression": WITH_SERVERS[way]}
    hashes(run_workers(trains, before[0], servers=before[1], strategy=before[2], until=HALF, **job))
    job |= {"until": STEPS, "again": str(again)}
    found = hashes(run_workers(trains, after[0], servers=after[1], strategy=after[2], **job))
    assert states_differ(tmp_path / "run" / f"checkpoint-{HALF}", again) == []
    assert found == straight
