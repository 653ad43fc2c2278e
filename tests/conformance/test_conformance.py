"""A part of PyTorch's own distributed tests, one of each kind; `make conformance` runs them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.driver import EXCEPTIONS, complaints, recorded
from tests.conformance.suite import LikeGloo, Outcome

ONE_OF_EACH = [
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather",
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_product",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_to_all",
    "test_all_to_all_single_unequal_split",
    "test_barrier",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_gather",
    "test_get_future",
    "test_isend_torch_profiler",
    "test_reduce_full_group_max",
    "test_reduce_sum_twice",
    "test_scatter",
    "test_scatter_object_list",
    "test_send_recv_any_source_autograd_profiler",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


@pytest.mark.job
def test_one_of_each_kind_of_pytorchs_distributed_tests_passes() -> None:
    command = [sys.executable, "-m", "tests.conformance.driver", "--world-size", "3", "--jobs", "3", "--tests"]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, *ONE_OF_EACH], cwd=root, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ONE_OF_EACH)} passed, 0 failed" in done.stdout


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
