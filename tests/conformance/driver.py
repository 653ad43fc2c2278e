"""PyTorch's own tests of torch.distributed, those inside its wheel, run on the paceline backend.

    python -m tests.conformance.driver --world-size 3                     everything that runs on CPU with gloo
    python -m tests.conformance.driver --world-size 3 test_get_rank …     some of it
    python -m tests.conformance.driver --backend gloo --record            which tests those are: cpu_tests.txt

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
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tests.conformance.suite import Outcome, names_to_run, run_test, start

_REFUSED = (
    "torch.distributed.monitored_barrier refuses every backend not named gloo; here any barrier names who is late"
)
# Tests that pass with gloo and can't here, each with its reason.
EXCEPTIONS: dict[str, str] = {
    "test_monitored_barrier_failure_order": _REFUSED,
    "test_monitored_barrier_gloo": _REFUSED,
    "test_monitored_barrier_gloo_rank_0_timeout": "calls gloo's own method of that name, which no other backend has",
    "test_monitored_barrier_gloo_subgroup": _REFUSED,
    "test_monitored_barrier_wait_all_ranks": _REFUSED,
}
RECORD = Path(__file__).with_name("cpu_tests.txt")
WORLD_SIZES = (3, 8)


def recorded(world_size: int) -> set[str]:
    """The tests that pass with gloo on CPU at this world size: `name least-world-size` on each line."""
    lines = [line.split() for line in RECORD.read_text().splitlines() if line and not line.startswith("#")]
    return {name for name, least in lines if world_size >= int(least)}


def record(passed: dict[int, set[str]]) -> None:
    lines = ["# Tests of torch's distributed suite that pass with gloo on CPU, and the world size from which they run."]
    for name in sorted(set().union(*passed.values())):
        lines.append(f"{name} {min(size for size, names in passed.items() if name in names)}")
    RECORD.write_text("\n".join(lines) + "\n")


def run_suite(backend: str, world_size: int, names: Iterable[str] | None, jobs: int) -> list[Outcome]:
    """Each job is a process of its own, since the suite reads the environment while it is imported."""
    outcomes = []
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), start, (backend, world_size, folder)
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
    return (
        f"world size {world_size}: {counts['passed']} passed, {counts['failed'] - len(excepted)} failed, "
        f"{len(excepted)} excepted, {counts['skipped']} need a GPU or more ranks, in {seconds:.0f} s"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="paceline")
    parser.add_argument("--world-size", type=int, nargs="*", default=WORLD_SIZES)
    parser.add_argument("--jobs", type=int, default=4, help="tests that run at once")
    parser.add_argument("--json", type=Path, help="write every outcome there")
    parser.add_argument("--record", action="store_true", help="write what passes to cpu_tests.txt")
    parser.add_argument("--tests", nargs="*", help="all where none is named")
    options = parser.parse_args(arguments)
    found, passed, lines, everything = [], {}, [], []
    for world_size in options.world_size:
        began = time.monotonic()
        outcomes = run_suite(options.backend, world_size, options.tests or None, options.jobs)
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
