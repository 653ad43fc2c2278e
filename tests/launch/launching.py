"""Start `paceline run` from a test, and see what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

QUICK = [sys.executable, str(Path(__file__).with_name("without_preload.py")), "run"]
FULL = [sys.executable, "-m", "paceline.cli.main", "run"]

# What an engine would tell, for scripts that have none.
PREAMBLE = """
import os, signal, subprocess, sys, time
from paceline.world.control import ControlClient
rank = int(os.environ["PACELINE_RANK"])
control = ControlClient.connect(os.environ["PACELINE_CONTROL"], rank)
"""


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s until {what}"
        time.sleep(0.02)


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie has ended, whoever is to reap it."""
    running = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
        except psutil.NoSuchProcess:
            pass
    return running


def wait_until_gone(pids: list[int], *folders: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [*map(_told, alive(pids)), *(str(folder) for folder in folders if folder.exists())]:
        assert time.monotonic() < deadline, f"after {timeout_s} s there are still: {'; '.join(left)}"
        time.sleep(0.02)


def _told(pid: int) -> str:
    try:
        with (process := psutil.Process(pid)).oneshot():
            return f"{pid}, child of {process.ppid()}, {process.status()}: {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"{pid}, just gone"


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str
    seconds: float


class Launch:
    """A `paceline run` in its own folder for temporary files, so that a test can see whether any is left."""

    def __init__(self, command: list[str], folder: Path, temporary: Path, environment: dict[str, str]) -> None:
        temporary.mkdir(exist_ok=True)
        self.temporary = temporary
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(temporary), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )

    def run_folders(self) -> list[Path]:
        return list(self.temporary.glob("paceline-*"))

    def descendants(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def finish(self, timeout_s: float = 60) -> Finished:
        out, err = self.process.communicate(timeout=timeout_s)
        return Finished(
            self.process.returncode,
            out.decode(errors="replace"),
            err.decode(errors="replace"),
            time.monotonic() - self.begun,
        )

    def interrupt(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
