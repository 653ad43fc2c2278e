"""Meters: how fast a run goes, since the last log and as a whole.

    restart ── step ── step ── step ── taken ── (evaluation, saving) ── restart ── step ── step ── taken ── …
       └─────── counted ───────┘                                           └──── counted ───┘

Only time between a `restart` and the `step`s that follow it counts, so that an evaluation slows no meter down. Nothing
here is smoothed: a log tells what happened since the last one, and a loss that was NaN once is NaN in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch

from paceline.trainer.peak_flops import ModelFlops, PeakFlops


@dataclass
class Stretch:
    """What was done in a stretch of training."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0

    def add(self, *, samples: int, tokens: int, seconds: float, waited_s: float) -> None:
        self.steps += 1
        self.samples += samples
        self.tokens += tokens
        self.seconds += seconds
        self.waited_s += waited_s


@dataclass
class Meters:
    """Call `restart` before a step that something else came before, and `step` when one has acted."""

    workers: int = 1
    flops: ModelFlops | None = None
    peak: PeakFlops | None = None
    memory: Callable[[], int] | None = None
    clock: Callable[[], float] = time.perf_counter
    whole: Stretch = field(default_factory=Stretch)
    last_loss: float | None = None
    _since_log: Stretch = field(default_factory=Stretch)
    _from: float | None = None

    def restart(self) -> None:
        """What came between the last step and now was no training."""
        self._from = self.clock()

    def step(self, *, samples: int, tokens: int = 0, waited_s: float = 0.0, loss: float | None = None) -> None:
        """A step of all workers has acted; what they saw in it, and how long this one waited for data."""
        now = self.clock()
        seconds = 0.0 if self._from is None else now - self._from
        self._from = now
        self.last_loss = loss if loss is not None else self.last_loss
        for stretch in (self._since_log, self.whole):
            stretch.add(samples=samples, tokens=tokens, seconds=seconds, waited_s=waited_s)

    def taken(self) -> dict[str, float]:
        """Since the last call, for a log."""
        stretch, self._since_log = self._since_log, Stretch()
        return self.told(stretch)

    def told(self, stretch: Stretch) -> dict[str, float]:
        if not stretch.steps or stretch.seconds <= 0:
            return {}
        values = {
            "samples_per_second": stretch.samples / stretch.seconds,
            "step_time_s": stretch.seconds / stretch.steps,
            "data_wait_s": stretch.waited_s / stretch.steps,
        }
        if stretch.tokens:
            values["tokens_per_second"] = stretch.tokens / stretch.seconds
        mfu = self.mfu(stretch)
        if mfu is not None:
            values["mfu"] = mfu
        if self.memory is not None:
            values["peak_memory_gib"] = self.memory() / 2**30
        return values

    def mfu(self, stretch: Stretch) -> float | None:
        if self.flops is None or self.peak is None or stretch.seconds <= 0:
            return None
        units = stretch.tokens if self.flops.unit == "token" else stretch.samples
        return units * self.flops.per_unit / stretch.seconds / (self.peak.per_worker * self.workers) if units else None

    @property
    def mfu_basis(self) -> str | None:
        """What MFU is a fraction of, for the log."""
        if self.flops is None or self.peak is None:
            return None
        return f"{self.flops.text} over {self.workers} × {self.peak.text}"


SHARED_FOR_S = 60.0
"""How long a worker goes by what it knows of its shared pages. Asking the kernel takes 25 ms in a process of 1 GiB."""


class PeakMemory:
    """The most that this worker had at once, in bytes: on its GPU, or its own part of the host's memory.

    Of the host's it is the highest resident size, with pages that workers share, such as torch's own, counted by their
    share.
    """

    def __init__(
        self, device: torch.device, proc: Path = Path("/proc/self"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device, self._proc, self._clock = device, proc, clock
        self._others_share = 0
        self._known_at = float("-inf")

    def __call__(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        try:
            peak = _kilobytes(self._proc / "status")["VmHWM"]
            if self._clock() - self._known_at >= SHARED_FOR_S:
                now = _kilobytes(self._proc / "smaps_rollup")
                self._others_share, self._known_at = now["Rss"] - now["Pss"], self._clock()
            return 1024 * (peak - self._others_share)
        except (OSError, KeyError):  # no such files: another kernel, or a container that hides them
            return 1024 * getrusage(RUSAGE_SELF).ru_maxrss


def _kilobytes(file: Path) -> dict[str, int]:
    pairs = (line.split(":", 1) for line in file.read_text().splitlines() if line.endswith(" kB"))
    return {name: int(value.split()[0]) for name, value in pairs}
