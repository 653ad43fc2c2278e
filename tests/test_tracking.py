"""What a run reports, where it arrives, and what a resumed run does to it."""

from __future__ import annotations

import http.server
import json
import math
import re
import socket
import sys
import threading
import types
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import TrainingArguments, tracking
from paceline.errors import ConfigError
from paceline.tracking import Reporters, choose
from paceline.tracking.json_lines import FILE_NAME, JsonLines, WrittenByAnother, rows
from paceline.tracking.kubeflow import Kubeflow
from paceline.tracking.prometheus import Prometheus
from paceline.tracking.reporter import RunInfo, in_section
from paceline.tracking.run import RunReports
from paceline.tracking.tensorboard import FOLDER, TensorBoard
from paceline.world.environment import KubeflowServer, kubeflow_server


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    config = {"learning_rate": 0.1, "fsdp": None, "output_dir": tmp_path, "extra": {"a": [1, float("inf")]}}
    return RunInfo("mnist", tmp_path / "out", config, {"workers": 2, "lanes": 4})


def lines(run: RunInfo) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (run.folder / FILE_NAME).read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# -- JSON lines --------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_valid_json_and_visible(run: RunInfo) -> None:
    reporter = JsonLines(clock=lambda: 7.0)
    reporter.start(run)
    reporter.log(3, {"loss": math.nan, "grad_norm": -math.inf, "learning_rate": 0.5})
    reporter.close()
    start, logged, end = lines(run)
    assert logged == {
        "step": 3,
        "time": 7.0,
        "loss": "NaN",
        "grad_norm": "-Infinity",
        "learning_rate": 0.5,
        "nonfinite": ["loss", "grad_norm"],
    }
    assert start["config"]["extra"] == {"a": [1, "Infinity"]}
    assert end == {"event": "end", "time": 7.0, "ok": True}
    (row,) = rows(run.folder / FILE_NAME)
    assert math.isnan(row["loss"])
    assert row["grad_norm"] == -math.inf


def test_each_line_is_there_as_soon_as_it_is_logged(run: RunInfo) -> None:
    reporter = JsonLines()
    reporter.start(run)
    reporter.log(1, {"loss": 1.0})
    assert lines(run)[-1]["loss"] == 1.0
    reporter.close()


def test_a_resumed_run_supersedes_what_came_after_its_checkpoint_and_loses_nothing(run: RunInfo) -> None:
    killed = JsonLines()
    killed.start(run)
    for step in (10, 20, 30):
        killed.log(step, {"loss": float(step)})
    assert killed._file is not None
    killed._file.write('{"step": 40, "lo')  # killed here: no end line, and half a line
    killed._file.close()
    resumed = JsonLines()
    resumed.start(replace(run, resumed_at=20))
    resumed.log(30, {"loss": 0.5})
    resumed.close()
    events = [line.get("event", line.get("step")) for line in lines(run)]
    assert events == ["start", 10, 20, 30, "cut", "resume", 30, "end"]
    assert lines(run)[4]["text"] == '{"step": 40, "lo'
    assert lines(run)[5]["superseded"] == "lines above of steps after 20"
    assert [(row["step"], row["loss"]) for row in rows(run.folder / FILE_NAME)] == [(10, 10.0), (20, 20.0), (30, 0.5)]


# -- taking over -------------------------------------------------------------------------------------------------------


def history(*lines: tuple[int, str]) -> list[dict[str, Any]]:
    return [{name: 0.5, "epoch": 1.0, "step": step} for step, name in lines]


def write(run: RunInfo, logged: list[dict[str, Any]]) -> None:
    reporter = JsonLines()
    reporter.start(run)
    for row in logged:
        reporter.log(row["step"], {name: value for name, value in row.items() if name != "step"})
    reporter.close()


TRAIN_10, EVAL_10, TRAIN_20 = (10, "loss"), (10, "eval_loss"), (20, "loss")


