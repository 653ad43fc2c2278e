"""What the page shows of a run: the numbers of its files, in a bounded size."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.dashboard import run_view
from paceline.dashboard.run_view import POINTS, view_of
from paceline.errors import DataError
from paceline.monitor.attribution import join, straggler
from paceline.monitor.events import BUCKETS_DTYPE, DTYPE, FOLDER, RECORD_BYTES, Kind, Part, Use, pack_note
from paceline.monitor.run_events import read_run
from paceline.tracking.json_lines import JsonLines
from paceline.tracking.reporter import RunInfo
from tests.monitor.simulated import Simulated


def as_sent(folder: Path) -> dict[str, Any]:
    return json.loads(json.dumps(view_of(folder), allow_nan=False))  # type: ignore[no-any-return]


def log(folder: Path, rows: dict[int, dict[str, float]], *, ok: bool = True) -> Path:
    lines = JsonLines()
    lines.start(RunInfo("run", folder, {"lr": 0.1, "path": Path("x")}, {}))
    for step, values in rows.items():
        lines.log(step, values)
    lines.close(ok=ok)
    return folder


@pytest.mark.parametrize("seed", range(4))
def test_history_has_every_step_of_every_worker_once(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    workers, steps = int(draw.integers(1, 6)), int(draw.integers(1, 900))
    run = read_run(Simulated(workers, steps, seed=seed).write(tmp_path))
    history = as_sent(tmp_path)["history"]
    assert len(history["step"]) <= POINTS
    assert history["step"] == sorted(set(history["step"]))
    width = -(-steps // POINTS)
    for place, middle in enumerate(history["step"]):
        first = 1 + place * width
        assert first <= middle <= steps
        inside = [own[(own["step"] >= first) & (own["step"] < first + width)] for own in run.workers.values()]
        mean = np.concatenate([own["parts"] for own in inside]).astype(float).mean(axis=0)
        shown = [history["parts"][part][place] for part in Part]
        assert np.allclose(shown, mean, atol=1e-6), (shown, mean)
        assert history["time"][place] == pytest.approx(min(own["began"][0] for own in inside), abs=2e-3)


def test_the_timeline_ends_with_the_last_step_and_its_parts_follow_each_other(tmp_path: Path) -> None:
    view = as_sent(Simulated(3, 50).write(tmp_path))
    for rows in view["timeline"]["rows"].values():
        assert [row[0] for row in rows] == list(range(31, 51))
        for row, after in itertools.pairwise(rows):
            assert row[1] + sum(row[3:-1]) == pytest.approx(after[1], abs=1e-4)


def test_the_late_worker_is_named_also_where_it_began_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "JUDGED", 60)
    view = as_sent(Simulated(3, 200, delays={(1, Part.DATA): 0.03}, since=40).write(tmp_path))
    assert (view["verdict"]["worker"], view["verdict"]["part"]) == (1, "data")
    assert view["verdict"]["text"] == str(straggler(join(read_run(tmp_path))))
    assert view["verdict"]["since"] < 60 < 200 - 60
    assert as_sent(Simulated(3, 60).write(tmp_path / "even"))["verdict"] is None


def test_what_was_logged_is_there_with_what_is_not_finite(tmp_path: Path) -> None:
    Simulated(1, 5).write(tmp_path)
    log(tmp_path, {1: {"loss": 2.0}, 2: {"loss": math.nan}, 3: {"loss": 1.0, "eval_loss": 0.5}}, ok=False)
    view = as_sent(tmp_path)
    assert view["logged"]["loss"]["value"] == [2.0, None, 1.0]
    assert view["logged"]["loss"]["step"] == [1, 2, 3]
    assert view["logged"]["eval_loss"]["last"] == 0.5
    assert view["config"] == {"lr": 0.1, "path": "x"}
    assert [note["text"] for note in view["notes"]] == ["the run ended by an error"]


def test_many_logged_values_are_fewer_points_with_the_same_mean(tmp_path: Path) -> None:
    Simulated(1, 5).write(tmp_path)
    log(tmp_path, {step: {"loss": step / 7} for step in range(1, 1501)})
    curve = as_sent(tmp_path)["logged"]["loss"]
    assert len(curve["value"]) == 500
    assert np.mean(curve["value"]) == pytest.approx(1501 / 2 / 7, rel=1e-5)
    assert curve["last"] == pytest.approx(1500 / 7)


def test_generations_and_resumes_are_on_the_time_axis(tmp_path: Path) -> None:
    Simulated(2, 20).write(tmp_path)
    for worker in range(2):
        with open(tmp_path / FOLDER / f"worker-{worker}.0", "ab") as file:
            file.write(pack_note(Kind.JOB, worker, 2, 9, 1000.5, "generation 2: workers 0, 1"))
    view = as_sent(tmp_path)
    assert [(note["step"], note["worker"], note["text"]) for note in view["notes"]] == [
        (9, None, "generation 2: workers 0, 1")
    ]
    assert view["history"]["time"][0] < view["notes"][0]["time"] < view["newest"]


def test_memory_stands_beside_what_was_predicted(tmp_path: Path) -> None:
    setting: dict[str, Any] = {"strategy": "zero2", "precision": "bf16", "accumulate": 2, "micro_batch": 4}
    setting |= {"activation_checkpointing": False}
    Simulated(2, 5).write(tmp_path, workers=2, lanes=2, **setting)
    assert as_sent(tmp_path)["predicted"] == {}
    row = {**setting, "step_s": 1.0, "sent_is_counted": False, "sent_bytes": [0]}
    rows = [row | {"accumulate": 1, "memory": {"model_state": 7, "peak": 7}}]
    rows.append(row | {"memory": {"model_state": 100, "peak": 300}})
    (tmp_path / "plan.json").write_text(json.dumps({"workers": 2, "lanes": 2, "fitting": rows, "too_large": []}))
    assert as_sent(tmp_path)["predicted"] == {"peak": 300, "model_state": 100}  # while it runs
    told = {"about": {}, "predicted": {"peak": 400, "sent_bytes": 7}, "measured": {}}
    (tmp_path / "residuals.json").write_text(json.dumps(told))
    assert as_sent(tmp_path)["predicted"] == {"peak": 400}
    (tmp_path / "residuals.json").write_text("{")
    assert "residuals.json can't be read" in as_sent(tmp_path)["problems"][0]


def test_use_of_cpu_and_gpu_is_the_mean_of_the_workers_that_know_it(tmp_path: Path) -> None:
    for worker, use in enumerate([Use(1.0, cpu=0.2, gpu=1.0), Use(1.0, cpu=0.6), Use(1.0)]):
        written = Simulated(3, 5, use=use).write(tmp_path / str(worker)) / FOLDER / f"worker-{worker}.0"
        (tmp_path / "run" / FOLDER).mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / FOLDER / written.name).write_bytes(written.read_bytes())
    view = as_sent(tmp_path / "run")
    assert view["history"]["cpu"] == [0.4] * 5
    assert view["history"]["gpu"] == [1.0] * 5
    assert [(row["cpu"], row["gpu"]) for row in view["workers"]] == [
        (pytest.approx(0.2), 1.0),
        (pytest.approx(0.6), None),
        (None, None),
    ]


def test_where_it_was_not_measured_use_has_no_curve_or_a_gap(tmp_path: Path) -> None:
    assert as_sent(Simulated(1, 5).write(tmp_path / "old"))["history"]["cpu"] == []
    path = Simulated(1, 5, use=Use(1.0, cpu=0.5)).write(tmp_path / "resumed") / FOLDER / "worker-0.0"
    line, _, data = path.read_bytes().partition(b"\n")
    records = np.frombuffer(data, DTYPE).copy()
    records["cpu"][:2] = 0
    path.write_bytes(line + b"\n" + records.tobytes())
    assert as_sent(tmp_path / "resumed")["history"]["cpu"] == [None, None, 0.5, 0.5, 0.5]


def test_a_long_run_is_shown_from_a_later_step_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "MOST_RECORDS", 80)
    view = as_sent(Simulated(2, 100).write(tmp_path))
    assert (view["is_cut"], view["first_step"], view["last_step"]) == (True, 62, 100)  # the last record is the end


@pytest.mark.parametrize("size", [0, 30, 1000, 1001])
def test_truncated_files_are_told_and_the_others_shown(size: int, tmp_path: Path) -> None:
    Simulated(2, 30).write(tmp_path)
    path = tmp_path / FOLDER / "worker-1.0"
    path.write_bytes(path.read_bytes()[:size])
    view = as_sent(tmp_path)
    assert view["last_step"] == 30
    if size < 100:
        assert len(view["problems"]) == 1
        assert "worker-1.0 can't be read" in view["problems"][0]
    else:
        assert [row["worker"] for row in view["workers"]] == [0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_in_place_of_records_are_no_harm(seed: int, tmp_path: Path) -> None:
    """Of all records, of some, or of one number of a record: the others still make it look like one."""
    draw = np.random.default_rng(seed)
    for number in range(12):
        folder = Simulated(3, 40, seed=seed).write(tmp_path / str(number))
        for worker in range(2):
            path = folder / FOLDER / f"worker-{worker}.0"
            line, _, rest = path.read_bytes().partition(b"\n")
            records = np.frombuffer(rest, DTYPE).copy()
            garbage = np.frombuffer(draw.bytes(records.nbytes), DTYPE).copy()
            garbage["kind"] = draw.integers(1, 5, len(records))
            for name in ("began", "voted", "hidden_s", "memory", "peer_s"):  # which random bits hardly ever are
                garbage[name][::3] = draw.choice([np.nan, np.inf, -np.inf, 1e38], len(garbage[::3]))
            for place in draw.permutation(len(records))[:10]:
                name = str(draw.choice([*(field[0] for field in DTYPE), "all"]))
                if name == "all":
                    records[place] = garbage[place]
                else:
                    records[name][place] = garbage[name][place]
            whole = garbage if number == worker else records
            path.write_bytes(line + b"\n" + whole.tobytes() + draw.bytes(int(draw.integers(2000))))
        view = as_sent(folder)
        assert [row["worker"] for row in view["workers"]] == [0, 1, 2]
        assert len(view["history"]["step"]) <= POINTS
        assert view["problems"] == []


@pytest.mark.parametrize("content", ["", "no json\n", '{"step": 1}\n{"step": 2, "loss": "x"}\n[1]\n', "\0" * 50])
def test_a_damaged_metrics_file_is_no_harm(content: str, tmp_path: Path) -> None:
    Simulated(1, 5).write(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(content)
    assert as_sent(tmp_path)["logged"] == {}


def test_a_folder_without_events_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no events"):
        view_of(tmp_path)


def test_numbers_that_no_float_has_are_left_out_of_what_was_logged(tmp_path: Path) -> None:
    Simulated(1, 5).write(tmp_path)
    huge = "9" * 400
    (tmp_path / "metrics.jsonl").write_text(
        f'{{"step": 1, "time": {huge}, "loss": 2.0}}\n{{"step": {huge}, "loss": 1.0}}\n{{"step": 2, "loss": {huge}}}\n'
        f'{{"event": "end", "time": NaN}}\n{{"event": "end", "time": {huge}}}\n{{"event": "end", "time": 7, "ok": 1}}\n'
    )
    view = as_sent(tmp_path)
    assert view["logged"]["loss"] == {"step": [1, 2], "time": [None, None], "value": [2.0, None], "last": None}
    assert [note["time"] for note in view["notes"]] == [7.0]


@pytest.mark.slow
def test_64_workers_with_10000_steps_take_less_than_2_s_of_a_core(tmp_path: Path) -> None:
    """CPU time, which other processes don't add to."""
    records = np.zeros(10_000, DTYPE)
    records["kind"], records["step"] = Kind.STEP, np.arange(1, 10_001)
    records["parts"][:, [Part.FORWARD, Part.BACKWARD, Part.VOTE]] = 0.02, 0.029, 0.001
    records["began"] = 1000 + 0.05 * records["step"]
    records["voted"] = records["began"] + 0.05
    left = np.zeros(10_000, dtype=BUCKETS_DTYPE)
    left["kind"], left["step"], left["began"], left["of"] = Kind.BUCKETS, records["step"], records["began"], 17
    left["after_s"] = np.linspace(0.02, 0.049, 17)
    header = (Simulated(1, 1).write(tmp_path) / FOLDER / "worker-0.0").read_bytes().partition(b"\n")[0]
    for worker in range(64):
        records["arrived"] = records["voted"] - 0.001 * (worker != 41)
        own = json.dumps({**json.loads(header), "worker": worker}).encode() + b"\n"
        own += np.stack([one.view(f"V{RECORD_BYTES}") for one in (records, left)], axis=1).tobytes()
        (tmp_path / FOLDER / f"worker-{worker}.0").write_bytes(own)
    log(tmp_path, {step: {"loss": 1.0} for step in range(1, 10_001)})
    began = time.process_time()
    text = json.dumps(view_of(tmp_path))
    spent = time.process_time() - began
    assert json.loads(text)["last_step"] == 10_000
    assert spent < 2.0, spent
    assert len(text) < 500_000
