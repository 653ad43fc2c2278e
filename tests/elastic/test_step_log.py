"""The step log has every committed step once, whatever happens to its writer or its disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.elastic.decisions import Commit
from paceline.elastic.step_log import StepLog, read_step_log
from paceline.errors import WorldError


def test_a_step_log_never_takes_a_step_twice_and_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = StepLog(path)
    for step in (1, 2, 3):
        ledger.commit(Commit(step, 0, 1, (0, 1)))
    with pytest.raises(WorldError, match=r"step 3 .* was committed already"):
        ledger.commit(Commit(3, 0, 2, (0,)))
    ledger.close()
    with path.open("a") as file:
        file.write('{"step":4,"upd')
    resumed = StepLog(path)
    resumed.rewind(2)
    resumed.commit(Commit(3, 0, 1, (0,)))
    resumed.close()
    assert read_step_log(path) == [Commit(1, 0, 1, (0, 1)), Commit(2, 0, 1, (0, 1)), Commit(3, 0, 1, (0,))]
    path.write_text("step 1\n")
    with pytest.raises(WorldError, match="line 1: not a row of a step log"):
        read_step_log(path)


def test_a_step_log_on_a_full_disk_says_so_once_and_the_job_goes_on() -> None:
    said: list[str] = []
    ledger = StepLog(Path("/dev/full"), said.append)
    for step in (1, 2):
        ledger.commit(Commit(step, 0, 1, (0,)))
    ledger.close()
    assert said == ["paceline: --ledger /dev/full is written no further: No space left on device"]
    assert len(ledger.rows) == 2
