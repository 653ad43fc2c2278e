"""Run a race: `paceline bench` starts this module in every worker, through the launcher of `paceline run`.

    torchrun --nproc-per-node 2 -m paceline.bench.measure RACE_AS_JSON RESULT_FILE

works as well, because the module only asks which world it is in.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.bench.contestants import Contestant, enter
from paceline.bench.race import THREADS_PER_WORKER, EngineTiming, Race, Round, steps_that_fill, summarise
from paceline.bench.statistics import CpuClock, foreign_and_steal, machine_facts
from paceline.bench.workloads import WORKLOADS, Workload
from paceline.errors import ConfigError
from paceline.torch_compat import PrefixStore
from paceline.world.control import call_supervisor
from paceline.world.environment import read_world
from paceline.world.rendezvous_store import open_store
from paceline.world.world import World

FIRST_STEPS = 2
"""Run before anything is timed: Engine and DDP both learn the order of their buckets in the first one."""
TRIAL_STEPS = 2
PART_S = 0.75
MOST_STEPS_PER_ROUND = 200
MEET_TIMEOUT_S = 120.0


def measure(race: Race, world: World) -> dict[str, Any]:
    """Run the whole race as one worker of `world`; what rank 0 returns is the result."""
    if world.size != race.workers:
        raise ConfigError(f"the race is for {race.workers} workers, but this world has {world.size}")
    workload = WORKLOADS[race.workload]
    workload = replace(workload, batch_size=race.samples_per_worker or workload.batch_size)
    most_steps = FIRST_STEPS + TRIAL_STEPS + race.all_rounds * (race.steps_per_round or MOST_STEPS_PER_ROUND)
    if world.is_server:
        for name in race.with_servers:
            enter(name, workload, race, world, most_steps)  # serves, and ends the process
    with borrowed_settings(), meeting(world):
        contestants: dict[str, Contestant] = {}
        try:
            # Engines meet by their number, and a server's first is that of who uses it.
            for name in (*race.with_servers, *(name for name in race.contestants if name not in race.with_servers)):
                with deterministic(False):  # an Engine that wants it otherwise says so, and is asked in `enter`
                    contestants[name] = enter(name, workload, race, world, most_steps)
            steps = warm_up(race, contestants)
            rounds = []
            for number in range(race.all_rounds):
                rounds.append(run_round(race.order(number), contestants, steps))
                if world.is_main:
                    print(told(number, race, rounds[-1], workload, steps), flush=True)
        finally:
            for contestant in contestants.values():
                contestant.close()
    return summarise(race, workload_facts(workload), machine_facts(), steps, rounds)


def run_round(order: Sequence[str], contestants: Mapping[str, Contestant], steps: int) -> Round:
    before, cpu_before = CpuClock.read(), time.process_time()
    mine: dict[str, float] = {}
    timings: dict[str, EngineTiming] = {}
    for name in order:
        mine[name] = run_part(contestants[name], steps)
        if taken := contestants[name].take_timings():
            timings[name] = _mean_timing(taken)
    seconds = {name: max(column) for name, column in zip(mine, gathered(list(mine.values())), strict=True)}
    timing = {
        name: EngineTiming(*(statistics.fmean(column) for column in gathered(_numbers(of_mine))))
        for name, of_mine in timings.items()
    }
    (ours_s,) = gathered([time.process_time() - cpu_before])
    foreign, steal = foreign_and_steal(before, CpuClock.read(), sum(ours_s))
    return Round(seconds, timing, foreign, steal)


def run_part(contestant: Contestant, steps: int) -> float:
    """Seconds on this worker for `steps` steps that all workers begin together."""
    with deterministic(contestant.deterministic), threads(contestant.threads):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            contestant.step()
        return time.perf_counter() - started


def warm_up(race: Race, contestants: Mapping[str, Contestant]) -> int:
    """First use of everything; the number of steps per round, the same on every worker."""
    trial_s = []
    for contestant in contestants.values():
        run_part(contestant, FIRST_STEPS)
        trial_s.append(run_part(contestant, TRIAL_STEPS) / TRIAL_STEPS)
        contestant.take_timings()
    slowest = [max(column) for column in gathered(trial_s)]
    return race.steps_per_round or steps_that_fill(PART_S, slowest, MOST_STEPS_PER_ROUND)


def gathered(values: Sequence[float]) -> list[list[float]]:
    """For each value the column of all workers' values."""
    mine = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    columns: list[list[float]] = torch.stack(rows, dim=1).tolist()
    return columns


@contextlib.contextmanager
def meeting(world: World) -> Iterator[None]:
    """torch's default group over the launcher's store: DDP's own, and ours for barriers and results."""
    supervisor = call_supervisor(world)
    store = open_store(world, supervisor, MEET_TIMEOUT_S)
    try:
        dist.init_process_group("gloo", store=PrefixStore("bench", store), rank=world.rank, world_size=world.size)
        try:
            yield
            dist.barrier()  # under torchrun rank 0 may serve the store: no worker leaves before all have closed theirs
        finally:
            dist.destroy_process_group()
    finally:
        supervisor.close()


@contextlib.contextmanager
def borrowed_settings() -> Iterator[None]:
    """A worker's threads, and the process as it was afterwards: an Engine sets what it needs for good."""
    fills: Any = torch.utils.deterministic
    filled = fills.fill_uninitialized_memory
    try:
        with deterministic(torch.are_deterministic_algorithms_enabled()), threads(THREADS_PER_WORKER):
            yield
    finally:
        fills.fill_uninitialized_memory = filled


@contextlib.contextmanager
def threads(wanted: int) -> Iterator[None]:
    """Of this process; OMP_NUM_THREADS, which the launcher set, is only where torch began."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def workload_facts(workload: Workload) -> dict[str, Any]:
    return {
        "name": workload.name,
        "parameters": workload.parameters,
        "batch_size": workload.batch_size,
        "units_per_sample": workload.units_per_sample,
        "unit": workload.unit,
    }


def told(number: int, race: Race, measured: Round, workload: Workload, steps: int) -> str:
    """One line per round, for the user who watches."""
    units = steps * race.workers * workload.batch_size * workload.units_per_sample
    speeds = " · ".join(f"{name} {units / measured.seconds[name]:,.0f}" for name in race.contestants)
    others = f"other work {measured.foreign + measured.steal:.0%}"
    return f"round {number + 1}/{race.all_rounds}: {speeds} {workload.unit} · {others}"


def _mean_timing(timings: Sequence[EngineTiming]) -> EngineTiming:
    columns = zip(*(_numbers(timing) for timing in timings), strict=True)
    return EngineTiming(*(statistics.fmean(column) for column in columns))


def _numbers(timing: EngineTiming) -> list[float]:
    return [timing.exposed_s, timing.backward_s, timing.left_during_backward]


def main(race: str, result_file: str) -> None:
    world = read_world()
    result = measure(Race.from_json(race), world)
    if world.is_main:
        Path(result_file).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
