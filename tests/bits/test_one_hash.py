"""The promise: the final weights have the same bits on 1, 2, 3 … workers, under every synchronous strategy."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from paceline.strategies.registry import Chosen, synchronous_strategies
from paceline.strategies.server import ParameterServer
from tests.bits.programs import PROGRAMS, RECOMPUTED, compiled, convnet, gpt, wide
from tests.smoke import first_of_each
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers


@cache
def hash_of_one_process(
    program: str, lanes: int, accumulate: int, precision: str = "fp32", strategy: Any = "ddp"
) -> str:
    job: dict[str, Any] = {"lanes": lanes, "accumulate": accumulate, "precision": precision, "strategy": strategy}
    (found,) = hashes(run_workers(PROGRAMS[program], 1, **job))
    return found


def reference_for(strategy: Chosen) -> Any:
    """What gives its bits on one worker: ddp, unless it trains other numbers."""
    return "ddp" if strategy.entry.bits_of_ddp else strategy.config


BACKENDS = ("paceline", "gloo")
KEEPS = (None, "nothing", "matmuls")  # what activation checkpointing keeps; None: there is none
PRECISIONS = ("fp32", "bf16")
# Without AVX-512 the bf16 LSTM of torch is made of operations that write into products: refused with +matmuls.
LSTM_CHANGES_PRODUCTS = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
STRATEGIES = synchronous_strategies()
Case = tuple[str, int, int, int, float, str, str | None, str, Chosen]
# program, workers, lanes, accumulate, bucket_mib; backends, keeps and precisions in turn: every pair is in some row.
PAIRWISE = [
    ("gpt", 2, 4, 1, 4.0), ("gpt", 3, 5, 2, 0.001), ("gpt", 4, 8, 1, 0.01), ("gpt", 3, 4, 1, 0.01),
    ("convnet", 2, 5, 1, 0.001), ("convnet", 3, 4, 2, 4.0), ("convnet", 4, 4, 1, 0.01),
    ("lstm", 4, 5, 1, 4.0), ("lstm", 2, 8, 2, 0.01), ("lstm", 3, 8, 1, 0.001),
    ("clipped", 4, 4, 2, 0.001), ("clipped", 3, 8, 1, 4.0), ("clipped", 2, 5, 1, 0.01),
    ("short_last_step", 2, 4, 1, 0.01), ("short_last_step", 3, 5, 1, 4.0), ("short_last_step", 4, 4, 1, 0.001),
    ("scheduled", 3, 4, 1, 0.001), ("scheduled", 4, 8, 2, 4.0), ("scheduled", 2, 4, 2, 0.01),
    ("gan", 2, 4, 1, 0.001), ("gan", 3, 5, 1, 0.01), ("gan", 4, 8, 2, 4.0),
    ("odd_parameters", 3, 4, 2, 0.001), ("odd_parameters", 4, 5, 1, 0.01), ("odd_parameters", 2, 8, 1, 4.0),
    ("wide", 2, 4, 2, 0.01), ("wide", 3, 5, 1, 4.0), ("wide", 4, 8, 1, 0.05),
]  # fmt: skip
EVERYTHING = [
    (program, workers, lanes, accumulate, bucket, backend, keep, precision, strategy)
    for strategy in STRATEGIES
    for program in PROGRAMS
    for workers in (2, 3, 4)
    for lanes in (4, 5, 8)
    for accumulate in (1, 2)
    for bucket in (0.001, 0.01, 4.0)
    for backend in BACKENDS
    for keep in KEEPS
    for precision in PRECISIONS
    if precision == "fp32" or strategy.entry.takes_low_precision
]


def in_turn(place: int, number: int, strategy: Chosen) -> tuple[str, str | None, str]:
    """What the other axes have in a row, for the strategy at `place`."""
    turn = number if place == 0 else number // 3
    precision = PRECISIONS[turn // 2 % 2] if strategy.entry.takes_low_precision else "fp32"
    return BACKENDS[number % 2], KEEPS[turn % 3], precision


def quick_cases() -> list[Case]:
    """All of them for the first strategy; each of the others, which share its bookkeeping, runs every third."""
    return [
        (*case, *in_turn(place, number, strategy), strategy)
        for place, strategy in enumerate(STRATEGIES)
        for number, case in enumerate(PAIRWISE)
        if place == 0 or number % 3 == place % 3
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        whole = EVERYTHING[:: metafunc.config.getoption("--every")]
        cases = whole if metafunc.config.getoption("--full-product") else quick_cases()
        metafunc.parametrize("case", first_of_each(cases, strategy_and_backend, described))


def strategy_and_backend(case: Case) -> tuple[str, str]:
    return str(case[-1]), case[5]


def described(case: Case) -> str:
    return "-".join(map(str, case))


@pytest.mark.product
def test_any_number_of_workers_gives_the_bits_of_one_process(case: Case) -> None:
    program, workers, lanes, accumulate, bucket_mib, backend, keep, precision, strategy = case
    job: dict[str, Any] = {"lanes": lanes, "accumulate": accumulate, "bucket_mib": bucket_mib, "backend": backend}
    job["precision"] = precision
    if keep is not None:
        keeps = keep == "matmuls" and not (program == "lstm" and precision == "bf16" and LSTM_CHANGES_PRODUCTS)
        job["activation_checkpointing"] = RECOMPUTED[program] + ("+matmuls" if keeps else "")
    found = hashes(run_workers(PROGRAMS[program], workers, strategy=strategy.config, **job))
    assert found == {hash_of_one_process(program, lanes, accumulate, precision, reference_for(strategy))}


def test_loader_processes_and_overlap_change_no_bit() -> None:
    job: dict[str, Any] = {"lanes": 4, "samples": 33, "epochs": 1}
    plain = hashes(run_workers(convnet, 1, **job))
    assert hashes(run_workers(convnet, 2, num_workers=2, overlap=False, **job)) == plain


def test_two_threads_per_worker_give_one_hash() -> None:
    job: dict[str, Any] = {"lanes": 4, "threads": 2, "epochs": 1, "samples": 32}
    assert hashes(run_workers(gpt, 2, **job)) == hashes(run_workers(gpt, 1, **job))


def test_a_compiled_model_gives_the_bits_of_one_process() -> None:
    assert hashes(run_workers(compiled, 2, lanes=4)) == hashes(run_workers(compiled, 1, lanes=4))


def test_another_seed_or_number_of_lanes_gives_other_bits() -> None:
    """The oracle can fail: it sees what it is meant to see."""
    found = [hash_of_one_process("gpt", lanes, 1) for lanes in (4, 5)]
    (reseeded,) = hashes(run_workers(gpt, 1, lanes=4, seed=1))
    assert len({*found, reseeded}) == 3


def test_fast_reduction_trains_to_nearly_the_same_weights() -> None:
    """`fast` promises agreement between the workers of one run, not bits across numbers of workers."""
    assert len(hashes(run_workers(gpt, 3, lanes=4, reduction="fast", epochs=1))) == 1


class AddsUp(torch.optim.SGD):
    """Its step depends on a sum over all elements, whose bits depend on where in memory they start."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            flat = parameter.grad.flatten()
            parameter.grad.mul_(1 + torch.dot(flat, flat.abs()))
        return super().step(closure)


@pytest.mark.parametrize(
    ("strategy", "workers", "servers"),
    [("ddp", 3, 0), ("ddp", 4, 0), ("star", 2, 0), (ParameterServer(mode="aggregate"), 3, 1)],
    ids=["ddp on 3", "ddp on 4", "star", "parameter server"],
)
def test_an_optimizer_that_adds_up_whole_gradients_gives_one_hash(strategy: Any, workers: int, servers: int) -> None:
    job: dict[str, Any] = {"lanes": 5, "optimizer": AddsUp}
    alone = hashes(run_workers(wide, 1, **job))
    assert hashes(run_workers(wide, workers, servers=servers, strategy=strategy, bucket_mib=0.05, **job)) == alone
