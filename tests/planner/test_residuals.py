"""Predictions beside measurements: written at the end of a run, read by `paceline plan --residuals`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.engine.run_residuals import step_seconds
from paceline.errors import ConfigError
from paceline.planner.residuals import FILE_NAME, Residual, read_residuals, show_residuals, write_residuals

ABOUT: dict[str, Any] = {"strategy": "ddp", "workers": 1, "precision": "fp32", "accumulate": 1}


def a_plan(**changed: Any) -> dict[str, Any]:
    row = {
        "strategy": "ddp", "precision": "fp32", "accumulate": 1, "step_s": 0.1, "sent_bytes": [0],
        "sent_is_counted": True, "memory": {"model_state": 1000, "peak": 2000},
    }  # fmt: skip
    return {"workers": 1, "fitting": [row | changed], "too_large": []}


def trains(folder: Path) -> None:
    with Engine(world=World(), project_dir=folder) as engine:
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


def test_the_errors_are_shown_with_their_median_and_worst(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Residual("a", "ddp on 2, fp32", "step_s", 0.11, 0.10), Residual("b", "ddp on 2, fp32", "step_s", 0.9, 1.0)]
    show_residuals(found, Console(width=120))
    shown = capsys.readouterr().out
    assert "+10.0%" in shown
    assert "-10.0%" in shown
    assert "step time: median 10.0%, worst 10.0% of 2" in shown


def test_a_plan_of_another_setting_predicts_nothing(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(a_plan(strategy="zero2")))
    write_residuals(tmp_path, ABOUT, {"step_s": 1.0}, {})
    assert json.loads((tmp_path / FILE_NAME).read_text())["predicted"] == {}
    with pytest.raises(ConfigError, match="no run in it has a prediction beside a measurement"):
        read_residuals(tmp_path)


def test_what_can_t_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        read_residuals(tmp_path / "none")
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="can't be read"):
        read_residuals(tmp_path)
    (tmp_path / "plan.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is no plan"):
        write_residuals(tmp_path, ABOUT, {}, {})


def test_the_time_of_a_step_is_the_median_between_lines() -> None:
    assert step_seconds([(0, 0.0), (2, 2.0), (3, 13.0), (5, 15.0)]) == 1.0
    assert step_seconds([(3, 1.0)]) is None
