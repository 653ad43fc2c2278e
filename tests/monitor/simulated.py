"""A run of workers that never was: their records, as they would have written them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.monitor.events import (
    FOLDER,
    FORMAT,
    VERSION,
    BucketsRecord,
    Kind,
    Part,
    StepRecord,
    Use,
    pack_buckets,
    pack_note,
    pack_step,
)

TYPICAL_S = {
    Part.DATA: 1e-3,
    Part.FORWARD: 15e-3,
    Part.BACKWARD: 25e-3,
    Part.OPTIMIZER: 4e-3,
    Part.OTHER: 1e-3,
}

USE = Use(2.0**30)


@dataclass
class Simulated:
    """`delays` in seconds, by worker and part, from step `since` on, in one of `every` steps.

    `clocks`: what each host's is ahead by. `meets_after_update`: as under zero. `link`: a worker, and what its messages
    take longer. `buckets` leave at equal distances in backward, and a delay of backward comes before `slow_bucket`.
    """

    workers: int = 4
    steps: int = 60
    seed: int = 0
    jitter: float = 0.1
    delays: Mapping[tuple[int, Part], float] = field(default_factory=dict)
    since: int = 1
    clocks: Mapping[int, float] = field(default_factory=dict)
    latency_s: float = 2e-4
    every: int = 1
    meets_after_update: bool = False
    link: tuple[int, float] | None = None
    use: Use = USE
    buckets: int = 0
    slow_bucket: int = 0
    own: list[list[StepRecord]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """All workers leave a vote together, a latency after the last has come."""
        draw, of_network = np.random.default_rng(self.seed), np.random.default_rng(self.seed + 1000)
        self.own = [[] for _ in range(self.workers)]
        begin = np.full(self.workers, 1000.0)
        for step in range(1, self.steps + 1):
            spent = np.zeros((self.workers, len(Part)))
            for part, typical in TYPICAL_S.items():
                spent[:, part] = typical * (1 + self.jitter * draw.gamma(2.0, 1.0, self.workers))
            is_slow = step >= self.since and of_network.random() < 1 / self.every
            for (worker, part), delay in self.delays.items():
                spent[worker, part] += delay * is_slow * draw.uniform(0.8, 1.2)
            arrived = begin + spent[:, [Part.DATA, Part.FORWARD, Part.BACKWARD]].sum(axis=1)
            voted = arrived.max() + self.latency_s * draw.uniform(1, 1.5, self.workers)
            spent[:, Part.VOTE] = voted - arrived
            spent[:, Part.EXCHANGE] += 1e-3
            peers = of_network.integers(self.workers, size=self.workers)
            peer_s = of_network.exponential(3e-4, self.workers)
            if self.link is not None and step >= self.since:
                slow, longer = self.link
                spent[:, Part.EXCHANGE] += longer * of_network.uniform(0.9, 1.1, self.workers)
                others = [worker for worker in range(self.workers) if worker != slow]
                peers[others], peer_s[others] = slow, longer * of_network.uniform(0.7, 1.0, len(others))
            if self.meets_after_update:
                ends = spent.sum(axis=1) + begin
                spent[:, Part.EXCHANGE] += ends.max() - ends
            for worker, records in enumerate(self.own):
                ahead = self.clocks.get(worker, 0.0)
                times = (float(one) + ahead for one in (begin[worker], arrived[worker], voted[worker]))
                peer = int(peers[worker]), float(peer_s[worker])
                records.append(StepRecord(worker, 0, step, *times, tuple(spent[worker]), 0.01, *peer))
            begin = begin + spent.sum(axis=1)

    def _left(self, record: StepRecord) -> bytes:
        delay = self.delays.get((record.rank, Part.BACKWARD), 0.0) if record.step >= self.since else 0.0
        begins = record.began + record.parts[Part.DATA] + record.parts[Part.FORWARD]
        apart = (record.parts[Part.BACKWARD] - delay) / self.buckets
        left = [begins + apart * (n + 1) + delay * (n >= self.slow_bucket) for n in range(self.buckets)]
        return pack_buckets(BucketsRecord(record.rank, record.generation, record.step, record.began, left))

    def write(self, folder: Path, *, number: int = 0, ended: bool = True, **about: Any) -> Path:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        for worker, records in enumerate(self.own):
            boot = f"host {worker}" if self.clocks else "one host"
            clock = 999.0 + self.clocks.get(worker, 0.0)
            header = {"format": FORMAT, "version": VERSION, "worker": worker, "host": boot, "boot": boot, "step": 0}
            header |= {"clock": clock, "time": 1.7e9, "joins": False, **about}
            packed = []
            for record in records:
                packed += [pack_step(record, self.use), *([self._left(record)] if self.buckets else [])]
            if ended:
                packed.append(pack_note(Kind.END, worker, 0, self.steps, records[-1].voted + 1, ""))
            data = json.dumps(header).encode() + b"\n" + b"".join(packed)
            (folder / FOLDER / f"worker-{worker}.{number}").write_bytes(data)
        return folder
