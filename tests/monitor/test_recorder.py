"""Records are written by a thread of their own; whatever the disk does, `add` returns and the training goes on."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline import input_file
from paceline.monitor import recorder
from paceline.monitor.events import FOLDER, Part, StepRecord, Use
from paceline.monitor.recorder import EventFile, record_steps
from paceline.monitor.run_events import read_run

ABOUT = {"worker": 0, "step": 0, "joins": False}


def record(step: int) -> StepRecord:
    return StepRecord(0, 1, step, 10.0 + step, 10.2 + step, 10.3 + step, (0.1,) * len(Part), 0.0)


class Meter:
    def sample(self) -> None: ...

    def read(self) -> Use:
        return Use(2.0**20)

    def close(self) -> None: ...


def opened(folder: Path, **options: Any) -> EventFile:
    return EventFile(folder, ABOUT, Meter, every_s=0.01, **options)


def steps_in(folder: Path) -> list[int]:
    return [int(step) for step in read_run(folder).workers[0]["step"]]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_all_that_is_added_is_there_after_close_and_nothing_is_left_open(tmp_path: Path) -> None:
    threads, files = threading.active_count(), descriptors()
    file = opened(tmp_path)
    for step in range(1, 501):
        file.add(record(step))
    file.close()
    assert steps_in(tmp_path) == list(range(1, 501))
    assert (threading.active_count(), descriptors()) == (threads, files)
    assert file.dropped == 0


def test_a_run_that_goes_on_gets_a_file_of_its_own(tmp_path: Path) -> None:
    for _ in range(3):
        opened(tmp_path).close()
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["worker-0.0", "worker-0.1", "worker-0.2"]


def test_a_disk_that_hangs_holds_up_nothing_and_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    append = input_file.append

    def hanging(descriptor: int, data: bytes) -> None:
        if hangs.is_set():
            goes_on.wait(30)
        append(descriptor, data)

    monkeypatch.setattr(input_file, "append", hanging)
    file = opened(tmp_path, most_waiting=100)
    hangs.set()
    began = time.perf_counter()
    for step in range(1, 20_001):
        file.add(record(step))
    assert time.perf_counter() - began < 5
    assert len(file._queue) <= 100
    assert file.dropped > 19_000
    hangs.clear()
    goes_on.set()
    file.add(record(20_001))
    file.close()
    run = read_run(tmp_path)
    assert len(run.workers[0]) + file.dropped >= 20_000
    assert any("records were dropped" in note.text for note in run.notes)


def test_a_full_disk_is_said_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_full, append = threading.Event(), input_file.append
    failed = threading.Semaphore(0)

    def filling(descriptor: int, data: bytes) -> None:
        if is_full.is_set():
            failed.release()
            raise OSError(errno.ENOSPC, "No space left on device")
        append(descriptor, data)

    monkeypatch.setattr(input_file, "append", filling)
    file = opened(tmp_path)
    is_full.set()
    for step in (1, 2):
        file.add(record(step))
        assert failed.acquire(timeout=20)
    is_full.clear()
    file.add(record(3))
    file.close()
    assert steps_in(tmp_path) == [3]
    assert [note.text for note in read_run(tmp_path).notes] == ["2 records were dropped: the disk was full or slow"]
    (said,) = capsys.readouterr().err.splitlines()
    assert "can't be written (No space left on device); training goes on" in said


def test_a_folder_that_can_not_be_made_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("a file")

    class Cpu:
        type = "cpu"

    assert record_steps(tmp_path / "run", ABOUT, None, lambda: None, Cpu()) is None  # type: ignore[arg-type]
    assert "training goes on without them" in capsys.readouterr().err


def test_a_record_in_the_queue_costs_microseconds(tmp_path: Path) -> None:
    """1 % of a 50 ms step is 500 µs; the bound leaves room for a machine with other work."""
    file = EventFile(tmp_path, ABOUT, Meter, every_s=recorder.EVERY_S)
    began = time.thread_time()
    for step in range(2000):
        file.add(record(step))
    spent = (time.thread_time() - began) / 2000
    file.close()
    assert spent < 100e-6, spent
