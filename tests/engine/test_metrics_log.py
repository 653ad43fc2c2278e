"""`engine.log` in a loop of one's own: written once, continued, taken over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.engine.stop_signals import StoppedOnRequest
from paceline.errors import ConfigError, LoopError
from paceline.planner import residuals
from paceline.tracking import run as tracking_run
from paceline.tracking.json_lines import FILE_NAME, events, rows
from paceline.world.world import World
from tests.faults.elastic_jobs import STEPS, check_unharmed, run_elastic
from tests.faults.jobs import run_job
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


# -- how a run ended ---------------------------------------------------------------------------------------------------


def loop(engine: paceline.Engine, ends: Callable[[], None] = lambda: None) -> None:
    """Two steps; `ends` in the second."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    model, optimizer, loader = engine.prepare(model, optimizer, data)
    engine.init_trackers("run")
    for (x,) in loader:
        engine.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        engine.log({"loss": 1.0})
        if engine.step == 2:
            ends()


def raises(error: BaseException) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


def ended_well(folder: Path) -> bool:
    """As metrics.jsonl says; measurements are stored of a run that did, alone."""
    *_, end = events(folder / "run" / FILE_NAME)
    assert end["event"] == "end"
    assert (folder / "run" / residuals.FILE_NAME).exists() is end["ok"]
    return bool(end["ok"])


def in_a_with_block(folder: Path, ends: Callable[[], None]) -> None:
    with paceline.Engine(world=World(), project_dir=folder) as engine:
        loop(engine, ends)


def in_a_finally(folder: Path, ends: Callable[[], None]) -> None:
    engine = paceline.Engine(world=World(), project_dir=folder)
    try:
        loop(engine, ends)
    finally:
        engine.close()


@pytest.mark.unit
@pytest.mark.parametrize("form", [in_a_with_block, in_a_finally])
@pytest.mark.parametrize(
    ("error", "well"),
    [
        (ValueError("a bad sample"), False),
        (KeyboardInterrupt(), False),
        (SystemExit(1), False),
        (SystemExit("no more disk"), False),
        (SystemExit(0), True),
        (StoppedOnRequest(), True),
    ],
    ids=repr,
)
def test_a_run_says_whether_its_loop_was_ended_by_an_error(
    form: Callable[[Path, Callable[[], None]], None], error: BaseException, well: bool, tmp_path: Path
) -> None:
    with pytest.raises(type(error)):
        form(tmp_path, raises(error))
    assert ended_well(tmp_path) is well


@pytest.mark.unit
@pytest.mark.parametrize("form", [in_a_with_block, in_a_finally])
def test_an_error_that_was_dealt_with_before_the_loop_is_not_its_end(
    form: Callable[[Path, Callable[[], None]], None], tmp_path: Path
) -> None:
    try:
        raise ImportError("an optional package is missing")
    except ImportError:
        form(tmp_path, lambda: None)
    assert ended_well(tmp_path)


SCRIPT = """
import sys
from pathlib import Path
import paceline
from tests.engine.test_metrics_log import loop, raises
loop(paceline.Engine(project_dir=sys.argv[1]), raises(ValueError("a bad sample")) if sys.argv[2:] else lambda: None)
"""


@pytest.mark.job
@pytest.mark.parametrize("fails", [True, False])
def test_an_engine_that_the_script_never_closed_says_it_too(fails: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *["fails"] * fails]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == int(fails), done.stderr
    assert ended_well(tmp_path) is not fails, done.stderr


@pytest.mark.job
@pytest.mark.parametrize("fails", [True, False])
def test_under_the_launcher_too(fails: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_job(tmp_path, "--workers 1 --lanes 1", f"{tmp_path / 'runs'} {'fails' if fails else ''}", script=script)
    assert done.code == int(fails), done.text
    assert ended_well(tmp_path / "runs") is not fails, done.text


@pytest.mark.unit
def test_what_a_worker_remembers_of_its_lines_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_run, "MOST_KEPT", 5)
    with paceline.Engine(world=World(), project_dir=tmp_path) as engine:
        engine.init_trackers("run")
        for step in range(100):
            engine.log({"loss": 0.0}, step=step)
        log = engine._metrics_log
        assert log._reports is not None
        assert [line["step"] for line in log._history] == [95, 96, 97, 98, 99]
        assert len(log._reports._times) == 5
    assert [step for step, _ in logged(tmp_path / "run")] == list(range(100))
