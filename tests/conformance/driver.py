"""PyTorch's own tests of torch.distributed, those inside its wheel, run on a backend of one's choice.

    python -m tests.conformance.driver paceline --world-size 3            everything that runs on CPU with gloo
    python -m tests.conformance.driver gloo --world-size 3 --list FILE    which tests those are

The suite decides while it is imported what a backend can do, by its name. Here it is imported as gloo's, and gets the
name of the backend afterwards, so that exactly gloo's tests run. Workers are forked from a process that has imported
everything, and several tests run at a time, since most of them sleep.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import io
import json
import logging
import multiprocessing
import os
import sys
import time
import unittest
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

# name: why it can't pass here. Everything else that passes with gloo has to pass.
EXCEPTIONS: dict[str, str] = {}

TEST_TIMEOUT_S = 300


class LikeGloo(str):
    """The backend's name, which inside the suite's tests also answers to gloo's."""

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


def load_suite(backend: str, world_size: int) -> type[unittest.TestCase]:
    """The suite's test case for `backend`. Once per process: it reads the environment while it is imported."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(world_size), "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test as suite

    torch.set_num_threads(1)
    # The first optimizer object pulls in torch._dynamo, seconds of imports that every worker would pay again.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    if backend != "gloo":
        import paceline.backend  # noqa: F401

        os.environ["BACKEND"] = backend
        suite.BACKEND = LikeGloo(backend)
        for names in (suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
            names.append(backend)
    assert dist.is_gloo_available()

    class Conformance(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Conformance


def run_one(case: type[unittest.TestCase], name: str) -> Outcome:
    began, said = time.monotonic(), io.StringIO()
    result = unittest.TestResult()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        case(name).run(result)
    seconds = round(time.monotonic() - began, 2)
    problems = [text for _, text in [*result.errors, *result.failures]]
    if problems:
        return Outcome(name, "failed", seconds, "\n".join(problems))
    if result.skipped:
        return Outcome(name, "skipped", seconds, result.skipped[0][1])
    return Outcome(name, "passed", seconds)


def names_in(case: type[unittest.TestCase]) -> list[str]:
    """What gloo would run, known before anything is started."""
    names = unittest.TestLoader().getTestCaseNames(case)
    return [name for name in names if not getattr(getattr(case, name), "__unittest_skip__", False)]


_case: type[unittest.TestCase] | None = None


def _start(backend: str, world_size: int, folder: str) -> None:
    global _case
    logging.disable(logging.CRITICAL)
    # What workers print is of interest only where one is looked at alone.
    log = os.open(Path(folder) / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _case = load_suite(backend, world_size)


def _names() -> list[str]:
    assert _case is not None
    return names_in(_case)


def _run(name: str) -> Outcome:
    assert _case is not None
    return run_one(_case, name)


def run_suite(backend: str, world_size: int, names: list[str] | None, jobs: int, folder: str) -> list[Outcome]:
    # Not multiprocessing's daemons, which may not have children.
    with concurrent.futures.ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), _start, (backend, world_size, folder)
    ) as pool:
        wanted = names if names is not None else pool.submit(_names).result()
        outcomes = []
        for done in concurrent.futures.as_completed([pool.submit(_run, name) for name in wanted]):
            outcomes.append(done.result())
            print(json.dumps(asdict(outcomes[-1])) if outcomes[-1].result == "failed" else "", end="", flush=True)
            print(f"{outcomes[-1].result:8} {outcomes[-1].seconds:7.2f} s  {outcomes[-1].name}", flush=True)
    return sorted(outcomes, key=lambda outcome: outcome.name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", default="/tmp")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    outcomes = run_suite(options.backend, options.world_size, options.tests or None, options.jobs, options.logs)
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    print(Counter(outcome.result for outcome in outcomes), f"{time.monotonic() - began:.0f} s")
    return int(any(outcome.result == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
