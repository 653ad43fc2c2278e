"""Does a worker still do anything? Time on a processor, of the worker and of the processes it started.

    /proc/4711/stat     … utime stime cutime cstime …      its own, and what its ended children used
    /proc/4711/task/*/children                             those that still run, and so on down

A worker that waits for a peer that has gone uses next to nothing; one that saves, evaluates or compresses does not.
"""

from __future__ import annotations

import os
from pathlib import Path

IDLE_SHARE = 0.01
"""Of one processor. Waiting with a look every now and then (threads that poll) stays below, work does not."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int, proc: Path = Path("/proc")) -> float:
    """What a process and its descendants have used so far; those that have just ended may be missing."""
    try:
        # The name in brackets may hold anything, spaces and brackets too.
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for task in (proc / str(pid) / "task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended meanwhile
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S + sum(processor_seconds(child, proc) for child in children)


def own_processor_seconds(pid: int, proc: Path = Path("/proc")) -> float | None:
    """What all threads of a process have used, without its children's; None where it is stopped, or gone."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "TtZX" else sum(map(int, fields[11:13])) / _TICKS_PER_S


class Activity:
    """Remembers what a worker had used and printed at the last look."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looked_at = float("-inf")
        self._used_s = 0.0
        self._printed = 0

    def seen(self, printed: int, now: float) -> bool:
        """Whether it has done anything since the last look; at the first it has."""
        used_s = processor_seconds(self._pid)
        worked = used_s - self._used_s > IDLE_SHARE * (now - self._looked_at)
        first = self._looked_at == float("-inf")
        active = first or worked or printed != self._printed
        self._looked_at, self._used_s, self._printed = now, used_s, printed
        return active
