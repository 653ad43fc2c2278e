"""Figures that can be trusted: a median with its spread, ratios of what was measured side by side, and other work.

    round      1      2      3     …
    ours     0.50   0.61   0.52    seconds for the same work
    peer     0.52   0.64   0.53
    ratio    1.04   1.05   1.02    paired: what slowed a whole round slowed both, and cancels

The median of the ratios is steadier than the ratio of the medians: identical runs on one machine drift by up to 13 %.

    busy (all programs, /proc/stat) − ours (the workers' own CPU time) = foreign        steal: given to other machines

Both as a share of all cores. A round in which they take more than 8 % together is *disturbed*: it is marked, and the
summary says how many there were.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.world.host_limits import usable_cores

DISTURBED_ABOVE = 0.08


@dataclass(frozen=True)
class Spread:
    """Median, quartiles (by linear interpolation) and extremes of some values."""

    median: float
    lower_quartile: float
    upper_quartile: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            raise ConfigError("no values to summarise: every round was dropped")
        if len(values) == 1:
            return cls(*[float(values[0])] * 5)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, float(min(values)), float(max(values)))


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """One ratio per round; both sides must come from the same rounds, in order."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


# -- how busy the machine was with other work --------------------------------------------------------------------------


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
