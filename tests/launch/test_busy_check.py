"""A worker that computes is told from one that hangs by its time on a processor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.launch.busy_check import ActivityCheck, BusyCheck, own_processor_seconds, processor_seconds


def test_time_on_a_processor_is_that_of_the_whole_family(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, name, used, children in ((7, "python", "1 2 3 4", "8"), (8, "a) b (c", "10 0 0 0", "")):
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        (tmp_path / f"{pid}/stat").write_text(f"{pid} ({name}) S 1 7 7 0 -1 4194560 9 9 0 0 {used} 20 0 1")
        (tmp_path / f"{pid}/task/{pid}/children").write_text(children)
    assert processor_seconds(7, tmp_path) == 20 / ticks
    assert processor_seconds(9, tmp_path) == 0.0
    assert processor_seconds(os.getpid()) > 0


def test_printing_and_working_are_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([5.0, 5.0, 5.0, 5.5, 5.501])
    monkeypatch.setattr("paceline.launch.busy_check.processor_seconds", lambda pid: next(used))
    activity = ActivityCheck(pid=1)
    looks = [activity.seen(printed, now) for now, printed in enumerate([0, 0, 12, 12, 12])]
    assert looks == [True, False, True, True, False]


def test_only_the_silent_who_use_a_processor_are_told_of() -> None:
    silence_s = {10: 0.1, 11: 3.0, 12: 3.0, 13: 3.0}
    used: dict[int, float | None] = {10: 5.0, 11: 5.0, 12: 5.0, 13: 5.0}
    now = [0.0]
    busy_check = BusyCheck(2.0, silence_s.__getitem__, lambda: now[0], used.__getitem__)
    assert busy_check.check({0: 10, 1: 11, 2: 12, 3: 13}) == []
    now[0] = 0.5
    used.update({10: 5.5, 11: 5.2, 12: 5.01, 13: None})  # heard; computes; polls; stopped
    assert busy_check.check({0: 10, 1: 11, 2: 12, 3: 13}) == [1]


def test_a_stopped_process_uses_no_processor(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, state in ((7, "R"), (8, "T")):
        (tmp_path / f"{pid}").mkdir()
        (tmp_path / f"{pid}/stat").write_text(f"{pid} (a) b) {state} 1 7 7 0 -1 4194560 9 9 0 0 5 3 100 100 20 0 1")
    assert own_processor_seconds(7, tmp_path) == 8 / ticks
    assert own_processor_seconds(8, tmp_path) is own_processor_seconds(9, tmp_path) is None
