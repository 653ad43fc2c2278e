"""Measure the network between the workers of this world: `paceline bench network` starts this module in every worker.

paceline run --hosts … -m paceline.bench.network_measure        on several hosts; the report is printed
torchrun --nproc-per-node 2 -m paceline.bench.network_measure   works as well
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.bench.measure import gathered, meeting
from paceline.bench.network import NetworkRun
from paceline.bench.statistics import machine_facts
from paceline.errors import ConfigError
from paceline.world.environment import read_world
from paceline.world.world import World

SMALL_BYTES = 8
MORE_OF_SMALL = 10  # round trips of small messages for one of a large one
WARM_UP = 3


def measure(run: NetworkRun, world: World) -> dict[str, Any]:
    """As one worker of `world`; what rank 0 returns is the result."""
    if world.size != run.workers:
        raise ConfigError(f"the measurement is for {run.workers} workers, but this world has {world.size}")
    with meeting(world):
        small, large = (torch.zeros(size, dtype=torch.uint8) for size in (SMALL_BYTES, run.message_bytes))
        pairs = []
        for first, second in itertools.combinations(range(world.size), 2):
            dist.barrier()
            both = first, second, world.rank
            mine = _round_trip(small, *both, MORE_OF_SMALL * run.rounds), _round_trip(large, *both, run.rounds)
            trip, large_trip = (of_workers[first] for of_workers in gathered(mine))
            bandwidth = run.message_bytes / (large_trip / 2)
            pairs.append({"pair": [first, second], "latency_s": trip / 2, "bandwidth": bandwidth})
        (times,) = gathered([_all_reduce(run.message_bytes, run.rounds)])
    seconds = max(times)
    sent = 2 * (world.size - 1) / world.size * run.message_bytes
    together = {"time_s": seconds, "bandwidth": sent / seconds}
    return {
        "asked": asdict(run), "workers": world.size, "pairs": pairs, "together": together, "machine": machine_facts(),
    }  # fmt: skip


def _round_trip(message: Tensor, first: int, second: int, rank: int, rounds: int) -> float:
    """Seconds there and back, the median; of no meaning on other workers than the first."""
    if rank not in (first, second):
        return 0.0
    trips = []
    for _ in range(WARM_UP + rounds):
        started = time.perf_counter()
        if rank == first:
            dist.send(message, second)
            dist.recv(message, second)
        else:
            dist.recv(message, first)
            dist.send(message, first)
        trips.append(time.perf_counter() - started)
    return statistics.median(trips[WARM_UP:])


def _all_reduce(size: int, rounds: int) -> float:
    """Seconds, the median."""
    tensor, calls = torch.zeros(size // 4), []
    for _ in range(WARM_UP + rounds):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        calls.append(time.perf_counter() - started)
    return statistics.median(calls[WARM_UP:])


def main(run: str | None = None, result_file: str | None = None) -> None:
    world = read_world()
    asked = replace(NetworkRun(), workers=world.size) if run is None else NetworkRun.from_json(run)
    result = measure(asked, world)
    if not world.is_main:
        return
    if result_file is not None:
        Path(result_file).write_text(json.dumps(result, indent=2) + "\n")
    else:
        from paceline.bench.report import console, show_network

        show_network(result, console())


if __name__ == "__main__":
    main(*sys.argv[1:])
