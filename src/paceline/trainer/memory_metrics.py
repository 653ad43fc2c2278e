"""`skip_memory_metrics=False`: how this worker's memory changed in a stage of its life, among the stage's metrics.

    stage    init          the Trainer is made; told with the first metrics after it, and with before_init_mem_cpu
             train         train()
             eval, test    evaluate() and predict(), unless they are called within another stage

    {stage}_mem_cpu_alloc_delta       bytes at its end, less those at its begin
    {stage}_mem_cpu_peaked_delta      the most in between, less those at its end
    {stage}_mem_gpu_…                 likewise what torch has allocated, where the worker's device is a GPU

Of the host it is the resident size. The most of it is a sample's, taken every few milliseconds by a thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

SAMPLED_EVERY_S = 0.005
_STATM = Path("/proc/self/statm")


class MemoryMetrics:
    def __init__(self, wanted: bool, device: torch.device) -> None:
        self._meters: list[_Meter] = []
        if wanted:
            self._meters = [_HostMemory(), *([_GpuMemory(device)] if device.type == "cuda" else [])]
        self._stage: str | None = None
        self._of_init: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage inside another one is a part of that."""
        if self._stage is not None or not self._meters:
            yield
            return
        self._stage = name
        for meter in self._meters:
            meter.start()
        try:
            yield
            if name == "init":
                self._of_init = self.read(name) | {f"before_init_mem_{one.kind}": one.begin for one in self._meters}
        finally:
            self._stage = None
            for meter in self._meters:
                meter.stop()

    def read(self, name: str) -> dict[str, int]:
        """What the stage `name` has to tell when it is about to end; nothing where another one is open."""
        if self._stage != name:
            return {}
        found, self._of_init = self._of_init, {}
        for meter in self._meters:
            now, most = meter.now(), meter.most()
            found[f"{name}_mem_{meter.kind}_alloc_delta"] = now - meter.begin
            found[f"{name}_mem_{meter.kind}_peaked_delta"] = max(0, most - now)
        return found


@dataclass
class _Meter:
    kind: str
    begin: int = 0

    def start(self) -> None:
        self.begin = self.now()

    def now(self) -> int:
        raise NotImplementedError

    def most(self) -> int:
        """Since `start`."""
        raise NotImplementedError

    def stop(self) -> None:
        """Nothing runs."""


class _HostMemory(_Meter):
    def __init__(self) -> None:
        super().__init__("cpu")
        self._most, self._ended, self._thread = 0, threading.Event(), threading.Thread()

    def start(self) -> None:
        super().start()
        self._most = self.begin
        self._ended.clear()
        self._thread = threading.Thread(target=self._sample, name="paceline-memory-metrics", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLED_EVERY_S):
            self._most = max(self._most, self.now())

    def now(self) -> int:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def most(self) -> int:
        return max(self._most, self.now())

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


class _GpuMemory(_Meter):
    def __init__(self, device: torch.device) -> None:
        super().__init__("gpu")
        self._device = device

    def start(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # before, there is nothing to reset
            torch.cuda.reset_peak_memory_stats(self._device)
        super().start()

    def now(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def most(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))
