"""The log of an asynchronous run: what is written comes back with its bits, and damage is named by file and line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError, ConfigError
from paceline.parameter_server.staleness_policy import Outcome
from paceline.parameter_server.update_log import (
    Applied,
    JobFacts,
    Read,
    Role,
    Settings,
    UpdateLog,
    next_attempt,
    read_log,
)
from tests.damage import files_no_longer_than

JOB = JobFacts(workers=1, servers=1, lanes=2, keys=2, clock="s=2", facts={"command": ["train.py", "--lr", "0.1"]})
READ = Read(worker=0, round=0, lanes=(0, 1), versions={0: 0, 1: 0})
SETTINGS: Settings = ({"lr": 0.1, "betas": (0.9, 0.999), "nesterov": False, "weight_decay": 0},)
APPLIED = Applied(server=0, key=0, order=0, round=0, lane=1, worker=0, settings=SETTINGS)
SECOND = replace(APPLIED, key=1, outcome=Outcome(3, 1 / 3, 0.1 + 0.2))


def begun(folder: Path, attempt: int, role: Role, number: int, job: JobFacts) -> UpdateLog:
    log = UpdateLog(folder, attempt, role, number, job)
    log.begin(0)
    return log


def written(folder: Path, *records: Read | Applied, job: JobFacts = JOB, attempt: int = 1, ended: bool = True) -> None:
    """The log of one worker and one server."""
    worker = begun(folder, attempt, "worker", 0, job)
    server = begun(folder, attempt, "server", 0, job)
    for record in records:
        if isinstance(record, Read):
            worker.read(record)
        else:
            server.applied(record)
    for log in (worker, server):
        log.end(well=ended)


def path_of(folder: Path, role: str, number: int = 0) -> Path:
    return folder / "parameter_server" / f"attempt-0001-{role}-{number:05d}.jsonl"


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_server_writes_a_header_settings_where_they_change_and_a_line_for_each_application(tmp_path: Path) -> None:
    slower = replace(APPLIED, order=1, lane=0, settings=({**SETTINGS[0], "lr": 0.05},))
    written(tmp_path, READ, APPLIED, SECOND, slower)
    header, *lines = lines_of(path_of(tmp_path, "server"))
    assert header == {
        "paceline": "parameter server",
        "version": 1,
        "attempt": 1,
        "role": "server",
        "number": 0,
        "workers": 1,
        "servers": 1,
        "lanes": 2,
        "keys": 2,
        "clock": "s=2",
        "first_round": 0,
        "facts": {"command": ["train.py", "--lr", "0.1"]},
    }
    assert [line["kind"] for line in lines] == ["settings", "apply", "apply", "settings", "apply", "end"]
    assert lines[0]["groups"] == [
        {"lr": (0.1).hex(), "betas": [(0.9).hex(), (0.999).hex()], "nesterov": False, "weight_decay": 0}
    ]
    assert lines[1] == {
        "kind": "apply",
        "key": 0,
        "order": 0,
        "round": 0,
        "lane": 1,
        "worker": 0,
        "delay": 0,
        "updates": 0,
        "lr_factor": "0x1.0000000000000p+0",
        "momentum": None,
        "dropped": False,
        "check": None,
    }


def test_a_worker_writes_a_line_for_each_round(tmp_path: Path) -> None:
    written(tmp_path, READ)
    assert lines_of(path_of(tmp_path, "worker"))[1:] == [
        {"kind": "read", "round": 0, "lanes": [0, 1], "versions": {"0": 0, "1": 0}},
        {"kind": "end", "records": 1},
    ]


def test_settings_that_change_under_the_hands_of_the_log_are_written_again(tmp_path: Path) -> None:
    group: dict[str, Any] = {"lr": 0.1}
    job = replace(JOB, keys=1)
    server = begun(tmp_path, 1, "server", 0, job)
    server.applied(replace(APPLIED, settings=(group,)))
    group["lr"] = 0.2
    server.applied(replace(APPLIED, order=1, lane=0, settings=(group,)))
    server.end(well=True)
    begun(tmp_path, 1, "worker", 0, job).end(well=True)
    assert [record.settings for record in read_log(tmp_path).applied[0]] == [({"lr": 0.1},), ({"lr": 0.2},)]


@pytest.mark.job
def test_a_killed_process_loses_no_line(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from paceline.parameter_server.update_log import UpdateLog, JobFacts, Read\n"
        "log = UpdateLog(Path(sys.argv[1]), 1, 'worker', 0, JobFacts(1, 1, 1, 1, 's=inf'))\n"
        "log.begin(0)\n"
        "for round in range(3):\n"
        "    log.read(Read(0, round, (0,), {0: round}))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [line["round"] for line in lines_of(path_of(tmp_path, "worker"))[1:]] == [0, 1, 2]


def test_a_disk_that_is_full_leaves_whole_lines_and_says_what_to_do(tmp_path: Path) -> None:
    log = begun(tmp_path, 1, "worker", 0, JOB)
    log.read(READ)
    before = path_of(tmp_path, "worker").read_bytes()
    text = (
        r"worker 0: the order of updates could not be recorded in .*attempt-0001-worker-00000.jsonl: File too large; "
        "make room, then resume from the last saved state"
    )
    with files_no_longer_than(len(before) + 20), pytest.raises(CheckpointError, match=text):
        log.read(replace(READ, round=1))
    assert path_of(tmp_path, "worker").read_bytes() == before
    log.end(well=False)
    log.end(well=False)


def test_a_disk_that_is_full_at_the_start_leaves_no_file(tmp_path: Path) -> None:
    with files_no_longer_than(10), pytest.raises(CheckpointError, match="could not be recorded"):
        begun(tmp_path, 1, "worker", 0, JOB)
    assert not path_of(tmp_path, "worker").exists()


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError) as caught:
        begun(tmp_path / "run", 1, "server", 0, JOB)
    assert str(caught.value) == (
        f"server 0: the order of updates can't be recorded in {tmp_path}/run/parameter_server: Not a directory; "
        "choose a folder that can be written to, or don't record it"
    )


def test_an_attempt_is_recorded_once(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(ConfigError) as caught:
        begun(tmp_path, 1, "worker", 0, JOB)
    assert str(caught.value) == (
        f"worker 0: {path_of(tmp_path, 'worker')} exists already, so attempt 1 was recorded before; another job writes "
        "to the same run folder, or the processes did not agree on the attempt's number"
    )


def test_attempts_are_counted_on(tmp_path: Path) -> None:
    assert next_attempt(tmp_path) == 1
    written(tmp_path)
    written(tmp_path, attempt=2)
    assert next_attempt(tmp_path) == 3


# -- reading -----------------------------------------------------------------------------------------------------------


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    written(tmp_path, READ, APPLIED, SECOND)
    run = read_log(tmp_path)
    assert (run.attempt, run.job, run.cut) == (1, JOB, ())
    assert run.reads == (READ,)
    assert run.applied == {0: (APPLIED,), 1: (SECOND,)}


@settings(max_examples=50, deadline=None)
@given(st.floats(), st.floats(), st.floats())
def test_floats_come_back_with_their_bits(
    tmp_path_factory: pytest.TempPathFactory, rate: float, factor: float, momentum: float
) -> None:
    folder = tmp_path_factory.mktemp("run")
    outcome = Outcome(1, factor, momentum)
    written(folder, replace(APPLIED, settings=({"lr": rate, "betas": (rate, factor)},), outcome=outcome))
    (found,) = read_log(folder).applied[0]
    group: Any = found.settings[0]
    came = [group["lr"], *group["betas"], found.outcome.lr_factor, found.outcome.momentum]
    assert [value.hex() for value in came] == [value.hex() for value in (rate, rate, factor, factor, momentum)]


def test_the_last_attempt_is_read(tmp_path: Path) -> None:
    written(tmp_path, READ)
    written(tmp_path, attempt=2)
    assert read_log(tmp_path).reads == ()
    assert read_log(tmp_path / "parameter_server").attempt == 2


def test_files_of_several_servers_and_workers_are_merged(tmp_path: Path) -> None:
    job = replace(JOB, workers=2, servers=2)
    for number in range(2):
        worker = begun(tmp_path, 1, "worker", number, job)
        worker.read(replace(READ, worker=number, lanes=(number,)))
        worker.end(well=True)
        server = begun(tmp_path, 1, "server", number, job)
        server.applied(replace(APPLIED, server=number, key=1 - number))
        server.end(well=True)
    run = read_log(tmp_path)
    assert [(read.worker, read.lanes) for read in run.reads] == [(0, (0,)), (1, (1,))]
    assert {key: [record.server for record in records] for key, records in run.applied.items()} == {0: [1], 1: [0]}


@pytest.mark.parametrize("kept", [0, 1, 20, -1])
def test_a_last_line_without_its_end_means_that_the_run_was_cut(tmp_path: Path, kept: int) -> None:
    written(tmp_path, READ, APPLIED, SECOND, ended=False)
    path = path_of(tmp_path, "server")
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[:kept])
    run = read_log(tmp_path)
    assert run.applied == {0: (APPLIED,), 1: ()}
    assert run.cut == ("attempt-0001-server-00000.jsonl", "attempt-0001-worker-00000.jsonl")


def damaged(folder: Path, role: str, line: int, text: str) -> str:
    """What reading says when one line, counted from 1, is another."""
    written(folder, READ, APPLIED, SECOND)
    path = path_of(folder, role)
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(CheckpointError) as caught:
        read_log(folder)
    message = str(caught.value)
    start = f"{path}, line {line}: "
    end = (
        "; the log is damaged, and what was applied after it is unknown: restore the file, or resume from a saved state"
    )
    assert message.startswith(start)
    assert message.endswith(end)
    return message[len(start) : -len(end)]


APPLY = (
    '"round":0,"lane":1,"worker":0,"delay":0,"updates":0,"lr_factor":"0x1p+0","momentum":null,"dropped":false,'
    '"check":null}'
)


@pytest.mark.parametrize(
    ("role", "line", "text", "why"),
    [
        (
            "server",
            3,
            '{"kind":"apply","key":0,"or',
            "it is not JSON (Unterminated string starting at: line 1 column 25 (char 24))",
        ),
        ("server", 3, "", "it is not JSON (Expecting value: line 1 column 1 (char 0))"),
        ("server", 3, '{"kind":"apply","key":2,"order":0,' + APPLY, "key is 2, expected a whole number from 0 to 1"),
        ("server", 4, '{"kind":"apply","key":0,"order":2,' + APPLY, "key 0 goes on with order 2, expected 1"),
        ("server", 3, '{"kind":"apply","key":0,' + APPLY, "no 'order'"),
        (
            "server",
            3,
            '{"kind":"apply","key":0,"order":0,' + APPLY.replace('"lane":1', '"lane":2'),
            "lane is 2, expected a whole number from 0 to 1",
        ),
        (
            "server",
            3,
            '{"kind":"apply","key":0,"order":0,' + APPLY.replace('"0x1p+0"', '"fast"'),
            "invalid hexadecimal floating-point string",
        ),
        (
            "server",
            3,
            '{"kind":"apply","key":0,"order":0,' + APPLY.replace('"dropped":false', '"dropped":0'),
            "dropped is 0, expected true or false",
        ),
        ("worker", 2, '{"kind":"read"}', "no 'versions'"),
        ("server", 3, '{"kind":"write"}', "a line of kind 'write' is not known"),
        ("server", 5, '{"kind":"end","records":3}', "the end counts 3 records, but 2 came before it"),
        (
            "worker",
            2,
            '{"kind":"read","round":0,"lanes":[0],"versions":{"0":0}}',
            "versions of keys [0], expected all of the 2 keys",
        ),
        (
            "worker",
            2,
            '{"kind":"read","round":0,"lanes":[0],"versions":{"0":0,"1":-1}}',
            "1 is -1, expected a whole number from 0",
        ),
        ("worker", 1, '{"paceline":"samples","version":1}', "its first line is not that of a log of version 1"),
    ],
)
def test_a_damaged_line_is_named_with_its_file_and_number(
    tmp_path: Path, role: str, line: int, text: str, why: str
) -> None:
    assert damaged(tmp_path, role, line, text) == why


def test_a_line_after_the_end_is_damage(tmp_path: Path) -> None:
    written(tmp_path, READ)
    with path_of(tmp_path, "worker").open("a") as file:
        file.write('{"kind":"end","records":1}\n')
    with pytest.raises(CheckpointError, match=r"worker-00000.jsonl, line 4: a line of kind 'end' after the end"):
        read_log(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    written(tmp_path, replace(APPLIED, worker=1), job=replace(JOB, workers=2))
    with pytest.raises(CheckpointError) as caught:
        read_log(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/parameter_server: attempt-0001-worker-00001.jsonl missing; a run of 2 workers and 1 servers has "
        "one file of each: copy those of all hosts here"
    )


def test_files_of_different_runs_are_not_merged(tmp_path: Path) -> None:
    begun(tmp_path, 1, "server", 0, JOB).end(well=True)
    begun(tmp_path, 1, "worker", 0, replace(JOB, clock="s=4")).end(well=True)
    with pytest.raises(CheckpointError) as caught:
        read_log(tmp_path)
    assert str(caught.value) == (
        f"{path_of(tmp_path, 'worker')}: clock is 's=4', but 's=2' in attempt-0001-server-00000.jsonl; "
        "these files are of different runs"
    )


def test_a_key_on_two_servers_is_an_error(tmp_path: Path) -> None:
    job = replace(JOB, servers=2)
    for number in range(2):
        server = begun(tmp_path, 1, "server", number, job)
        server.applied(replace(APPLIED, server=number))
        server.end(well=True)
    begun(tmp_path, 1, "worker", 0, job).end(well=True)
    text = "server 1 updated key 0, and so did server 0; a key lives on one server: these files are of different runs"
    with pytest.raises(CheckpointError, match=text):
        read_log(tmp_path)


def test_a_folder_without_a_log_says_when_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_log(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/parameter_server: no log of a parameter server is here; "
        "an asynchronous run writes it when recording is on"
    )


def test_a_file_cut_before_its_first_line_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    os.truncate(path_of(tmp_path, "worker"), 10)
    with pytest.raises(CheckpointError, match=r"worker-00000.jsonl has no first line: the run was cut before it began"):
        read_log(tmp_path)
