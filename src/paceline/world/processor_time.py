"""Time on a processor, as the kernel counts it: of a process, and of a process with all below it.

    /proc/4711/stat     … utime stime cutime cstime …      its own, and what its ended children used
    /proc/4711/task/*/children                             those that still run, and so on down

What an ended child used is its parent's from the moment that the parent has waited for it, so the sum over a family
goes on without a step when one of its processes ends. The kernel counts in hundredths of a second.
"""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int, proc: Path = Path("/proc")) -> float:
    """What a process and its descendants have used so far; those that have just ended may be missing."""
    try:
        fields = _stat(pid, proc)
        tasks = os.listdir(f"{proc}/{pid}/task")
    except OSError:  # it has ended meanwhile
        return 0.0
    children = [int(child) for task in tasks for child in _read(f"{proc}/{pid}/task/{task}/children").split()]
    return sum(map(int, fields[11:15])) / _TICKS_PER_S + sum(processor_seconds(child, proc) for child in children)


def own_processor_seconds(pid: int, proc: Path = Path("/proc")) -> float | None:
    """What all threads of a process have used, without its children's; None where it is stopped, or gone."""
    try:
        fields = _stat(pid, proc)
    except OSError:
        return None
    return None if fields[0] in "TtZX" else sum(map(int, fields[11:13])) / _TICKS_PER_S


def _stat(pid: int, proc: Path) -> list[str]:
    """The fields from the state on; the name in brackets before it may hold anything, spaces and brackets too."""
    return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _read(file: str) -> bytes:
    """A thread may have ended since it was listed: that is no reason to count nothing of its process."""
    try:
        with open(file, "rb", buffering=0) as opened:  # four times as fast as text: there may be a hundred threads
            return opened.read()
    except OSError:
        return b""
