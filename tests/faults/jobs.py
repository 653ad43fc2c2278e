"""Run whole jobs of `paceline run` in a second or two each, hurt them, and see what came of them.

    job = run_job(tmp_path, "--workers 3 --elastic", faults="kill:rank=1,step=3,phase=exchange")
    job.code, job.text                    how it ended, and what it printed
    job.hashes                            of the final weights, by slot
    job.ledger                            the committed steps
    job.samples                           the audit of the samples used
    job.left                              what should have gone with it: processes, memory folders, run folders

The job's supervisor is forked from the parent of all test workers (`borrowed_fork_server`) and runs in `folder`, by
which its processes are found again, whoever their parents are by then.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from paceline.data.audit import Report, audit
from paceline.elastic.decisions import Commit
from paceline.elastic.random_faults import HurtJob
from paceline.elastic.step_log import read_step_log
from paceline.launch.worker_main import ALL_STACKS_SIGNAL
from tests.workers import _CONTEXT

SCRIPT = Path(__file__).with_name("training.py")
LANES = 8
LEDGER = "ledger.jsonl"
STACKS_S = 0.5
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Job:
    """What is left of a job that has ended."""

    code: int | None
    out: str
    err: str
    hashes: dict[int, str]
    ledger: list[Commit]
    seconds: float
    folder: Path
    left: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return f"{self.out}{self.err}"

    @property
    def samples(self) -> Report:
        return audit(self.folder / "run")

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.ledger]


def run_job(folder: Path, flags: str, arguments: str = "", **options: Any) -> Job:
    """Start it, wait for its end, and look around."""
    with started_job(folder, flags, arguments, **options) as job:
        return job.finish()


@contextmanager
def started_job(
    folder: Path,
    flags: str,
    arguments: str = "",
    *,
    faults: str | None = None,
    script: Path = SCRIPT,
    lanes: int | None = LANES,
    environment: dict[str, str] | None = None,
    timeout_s: float = 75.0,
) -> Iterator[RunningJob]:
    """A job that goes on while the test does something to it; nothing of it outlives the block."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    variables = {"TMPDIR": str(temporary), **(environment or {})}
    if faults is not None:
        variables["PACELINE_FAULTS"] = faults
    of_flag = [] if lanes is None else ["--lanes", str(lanes)]
    command = ["run", *of_flag, *shlex.split(flags), str(script), *shlex.split(arguments)]
    outputs = (folder / "out.txt", folder / "err.txt")
    process = _CONTEXT.Process(target=_run_paceline, args=(command, folder, variables, *outputs))
    process.start()
    job = RunningJob(process, folder, timeout_s)
    try:
        yield job
    finally:
        job.end()


class RunningJob:
    def __init__(self, process: Any, folder: Path, timeout_s: float) -> None:
        self._process, self.folder = process, folder
        self._begun = time.monotonic()
        self._deadline = self._begun + timeout_s

    @property
    def supervisor(self) -> int:
        return int(self._process.pid)

    @property
    def committed(self) -> list[Commit]:
        path = self.folder / LEDGER
        return read_step_log(path) if path.exists() else []

    def signal(self, number: signal.Signals) -> None:
        """To the supervisor."""
        os.kill(self.supervisor, number)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            assert self._process.is_alive(), f"the job ended before {what}:\n{self.printed()}"
            assert time.monotonic() < self._deadline, f"waited in vain until {what}:\n{self.printed()}"
            time.sleep(0.01)

    def finish(self) -> Job:
        self._process.join(max(0.0, self._deadline - time.monotonic()))
        assert self._process.exitcode is not None, f"the job did not end in time:\n{self._with_stacks()}"
        return Job(
            code=self._process.exitcode,
            out=(self.folder / "out.txt").read_text(),
            err=(self.folder / "err.txt").read_text(),
            hashes={int(path.name): path.read_text() for path in sorted((self.folder / "hashes").glob("*"))},
            ledger=self.committed,
            seconds=time.monotonic() - self._begun,
            folder=self.folder,
            left=self._left(),
        )

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()  # the fork server takes the workers with it
        self._process.join(10)
        for process in processes_in(self.folder):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def _left(self) -> list[str]:
        processes = [f"process {process.pid} {' '.join(process.cmdline())}" for process in processes_in(self.folder)]
        folders = SHARED_MEMORY.glob(f"paceline-{self.supervisor}-*")
        return [*processes, *map(str, folders), *map(str, (self.folder / "tmp").glob("paceline-*"))]

    def _with_stacks(self) -> str:
        """What was printed, and where the workers are now."""
        for pid in HurtJob(self.supervisor, self.folder / LEDGER).processes():
            os.kill(pid, ALL_STACKS_SIGNAL)
        time.sleep(STACKS_S)
        return self.printed()

    def printed(self) -> str:
        return "".join(path.read_text() for name in ("out.txt", "err.txt") if (path := self.folder / name).exists())


def processes_in(folder: Path) -> list[psutil.Process]:
    """All that run in this folder, and so also all that listen on a port for it; a zombie has ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class BorrowedPopen:
    """`paceline …` in a process forked from one that has torch, where a `Popen` is expected."""

    def __init__(self, command: list[str], log: Path, variables: dict[str, str]) -> None:
        self._process = _CONTEXT.Process(target=_run_paceline, args=(command, Path.cwd(), variables, log, log))
        self._process.start()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        self._process.join(30)


def _run_paceline(command: list[str], folder: Path, variables: dict[str, str], out: Path, err: Path) -> None:
    """In the process that becomes the supervisor."""
    from tests.faults.borrowed_fork_server import lend_fork_server

    os.chdir(folder)
    os.environ.update(variables)
    for path, descriptor in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    lend_fork_server()
    from paceline.cli.main import main

    sys.argv = ["paceline", *command]
    main()
