"""A file is there whole or not at all, and nothing is left of writers that failed."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.data.token_build import ABANDONED_AFTER_S, published_when_whole

HOST = socket.gethostname()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, text: bytes = b"new") -> None:
    with published_when_whole(path) as file:
        file.write(text)


def test_the_name_appears_when_the_writer_is_done(tmp_path: Path) -> None:
    with published_when_whole(tmp_path / "folder" / "a") as file:
        file.write(b"text")
        assert not (tmp_path / "folder" / "a").exists()
    assert (tmp_path / "folder" / "a").read_bytes() == b"text"
    assert names(tmp_path / "folder") == ["a"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_writer_that_fails_leaves_the_older_file_and_nothing_else(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    write(tmp_path / "a", b"old")
    with pytest.raises(failure), published_when_whole(tmp_path / "a") as file:
        file.write(b"half")
        raise failure
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.job
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib; from paceline.data.token_build import published_when_whole\n"
        "with published_when_whole(pathlib.Path(sys.argv[1])) as file:\n"
        "    print('writing', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path / "a"], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        write(tmp_path / "a")
        assert len(names(tmp_path)) == 2  # the other one lives, and keeps its file
        writer.send_signal(signal.SIGKILL)
    assert len(names(tmp_path)) == 2
    write(tmp_path / "a")
    assert names(tmp_path) == ["a"]


def test_two_writers_at_once_do_not_meet_and_the_last_one_stays(tmp_path: Path) -> None:
    with published_when_whole(tmp_path / "a") as first:
        first.write(b"first")
        write(tmp_path / "a", b"second")
        assert (tmp_path / "a").read_bytes() == b"second"
    assert (tmp_path / "a").read_bytes() == b"first"
    assert names(tmp_path) == ["a"]


def test_another_host_s_partial_file_is_left_alone_until_it_has_been_silent_for_long(tmp_path: Path) -> None:
    partial = tmp_path / ".a.elsewhere.123.partial"
    partial.touch()
    write(tmp_path / "a")
    assert partial.exists()
    long_ago = partial.stat().st_mtime - ABANDONED_AFTER_S - 1
    os.utime(partial, (long_ago, long_ago))
    write(tmp_path / "a")
    assert not partial.exists()


def test_partial_files_of_other_names_are_nobody_s_business(tmp_path: Path) -> None:
    others = [f".ab.{HOST}.123.partial", f".x[a].{HOST}.123.partial", "a.partial"]
    for other in others:
        (tmp_path / other).touch()
    write(tmp_path / "a")
    assert names(tmp_path) == sorted([*others, "a"])
    write(tmp_path / "x[a]")
    assert f".x[a].{HOST}.123.partial" not in names(tmp_path)


def test_a_locked_partial_file_is_not_a_leftover(tmp_path: Path) -> None:
    partial = tmp_path / f".a.{HOST}.123.partial"
    with partial.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write(tmp_path / "a")
        assert partial.exists()
    write(tmp_path / "a")
    assert not partial.exists()


def test_what_is_no_file_of_this_user_is_not_taken_for_a_leftover_and_holds_nobody(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.touch()
    os.mkfifo(tmp_path / f".a.{HOST}.1.partial")
    (tmp_path / f".a.{HOST}.2.partial").symlink_to(precious)
    write(tmp_path / "a")
    assert names(tmp_path) == [f".a.{HOST}.1.partial", f".a.{HOST}.2.partial", "a", "precious"]
