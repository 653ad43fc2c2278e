"""A few of PyTorch's own distributed tests, through the driver; `make conformance` runs them all."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.driver import EXCEPTIONS, OF_GLOO, complaints, recorded, source_of_gloo_tests
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
    assert set(EXCEPTIONS) <= recorded(8) | recorded(OF_GLOO)
    assert len(recorded(3)) < len(recorded(8))


def test_inside_the_suite_the_backend_answers_to_gloos_name_too() -> None:
    name = LikeGloo("paceline")
    assert name == "gloo"
    assert name == "paceline"
    assert name != "nccl"
    assert name in ["mpi", "gloo"]


def test_without_gloos_tests_the_driver_says_what_did_not_run_and_how_it_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    said = source_of_gloo_tests(None)
    assert isinstance(said, str)
    assert said.startswith("not run, because https://raw.githubusercontent.com/pytorch/pytorch/v")
    assert "no route to host" in said
    assert "--pytorch" in said
    assert source_of_gloo_tests(tmp_path) == tmp_path / "test/distributed"


def test_gloos_tests_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(address: str, **_: object) -> io.BytesIO:
        asked.append(address.rpartition("/")[2])
        return io.BytesIO(b"pass\n")

    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("urllib.request.urlopen", answer)
    folder = source_of_gloo_tests(None)
    assert folder == source_of_gloo_tests(None)
    assert asked == ["test_c10d_gloo.py", "test_c10d_common.py"]
    assert isinstance(folder, Path)
    assert sorted(path.name for path in folder.iterdir()) == sorted(asked)
