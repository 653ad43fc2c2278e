"""How busy the machine was with other work while we measured.

    busy (all programs, /proc/stat) − ours (the workers' own CPU time) = foreign        steal: given to other machines

Both as a share of all cores. A round in which they take more than 8 % together is *disturbed*: it is marked, and the
summary says how many there were.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.world.host_limits import usable_cores

DISTURBED_ABOVE = 0.08


@dataclass(frozen=True)
class CpuClock:
    """CPU seconds since boot, over all cores, at one moment."""

    at_s: float
    busy_s: float
    steal_s: float
    cores: int

    @classmethod
    def read(cls) -> CpuClock:
        return cls.parse(Path("/proc/stat").read_text(), time.perf_counter(), os.sysconf("SC_CLK_TCK"))

    @classmethod
    def parse(cls, text: str, at_s: float, ticks_per_s: int) -> CpuClock:
        lines = [line.split() for line in text.splitlines() if line.startswith("cpu")]
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(ticks) for ticks in lines[0][1:9])
        busy = user + nice + system + irq + softirq
        return cls(at_s, busy / ticks_per_s, steal / ticks_per_s, cores=len(lines) - 1)


def foreign_and_steal(before: CpuClock, after: CpuClock, ours_s: float) -> tuple[float, float]:
    """The shares of all cores that others had between two readings, in which our processes used `ours_s`."""
    capacity = (after.at_s - before.at_s) * before.cores
    foreign = max(0.0, after.busy_s - before.busy_s - ours_s)  # ticks are 10 ms: a little below zero is zero
    return foreign / capacity, (after.steal_s - before.steal_s) / capacity


def is_disturbed(foreign: float, steal: float) -> bool:
    return foreign + steal > DISTURBED_ABOVE


def machine_facts() -> dict[str, str | int]:
    """What a figure depends on besides the code; neither date nor host name."""
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": usable_cores(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
