"""`engine.log` in a loop of one's own: written once, continued, taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import ConfigError, LoopError
from paceline.tracking.json_lines import FILE_NAME, rows
from paceline.world.world import World
from tests.faults.elastic_jobs import STEPS, check_unharmed, run_elastic
from tests.workers import run_workers


def logged(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(folder / FILE_NAME)]


def log_three(world: World, *, folder: str) -> None:
    with paceline.Engine(world=world, project_dir=folder, log_with="tensorboard") as engine:
        engine.init_trackers("run", config={"lr": 0.1})
        for step in range(3):
            engine.log({"loss": torch.tensor(step / 2)}, step=step)


@pytest.mark.workers
def test_every_worker_logs_and_one_writes(tmp_path: Path) -> None:
    for result in run_workers(log_three, 2, folder=str(tmp_path)):
        assert result.error is None, result.traceback
    assert logged(tmp_path / "run") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.job
def test_the_next_main_worker_goes_on_where_a_lost_one_stopped(tmp_path: Path) -> None:
    orders = ["kill:rank=0,step=3,phase=exchange", "kill:rank=1,step=6,phase=apply"]
    job = run_elastic(tmp_path, "", "--log", orders=orders)
    check_unharmed(job, orders)
    lines = logged(tmp_path / "run" / "logged")
    assert [step for step, _ in lines] == STEPS


@pytest.mark.unit
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda engine: engine.log({"loss": 1.0}), LoopError, r"engine\.init_trackers\(name\)"),
        (lambda engine: engine.init_trackers("a/b"), ConfigError, "a folder in project_dir"),
        (lambda engine: (engine.init_trackers("a"), engine.init_trackers("b")), LoopError, "twice"),
        (lambda engine: (engine.init_trackers("a"), engine.log({"x": "y"})), ConfigError, "'x' is a str, not a number"),
    ],
)
def test_what_can_not_work_is_refused(call: Any, error: type[Exception], words: str, tmp_path: Path) -> None:
    with paceline.Engine(world=World(), project_dir=tmp_path) as engine, pytest.raises(error, match=words):
        call(engine)


@pytest.mark.unit
def test_a_wrong_tracker_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        paceline.Engine(world=World(), log_with="tensorbord")
