"""Workers that train write where their time goes, and a delay that is put into one of them is named."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.monitor.attribution import join, straggler
from paceline.monitor.events import Part
from paceline.monitor.run_events import RunEvents, left_at, read_run
from paceline.strategies.server.parameter_server import ParameterServer
from paceline.world.world import World
from tests.faults.elastic_jobs import STEPS as STEPS_OF_JOB
from tests.faults.elastic_jobs import check_unharmed, run_elastic
from tests.trainer.jobs import make_trainer
from tests.workers import run_workers

DELAY_S = 0.03
STEPS = 24


class Points(Dataset[Any]):
    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def __len__(self) -> int:
        return 2 * 3 * STEPS

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._delay_s / 2)  # two of them in a batch
        return torch.full((8,), index / 100), torch.tensor([index % 3 / 3])


def train(
    world: World,
    *,
    folder: str,
    slow: int = 0,
    part: str = "",
    lanes: int | None = None,
    writes: bool = True,
    strategy: Any = "ddp",
    backend: str | None = None,
) -> dict[str, Any]:
    def delays(here: str) -> float:
        return DELAY_S if world.rank == slow and part == here else 0.0

    threads = threading.active_count()
    options: Any = {"lanes": lanes, "strategy": strategy} | ({} if backend is None else {"backend": backend})
    with paceline.Engine(world=world, project_dir=folder, seed=1, **options) as engine:
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        model.register_forward_hook(lambda *_: time.sleep(delays("forward")))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: time.sleep(delays("optimizer")))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(Points(delays("data")), batch_size=2))
        if writes:
            engine.init_trackers("run")
        ends: list[float] = []
        engine._group.after_step.append(lambda: ends.append(time.perf_counter()))
        for points, labels in loader:
            loss = (model(points) - labels).square().mean()
            loss.register_hook(lambda _: time.sleep(delays("backward")))
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        hash = engine.weights_hash()
    return {"hash": hash, "ends": ends, "threads": threading.active_count() - threads}


def train_on(workers: int, folder: Path, **options: Any) -> tuple[RunEvents, list[dict[str, Any]]]:
    results = run_workers(train, workers, folder=str(folder), **options)
    for result in results:
        assert result.error is None, result.traceback
    return read_run(folder / "run"), [result.value for result in results]


@pytest.mark.workers
@pytest.mark.parametrize(
    ("slow", "part"),
    [(1, Part.DATA), (2, Part.FORWARD), (0, Part.BACKWARD), (1, Part.OPTIMIZER)],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_worker_that_is_late_is_named_with_the_part_of_the_step(slow: int, part: Part, tmp_path: Path) -> None:
    run, results = train_on(3, tmp_path, slow=slow, part=part.name.lower())
    found = straggler(join(run))
    assert found is not None
    assert (found.worker, found.part) == (slow, part), str(found)
    assert found.late_s > 0.5 * DELAY_S
    assert run.has_ended
    assert [one["threads"] for one in results] == [0, 0, 0]


@pytest.mark.workers
@pytest.mark.parametrize(
    ("strategy", "backend"),
    [("zero1", None), ("zero2", "gloo"), ("zero3", None), ("fsdp", None), ("fsdp", "gloo"), ("parameter_server", None)],
)
def test_a_slow_update_is_named_where_workers_wait_for_each_other_after_it(
    strategy: str, backend: str | None, tmp_path: Path
) -> None:
    chosen: Any = ParameterServer(mode="aggregate") if strategy == "parameter_server" else strategy
    run, _ = train_on(3, tmp_path, slow=1, part="optimizer", strategy=chosen, backend=backend)
    found = straggler(join(run))
    assert found is not None, {worker: steps["parts"].mean(axis=0) for worker, steps in run.workers.items()}
    assert (found.worker, found.part) == (1, Part.OPTIMIZER), str(found)


@pytest.mark.workers
@pytest.mark.parametrize("lanes", [2, 4])
def test_the_parts_of_a_step_add_up_to_its_wall_time(lanes: int, tmp_path: Path) -> None:
    run, results = train_on(2, tmp_path, slow=1, part="forward", lanes=lanes)
    for steps, result in zip(run.workers.values(), results, strict=True):
        parts, walls = steps["parts"].astype(float).sum(axis=1)[1:], np.diff(result["ends"])
        assert abs(parts.sum() / walls.sum() - 1) < 0.02
        assert np.median(np.abs(parts / walls - 1)) < 0.02
        assert np.abs(steps["began"][1:-1] + parts[:-1] - steps["began"][2:]).max() < 1e-3  # one follows the other
        assert (steps["step"] == np.arange(1, len(steps) + 1)).all()


@pytest.mark.workers
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_every_bucket_leaves_between_the_begin_of_a_steps_backward_and_its_vote(strategy: str, tmp_path: Path) -> None:
    run, _ = train_on(2, tmp_path, slow=1, part="backward", strategy=strategy)
    for worker, steps in run.workers.items():
        left = left_at(run, worker, steps)
        assert left.shape[1] >= 1
        assert not np.isnan(left[1:]).any()
        before = steps["began"] + steps["parts"][:, [Part.DATA, Part.FORWARD]].astype(float).sum(axis=1)
        assert (left[1:] > before[1:, None] - 1e-3).all()
        assert (left[1:] < steps["voted"][1:, None]).all()


@pytest.mark.workers
def test_events_change_no_bit(tmp_path: Path) -> None:
    with_events = run_workers(train, 2, folder=str(tmp_path / "with"), slow=1, part="data")
    without = run_workers(train, 2, folder=str(tmp_path / "without"), writes=False)
    assert (tmp_path / "with" / "run" / "events").is_dir()
    assert not (tmp_path / "without").exists()
    for result in [*with_events, *without]:
        assert result.error is None, result.traceback
    assert len({result.value["hash"] for result in [*with_events, *without]}) == 1


def test_the_trainer_writes_them_to_its_folder(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    run = read_run(tmp_path)
    assert run.workers[0]["step"].tolist() == list(range(1, 7))
    assert run.has_ended


@pytest.mark.job
def test_a_worker_that_is_killed_and_replaced_is_on_the_time_axis(tmp_path: Path) -> None:
    orders = ["kill:rank=1,step=3,phase=backward"]
    job = run_elastic(tmp_path, "", "--log", orders=orders)
    check_unharmed(job, orders)
    run = read_run(tmp_path / "run" / "logged")
    assert run.workers[0]["step"].tolist() == STEPS_OF_JOB
    assert run.workers[0]["parts"][2, Part.RECOVERY] > 0  # the third step was done again
    assert set(run.workers[0]["generation"].tolist()) >= {1, 2}
    told = [note.text for note in run.notes if note.worker is None]
    assert told[:2] == ["generation 2: workers 0, 2, 3", "worker 1 was killed by SIGKILL in step 3"]
    assert len(told) == len(set(told))
    first, third = (float(run.workers[0]["began"][at]) for at in (0, 3))
    assert first < run.notes[0].time < third + 60