@pytest.mark.parametrize("by_the_lost", [[], [TRAIN_10], [TRAIN_10, EVAL_10], [TRAIN_10, EVAL_10, TRAIN_20]])
@pytest.mark.parametrize("by_the_next", [[], [TRAIN_10], [TRAIN_10, EVAL_10], [TRAIN_10, EVAL_10, TRAIN_20]])
def test_every_line_is_there_once_wherever_the_two_workers_were(
    run: RunInfo, by_the_lost: list[tuple[int, str]], by_the_next: list[tuple[int, str]]
) -> None:
    write(run, history(*by_the_lost))
    written = WrittenByAnother(run.folder, history(*by_the_next))
    still_to_come = history(*[line for line in (TRAIN_10, EVAL_10, TRAIN_20) if line not in by_the_next])
    late = [row for row in still_to_come if not written.has(row["step"], {k: row[k] for k in row if k != "step"})]
    write(run, [{"step": step, **values} for step, values in written.missing] + late)
    there = [(line["step"], list(line)[2]) for line in lines(run) if "event" not in line]
    assert there == [TRAIN_10, EVAL_10, TRAIN_20]


def test_a_run_that_was_moved_is_not_told_again_what_it_had_logged_before(run: RunInfo) -> None:
    write(replace(run, resumed_at=10), history((20, "loss")))
    assert WrittenByAnother(run.folder, history((10, "loss"), (20, "loss"))).missing == []


def test_who_takes_over_goes_on_in_the_files_and_says_so(run: RunInfo) -> None:
    before = choose("tensorboard")
    before.start(run)
    before.log(1, {"loss": 1.0})
    before.log(2, {"loss": 2.0})
    with (run.folder / FILE_NAME).open("a") as file:
        file.write('{"step": 3, "lo')  # killed here
    written = WrittenByAnother(run.folder, history((1, "loss"), (2, "loss"), (3, "loss")))
    after = choose("tensorboard")
    after.start(replace(run, resumed_at=written.last_step, taken_over=written.last_lines))
    for step, values in written.missing:
        after.log(step, values)
    after.close()
    events = [line.get("event", line.get("step")) for line in lines(run)]
    assert events == ["start", 1, 2, "cut", "takeover", 3, "end"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(run.folder / FOLDER)).Reload()
    assert [(event.step, event.value) for event in seen.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 0.5)]
    before.close()


def test_one_that_cannot_go_on_elsewhere_does_not_end_the_run(run: RunInfo) -> None:
    several = Reporters([Fails("start"), Fails("never")])
    with pytest.warns(UserWarning, match="fails stopped reporting"):
        several.start(replace(run, resumed_at=3, taken_over=[]))
    assert several.names == ["fails"]


