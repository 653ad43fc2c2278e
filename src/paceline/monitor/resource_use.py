"""What a worker uses of its host: memory, its share of the CPUs, and how busy its GPU is.

    every half second       NVML is asked how busy the GPU has been
    when records are        memory now; CPU time since the last time, over that of all CPUs the worker may use;
    written                 the mean of what NVML has said since

CPU time is that of the process and of all processes below it, its loader processes among them. The CPUs are those of
the main thread's affinity, or the quota of a control group where that is less. Workers of one host mostly share them,
and then their shares add up to at most one: a worker that keeps 2 of 8 CPUs busy has a share of 0.25.

NVML is the driver's library, which tells what `nvidia-smi` shows, through the optional package nvidia-ml-py. It counts
the time in which any kernel ran on the device, not how much of the device the kernel used; and the device counts, so
several workers on one GPU all have its number.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil  # type: ignore[import-untyped]

from paceline.monitor.events import Use
from paceline.world.host_limits import cpu_quotas
from paceline.world.processor_time import processor_seconds

LEAST_S = 0.1
"""Between two looks at the CPU time, which the kernel counts in hundredths of a second."""


class ResourceUse:
    """Of this process and `device`, torch's. Made and asked by the recorder's thread alone: no step waits for it."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._process = psutil.Process()
        self._cpu = CpuShare(usable_cpus())
        self._gpu: Gpu | None = None
        self._samples, self._busy = 0, 0.0
        self._gpu_share: float | None = None
        if device.type == "cuda":
            # Whatever package and driver are here, in whatever state: what they don't tell is not known.
            with contextlib.suppress(Exception):
                self._gpu = Gpu(uuid_of(device))

    def sample(self) -> None:
        if self._gpu is not None:
            try:
                self._busy += self._gpu.busy()
                self._samples += 1
            except Exception:  # as above; not asked again, since a driver that fails may take its time over it
                self.close()

    def read(self) -> Use:
        """Shares are of the time since the last call, or the one before where that was a moment ago."""
        on_device = 0
        if self._device.type == "cuda":
            import torch

            on_device = torch.cuda.memory_allocated(self._device)
        if self._samples:
            self._gpu_share = self._busy / self._samples
            self._samples, self._busy = 0, 0.0
        return Use(float(self._process.memory_info().rss), float(on_device), self._cpu.read(), self._gpu_share)

    def close(self) -> None:
        gpu, self._gpu, self._gpu_share, self._samples = self._gpu, None, None, 0
        if gpu is not None:
            with contextlib.suppress(Exception):
                gpu.close()


class CpuShare:
    """Of `cpus`, what this process and all below it use from one call to the next."""

    def __init__(
        self,
        cpus: float,
        used_s: Callable[[], float] = lambda: processor_seconds(os.getpid()),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpus, self._used_s, self._clock = cpus, used_s, clock
        self._at, self._used = clock(), used_s()
        self._share: float | None = None

    def read(self) -> float | None:
        now = self._clock()
        if (passed := now - self._at) < LEAST_S:
            return self._share
        before, self._at, self._used = self._used, now, self._used_s()
        # Less than before: /proc can't be read, or a process ended that its parent did not wait for.
        self._share = None if self._used < before or not self._used else (self._used - before) / (passed * self._cpus)
        return self._share


def usable_cpus() -> float:
    # The main thread's: each thread has an affinity of its own.
    return min([float(len(os.sched_getaffinity(os.getpid()))), *cpu_quotas()])


class Gpu:
    """A device of this host as NVML knows it, by its UUID: a number is another one under CUDA_VISIBLE_DEVICES.

    To make one raises whatever error the package or the driver has where either is missing, where NVML does not know
    the device, or tells no utilisation of it (as of a part of a GPU, MIG).
    """

    def __init__(self, uuid: str) -> None:
        with contextlib.ExitStack() as undo:
            self._nvml = undo.enter_context(opened_nvml())
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self.busy()
            self.close = undo.pop_all().close

    def busy(self) -> float:
        """Of the driver's last sample, between a sixth of a second and a second: the share in which a kernel ran."""
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100


@contextlib.contextmanager
def opened_nvml() -> Iterator[Any]:
    """The module `pynvml`; NVML counts who opens it, so other users of it in this process keep it."""
    nvml: Any = importlib.import_module("pynvml")  # not installed with paceline, so not known to a type checker
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def uuid_of(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
