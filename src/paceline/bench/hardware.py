"""A profile of this machine for `paceline plan`: what a worker computes, and what workers' exchanges cost.

    paceline bench hardware --workers 2 --workers 4 --json here.json

For each number of workers, all busy at once: products by dtype, copies, the optimizer's update; an all-reduce by size
over gloo and over shared memory; and a step of each strategy with a model that computes nothing,

    a step of the Engine - a step of plain torch, which talks to no other worker + the part of the update saved

over three models (bytes and tensors differ), from which three coefficients follow: fixed, per byte, per tensor; over
a fourth of next to no size, the least that it takes; and what a lone worker's Engine adds to a step and to an item.
It measures CPUs, whatever else the machine has: a GPU's profile comes from its data sheet (docs/concepts/plan.md).
The plan is here, without torch; `hardware_measure` runs in the workers.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.launch.job import Job
from paceline.launch.supervisor import supervise
from paceline.launch.worker_main import Script
from paceline.world.world import LaunchSettings

MODULE = "paceline.bench.hardware_measure"
BACKENDS = ("paceline", "gloo")
STRATEGIES = ("ddp", "star", "zero1", "zero2", "zero3", "fsdp")


@dataclass(frozen=True)
class HardwareRun:
    workers: int
    backends: tuple[str, ...] = BACKENDS
    strategies: tuple[str, ...] = STRATEGIES
    steps: int = 8
    threads: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1 or self.steps < 1 or self.threads < 1:
            raise ConfigError("--workers, --steps and --threads are at least 1")
        for name in self.backends:
            if name not in BACKENDS:
                raise ConfigError(f"--backend {name!r} is not known; choose among {', '.join(BACKENDS)}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HardwareRun:
        told = json.loads(text)
        return cls(**told | {name: tuple(told[name]) for name in ("backends", "strategies")})


def run_in_workers(run: HardwareRun) -> dict[str, Any] | int:
    """The result, or the exit code of workers that failed; they have told why."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        result_file = Path(folder) / "result.json"
        job = Job(
            script=Script(MODULE, (run.to_json(), str(result_file)), is_module=True),
            workers=run.workers,
            settings=LaunchSettings(lanes=run.workers, threads=run.threads),
            keep_memory=True,
            quiet=True,
        )
        code = asyncio.run(supervise(job))
        if code != 0:
            return code
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result


def measure_hardware(
    workers: Sequence[int], backends: Sequence[str], steps: int, threads: int, tell: Callable[[str], None]
) -> dict[str, Any] | int:
    """What `planner.hardware.read_hardware` reads, or the exit code of workers that failed."""
    profile: dict[str, Any] = {}
    for count in sorted({1, *workers}):
        tell(f"{count} {'worker' if count == 1 else 'workers'} busy at once …")
        found = run_in_workers(HardwareRun(count, tuple(backends), steps=steps, threads=threads))
        if isinstance(found, int):
            return found
        profile = merged(profile, found, count)
    return profile


def merged(profile: dict[str, Any], found: dict[str, Any], count: int) -> dict[str, Any]:
    """The profile with what another number of workers measured."""
    if not profile:
        profile = {key: found[key] for key in ("name", "memory_bytes", "cores", "threads")} | {
            "format": 1, "kind": "paceline hardware profile", "device": "cpu", "between": None, "rates": {},
            "exchanges": {}, "collectives": {}, "inside": None,
            "source": f"paceline bench hardware, torch {found['torch']}",
        }  # fmt: skip
    profile["rates"][str(count)] = found["rates"]
    for backend, exchanges in found["exchanges"].items():
        profile["exchanges"].setdefault(backend, {})[str(count)] = exchanges
    for backend, rows in found["collectives"].items():
        profile["collectives"].setdefault(backend, {})[str(count)] = rows
    if profile["inside"] is None:
        profile["inside"] = {"name": "memory", "bandwidth": found["rates"]["memory_bandwidth"] / 3, "latency_s": 5e-5}
    if link := found["link"]:
        profile["inside"] = link
    return profile
