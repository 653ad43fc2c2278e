"""A run's files are read whatever state they are in: each that can't be is a line, and the others count."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import DataError
from paceline.monitor.events import DTYPE, FOLDER, RECORD_BYTES, VERSION, Kind, pack_note
from paceline.monitor.run_events import read_run
from tests.monitor.simulated import Simulated


def file_of(folder: Path, worker: int, number: int = 0) -> Path:
    return folder / FOLDER / f"worker-{worker}.{number}"


def with_header(path: Path, **changes: object) -> None:
    line, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(line) | changes).encode() + b"\n" + rest)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    simulated = Simulated(3, 20)
    run = read_run(simulated.write(tmp_path))
    assert list(run.workers) == [0, 1, 2]
    assert run.has_ended
    assert run.last_step == 20
    for worker, steps in run.workers.items():
        assert steps["step"].tolist() == [record.step for record in simulated.own[worker]]
        assert np.allclose(steps["parts"], [record.parts for record in simulated.own[worker]])
        offset = 1.7e9 - 999.0
        assert np.allclose(steps["arrived"], [record.arrived + offset for record in simulated.own[worker]], atol=1e-5)


def test_the_first_step_counts_though_another_worker_was_slower_to_make_its_file(tmp_path: Path) -> None:
    with_header(file_of(Simulated(2, 20).write(tmp_path), 1), clock=1000.02)  # step 1 goes from 1000.0 to 1000.05
    run = read_run(tmp_path)
    assert [len(steps) for steps in run.workers.values()] == [20, 20]


@pytest.mark.parametrize("kept", [0, 1, 40, 200, 200 + RECORD_BYTES // 2])
def test_a_file_that_was_cut_is_left_out_or_ends_with_its_last_whole_record(kept: int, tmp_path: Path) -> None:
    path = file_of(Simulated(2, 20).write(tmp_path), 1)
    data = path.read_bytes()
    header = data.index(b"\n") + 1
    path.write_bytes(data[:kept] if kept < header else data[: header + kept])
    run = read_run(tmp_path)
    assert len(run.workers[0]) == 20
    if kept < header:
        assert 1 not in run.workers
        assert len(run.problems) == 1
        assert str(path) in run.problems[0]
    else:
        assert len(run.workers[1]) == kept // RECORD_BYTES
        assert not run.has_ended


def test_every_length_of_a_file_can_be_read(tmp_path: Path) -> None:
    path = file_of(Simulated(1, 3).write(tmp_path), 0)
    data = path.read_bytes()
    header = data.index(b"\n") + 1
    for length in range(0, len(data), 3):
        path.write_bytes(data[:length])
        if length < header:
            with pytest.raises(DataError, match="can't be read: it"):
                read_run(tmp_path)
        else:
            assert len(read_run(tmp_path).workers[0]) == min((length - header) // RECORD_BYTES, 3)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: folder.joinpath("nowhere"), "there is no such run"),
        (lambda folder: folder.joinpath("empty").mkdir() or folder / "empty", "has no events"),
        (
            lambda folder: folder.joinpath("runs/a/events").mkdir(parents=True) or folder / "runs",
            "runs/a has some: runs",
        ),
        (lambda folder: (file_of(folder, 0).write_bytes(b"") and None) or folder, "it is empty"),
        (lambda folder: file_of(folder, 0).write_bytes(b"{}\n") and folder, "no header of paceline's events"),
        (lambda folder: file_of(folder, 0).write_bytes(b"\xff\n") and folder, "not UTF-8"),
        (lambda folder: file_of(folder, 0).write_bytes(b"[" * 4000 + b"\n") and folder, "can't be read"),
        (lambda folder: with_header(file_of(folder, 0), version=VERSION + 1) or folder, "update it"),
        (lambda folder: with_header(file_of(folder, 0), clock=None) or folder, "lacks the worker or its clock"),
        (lambda folder: with_header(file_of(folder, 0), time=np.nan) or folder, "lacks the worker or its clock"),
        (lambda folder: with_header(file_of(folder, 0), clock=1e300) or folder, "lacks the worker or its clock"),
        (lambda folder: file_of(folder, 0).unlink() or file_of(folder, 0).mkdir() or folder, "it is a folder"),
    ],
)
def test_what_can_not_be_read_is_said_in_a_line(harm, words: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = harm(Simulated(1, 3).write(tmp_path))
    with pytest.raises(DataError, match=words) as said:
        read_run(folder)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    "name", ["began", "arrived", "voted", "parts", "hidden_s", "memory", "device_memory", "peer_s"]
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1e30])
def test_a_record_that_no_worker_can_have_written_is_left_out(name: str, value: float, tmp_path: Path) -> None:
    path = file_of(Simulated(1, 9).write(tmp_path), 0)
    line, _, rest = path.read_bytes().partition(b"\n")
    records = np.frombuffer(rest, DTYPE).copy()
    records[name][4] = value
    path.write_bytes(line + b"\n" + records.tobytes())
    assert read_run(tmp_path).workers[0]["step"].tolist() == [1, 2, 3, 4, 6, 7, 8, 9]


def test_a_note_without_a_moment_is_left_out(tmp_path: Path) -> None:
    path = file_of(Simulated(1, 3).write(tmp_path), 0)
    with path.open("ab") as file:
        file.write(pack_note(Kind.NOTE, 0, 1, 3, float("nan"), "never") + pack_note(Kind.NOTE, 0, 1, 3, 1001.0, "then"))
    assert [note.text for note in read_run(tmp_path).notes] == ["then"]


def test_what_a_script_did_beyond_the_checkpoint_that_it_went_back_to_no_longer_counts(tmp_path: Path) -> None:
    path = file_of(Simulated(1, 6).write(tmp_path, ended=False), 0)
    line, _, rest = path.read_bytes().partition(b"\n")
    again = Simulated(1, 5, seed=1).write(tmp_path / "again", ended=False)
    path.write_bytes(line + b"\n" + rest + file_of(again, 0).read_bytes().partition(b"\n")[2][3 * RECORD_BYTES :])
    assert read_run(tmp_path).workers[0]["step"].tolist() == [1, 2, 3, 4, 4, 5]


def test_what_a_resumed_job_had_done_beyond_its_checkpoint_no_longer_counts(tmp_path: Path) -> None:
    Simulated(3, 30, seed=1).write(tmp_path, ended=False)
    Simulated(2, 15, seed=2).write(tmp_path, number=1)
    for worker in (0, 1):  # resumed at step 0 with two workers, an hour later
        path = file_of(tmp_path, worker, 1)
        with_header(path, clock=999.0, time=1.7e9 + 3600, boot="another boot")
    run = read_run(tmp_path)
    assert [len(run.workers[worker]) for worker in (0, 1)] == [15, 15]
    assert len(run.workers[2]) == 0
    assert run.workers[0]["began"][0] > 1.7e9 + 3600


def test_a_worker_that_joins_takes_nothing_from_the_others(tmp_path: Path) -> None:
    Simulated(2, 30).write(tmp_path)
    data = file_of(tmp_path, 1).read_bytes()
    header = data.index(b"\n") + 1
    file_of(tmp_path, 1).write_bytes(data[: header + 10 * RECORD_BYTES])
    file_of(tmp_path, 1, 1).write_bytes(data[:header] + data[header + 12 * RECORD_BYTES :])
    with_header(file_of(tmp_path, 1, 1), joins=True, clock=999.5)
    run = read_run(tmp_path)
    assert len(run.workers[0]) == 30
    assert run.workers[1]["step"].tolist() == [*range(1, 11), *range(13, 31)]


@pytest.mark.parametrize("recent", [1, 7, 20, 1000])
def test_the_last_records_can_be_read_alone(recent: int, tmp_path: Path) -> None:
    run = read_run(Simulated(2, 20).write(tmp_path, ended=False), recent)
    assert run.workers[1]["step"].tolist() == list(range(max(1, 21 - recent), 21))


def test_notes_are_on_the_same_axis(tmp_path: Path) -> None:
    simulated = Simulated(1, 10)
    path = file_of(simulated.write(tmp_path), 0)
    at = simulated.own[0][4].began
    with path.open("ab") as file:
        file.write(pack_note(Kind.NOTE, 0, 2, 5, at, "generation 2: workers 0, " + "é" * 60))
    run = read_run(tmp_path)
    (note,) = run.notes
    assert note.text.startswith("generation 2: workers 0, ééé")
    assert abs(note.time - float(run.workers[0]["began"][4])) < 1e-6


def test_64_workers_of_10_000_steps_are_read_and_judged_in_seconds(tmp_path: Path) -> None:
    """Under 2 s on a machine of its own; here with room for others' work."""
    from paceline.monitor.attribution import join, straggler

    path = file_of(Simulated(1, 100).write(tmp_path), 0)
    line, _, rest = path.read_bytes().partition(b"\n")
    numbered = np.frombuffer(rest[: 100 * RECORD_BYTES] * 100, DTYPE).copy()
    numbered["step"] = np.arange(1, 10_001)
    records = numbered.tobytes()
    for worker in range(64):
        header = json.dumps(json.loads(line) | {"worker": worker}).encode() + b"\n"
        file_of(tmp_path, worker).write_bytes(header + records)
    began = time.process_time()
    run = read_run(tmp_path)
    straggler(join(run))
    assert sum(map(len, run.workers.values())) == 640_000
    assert time.process_time() - began < 6
