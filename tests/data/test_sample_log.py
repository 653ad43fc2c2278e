"""The sample log: what is committed is on file, whole, whatever happens next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.data.sample_log import LogHeader, MicroBatch, SampleLog, next_attempt
from paceline.errors import CheckpointError, ConfigError
from tests.damage import files_no_longer_than
from tests.data.logged_runs import lines_of

HEADER = LogHeader(
    worker=0, workers=4, lanes=4, epoch=0, samples=1000, samples_per_epoch=1000, each_id_once=True, position=0
)
STREAM = LogHeader(worker=1, workers=2, lanes=4, epoch=2, stream=True, lane_positions={2: 120, 3: 96})
FIRST = MicroBatch(step=1, epoch=0, epoch_step=0, lane=0, micro_batch=0, position=0, ids=(5, 9))
SECOND = MicroBatch(step=1, epoch=0, epoch_step=0, lane=1, micro_batch=0, position=2, ids=(0, 3), used=False)


def path_of(folder: Path, attempt: int = 1, worker: int = 0) -> Path:
    return folder / "samples" / f"attempt-{attempt:04d}-worker-{worker:05d}.jsonl"


def test_a_file_is_a_header_and_a_line_for_each_micro_batch(tmp_path: Path) -> None:
    record = SampleLog.start(tmp_path / "run", 1, HEADER)
    record.add(FIRST)
    record.add(SECOND)
    record.commit()
    record.close()
    place = {"step": 1, "epoch": 0, "epoch_step": 0, "micro_batch": 0}
    assert lines_of(path_of(tmp_path / "run")) == [
        {
            "paceline": "samples",
            "version": 1,
            "attempt": 1,
            "worker": 0,
            "workers": 4,
            "lanes": 4,
            "epoch": 0,
            "position": 0,
            "samples": 1000,
            "samples_per_epoch": 1000,
            "each_id_once": True,
            "stream": False,
        },
        {**place, "lane": 0, "position": 0, "ids": [5, 9]},
        {**place, "lane": 1, "position": 2, "ids": [0, 3], "used": False},
    ]


def test_a_stream_records_counts_and_the_place_of_each_lane(tmp_path: Path) -> None:
    record = SampleLog.start(tmp_path, 3, STREAM)
    record.add(replace(FIRST, lane=2, position=120, ids=None, count=8))
    record.commit()
    record.close()
    header, line = lines_of(path_of(tmp_path, attempt=3, worker=1))
    assert header["stream"] is True
    assert header["lane_positions"] == {"2": 120, "3": 96}
    assert "position" not in header
    assert line["count"] == 8
    assert "ids" not in line


@pytest.mark.parametrize("header", [HEADER, replace(HEADER, position=320, epoch=7), STREAM])
def test_a_header_comes_back_from_its_line_as_it_was(header: LogHeader) -> None:
    assert LogHeader.of_line(header.line(attempt=4)) == header


def test_nothing_is_written_before_the_step_commits_nor_when_it_never_does(tmp_path: Path) -> None:
    record = SampleLog.start(tmp_path, 1, HEADER)
    record.add(FIRST)
    assert len(lines_of(path_of(tmp_path))) == 1
    record.close()
    record.close()
    assert len(lines_of(path_of(tmp_path))) == 1


def test_a_commit_without_micro_batches_writes_nothing(tmp_path: Path) -> None:
    record = SampleLog.start(tmp_path, 1, HEADER)
    record.commit()
    record.close()
    assert len(lines_of(path_of(tmp_path))) == 1


@pytest.mark.job
def test_a_killed_process_loses_no_committed_step(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from paceline.data.sample_log import MicroBatch, LogHeader, SampleLog\n"
        "record = SampleLog.start(Path(sys.argv[1]), 1, LogHeader(0, 1, 4, 0, 1000, 1000, True))\n"
        "for lane in range(3):\n"
        "    record.add(MicroBatch(1, 0, 0, lane, 0, 2 * lane, [lane, lane + 9]))\n"
        "    if lane == 1: record.commit()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["lane"] for line in lines_of(path_of(tmp_path))[1:]] == [0, 1]


def test_the_length_of_an_epoch_is_written_only_where_it_is_news(tmp_path: Path) -> None:
    record = SampleLog.start(tmp_path, 1, HEADER)
    for epoch, samples in enumerate([1000, 1000, 1200, 1200]):
        record.begin_epoch(epoch, samples, samples)
        record.add(replace(FIRST, epoch=epoch, step=epoch + 1))
        record.commit()
    record.close()
    lines = lines_of(path_of(tmp_path))[1:]
    assert [line.get("samples_per_epoch") for line in lines] == [None, None, 1200, None, None]
    assert lines[2] == {"epoch": 2, "samples": 1200, "samples_per_epoch": 1200}


def test_a_disk_that_is_full_leaves_whole_lines_and_the_commit_can_be_tried_again(tmp_path: Path) -> None:
    record = SampleLog.start(tmp_path, 1, HEADER)
    record.add(FIRST)
    record.commit()
    before = path_of(tmp_path).read_bytes()
    record.add(replace(FIRST, step=2, position=2))
    text = (
        r"worker 0: the samples of step 2 could not be recorded in .*attempt-0001-worker-00000.jsonl: File too large; "
    )
    with files_no_longer_than(len(before) + 20), pytest.raises(CheckpointError, match=text):
        record.commit()
    assert path_of(tmp_path).read_bytes() == before
    record.commit()
    record.close()
    assert [line["step"] for line in lines_of(path_of(tmp_path))[1:]] == [1, 2]


def test_a_disk_that_is_full_at_the_start_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    text = r"worker 0: samples can't be recorded in .*samples: File too large; choose a folder that can be written to"
    with files_no_longer_than(10), pytest.raises(ConfigError, match=text):
        SampleLog.start(tmp_path, 1, HEADER)
    assert not path_of(tmp_path).exists()


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"worker 0: samples can't be recorded in .*run/samples: Not a directory; "):
        SampleLog.start(tmp_path / "run", 1, HEADER)


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    SampleLog.start(tmp_path, 1, HEADER).close()
    with pytest.raises(ConfigError, match=r"attempt-0001-worker-00000.jsonl exists already, so attempt 1 was recorded"):
        SampleLog.start(tmp_path, 1, HEADER)
    SampleLog.start(tmp_path, 1, replace(HEADER, worker=1)).close()


def test_attempts_are_numbered_from_one_by_what_is_there(tmp_path: Path) -> None:
    assert next_attempt(tmp_path) == 1
    SampleLog.start(tmp_path, 1, HEADER).close()
    assert next_attempt(tmp_path) == 2
    SampleLog.start(tmp_path, 9999, replace(HEADER, worker=3)).close()
    assert next_attempt(tmp_path) == 10_000
    SampleLog.start(tmp_path, 10_000, HEADER).close()
    (tmp_path / "samples" / "attempt-notes.jsonl").write_text("")
    assert next_attempt(tmp_path) == 10_001


def test_a_record_that_is_closed_leaves_no_open_file(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    record = SampleLog.start(tmp_path, 1, HEADER)
    record.close()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"worker": 4}, "worker 4 of 4 workers does not exist"),
        ({"lanes": 0}, "lanes=0: a job has at least one lane"),
        ({"epoch": -1}, "epoch=-1 is before the first"),
        ({"position": 1001}, "position 1001 is not in an epoch of 1000 samples"),
        ({"samples_per_epoch": 1001}, "1001 samples per epoch of 1000 samples"),
        ({"samples": None}, "only a stream may have no number of samples"),
        ({"stream": True}, "a stream, and nothing else, has lane_positions"),
        ({"stream": True, "lane_positions": {}}, "a stream has no ids, so each_id_once can't be promised"),
        ({"stream": True, "each_id_once": False, "lane_positions": {4: 0}}, "there is no lane 4 among 4"),
        ({"stream": True, "each_id_once": False, "lane_positions": {3: -1}}, "lane 3 can't begin at position -1"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(changed: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        replace(HEADER, **changed)  # type: ignore[arg-type]
