"""A worker that computes is told from one that hangs by its time on a processor."""

from __future__ import annotations

import pytest

from paceline.launch.busy_check import ActivityCheck, BusyCheck


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
