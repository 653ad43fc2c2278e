"""Replay: what workers did at once, each at its own speed, one process does again with the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.parameter_server.clock import parse_clock
from paceline.parameter_server.replay import replay_of
from paceline.parameter_server.staleness_policy import StalenessPolicy
from paceline.parameter_server.update_log import FOLDER, RecordedRun, read_log
from paceline.strategies.server import ParameterServer
from paceline.world.world import LaunchSettings
from tests.workers import Result, run_workers

pytestmark = pytest.mark.workers


class Net(nn.Module):
    """Everything whose bits could come from the wrong place: buffers, random numbers, a part used only sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Dropout(0.2)
        self.sometimes, self.head = nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(F.relu(self.norm(self.first(x))))
        if float(x.detach().sum()) > 0:
            hidden = hidden + self.sometimes(hidden)
        out: Tensor = self.head(hidden)
        return out


def train(
    world: World,
    *,
    record: str,
    clock: str = "s=1,from=0",
    optimizer: str = "adamw",
    epochs: int = 2,
    samples: int = 90,
    width: int = 8,
    scheduled: bool = False,
    clip: float | None = None,
    stop_at: int | None = None,
    break_at: int | None = None,
    look_every: int | None = None,
    kill: tuple[int, int] | None = None,
    policy: StalenessPolicy | None = None,
    shrink: float | None = None,
    **job: Any,
) -> tuple[str, list[str]]:
    """The last hash, and those that were looked at inside the loops."""
    settings = ParameterServer(
        clock=parse_clock(clock), staleness_policy=policy or StalenessPolicy(), key_mib=0.0005, record=record
    )
    pace = random.Random(world.rank)
    seen: list[str] = []
    with Engine(
        world=world, strategy=settings, **{"device": "cpu", "backend": "gloo", "timeout_s": 20.0} | job
    ) as engine:
        model = Net() if width == 8 else nn.Sequential(nn.Linear(8, width), nn.Linear(width, 4))
        how = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
        }[optimizer]
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(samples, 8, generator=generator), torch.randint(0, 4, (samples,), generator=generator)
        )
        update = how(model.parameters())
        model, update, loader = engine.prepare(model, update, DataLoader(data, batch_size=3, shuffle=True))
        if shrink is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(shrink)
        total = epochs * engine.steps_per_epoch(loader) * engine.config.accumulate + 1
        schedule = torch.optim.lr_scheduler.OneCycleLR(update, 0.1, total_steps=total)
        if scheduled:
            engine.prepare(schedule)
        for _ in range(epochs):
            for x, y in loader:
                if world.size > 1:
                    time.sleep(pace.random() * 0.004 * (1 + 2 * world.rank))
                if kill == (world.rank, engine.step):
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.backward(F.cross_entropy(model(x), y) * (1 + engine.step / 100))
                if clip is not None:
                    engine.clip_grad_norm_(clip)
                update.step()
                update.zero_grad()
                if scheduled:
                    schedule.step()
                if engine.stepped and look_every is not None and engine.step % look_every == 0:
                    seen.append(engine.weights_hash())
                if stop_at is not None and engine.step >= stop_at:
                    engine.stop()
                if break_at is not None and engine.step >= break_at:
                    break
        return engine.weights_hash(), seen


def replayed(_: World, *, record: str, **options: Any) -> tuple[str, list[str], str]:
    found, seen = train(World(settings=LaunchSettings(replay=record)), record=record, **options)
    return found, seen, replay_of(Path(record)).verdict()


def recorded(folder: Path, workers: int, servers: int, **options: Any) -> tuple[str, list[str]]:
    """Run it, and the hash that all workers which lived to the end agree on."""
    results = run_workers(train, workers, servers=servers, record=str(folder), **options)
    alive = [result for result in results[:workers] if not str(result.error).startswith("Died")]
    for result in [*alive, *results[workers:]]:
        assert result.error is None, f"{result.name}: {result.error}\n{result.traceback}"
    assert len({result.value[0] for result in alive}) == 1
    value: tuple[str, list[str]] = alive[0].value
    return value


def replay(folder: Path, **options: Any) -> Result:
    (result,) = run_workers(replayed, 1, record=str(folder), **options)
    return result


def stale_reads(run: RecordedRun) -> int:
    """Reads that lacked an update of an earlier round."""
    lacking = 0
    for read in run.reads:
        for key, version in read.versions.items():
            later = [record for record in run.applied[key] if not record.outcome.dropped][version:]
            lacking += any(record.round < read.round for record in later)
    return lacking


