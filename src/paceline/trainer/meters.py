"""Meters: how fast a run goes, since the last log and as a whole, and how much of the hardware it uses.

    restart ── step ── step ── step ── since_last_log ── (evaluation, saving) ── restart ── step ── step ── …
       └─────── counted ───────┘                                                    └─── counted ───┘

Only time between a `restart` and the `step`s that follow it counts, so that an evaluation slows no meter down. Nothing
here is smoothed: a log tells what happened since the last one, and a loss that was NaN once is NaN in it.

    MFU  =  floating-point operations of the model in a second  /  peak of all workers' devices in a second
            6 · parameters · tokens (or samples)                    from the table of GPUs, or measured on a CPU

Six operations per parameter and token: two in forward, four in backward. By convention attention over the context and
recomputation are not counted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
from torch import nn


@dataclass
class Stretch:
    """What was done in a stretch of training."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    exposed_s: float = 0.0

    def add(self, *, samples: int, tokens: int, seconds: float, waited_s: float, exposed_s: float) -> None:
        self.steps += 1
        self.samples += samples
        self.tokens += tokens
        self.seconds += seconds
        self.waited_s += waited_s
        self.exposed_s += exposed_s


@dataclass
class Meters:
    """Call `restart` before a step that something else came before, and `step` when one has acted."""

    workers: int = 1
    flops_per_unit: float | None = None  # of the model, for a token, or for a sample where there are no tokens
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

    def step(
        self,
        *,
        samples: int,
        tokens: int = 0,
        waited_s: float = 0.0,
        exposed_s: float = 0.0,
        loss: float | None = None,
    ) -> None:
        """A step of all workers has acted; what they saw in it, and how long this one waited for data and gradients."""
        now = self.clock()
        seconds = 0.0 if self._from is None else now - self._from
        self._from = now
        self.last_loss = loss if loss is not None else self.last_loss
        for stretch in (self._since_log, self.whole):
            stretch.add(samples=samples, tokens=tokens, seconds=seconds, waited_s=waited_s, exposed_s=exposed_s)

    def since_last_log(self) -> dict[str, float]:
        """Since the last call, for a log."""
        stretch, self._since_log = self._since_log, Stretch()
        if not stretch.steps or stretch.seconds <= 0:
            return {}
        values = {
            "samples_per_second": stretch.samples / stretch.seconds,
            "step_time_s": stretch.seconds / stretch.steps,
            "data_wait_s": stretch.waited_s / stretch.steps,
        }
        if self.workers > 1:
            values["exposed_communication_s"] = stretch.exposed_s / stretch.steps
        if stretch.tokens:
            values["tokens_per_second"] = stretch.tokens / stretch.seconds
        mfu = self.mfu(stretch)
        if mfu is not None:
            values["mfu"] = mfu
        if self.memory is not None:
            values["peak_memory_gib"] = self.memory() / 2**30
        return values

    def mfu(self, stretch: Stretch) -> float | None:
        units = stretch.tokens or stretch.samples
        if self.flops_per_unit is None or self.peak is None or stretch.seconds <= 0 or not units:
            return None
        return units * self.flops_per_unit / stretch.seconds / (self.peak.per_worker * self.workers)


def model_flops(model: nn.Module) -> float:
    """For a token or a sample, forward and backward; asked before `prepare`, while the model has all its parameters."""
    return 6.0 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


# -- the peak of a device --------------------------------------------------------------------------------------------

# Dense bf16 (fp16 before Ampere) with fp32 accumulation, in 10¹² per second, from the makers' data sheets. The first
# name that is found in the device's own wins, as whole words: an A4000 is no A40.
GPU_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500), ("B200", 2250), ("B100", 1750),
    ("GH200", 989), ("H200", 989), ("H100 NVL", 835), ("H100 PCIe", 756), ("H100", 989), ("H800", 989), ("H20", 148),
    ("A100", 312), ("A800", 312), ("A40", 150), ("A30", 165), ("A10G", 70), ("A10", 125),
    ("L40S", 362), ("L40", 181), ("L4", 121), ("V100", 125), ("T4", 65),
    ("RTX 5090", 210), ("RTX 4090", 165), ("RTX 3090", 71), ("RTX A6000", 155),
    ("MI355X", 2516), ("MI325X", 1307), ("MI300X", 1307), ("MI250X", 383), ("MI210", 181),
)  # fmt: skip

MEASURE_FOR_S = 0.2
MATRIX = 1024


@dataclass(frozen=True)
class PeakFlops:
    """Operations that one worker's device can do in a second, and where the number comes from."""

    per_worker: float
    source: str

    @property
    def text(self) -> str:
        return f"{_short(self.per_worker)}FLOP/s per worker ({self.source})"


def peak_flops(device: torch.device, dtype: torch.dtype) -> PeakFlops | None:
    """Of this worker's device; None where it is not known. On CPUs all workers call it together: they share cores."""
    if device.type == "cpu":
        return measured_peak(dtype)
    return gpu_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def gpu_peak(name: str) -> PeakFlops | None:
    for part, peak in GPU_PEAKS:
        if re.search(rf"\b{part}\b", name, re.IGNORECASE):
            return PeakFlops(peak * 1e12, f"{part} in bf16, data sheet")
    return None


def measured_peak(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> PeakFlops:
    """The best of some matrix products, by this worker's threads."""
    left, right = torch.full((2, MATRIX, MATRIX), 0.5, dtype=dtype)
    best_s, begun = float("inf"), clock()
    product = left @ right  # the first one sets things up
    while clock() - begun < MEASURE_FOR_S or best_s == float("inf"):
        before = clock()
        torch.mm(left, right, out=product)
        best_s = min(best_s, clock() - before)
    threads = torch.get_num_threads()
    kind = str(dtype).removeprefix("torch.")
    source = f"measured, {kind} matmul on {threads} thread{'s' if threads > 1 else ''}"
    return PeakFlops(2.0 * MATRIX**3 / best_s, source)


def _short(count: float) -> str:
    """`61.4 M`, `1.98 T`."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:.3g} "


# -- memory ----------------------------------------------------------------------------------------------------------

SHARED_FOR_S = 60.0
"""How long the size of shared pages is taken as known: asking the kernel takes 25 ms in a process of 1 GiB."""


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
