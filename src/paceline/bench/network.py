"""The network between workers: what each pair of them has, what all have at once, and what a step would wait for it.

    latency          half the round trip of 8 bytes, the median
    bandwidth        of a pair: a large message over half of its round trip; the others are silent meanwhile
    all at once      an all-reduce of that many bytes between all: 2·(N-1)/N · bytes / time, what each worker sends
    waits, per step  (bytes sent / bandwidth of all at once + 2 · slowest latency) / H, where nothing is hidden

Waits are those of workers with one lane each: one with m of them sends (m + 1) / 2 times as much of what is compressed.
On several hosts the same is measured by `paceline run … -m paceline.bench.network_measure`, which prints the report.
Plan, start and estimates are here, without torch; `network_measure` runs the plan.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.launch.job import Job
from paceline.launch.supervisor import supervise
from paceline.launch.worker_main import Script
from paceline.world.less_traffic import LARGE, WAYS, Way
from paceline.world.world import LaunchSettings

MODULE = "paceline.bench.network_measure"


@dataclass(frozen=True)
class NetworkRun:
    """What is asked for. `step_s`: how long a step computes, if that is known."""

    workers: int = 2
    message_bytes: int = 4 * 2**20
    rounds: int = 20
    parameters: int = 10_000_000
    step_s: float | None = None

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ConfigError(f"--workers {self.workers}: a network needs at least two")
        if self.message_bytes < 1024:
            raise ConfigError(
                f"--mib: messages of {self.message_bytes:,} bytes say nothing about bandwidth; at least 1 KiB"
            )
        if self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds}: at least one round is measured")
        if self.parameters < 1:
            raise ConfigError(f"--parameters {self.parameters}: a model has at least one")
        if self.step_s is not None and not self.step_s > 0:
            raise ConfigError(f"--step-ms {1e3 * self.step_s:g}: a step takes some time")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NetworkRun:
        told = json.loads(text)
        if not isinstance(told, dict) or set(told) != {field.name for field in fields(cls)}:
            raise ConfigError(f"not a measurement: {text[:120]!r}; this module is started by `paceline bench network`")
        return cls(**told)


def estimates(result: Mapping[str, Any], ways: Sequence[Way] = WAYS) -> list[dict[str, Any]]:
    """For each way: what it sends and waits for in a step, and if the step's own time is known what share that is."""
    asked, bandwidth = result["asked"], result["together"]["bandwidth"]
    latency_s = max(pair["latency_s"] for pair in result["pairs"])
    rows = []
    for way in ways:
        job = asked["parameters"], result["workers"]
        waits = way.waits(*job, bandwidth, latency_s)
        share = None if asked["step_s"] is None else waits / (waits + asked["step_s"])
        told = {"way": way.name, "sent_bytes": way.sent(*job), "waits_s": waits, "share": share}
        rows.append({**told, "is_compressed": way.is_compressed})
    return rows


def advice(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which way would cut the wait, with a number; the first row is what is compared with."""
    first, *others = rows
    if first["share"] is None:
        return "with --step-ms, what a step computes, the share of each wait is told"
    kept = f"{first['way']} waits for the network in {first['share']:.0%} of a step"
    if first["share"] < LARGE:
        return f"{kept} at most: leave it as it is"
    found = next((row for row in others if row["share"] < LARGE), min(others, key=lambda row: row["share"]))
    faster = (1 - found["share"]) / (1 - first["share"])
    where = ", with one lane on each worker," if found["is_compressed"] else ""
    return f"{kept}, {found['way']}{where} in {found['share']:.0%}: {faster:.1f} times the steps per second"


def run_in_workers(run: NetworkRun) -> dict[str, Any] | int:
    """The result, or the exit code of workers that failed; they have told why."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        result_file = Path(folder) / "result.json"
        job = Job(
            script=Script(MODULE, (run.to_json(), str(result_file)), is_module=True),
            workers=run.workers,
            settings=LaunchSettings(lanes=run.workers, threads=1),
        )
        code = asyncio.run(supervise(job))
        if code != 0:
            return code
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result
