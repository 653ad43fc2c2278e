"""One process that has imported PyTorch's distributed tests, and runs them one after the other for a backend.

    distributed_test     in torch's wheel: every collective, messages, groups, DDP; at any world size
    test_c10d_gloo       in PyTorch's repository: gloo's own tests, each at a world size of its own

The first decides by the backend's name, while it is imported, what that backend can do. So it is imported as gloo's and
gets the other name afterwards: exactly gloo's tests run, with all of gloo's expectations. Those of all_to_all, which on
CPU only MPI has there, run too. The second calls gloo by name: wherever it does so it gets the other backend.

Workers are forked from this process, which has imported everything they need.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import sys
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


def load_suite(backend: str, world_size: int, folder: Path) -> dict[str, unittest.TestCase]:
    """The tests of the suite in the wheel, by name. Once per process: it reads the environment while it is imported."""
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "INIT_METHOD": f"file://{folder}/again-{os.getpid()}",
    }
    from torch.testing._internal.distributed import distributed_test as suite

    base: Any = suite.DistributedTest._DistTestBase
    if backend != "gloo":
        _rename(suite, base, backend)

    class Conformance(suite.TestDistBackend, base):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return {name: Conformance(name) for name in unittest.TestLoader().getTestCaseNames(Conformance)}


GLOO_CASES = (
    "ProcessGroupGlooTest",
    "DistributedDataParallelTest",
    "ReducerTest",
    "CommTest",
    "GlooProcessGroupWithDispatchedCollectivesTests",
    "LargeCommTest",
)


def load_gloo_tests(backend: str, pytorch: Path) -> dict[str, unittest.TestCase]:
    """Tests of test_c10d_gloo.py that are about collectives, not about how gloo connects or what it writes down."""
    sys.path.insert(0, str(pytorch))
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    fork = multiprocessing.get_context("fork").Process
    MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)  # type: ignore[method-assign]
    module = importlib.import_module("test_c10d_gloo")
    if backend != "gloo":
        _swap_gloo(backend)
    return {
        f"{case}.{name}": getattr(module, case)(name)
        for case in GLOO_CASES
        for name in unittest.TestLoader().getTestCaseNames(getattr(module, case))
    }


def _swap_gloo(backend: str) -> None:
    """torch.distributed as these tests use it, where the name gloo means the other backend."""
    import torch.distributed as dist

    import paceline.backend

    init, new_group, gloo = dist.init_process_group, dist.new_group, dist.ProcessGroupGloo

    class Swapped:
        """In gloo's place: its options and devices are made as ever, and of them only the timeout is used."""

        _Options = gloo._Options  # type: ignore[attr-defined]
        create_device = staticmethod(gloo.create_device)

        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            return paceline.backend.create_group(store, rank, size, options._timeout)

    def named(name: Any) -> Any:
        return backend if name == "gloo" else name

    def init_swapped(name: Any = None, *args: Any, **options: Any) -> None:
        name = named(options.pop("backend", name))
        init(name, *args, **options)

    def new_swapped(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": named(options.get("backend"))})

    from paceline.collectives.shared_memory.group import SharedMemoryGroup

    # A device of gloo's that some tests make beside the group, and do not use.
    SharedMemoryGroup.create_device = staticmethod(gloo.create_device)  # type: ignore[attr-defined]
    for module in (dist, dist.distributed_c10d):
        vars(module).update(init_process_group=init_swapped, new_group=new_swapped, ProcessGroupGloo=Swapped)


def _rename(suite: Any, base: Any, backend: str) -> None:
    import paceline.backend  # noqa: F401

    os.environ["BACKEND"] = backend
    suite.BACKEND = LikeGloo(backend)
    suite.PROFILING_SUPPORTED_BACKENDS.append(backend)
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    for name, test in vars(base).items():
        if name.startswith("test_") and getattr(test, "__unittest_skip_why__", "").startswith(_OURS_TOO):
            test.__unittest_skip__ = False


_tests: dict[str, unittest.TestCase] = {}


def start(backend: str, world_size: int, folder: str, pytorch: Path | None) -> None:
    """Prepare this process. What workers print goes to a file: a failure's traceback comes back by another way."""
    logging.disable(logging.CRITICAL)
    tempfile.tempdir = folder  # the suite leaves files behind
    log = os.open(Path(folder) / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ |= {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_TIMEOUT_S), "OMP_NUM_THREADS": "1"}
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    # The first optimizer object pulls in torch._dynamo, seconds of imports that every worker would pay again.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    _tests.update(
        load_suite(backend, world_size, Path(folder)) if pytorch is None else load_gloo_tests(backend, pytorch)
    )


def names_to_run() -> list[str]:
    """Whatever is not skipped already when it is defined."""
    return [name for name, test in _tests.items() if not getattr(_method(test), "__unittest_skip__", False)]


def _method(test: unittest.TestCase) -> Any:
    return getattr(test, test.id().rpartition(".")[2])


def run_test(name: str) -> Outcome:
    began, said, result = time.monotonic(), io.StringIO(), unittest.TestResult()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        _tests[name].run(result)
    seconds = round(time.monotonic() - began, 2)
    problems = [text for _, text in [*result.errors, *result.failures]]
    if problems:
        return Outcome(name, "failed", seconds, "\n".join(problems))
    if result.skipped:
        return Outcome(name, "skipped", seconds, result.skipped[0][1])
    return Outcome(name, "passed", seconds)