# workers, servers, clock, job: every program has BatchNorm, dropout and a layer that only some micro-batches use.
JOBS: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "walk": (2, 1, "s=1,from=0", {"lanes": 2, "optimizer": "sgd", "epochs": 1, "width": 16}),
    "adamw": (3, 1, "s=2,from=0", {"lanes": 3, "seed": 1}),
    "another seed": (3, 1, "s=2,from=0", {"lanes": 3, "seed": 2}),
    "momentum, accumulated, two servers": (2, 2, "s=3,from=0", {"lanes": 2, "optimizer": "momentum", "accumulate": 2}),
    "worker 0 serves four": (4, 0, "s=inf", {"lanes": 4}),
    "unequal lanes": (2, 1, "s=1,from=0", {"lanes": 5, "optimizer": "momentum", "samples": 100}),
    "sees its own": (3, 2, "s=2,own,from=0", {"lanes": 4}),
    "schedule and clipping": (2, 1, "s=2,from=0", {"lanes": 3, "scheduled": True, "clip": 0.5}),
    "late steps shrink": (3, 1, "s=4,from=0", {"lanes": 3, "policy": StalenessPolicy("divide by delay", "corrected")}),
    "late pushes are dropped": (4, 1, "s=inf", {"lanes": 4, "policy": StalenessPolicy(drop_beyond=0)}),
    "stops": (2, 1, "s=1,from=0", {"lanes": 4, "epochs": 1, "stop_at": 3}),
    "breaks": (2, 1, "s=1,from=0", {"lanes": 4, "epochs": 1, "break_at": 4}),
    "looks": (3, 1, "s=2,from=3", {"lanes": 3, "look_every": 4}),
    "weights changed before the first step": (2, 1, "s=1,from=0", {"lanes": 2, "epochs": 1, "shrink": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_a_recorded_run_is_replayed_bit_for_bit_on_one_process(name: str, tmp_path: Path) -> None:
    workers, servers, clock, job = JOBS[name]
    found, seen = recorded(tmp_path, workers, servers, clock=clock, **job)
    again = replay(tmp_path, clock=clock, **job)
    assert again.error is None, again.traceback
    assert again.value[:2] == (found, seen)
    run = read_log(tmp_path)
    pushes = sum(not record.outcome.dropped for records in run.applied.values() for record in records)
    assert again.value[2] == f"replayed {pushes:,} pushes of {workers} workers: {found} equal to the recorded run"


def test_the_runs_that_are_replayed_really_read_stale_weights_and_drop_pushes(tmp_path: Path) -> None:
    job: dict[str, Any] = {"lanes": 4, "policy": StalenessPolicy(drop_beyond=0), "clock": "s=inf"}
    recorded(tmp_path, 4, 1, **job)
    run = read_log(tmp_path)
    assert stale_reads(run) > 0
    assert any(record.outcome.dropped for records in run.applied.values() for record in records)


@pytest.mark.parametrize("killed_in", [0, 4, 12])
def test_a_run_that_went_on_without_a_killed_worker_is_replayed(killed_in: int, tmp_path: Path) -> None:
    """In its first round, inside an epoch, and in the next one."""
    job: dict[str, Any] = {"lanes": 3, "clock": "s=2,from=0"}
    found, _ = recorded(tmp_path, 3, 1, kill=(2, killed_in), **job)
    again = replay(tmp_path, **job)
    assert again.error is None, again.traceback
    assert again.value[0] == found
    assert "equal to the recorded run" in again.value[2]


# -- what is wrong with a log or with the script -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    recorded(folder, 2, 1, lanes=2, epochs=1)
    return folder


@pytest.fixture
def copied(a_run: Path, tmp_path: Path) -> Path:
    for file in (a_run / FOLDER).iterdir():
        (tmp_path / FOLDER).mkdir(exist_ok=True)
        (tmp_path / FOLDER / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_log_that_was_cut_is_replayed_up_to_where_it_ends(copied: Path) -> None:
    """As if all processes had been killed at once: what was read and applied first is on file."""
    by_server = copied / FOLDER / "attempt-0001-server-00000.jsonl"
    lines = by_server.read_text().splitlines(keepends=True)
    applied = lines[: len(lines) // 2]
    by_server.write_text("".join(applied) + '{"kind": "app')
    versions = Counter(str(row["key"]) for row in map(json.loads, applied) if row.get("kind") == "apply")
    for file in (copied / FOLDER).glob("*worker*"):
        header, *reads = file.read_text().splitlines(keepends=True)
        seen = takewhile(lambda line: could_be_read(json.loads(line), versions), reads)
        file.write_text("".join([header, *seen]) + '{"kind": "re')
    again = replay(copied, lanes=2, epochs=1)
    assert again.error is None, again.traceback
    assert "where the log ends; the run was cut before it could record its own" in again.value[2]
    assert "attempt-0001-worker-00001.jsonl" in again.value[2]


def could_be_read(row: dict[str, Any], versions: Counter[str]) -> bool:
    return row["kind"] == "read" and all(version <= versions[key] for key, version in row["versions"].items())


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"width": 16}, "trained another model, or cut it into other keys"),
        ({"clock": "s=3"}, "had clock s=1,from=0 and 2 lanes, but the script has clock s=3,from=100 and 2"),
        ({"lanes": 3}, "had clock s=1,from=0 and 2 lanes, but the script has clock s=1,from=0 and 3"),
        ({"seed": 5}, "began with other weights of the same model"),
        ({"optimizer": "sgd"}, "the log has settings of another optimizer"),
        ({"samples": 60}, "begins to differ from the recorded run with version 1"),
        ({"clip": 0.01}, "begins to differ from the recorded run with version"),
        ({"epochs": 0}, "the script ended after 0 pushes, but the log goes on with round 0"),
        ({"clock": "s=0"}, "its rounds are applied in order, so the run gives the same bits"),
    ],
)
def test_a_script_that_was_edited_is_told_in_one_line(a_run: Path, changed: dict[str, Any], complaint: str) -> None:
    again = replay(a_run, **{"lanes": 2, "epochs": 1} | changed)
    assert again.error is not None
    assert complaint in again.error


def test_a_gradient_that_differs_is_named_by_the_key_and_version_it_makes_first(copied: Path) -> None:
    """The check of one update is wrong: as if something else had been computed there."""
    file = copied / FOLDER / "attempt-0001-server-00000.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    key_1 = [line for line in lines if line.get("kind") == "apply" and line["key"] == 1]
    key_1[3]["check"] += 1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = replay(copied, lanes=2, epochs=1)
    assert again.error is not None
    assert "replay: key 1 (" in again.error
    made_of = f"round {key_1[3]['round']}, lane {key_1[3]['lane']} of worker {key_1[3]['worker']}"
    assert f"begins to differ from the recorded run with version 4, made of the gradient of {made_of}" in again.error