# -- Kubeflow ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What a controller is told: (token, status)."""
    told: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.append((self.headers["Authorization"], body["trainerStatus"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    yield told
    server.shutdown()
    thread.join()
    server.server_close()


def test_kubeflow_is_told_how_far_the_run_is(run: RunInfo, controller: list[Any]) -> None:
    now = [0.0]
    server = kubeflow_server()
    assert server is not None
    reporter = Kubeflow(server, clock=lambda: now[0])
    reporter.start(replace(run, config={"max_steps": 10, "num_train_epochs": 3}))
    for step in range(1, 5):  # a log each three seconds
        now[0] += 3.0
        reporter.log(step, {"loss": 1.0 / step})
    reporter.close(ok=True)
    assert [token for token, _ in controller] == ["Bearer secret"] * 4
    assert [status["progressPercentage"] for _, status in controller] == [0, 20, 40, 100]
    assert [status.get("estimatedRemainingSeconds") for _, status in controller] == [None, 24, 18, 0]
    assert controller[1][1]["metrics"] == [{"name": "loss", "value": "0.5"}, {"name": "current_step", "value": "2"}]


def test_a_controller_that_is_away_is_warned_of_once(run: RunInfo, tmp_path: Path) -> None:
    reporters = Reporters([Kubeflow(KubeflowServer("http://127.0.0.1:1/", None, None), clock=lambda: 0.0)])
    with pytest.warns(UserWarning, match="kubeflow's controller does not take an update") as warned:
        reporters.start(run)
        reporters.close()
    assert len(warned) == 1


def test_kubeflow_is_on_in_a_train_job_alone(monkeypatch: pytest.MonkeyPatch, controller: list[Any]) -> None:
    assert TrainingArguments(report_to="none").report_to == ["kubeflow"]
    assert TrainingArguments(report_to=["kubeflow"]).report_to == ["kubeflow"]
    assert "kubeflow" in choose("all").names
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "TRUE")
    assert TrainingArguments(report_to="none").report_to == []
    assert "kubeflow" not in choose("all").names
    with pytest.raises(ConfigError, match="report_to='kubeflow' needs KUBEFLOW_TRAINER_SERVER_URL"):
        choose("kubeflow")


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_json_lines_are_always_there_and_only_on_the_main_worker(run: RunInfo) -> None:
    assert choose("none").names == choose(None).names == choose([]).names == ["json lines"]
    others = choose("tensorboard", main=False)
    others.start(run)
    others.log(1, {"loss": 1.0})
    others.close()
    assert not run.folder.exists()


def test_all_means_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_is_installed", lambda module: module in ("tensorboard", "prometheus_client"))
    assert choose("all").names == ["json lines", "tensorboard", "prometheus"]


def test_a_folder_called_wandb_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="report_to='wandb' needs a package that is not installed: pip install wandb"):
        choose("wandb")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tensorbord", "report_to='tensorbord' is not known; did you mean 'tensorboard'? It takes tensorboard, wandb"),
        (
            "comet_ml",
            "report_to='comet_ml' is not known; it takes tensorboard, wandb, mlflow, prometheus, kubeflow, or all",
        ),
        ("tensorboard:9", "report_to='tensorboard:9' is not known; it takes tensorboard"),
        ("prometheus:here", "after the colon comes a port or the path of a .prom file"),
    ],
)
def test_a_name_that_is_not_known_is_one_clear_line(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        choose([name])


class Fails:
    name = "fails"

    def __init__(self, at: str) -> None:
        self.at, self.calls = at, [""]

    def start(self, run: RunInfo) -> None:
        self._do("start")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._do("log")

    def close(self, *, ok: bool = True) -> None:
        self._do(f"close {ok}")

    def _do(self, what: str) -> None:
        self.calls.append(what)
        if what == self.at:
            raise OSError("the network is away")


def test_a_reporter_that_fails_on_the_way_is_dropped_and_the_others_go_on(run: RunInfo) -> None:
    broken, whole = Fails("log"), Fails("never")
    reporters = Reporters([broken, whole])
    reporters.start(run)
    with pytest.warns(UserWarning, match="fails stopped reporting: OSError: the network is away; training continues"):
        reporters.log(1, {"loss": 1.0})
    reporters.log(2, {"loss": 1.0})
    reporters.close(ok=False)
    assert broken.calls[1:] == ["start", "log"]
    assert whole.calls[1:] == ["start", "log", "log", "close False"]


def test_what_fails_at_the_end_is_one_line_and_the_reporters_are_closed(
    run: RunInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(folder: Path, times: Sequence[tuple[int, float]]) -> None:
        raise OSError(28, "No space left on device")

    options = {"is_main": lambda: True, "world": dict, "say": print, "at_end": fails}
    reports = RunReports("none", run, **options)  # type: ignore[arg-type]
    reports.log(1, {"loss": 1.0}, [])
    reports.close(ok=True)
    (said,) = capsys.readouterr().err.splitlines()
    assert "what the run measured can't be stored (No space left on device)" in said
    assert lines(run)[-1]["event"] == "end"


def test_one_that_cannot_start_is_an_error_if_named_and_left_out_of_all(run: RunInfo) -> None:
    before = Fails("never")
    with pytest.raises(ConfigError, match="fails can't report: OSError: the network is away"):
        Reporters([before, Fails("start")]).start(run)
    assert before.calls[1:] == ["start", "close False"]
    several = Reporters([Fails("start"), Fails("never")], strict=False)
    with pytest.warns(UserWarning, match="stopped reporting"):
        several.start(run)
    assert several.names == ["fails"]


def test_curves_are_grouped_as_transformers_names_them() -> None:
    assert [in_section(name) for name in ("loss", "eval_loss", "test_f1", "train_loss", "a/b")] == [
        "train/loss", "eval/loss", "test/f1", "train/train_loss", "a/b",
    ]  # fmt: skip


# -- TensorBoard, Prometheus: the real ones ----------------------------------------------------------------------------


def test_tensorboard_shows_every_step_once_after_a_resume(run: RunInfo) -> None:
    first = TensorBoard()
    first.start(run)
    for step in (1, 2, 3):
        first.log(step, {"loss": float(step), "eval_loss": math.nan})
    first.close()
    second = TensorBoard()
    second.start(replace(run, resumed_at=1))
    second.log(2, {"loss": 0.5})
    second.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(run.folder / FOLDER)).Reload()
    assert [(event.step, event.value) for event in seen.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
    assert math.isnan(seen.Scalars("eval/loss")[0].value)
    assert "config/text_summary" in seen.Tags()["tensors"]


def test_prometheus_serves_the_latest_values_on_loopback_until_the_end(run: RunInfo) -> None:
    reporter = Prometheus(port=0)
    reporter.start(run)
    for step in (1, 2):
        reporter.log(step, {"loss": math.nan, "tokens/s": 10.0 * step})
    port = reporter.port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    reporter.close()
    assert 'paceline_step{run="mnist"} 2.0' in page
    assert 'paceline_train_loss{run="mnist"} NaN' in page
    assert 'paceline_tokens_s{run="mnist"} 20.0' in page
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port or 0))) != 0


