"""Predictions beside measurements: written at the end of a run, read by `paceline plan --residuals`."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import ActivationCheckpointing, Engine, Precision, World
from paceline.dashboard.run_view import view_of
from paceline.engine.run_residuals import step_seconds
from paceline.errors import ConfigError
from paceline.monitor.run_events import read_run
from paceline.planner.residuals import FILE_NAME, Residual, of_plan, read_residuals, show_residuals, write_residuals
from tests.workers import run_workers

ABOUT: dict[str, Any] = {
    "strategy": "ddp", "workers": 1, "lanes": 1, "precision": "fp32", "accumulate": 1, "micro_batch": 4,
    "activation_checkpointing": False,
}  # fmt: skip


def a_row(**changed: Any) -> dict[str, Any]:
    row = {
        "strategy": "ddp", "precision": "fp32", "accumulate": 1, "micro_batch": 4, "activation_checkpointing": False,
        "compile": False, "step_s": 0.1, "sent_bytes": [0], "sent_is_counted": True,
        "memory": {"model_state": 1000, "peak": 2000},
    }  # fmt: skip
    return row | changed


def a_plan(*others: dict[str, Any]) -> dict[str, Any]:
    return {"workers": 1, "lanes": 1, "fitting": [*others, a_row()], "too_large": []}


def stored(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FILE_NAME).read_text())  # type: ignore[no-any-return]


def trains(folder: Path, **options: Any) -> None:
    with Engine(world=World(), project_dir=folder, **options) as engine:
        model = nn.Linear(4, 2)
        data = TensorDataset(torch.randn(24, 4))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        engine.init_trackers("run")
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
            engine.log({"loss": 1.0})


def test_a_run_stores_what_it_measured_beside_its_plan(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text(json.dumps(a_plan()))
    trains(tmp_path)
    told = json.loads((tmp_path / "run" / FILE_NAME).read_text())
    assert told["about"]["strategy"] == "ddp"
    assert told["measured"]["step_s"] > 0
    assert told["predicted"]["step_s"] == 0.1
    found = {one.quantity: one for one in read_residuals(tmp_path)}
    assert found["sent_bytes"].error == 0
    assert found["step_s"].predicted == 0.1
    (tmp_path / "run" / FILE_NAME).unlink()  # while it goes on, what its events say of it has to do
    assert view_of(tmp_path / "run")["predicted"] == {"peak": 2000, "model_state": 1000}


def test_the_errors_are_shown_with_their_median_and_worst(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Residual("a", "ddp on 2, fp32", "step_s", 0.11, 0.10), Residual("b", "ddp on 2, fp32", "step_s", 0.9, 1.0)]
    show_residuals(found, Console(width=120))
    shown = capsys.readouterr().out
    assert "+10.0%" in shown
    assert "-10.0%" in shown
    assert "step time: median 10.0%, worst 10.0% of 2" in shown


OTHERS: list[dict[str, Any]] = [
    {"strategy": "zero2"},
    {"precision": "bf16"},
    {"accumulate": 2},
    {"micro_batch": 2},
    {"activation_checkpointing": True},
    {"compile": True},
]


@pytest.mark.parametrize("other", [*OTHERS, {"workers": 2}, {"lanes": 2}, {"micro_batch": None}])
def test_a_plan_of_another_setting_predicts_nothing(other: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(a_plan()))
    write_residuals(tmp_path, ABOUT | other, {"step_s": 1.0}, {})
    assert stored(tmp_path)["predicted"] == {}
    with pytest.raises(ConfigError, match="no run in it has a prediction beside a measurement"):
        read_residuals(tmp_path)


def test_of_many_rows_the_one_of_this_setting_is_taken_and_of_several_none(tmp_path: Path) -> None:
    faster = [a_row(step_s=0.01, **other) for other in OTHERS]
    (tmp_path / "plan.json").write_text(json.dumps(a_plan(*faster)))
    assert of_plan(tmp_path / "plan.json", ABOUT)["step_s"] == 0.1
    (tmp_path / "plan.json").write_text(json.dumps(a_plan(*faster, a_row(step_s=0.05))))
    assert of_plan(tmp_path / "plan.json", ABOUT) == {}


def test_a_plan_or_a_run_that_says_nothing_of_compiled_code_had_none(tmp_path: Path) -> None:
    row = a_row()
    del row["compile"]
    (tmp_path / "plan.json").write_text(json.dumps(a_plan() | {"fitting": [row]}))
    assert of_plan(tmp_path / "plan.json", ABOUT)["step_s"] == 0.1
    assert of_plan(tmp_path / "plan.json", ABOUT | {"compile": True}) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "int8"},
        {"reduction": "fast"},
        {"activation_checkpointing": ActivationCheckpointing(modules=nn.Linear)},
        {"precision": Precision("bf16", reduction="bf16")},
    ],
    ids=["compression", "reduction", "blocks of its own", "lanes rounded"],
)
def test_what_no_plan_knows_of_is_not_predicted(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    rows = [a_row(**other) for other in OTHERS]
    (tmp_path / "run" / "plan.json").write_text(json.dumps(a_plan(*rows)))
    trains(tmp_path, **options)
    assert stored(tmp_path / "run")["predicted"].keys() <= {"sent_bytes"}


def in_memory(world: World, folder: str) -> float:
    with Engine(world=world, project_dir=folder, strategy="ddp", backend="paceline") as engine:
        model = nn.Linear(4, 2)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        data = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
        model, optimizer, loader = engine.prepare(model, optimizer, data)
        engine.init_trackers("run")
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        return engine.traffic.sent_bytes


@pytest.mark.workers
def test_in_shared_memory_nothing_is_predicted_to_be_sent_and_nothing_is(tmp_path: Path) -> None:
    results = run_workers(in_memory, 3, folder=str(tmp_path))
    assert [result.value for result in results] == [0, 0, 0], results[0].traceback
    (sent,) = read_residuals(tmp_path)
    assert (sent.quantity, sent.predicted, sent.measured) == ("sent_bytes", 0, 0)


def test_what_can_t_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        read_residuals(tmp_path / "none")
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="can't be read"):
        read_residuals(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "{", "{}", '{"workers": 1, "lanes": 1, "fitting": [7], "too_large": []}'])
def test_a_damaged_plan_is_a_warning_and_what_was_measured_is_stored(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text(content)
    trains(tmp_path)
    assert stored(tmp_path / "run")["predicted"] == {"sent_bytes": 0}
    (said,) = capsys.readouterr().err.splitlines()
    assert "plan.json is no plan" in said
    assert "what the run measured is stored without a prediction" in said


def test_a_full_disk_at_the_end_takes_no_report_and_no_file_of_another_run_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        trains(tmp_path)
    (said,) = capsys.readouterr().err.splitlines()
    assert "what the run measured can't be stored (No space left on device)" in said
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["ok"] is True
    assert read_run(tmp_path / "run").has_ended
    assert not (tmp_path / "run" / FILE_NAME).exists()


def test_the_time_of_a_step_is_the_median_between_lines() -> None:
    assert step_seconds([(0, 0.0), (2, 2.0), (3, 13.0), (5, 15.0)]) == 1.0
    assert step_seconds([(3, 1.0)]) is None
