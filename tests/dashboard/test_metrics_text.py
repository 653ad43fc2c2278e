"""What Prometheus scrapes is what it can read, and what the Grafana dashboard asks for is there."""

from __future__ import annotations

import json
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.dashboard.metrics_text import HELP, metrics_text, samples
from paceline.dashboard.run_view import view_of
from paceline.monitor.events import Part, Use
from tests.dashboard.served import served
from tests.dashboard.test_run_view import log
from tests.monitor.simulated import Simulated


@pytest.fixture
def run(tmp_path: Path) -> Path:
    use = Use(2.0**30, 2.0**29, cpu=0.43, gpu=0.9)
    folder = Simulated(3, 60, delays={(1, Part.DATA): 0.02}, use=use).write(tmp_path / 'a "run"')
    (folder / "residuals.json").write_text(json.dumps({"predicted": {"peak": 2**30}}))
    return log(folder, {10: {"loss": 2.5, "eval_loss": math.nan}})


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_parts_of_every_worker(run: Path) -> None:
    view = view_of(run)
    found = values(metrics_text([view]))
    for row in view["workers"]:
        for part, seconds in zip(view["parts"], row["parts"], strict=True):
            labels = {"run": 'a "run"', "worker": str(row["worker"]), "part": part}
            assert found["paceline_worker_part_seconds", frozenset(labels.items())] == pytest.approx(seconds)
        of_worker = frozenset({"run": 'a "run"', "worker": str(row["worker"])}.items())
        assert found["paceline_worker_cpu_ratio", of_worker] == pytest.approx(0.43)
        assert found["paceline_worker_gpu_ratio", of_worker] == pytest.approx(0.9)
    late = {"run": 'a "run"', "worker": "1", "part": "data"}
    assert found["paceline_straggler_late_seconds", frozenset(late.items())] > 0.01
    of_run = frozenset({"run": 'a "run"'}.items())
    assert found["paceline_train_loss", of_run] == 2.5
    assert math.isnan(found["paceline_eval_loss", of_run])
    assert found["paceline_run_last_step_timestamp_seconds", of_run] == view["newest"]


def test_what_is_not_known_is_no_metric(tmp_path: Path) -> None:
    text = metrics_text([view_of(Simulated(2, 5, use=Use(2.0**30, cpu=0.0)).write(tmp_path / "cpu"))])
    assert 'paceline_worker_cpu_ratio{run="cpu",worker="1"} 0' in text
    assert "gpu_ratio" not in text


def test_several_runs_are_one_answer_and_it_is_served(run: Path, tmp_path: Path) -> None:
    other = Simulated(2, 5).write(tmp_path / "other")
    with served(run, other) as server:
        answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = re.findall(r"^# TYPE (\S+)", answer.text, re.MULTILINE)
    assert len(names) == len(set(names))
    assert {dict(labels)["run"] for _, labels in values(answer.text)} == {'a "run"', "other"}


def test_every_metric_has_a_help_text_or_was_logged(run: Path) -> None:
    names = {name for name, _, _ in samples(view_of(run))}
    assert names - set(HELP) == {"paceline_train_loss", "paceline_eval_loss"}
    assert set(HELP) <= names


def test_the_grafana_dashboard_asks_for_metrics_and_labels_that_exist(run: Path) -> None:
    dashboard: dict[str, Any] = json.loads(files("paceline.dashboard").joinpath("grafana.json").read_text())
    labels: dict[str, set[str]] = {}
    for name, own, _ in samples(view_of(run)):
        labels.setdefault(name, set()).update(own)
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(targets) == 12
    for target in targets:
        asked = re.findall(r"paceline_\w+", target["expr"])
        assert asked
        for name in asked:
            assert name in labels, f"{target['expr']}: there is no {name}"
        used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) | set(re.findall(r"(\w+)=~", target["expr"]))
        used |= {word for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for word in group.split(", ")}
        assert used <= set().union(*(labels[name] for name in asked)), target
    variable = dashboard["templating"]["list"][1]["query"]
    assert re.fullmatch(r"label_values\((paceline_run_last_step), (run)\)", variable)