def test_a_busy_port_is_one_clear_line(run: RunInfo) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        reporters = choose(f"prometheus:{busy.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"can't be used .*; another run may report there: give another as"):
            reporters.start(run)


def test_prometheus_writes_a_file_instead_of_listening(run: RunInfo, tmp_path: Path) -> None:
    reporters = choose(f"prometheus:{tmp_path}/made/run.prom")
    reporters.start(run)
    reporters.log(4, {"loss": 2.5})
    reporters.close()
    assert 'paceline_train_loss{run="mnist"} 2.5' in (tmp_path / "made/run.prom").read_text()


# -- W&B and MLflow: stand-ins that write down what they are told ------------------------------------------------------


class Recorder(types.ModuleType):
    """A module whose functions, and the functions of what they return, are written down."""

    def __init__(self, name: str, **given: Any) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return self

        return call

    def told(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for called, args, options in self.calls if called == name]


def test_wandb_goes_on_in_the_same_run(run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Recorder("wandb", id="abc123")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for info in (run, replace(run, resumed_at=5)):
        reporters = choose("wandb")
        reporters.start(info)
        reporters.log(6, {"loss": 1.5, "eval_loss": 2.5})
        reporters.close(ok=info is run)
    first, second = (options for _, options in fake.told("init"))
    assert (first["name"], first["id"], first["resume"]) == ("mnist", None, None)
    assert first["config"]["world"] == {"workers": 2, "lanes": 4}
    assert (second["id"], second["resume"]) == ("abc123", "allow")
    assert fake.told("log")[0][0][0] == {"train/loss": 1.5, "eval/loss": 2.5, "train/global_step": 6}
    assert [options for _, options in fake.told("finish")] == [{"exit_code": 0}, {"exit_code": 1}]


def test_mlflow_goes_on_in_the_same_run_and_sets_parameters_once(run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Recorder("mlflow", info=types.SimpleNamespace(run_id="r1"))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    many = replace(run, config={f"field{number}": "x" * 900 for number in range(150)})
    for info in (many, replace(many, resumed_at=5)):
        reporters = choose("mlflow")
        reporters.start(info)
        reporters.log(6, {"loss": 1.5})
        reporters.close(ok=info is many)
    assert [options for _, options in fake.told("start_run")] == [
        {"run_id": None, "run_name": "mnist"},
        {"run_id": "r1", "run_name": None},
    ]
    given = [args[0] for args, _ in fake.told("log_params")]
    assert [len(some) for some in given] == [100, 52]
    assert given[1]["world.lanes"] == "4"
    assert max(len(value) for some in given for value in some.values()) == 500
    assert fake.told("log_metrics")[0] == (({"loss": 1.5},), {"step": 6})
    assert [args for args, _ in fake.told("end_run")] == [("FINISHED",), ("FAILED",)]
