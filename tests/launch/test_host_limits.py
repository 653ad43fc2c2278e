"""A host that can't carry a job says so before it starts; one that runs out of something on the way says it once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.data import loader_watch
from paceline.errors import DataError
from paceline.launch.folders import MEMORY, elsewhere_than_asked, memory_folder
from paceline.launch.fork_server import ForkServer
from paceline.launch.job import Job
from paceline.launch.supervisor import Supervisor
from paceline.launch.worker_main import Script
from paceline.world import host_limits
from paceline.world.host_limits import MemoryLimit
from paceline.world.world import LaunchSettings, World
from tests.workers import run_workers

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "usable_cores", lambda: 4)
    monkeypatch.setattr(host_limits, "memory_limit", lambda: MemoryLimit(8 * 2**30, "the host"))
    monkeypatch.setattr(host_limits, "process_limits", lambda: iter(()))


@pytest.mark.job
def test_a_launcher_with_24_open_files_ends_at_once_in_one_line(tmp_path: Path) -> None:
    """It wrote 279,604 lines, each a connection of a worker that could not be accepted."""
    (tmp_path / "train.py").write_text("raise SystemExit(9)")

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    ran = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", "run", "--elastic", "--workers", "4", "train.py"],
        cwd=tmp_path, preexec_fn=few_files, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1), ran.stderr[:2000]
    assert "the launcher needs 48 open files, and 24 are allowed here" in ran.stderr


def test_connections_that_cannot_be_accepted_end_the_job_in_one_line() -> None:
    said: list[tuple[str, int]] = []

    class Decided:
        def fail(self, text: str, code: int) -> None:
            said.append((text, code))

    async def run() -> list[dict[str, Any]]:
        loop, left = asyncio.get_running_loop(), []
        supervisor = Supervisor(Job(Script("train.py"), 1, LaunchSettings()))
        supervisor._decider = Decided()  # type: ignore[assignment]
        error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        supervisor._on_loop_error(loop, {"message": "socket.accept() out of system resource", "exception": error})
        loop.default_exception_handler = left.append  # type: ignore[method-assign, assignment]
        supervisor._on_loop_error(loop, {"message": "something else", "exception": ValueError()})
        supervisor._screen.close(1)
        return left

    assert [context["message"] for context in asyncio.run(run())] == ["something else"]
    assert [code for _, code in said] == [1]
    assert said[0][0].startswith("the launcher can't take further connections of workers: Too many open files; raise")


def _refused_forks(world: World, folder: str) -> list[dict[str, Any]]:
    """In a process of its own: a fork server has handlers of signals."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fork_server = ForkServer(theirs, Path(folder), os.getppid())

    def no_fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    os.fork = no_fork
    said = []
    for outputs in ([1, 2], [1]):  # the kernel drops descriptors that a process may not have
        message = {"kind": "start", "rank": 3, "variables": {}}
        socket.send_fds(ours, [json.dumps(message).encode()], outputs)
        assert fork_server._handle_request() is None
        said.append(json.loads(ours.recv(4096)))
    return said


@pytest.mark.workers
def test_a_worker_that_cannot_be_forked_is_reported(tmp_path: Path) -> None:
    (result,) = run_workers(_refused_forks, 1, folder=str(tmp_path))
    assert result.error is None, result.traceback
    assert [(said["kind"], said["rank"], said["text"]) for said in result.value] == [
        ("failed", 3, "Resource temporarily unavailable"),
        ("failed", 3, "Too many open files"),
    ]


# -- memory and folders ------------------------------------------------------------------------------------------------


def in_its_own_mounts(mounts: str, program: str) -> str:
    """What a Python program says in a mount namespace of its own, after shell commands that mount something there."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("needs a mount namespace")
    command = f'{mounts}; exec "$0" -c "$1"'
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-ec", command, sys.executable, program],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.job
@pytest.mark.parametrize(
    ("mount", "told"),
    [
        ("mount -t tmpfs -o size=2g,ro tmpfs /dev/shm", "/dev/shm can't be written to (mounted read-only"),
        ("mount -t tmpfs -o size=64k tmpfs /dev/shm", "/dev/shm has 0 MiB free and 256 MiB are wanted"),
        ("mount -t tmpfs tmpfs /dev; test ! -e /dev/shm", "/dev/shm can't be used (No such file or directory)"),
    ],
)
def test_an_elastic_job_without_shared_memory_says_where_it_keeps_its_state(mount: str, told: str) -> None:
    program = (
        "from paceline.launch.folders import run_folder, memory_folder\n"
        "with run_folder() as run, memory_folder(run, log=print) as kept:\n"
        "    assert kept == run / 'memory' and kept.is_dir() and not kept.is_symlink()\n"
        "assert not run.exists()"
    )
    said = in_its_own_mounts(mount, program).splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"paceline: elastic: {told}")
    assert "what workers keep for each other is in " in said[0]


def test_a_memory_folder_in_shared_memory_is_not_spoken_of(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "shm").mkdir()
    (tmp_path / "run").mkdir()
    with memory_folder(tmp_path / "run", tmp_path / "shm", said.append) as kept:
        assert (tmp_path / "run" / MEMORY).readlink() == kept
    assert said == []


def test_a_run_folder_elsewhere_than_tmpdir_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert elsewhere_than_asked(tmp_path / "paceline-1", str(tmp_path)) is None
    assert elsewhere_than_asked(Path("/tmp/paceline-1"), None) is None
    told = elsewhere_than_asked(Path("/tmp/paceline-1"), "/nowhere")
    assert told == "paceline: TMPDIR=/nowhere can't be written to; the job's run folder is /tmp/paceline-1"
    assert "is too long for the address" in str(elsewhere_than_asked(Path("/tmp/paceline-1"), "/tmp/" + "x" * 150))
    monkeypatch.chdir(tmp_path)
    assert "no temporary folder can be written to" in str(elsewhere_than_asked(tmp_path / "paceline-1", None))


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.ENOENT, errno.EAGAIN, errno.EMFILE])
def test_loader_processes_that_the_system_does_not_allow_are_one_line(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number), "/dev/shm/pym-1")

    monkeypatch.setattr(loader_watch, "RawArray", refuse)
    with pytest.raises(DataError, match=r"processes could not be started: .* \(/dev/shm/pym-1\). They need shared"):
        loader_watch.LoaderWatch(2)
