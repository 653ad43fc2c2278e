"""Saved under any strategy by any number of workers, loaded under any other by another number: not one bit changes.

Strategies that train other numbers than ddp go on under themselves alone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from paceline import Engine, World
from paceline.checkpoint.load import Checkpoint, differences
from paceline.strategies.registry import Chosen, synchronous_strategies
from tests.bits.programs import tied_and_scheduled
from tests.bits.test_one_hash import reference_for
from tests.smoke import first_of_each
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers

STRATEGIES = synchronous_strategies()
STEPS, HALF = 6, 3


def next_alike(place: int) -> int:
    """The next one, in a ring, that trains the same numbers."""
    others = (number % len(STRATEGIES) for number in range(place + 1, place + 1 + len(STRATEGIES)))
    return next(other for other in others if STRATEGIES[other].updates == STRATEGIES[place].updates)


# From each to the next, so that each is once on either side; workers in turn.
IN_A_RING = [(place, next_alike(place), 1 + place % 4, 1 + (place + 2) % 4) for place in range(len(STRATEGIES))]
EVERYTHING = [
    (before, after, saving, loading)
    for before in range(len(STRATEGIES))
    for after in range(len(STRATEGIES))
    for saving, loading in ((1, 4), (2, 3), (3, 2), (4, 1))
    if STRATEGIES[before].updates == STRATEGIES[after].updates
]
Case = tuple[int, int, int, int]


def trains(
    world: World, *, until: int, run: str | None = None, again: str | None = None, asynchronous: bool = True, **job: Any
) -> str:
    """Goes on from the newest checkpoint of `run` if there is one, and saves one; `again`: also what it has loaded."""
    with Engine(world=world, **{"lanes": 4, "accumulate": 2, "bucket_mib": 0.01} | job) as engine:
        model, optimizer, loader, schedule = tied_and_scheduled(engine)
        checkpoints = engine.checkpoints(run or "unused", asynchronous=asynchronous)
        if run is not None:
            checkpoints.resume()
        if again is not None:
            engine.save_state(again)
        while engine.step < until:
            for x, y in loader:
                engine.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
                optimizer.step()
                schedule.step()
                if engine.stepped and engine.step == HALF and run is not None:
                    checkpoints.save()
                if engine.stepped and engine.step == until:
                    break
        checkpoints.close()
        return engine.weights_hash()


@cache
def straight(precision: str, strategy: Any) -> frozenset[str]:
    return frozenset(hashes(run_workers(trains, 1, until=STEPS, precision=precision, strategy=strategy)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@cache
def saved(runs: Path, place: int, workers: int, precision: str) -> Path:
    """A run of so many workers under a strategy that has saved after half of its steps, and trained a little more."""
    run = runs / f"{place} {workers} {precision}"
    strategy = STRATEGIES[place].config
    results = run_workers(trains, workers, until=HALF + 1, run=str(run), strategy=strategy, precision=precision)
    hashes(results)
    return run / f"checkpoint-{HALF}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        whole = EVERYTHING[:: metafunc.config.getoption("--every")]
        cases = whole if metafunc.config.getoption("--full-product") else IN_A_RING
        metafunc.parametrize("case", first_of_each(cases, lambda case: "any", described))


def described(case: Case) -> str:
    before, after, saving, loading = case
    return f"{STRATEGIES[before]} on {saving} to {STRATEGIES[after]} on {loading}"


def precision_for(*chosen: Chosen) -> str:
    """bf16 keeps masters apart from weights, which is the harder case; where both sides can."""
    return "bf16" if all(one.entry.takes_low_precision for one in chosen) else "fp32"


@pytest.mark.product
def test_a_checkpoint_goes_on_elsewhere_to_the_bits_of_the_run_never_stopped(
    case: Case, runs: Path, tmp_path: Path
) -> None:
    before, after, saving, loading = case
    precision = precision_for(STRATEGIES[before], STRATEGIES[after])
    checkpoint, again = saved(runs, before, saving, precision), tmp_path / "again"
    run = tmp_path / "run"
    run.mkdir()
    (run / checkpoint.name).symlink_to(checkpoint)
    job = {"until": STEPS, "run": str(run), "again": str(again), "strategy": STRATEGIES[after].config}
    found = hashes(run_workers(trains, loading, precision=precision, **job))
    assert states_differ(checkpoint, again) == []
    assert found == straight(precision, reference_for(STRATEGIES[before]))


def states_differ(first: Path, second: Path) -> list[Any]:
    """Weights, buffers, optimizer states and everything else that was loaded."""
    one, other = Checkpoint.open(first), Checkpoint.open(second)
    assert one.verify() == other.verify() == []
    return list(differences(one.tree, other.tree))
