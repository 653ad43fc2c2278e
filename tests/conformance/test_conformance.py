"""A few of PyTorch's own distributed tests, through the driver; `make conformance` runs them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.driver import EXCEPTIONS, complaints, recorded
from tests.conformance.suite import LikeGloo, Outcome

A_FEW = [
    "test_DistributedDataParallelCPU",
    "test_all_reduce_sum_async",
    "test_all_to_all",
    "test_barrier",
    "test_broadcast",
    "test_send_recv_with_tag",
]


@pytest.mark.job
def test_some_of_pytorchs_distributed_tests_pass() -> None:
    command = [sys.executable, "-m", "tests.conformance.driver", "--world-size", "3", "--jobs", "2", "--tests"]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, *A_FEW], cwd=root, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(A_FEW)} passed, 0 failed" in done.stdout


def test_a_test_that_gloo_passes_and_we_skip_or_fail_is_complained_about() -> None:
    outcomes = [
        Outcome("a", "skipped", 0.1, "no GPU"),
        Outcome("b", "skipped", 0.1),
        Outcome("c", "failed", 0.1, "why"),
    ]
    assert complaints(outcomes, {"a"}) == ["a runs with gloo but was skipped: no GPU", "c failed:\nwhy"]


def test_an_exception_that_passes_is_complained_about() -> None:
    name = next(iter(EXCEPTIONS))
    assert complaints([Outcome(name, "failed", 0.1)], {name}) == []
    assert complaints([Outcome(name, "passed", 0.1)], {name}) == [f"{name} passes: take it out of EXCEPTIONS"]


def test_every_exception_is_a_test_that_passes_with_gloo() -> None:
    assert set(EXCEPTIONS) <= recorded(8)
    assert len(recorded(3)) < len(recorded(8))


def test_inside_the_suite_the_backend_answers_to_gloos_name_too() -> None:
    name = LikeGloo("paceline")
    assert name == "gloo"
    assert name == "paceline"
    assert name != "nccl"
    assert name in ["mpi", "gloo"]
