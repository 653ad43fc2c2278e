"""What the hardware could do at best, and what a model asks of it: the two sides of MFU.

    MFU  =  floating-point operations of the model in a second  /  what all workers' devices could do in a second
            6 · parameters · tokens, or as given                   as given, from the table, or measured

Six operations per parameter and token: two in forward, four in backward. What attention does with the context comes on
top and what is computed again does not, by convention. The other side says where it comes from, in the log.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

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
    """Operations that one worker's device can do in a second, and who says so."""

    per_worker: float
    source: str

    @property
    def text(self) -> str:
        return f"{short_flops(self.per_worker)}FLOP/s per worker ({self.source})"


@dataclass(frozen=True)
class ModelFlops:
    """Operations per token; or per sample, where nobody counts tokens."""

    per_unit: float
    unit: str
    source: str

    @property
    def text(self) -> str:
        return f"{short_flops(self.per_unit)}FLOP per {self.unit} ({self.source})"


def model_flops(model: nn.Module, *, per_token: float | None = None, counts_tokens: bool = True) -> ModelFlops:
    unit = "token" if counts_tokens else "sample"
    if per_token is not None:
        return ModelFlops(per_token, unit, "as given")
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return ModelFlops(6.0 * parameters, unit, f"6 × {parameters:,} parameters")


def peak_flops(
    device: torch.device, *, given: float | None = None, dtype: torch.dtype = torch.float32
) -> PeakFlops | None:
    """Of this worker's device; None where nobody knows. On CPUs all workers call it together: they share the cores."""
    if given is not None:
        return PeakFlops(given, "as given")
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


def short_flops(count: float) -> str:
    """`61.4 M`, `1.98 T`."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:.3g} "
