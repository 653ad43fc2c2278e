"""One process that has imported PyTorch's distributed tests, and runs them one after the other for a backend.

The suite decides by the backend's name, while it is imported, what that backend can do. So it is imported as gloo's and
gets the other name afterwards: exactly gloo's tests run, with all of gloo's expectations. Those of all_to_all, which on
CPU only MPI has there, run too. Workers are forked from this process, which has imported everything they need.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import tempfile
import time
import unittest
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEST_TIMEOUT_S = 120
_OURS_TOO = "Only MPI supports"  # how the suite begins its reason to skip all_to_all on CPU


class LikeGloo(str):
    """The backend's name, which inside the tests also answers to gloo's."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@dataclass(frozen=True)
class Outcome:
    name: str
    result: str  # passed, failed, skipped
    seconds: float
    text: str = ""

    def __str__(self) -> str:
        return f"{self.result:8} {self.seconds:6.2f} s  {self.name}"


def load_suite(backend: str, world_size: int, folder: Path) -> type[unittest.TestCase]:
    """The suite's test case for `backend`. Once per process: it reads the environment while it is imported."""
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "INIT_METHOD": f"file://{folder}/again-{os.getpid()}",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_TIMEOUT_S),
        "OMP_NUM_THREADS": "1",
    }
    warnings.simplefilter("ignore")
    import torch
    from torch.testing._internal.distributed import distributed_test as suite

    torch.set_num_threads(1)
    # The first optimizer object pulls in torch._dynamo, seconds of imports that every worker would pay again.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    base: Any = suite.DistributedTest._DistTestBase
    if backend != "gloo":
        _rename(suite, base, backend)

    class Conformance(suite.TestDistBackend, base):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Conformance


def _rename(suite: Any, base: Any, backend: str) -> None:
    import paceline.backend  # noqa: F401

    os.environ["BACKEND"] = backend
    suite.BACKEND = LikeGloo(backend)
    suite.PROFILING_SUPPORTED_BACKENDS.append(backend)
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    for name, test in vars(base).items():
        if name.startswith("test_") and getattr(test, "__unittest_skip_why__", "").startswith(_OURS_TOO):
            test.__unittest_skip__ = False


_case: type[unittest.TestCase] | None = None


def start(backend: str, world_size: int, folder: str) -> None:
    """Prepare this process. What workers print goes to a file: a failure's traceback comes back by another way."""
    global _case
    logging.disable(logging.CRITICAL)
    tempfile.tempdir = folder  # the suite leaves files behind
    log = os.open(Path(folder) / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _case = load_suite(backend, world_size, Path(folder))


def names_to_run() -> list[str]:
    """Whatever is not skipped already when it is defined."""
    assert _case is not None
    names = unittest.TestLoader().getTestCaseNames(_case)
    return [name for name in names if not getattr(getattr(_case, name), "__unittest_skip__", False)]


def run_test(name: str) -> Outcome:
    assert _case is not None
    began, said, result = time.monotonic(), io.StringIO(), unittest.TestResult()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        _case(name).run(result)
    seconds = round(time.monotonic() - began, 2)
    problems = [text for _, text in [*result.errors, *result.failures]]
    if problems:
        return Outcome(name, "failed", seconds, "\n".join(problems))
    if result.skipped:
        return Outcome(name, "skipped", seconds, result.skipped[0][1])
    return Outcome(name, "passed", seconds)
