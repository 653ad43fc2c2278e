"""PyTorch's own tests of torch.distributed, run on the paceline backend: the suite in its wheel, and those of gloo.

    python -m tests.conformance.driver                                    everything that runs on CPU with gloo
    python -m tests.conformance.driver --world-size 3 --tests test_get_rank …     some of the wheel's
    python -m tests.conformance.driver --world-size --pytorch FOLDER      gloo's alone, from a checkout of PyTorch
    python -m tests.conformance.driver --backend gloo --record            which tests those are: cpu_tests.txt

gloo's tests are not in the wheel. Without a checkout they come from GitHub, as they are in the release of the torch
that is installed, and are kept in the user's cache.

A run fails if a test that passes with gloo neither passes here nor stands in EXCEPTIONS, or stands there and passes.
Most tests sleep for most of their time, so several run at once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from tests.conformance.suite import Outcome, names_to_run, run_test, start

_REFUSED = (
    "torch.distributed.monitored_barrier refuses every backend not named gloo; here any barrier names who is late"
)
_DISPATCHED = "GlooProcessGroupWithDispatchedCollectivesTests"
_WORDS = "expects gloo's words for a timeout; ours name the operation and who has not come"
_TAKES = "expects a refusal of what this backend takes:"
_OPTIONS = "reads the options of gloo's class; torch's _set_pg_timeout knows only gloo and NCCL, by class"
# Tests that pass with gloo and can't here, each with its reason.
EXCEPTIONS: dict[str, str] = {
    "test_monitored_barrier_failure_order": _REFUSED,
    "test_monitored_barrier_gloo": _REFUSED,
    "test_monitored_barrier_gloo_rank_0_timeout": "calls gloo's own method of that name, which no other backend has",
    "test_monitored_barrier_gloo_subgroup": _REFUSED,
    "test_monitored_barrier_wait_all_ranks": _REFUSED,
    f"{_DISPATCHED}.test_monitored_barrier": _REFUSED,
    f"{_DISPATCHED}.test_all_to_all_single": f"{_TAKES} a tensor that is not contiguous",
    f"{_DISPATCHED}.test_init_process_group_for_all_backends": "expects the name 'custom' of all but torch's own, and "
    "so fails with gloo too where paceline is installed",
    "ProcessGroupGlooTest.test_allreduce_coalesced_checks": f"{_TAKES} several dtypes, or sparse tensors, in one list",
    "ProcessGroupGlooTest.test_alltoall_checks": f"{_TAKES} tensors of several sizes",
    "ProcessGroupGlooTest.test_allreduce_op_timeout": _WORDS,
    "ProcessGroupGlooTest.test_allreduce_overall_timeout": _WORDS,
    "ProcessGroupGlooTest.test_gloo_set_pg_timeout_api": _OPTIONS,
    "ProcessGroupGlooTest.test_set_gloo_pg_timeout": _OPTIONS,
}
RECORD = Path(__file__).with_name("cpu_tests.txt")
WORLD_SIZES = (3, 8)
OF_GLOO = 0  # in place of a world size: gloo's tests, which choose theirs


def recorded(world_size: int) -> set[str]:
    """The tests that pass with gloo on CPU at this world size: `name least-world-size` on each line."""
    lines = [line.split() for line in RECORD.read_text().splitlines() if line and not line.startswith("#")]
    return {
        name
        for name, least in lines
        if (int(least) == OF_GLOO if world_size == OF_GLOO else OF_GLOO < int(least) <= world_size)
    }


def record(passed: dict[int, set[str]]) -> None:
    """Those of sizes that did not run stay as they are."""
    known = {size: recorded(size) for size in (OF_GLOO, *WORLD_SIZES)} | passed
    lines = ["# Tests of torch's distributed suite that pass with gloo on CPU, and the world size from which they run;"]
    lines += ["# 0: tests of test_c10d_gloo.py, which choose it themselves."]
    for name in sorted(set().union(*known.values())):
        lines.append(f"{name} {min(size for size, names in known.items() if name in names)}")
    RECORD.write_text("\n".join(lines) + "\n")


SOURCES = ("test_c10d_gloo.py", "test_c10d_common.py")


def source_of_gloo_tests(checkout: Path | None) -> Path | str:
    """The folder that has them, or why there is none."""
    if checkout is not None:
        return checkout / "test/distributed"
    release = f"v{torch.__version__.partition('+')[0]}"
    folder = Path.home() / ".cache/paceline/pytorch" / release
    folder.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        if not (folder / name).exists():
            address = f"https://raw.githubusercontent.com/pytorch/pytorch/{release}/test/distributed/{name}"
            try:
                with urllib.request.urlopen(address, timeout=30) as answer:
                    text = answer.read()
            except OSError as error:
                return f"not run, because {address} can't be had ({error}); give --pytorch a checkout of {release}"
            (folder / f"{name}.part").write_bytes(text)
            (folder / f"{name}.part").rename(folder / name)
    return folder


def run_suite(
    backend: str, world_size: int, names: Iterable[str] | None, jobs: int, pytorch: Path | None = None
) -> list[Outcome]:
    """Each job is a process of its own, since the suite reads the environment while it is imported."""
    outcomes = []
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), start, (backend, world_size, folder, pytorch)
        ) as pool,
    ):
        wanted = list(names) if names is not None else pool.submit(names_to_run).result()
        for done in concurrent.futures.as_completed([pool.submit(run_test, name) for name in wanted]):
            outcomes.append(done.result())
            print(outcomes[-1], flush=True)
    return sorted(outcomes, key=lambda outcome: outcome.name)


def complaints(outcomes: list[Outcome], expected: set[str]) -> list[str]:
    """What is not as it should be, one line each."""
    found = []
    for outcome in outcomes:
        if outcome.result == "passed" and outcome.name in EXCEPTIONS:
            found.append(f"{outcome.name} passes: take it out of EXCEPTIONS")
        elif outcome.name in EXCEPTIONS:
            continue
        elif outcome.result == "failed":
            found.append(f"{outcome.name} failed:\n{outcome.text}")
        elif outcome.result == "skipped" and outcome.name in expected:
            found.append(f"{outcome.name} runs with gloo but was skipped: {outcome.text}")
    return found


def summary(outcomes: list[Outcome], world_size: int, seconds: float) -> str:
    excepted = [outcome for outcome in outcomes if outcome.result == "failed" and outcome.name in EXCEPTIONS]
    counts = Counter(outcome.result for outcome in outcomes)
    what = "test_c10d_gloo" if world_size == OF_GLOO else f"world size {world_size}"
    return (
        f"{what}: {counts['passed']} passed, {counts['failed'] - len(excepted)} failed, "
        f"{len(excepted)} excepted, {counts['skipped']} need a GPU or more ranks, in {seconds:.0f} s"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="paceline")
    parser.add_argument("--world-size", type=int, nargs="*", default=WORLD_SIZES, help="of the suite in the wheel")
    parser.add_argument("--pytorch", type=Path, help="a checkout of PyTorch, of the release that is installed")
    parser.add_argument("--jobs", type=int, default=4, help="tests that run at once")
    parser.add_argument("--json", type=Path, help="write every outcome there")
    parser.add_argument("--record", action="store_true", help="write what passes to cpu_tests.txt")
    parser.add_argument("--tests", nargs="*", help="all where none is named; those with a dot are gloo's")
    options = parser.parse_args(arguments)
    found, passed, lines, everything = [], {}, [], []
    for world_size in (*options.world_size, OF_GLOO):
        began, pytorch = time.monotonic(), None
        names = [name for name in options.tests or () if ("." in name) == (world_size == OF_GLOO)]
        if options.tests and not names:
            continue
        if world_size == OF_GLOO:
            pytorch = source_of_gloo_tests(options.pytorch)
            if isinstance(pytorch, str):
                lines.append(f"test_c10d_gloo: {pytorch}")
                continue
        outcomes = run_suite(options.backend, world_size, names or None, options.jobs, pytorch)
        lines.append(summary(outcomes, world_size, time.monotonic() - began))
        expected = recorded(world_size) if not options.record else set()
        if not options.tests:
            found += [f"{name} was not found" for name in expected - {outcome.name for outcome in outcomes}]
        found += complaints(outcomes, expected) if options.backend != "gloo" else []
        passed[world_size] = {outcome.name for outcome in outcomes if outcome.result == "passed"}
        everything += [asdict(outcome) | {"world_size": world_size} for outcome in outcomes]
    if options.record:
        record(passed)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))
    print("\n".join([*found, *lines]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
