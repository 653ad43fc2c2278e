"""Whoever serves may be lost as any other: a process of its own, or the worker that doubles as one.

    4 workers, 2 servers      worker 0   1   2   3   server 0 (rank 4)   server 1 (rank 5)
    lost                      its keys are served by
    server 1                  server 0
    server 0 as well          worker 0, or the first that is left
    and when its fresh process is there they go back to it

`make faults` tries each kind with each server, mode and backend, and random sequences of losses (--full-product).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.elastic_jobs import WORKERS, check_unharmed, run_elastic
from tests.faults.test_any_moment import BACKENDS, KINDS

pytestmark = pytest.mark.job

MODES = ("update", "aggregate")
SERVERS = (WORKERS, WORKERS + 1)
PHASES_OF_WORKERS = (
    "data",
    "forward",
    "backward",
    "bucket",
    "exchange",
    "ready",
    "before_commit",
    "after_commit",
    "apply",
)
LIVES = 20


@dataclass(frozen=True)
class Case:
    mode: str
    backend: str
    orders: tuple[str, ...]
    arguments: str = ""

    def __str__(self) -> str:
        return f"{self.mode}-{self.backend}-{'+'.join(self.orders)}"


def quick_cases() -> list[Case]:
    each_in_turn = (
        "stop:rank=5,step=2,phase=serve",
        "kill:rank=4,step=5,phase=serve",
        "kill:rank=0,step=7,phase=apply",
    )
    return [
        Case("update", "paceline", each_in_turn),
        Case("aggregate", "gloo", ("raise:rank=4,step=3,phase=serve", "kill:rank=1,step=3,phase=exchange")),
    ]


def full_product() -> list[Case]:
    single = [
        Case(mode, backend, (f"{kind}:rank={rank},step={step},phase=serve",))
        for mode in MODES
        for backend in BACKENDS
        for kind in KINDS
        for rank, step in zip(SERVERS, (1, 6), strict=True)
    ]
    return [*quick_cases(), *single, *(random_life(seed) for seed in range(LIVES))]


def random_life(seed: int) -> Case:
    """Each server once, and two workers, at random moments of random steps; replacements join meanwhile."""
    draw = random.Random(seed)
    steps = draw.choices(range(1, 8), k=4)
    lost = [(rank, "serve") for rank in SERVERS]
    lost += [(rank, draw.choice(PHASES_OF_WORKERS)) for rank in draw.sample(range(WORKERS), 2)]
    kinds = draw.choices(KINDS[:2], k=4)  # the same step failing twice by exceptions is the code, not the machine
    orders = [f"{k}:rank={r},step={s},phase={p}" for k, (r, p), s in zip(kinds, lost, steps, strict=True)]
    return Case(draw.choice(MODES), draw.choice(BACKENDS), tuple(orders), "--step-s 0.05 --save-every 3")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = full_product() if metafunc.config.getoption("--full-product") else quick_cases()
        metafunc.parametrize("case", cases, ids=list(map(str, cases)))


def test_a_server_process_lost_in_any_way_changes_no_bit(case: Case, tmp_path: Path) -> None:
    strategy, arguments = "--strategy parameter_server", case.arguments
    if case.mode == "aggregate":
        strategy, arguments = "", f"{arguments} --sums-on-servers"
    flags = f"{strategy} --servers {len(SERVERS)} --backend {case.backend}"
    job = run_elastic(tmp_path / "job", flags, arguments, orders=list(case.orders))
    check_unharmed(job, list(case.orders))


@pytest.mark.parametrize(("rank", "phase", "name"), [(0, "forward", "worker 0"), (2, "serve", "server 0")])
def test_who_comes_back_while_the_others_save_is_taken_in(rank: int, phase: str, name: str, tmp_path: Path) -> None:
    """A worker that saves asks the servers, which have heard by then that another generation is about to begin."""
    orders = [f"kill:rank={rank},step=1,phase={phase}"]
    flags = "--strategy parameter_server --servers 1 --workers 2"
    job = run_elastic(tmp_path / "job", flags, f"--save-every 1 --step-s 0.05 --await-joiner {rank}-1", orders=orders)
    check_unharmed(job, orders)
    assert f"{name} is back" in job.err, job.text
    assert "lost each other" not in job.err, job.text


@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
def test_losing_the_worker_that_serves_changes_no_bit(kind: str, tmp_path: Path) -> None:
    orders = [f"{kind}:rank=0,step=3,phase=exchange"]
    job = run_elastic(tmp_path / "job", "--strategy parameter_server", orders=orders)
    check_unharmed(job, orders)


def test_every_worker_that_serves_is_lost_in_turn(tmp_path: Path) -> None:
    """Who comes first of those that are left is the next one to serve."""
    orders = [f"kill:rank={rank},step={2 * rank + 2},phase=apply" for rank in range(3)]
    job = run_elastic(tmp_path / "job", "--strategy parameter_server --no-restart-workers", orders=orders)
    check_unharmed(job, orders)
