"""Time on a processor is that of a process with all below it, or of the process alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from paceline.world.processor_time import own_processor_seconds, processor_seconds


def test_time_on_a_processor_is_that_of_the_whole_family(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, name, used, children in ((7, "python", "1 2 3 4", "8"), (8, "a) b (c", "10 0 0 0", "")):
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        (tmp_path / f"{pid}/stat").write_text(f"{pid} ({name}) S 1 7 7 0 -1 4194560 9 9 0 0 {used} 20 0 1")
        (tmp_path / f"{pid}/task/{pid}/children").write_text(children)
    assert processor_seconds(7, tmp_path) == 20 / ticks
    assert processor_seconds(9, tmp_path) == 0.0
    assert processor_seconds(os.getpid()) > 0


def test_a_thread_that_has_ended_since_it_was_listed_takes_nothing_away(tmp_path: Path) -> None:
    (tmp_path / "7/task/8").mkdir(parents=True)  # its file of children is gone
    (tmp_path / "7/stat").write_text("7 (python) S 1 7 7 0 -1 4194560 9 9 0 0 1 2 3 4 20 0 1")
    assert processor_seconds(7, tmp_path) == 10 / os.sysconf("SC_CLK_TCK")
    shutil.rmtree(tmp_path / "7/task")
    assert processor_seconds(7, tmp_path) == 0.0


def test_a_stopped_process_uses_no_processor(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, state in ((7, "R"), (8, "T")):
        (tmp_path / f"{pid}").mkdir()
        (tmp_path / f"{pid}/stat").write_text(f"{pid} (a) b) {state} 1 7 7 0 -1 4194560 9 9 0 0 5 3 100 100 20 0 1")
    assert own_processor_seconds(7, tmp_path) == 8 / ticks
    assert own_processor_seconds(8, tmp_path) is own_processor_seconds(9, tmp_path) is None
