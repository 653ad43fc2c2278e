"""Run a comparison: `paceline bench collectives` starts this module in every worker.

    torchrun --nproc-per-node 2 -m paceline.bench.collectives_measure COMPARISON_AS_JSON RESULT_FILE

works as well, and so does mpirun, because the module only asks which world it is in.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from paceline.bench.collective_contestants import Contestant, Prepared, Room, enter
from paceline.bench.collectives import BASELINE, ITEM_BYTES, OPERATIONS, WARM_UP_ROUNDS, Comparison, size_text
from paceline.bench.measure import borrowed_settings, gathered, meeting
from paceline.bench.statistics import (
    DISTURBED_ABOVE,
    CpuClock,
    Spread,
    foreign_and_steal,
    is_disturbed,
    machine_facts,
    paired_ratios,
)
from paceline.errors import ConfigError
from paceline.world.environment import read_world
from paceline.world.world import World

TRIAL_CALLS = 3
MOST_CALLS = 5000


@dataclass(frozen=True)
class Round:
    """Seconds of one call, by contestant, on the slowest rank; what others had of the cores meanwhile."""

    seconds: dict[str, float]
    mean_seconds: dict[str, float]
    foreign: float
    steal: float

    @property
    def disturbed(self) -> bool:
        return is_disturbed(self.foreign, self.steal)


@dataclass(frozen=True)
class Part:
    """Seconds of one call among several in a row."""

    median: float
    mean: float

    @classmethod
    def of(cls, stamps: Sequence[float]) -> Part:
        """From the beginning of the first and the ends of all."""
        each = [after - before for before, after in itertools.pairwise(stamps)]
        return cls(statistics.median(each), statistics.fmean(each))


# -- in every worker ---------------------------------------------------------------------------------------------------


def compare(comparison: Comparison, world: World) -> dict[str, Any]:
    """All cases as one worker of `world`; what rank 0 returns is the result."""
    if world.size != comparison.workers:
        raise ConfigError(f"the comparison is for {comparison.workers} workers, but this world has {world.size}")
    names = dict.fromkeys(name for operation in comparison.operations for name in comparison.contestants(operation))
    most = comparison.elements(max(comparison.sizes))
    cases = []
    with borrowed_settings(), meeting(world):
        room = Room(comparison)
        contestants: dict[str, Contestant] = {}
        try:
            for name in names:
                contestants[name] = enter(name, room, world, _get_default_store(), most)
            for operation in comparison.operations:
                for size in comparison.sizes:
                    cases.append(measure_case(comparison, operation, size, contestants, world))
                    if world.is_main:
                        print(told(cases[-1]), flush=True)
        finally:
            for contestant in contestants.values():
                contestant.close()
    return {
        "machine": machine_facts(),
        "comparison": asdict(comparison),
        "threads_per_worker": 1,
        "disturbed_above": DISTURBED_ABOVE,
        "cases": cases,
    }


def measure_case(
    comparison: Comparison, operation: str, size: int, contestants: Mapping[str, Contestant], world: World
) -> dict[str, Any]:
    """One operation at one size."""
    names, elements = comparison.contestants(operation), comparison.elements(size)
    prepared: dict[str, Prepared] = {}
    sent: dict[str, float | None] = {}
    calls: dict[str, int] = {}
    for name in names:
        prepared[name] = contestants[name].prepare(operation, elements)
        before = contestants[name].sent_bytes()
        prepared[name].check(name, world.rank, world.size)
        after = contestants[name].sent_bytes()
        sent[name] = None if before is None or after is None else max(gathered([after - before])[0])
        run_part(prepared[name], 1)
        trial_s = max(gathered([run_part(prepared[name], TRIAL_CALLS).mean])[0])
        calls[name] = min(MOST_CALLS, max(1, round(comparison.part_s / trial_s)))
    all_rounds = [
        run_round(comparison.order(operation, number), prepared, calls) for number in range(comparison.all_rounds)
    ]
    formula = {name: contestants[name].formula_bytes(operation, elements) for name in names}
    rounds = all_rounds[WARM_UP_ROUNDS:]
    case = summarise(operation, elements * ITEM_BYTES, world.size, rounds, calls, sent, formula)
    return {"size": size_text(size), **case}


def run_round(order: Sequence[str], prepared: Mapping[str, Prepared], calls: Mapping[str, int]) -> Round:
    before, cpu_before = CpuClock.read(), time.process_time()
    mine = {name: run_part(prepared[name], calls[name]) for name in order}
    medians, means = (
        {name: max(column) for name, column in zip(mine, gathered(values), strict=True)}
        for values in ([part.median for part in mine.values()], [part.mean for part in mine.values()])
    )
    (ours_s,) = gathered([time.process_time() - cpu_before])
    return Round(medians, means, *foreign_and_steal(before, CpuClock.read(), sum(ours_s)))


def run_part(prepared: Prepared, calls: int) -> Part:
    """Seconds of one call of `calls` that all ranks begin together."""
    call, clock = prepared.call, time.perf_counter
    ends = [0.0] * calls
    dist.barrier()
    started = clock()
    for number in range(calls):
        call()
        ends[number] = clock()
    return Part.of([started, *ends])


# -- from rounds to what is written down -------------------------------------------------------------------------------


def summarise(
    operation: str,
    nbytes: int,
    workers: int,
    rounds: Sequence[Round],
    calls: Mapping[str, int],
    sent: Mapping[str, float | None],
    formula: Mapping[str, float],
) -> dict[str, Any]:
    quiet = [each for each in rounds if not each.disturbed]
    factor = OPERATIONS[operation].factor(workers)
    contestants: dict[str, dict[str, Any]] = {}
    for name in calls:
        time_s = Spread.of([each.seconds[name] for each in rounds])
        contestants[name] = {
            "calls_per_round": calls[name],
            "time_s": asdict(time_s),
            "mean_s": asdict(Spread.of([each.mean_seconds[name] for each in rounds])),
            "algorithm_bandwidth": nbytes / time_s.median,
            "bus_bandwidth": nbytes / time_s.median * factor,
            "sent_bytes": sent[name],
            "formula_bytes": formula[name],
            "times_baseline": _times_baseline(name, [each.seconds for each in rounds]),
            "times_baseline_in_quiet_rounds": _times_baseline(name, [each.seconds for each in quiet]),
            "times_baseline_by_means": _times_baseline(name, [each.mean_seconds for each in rounds]),
        }
    return {
        "operation": operation,
        "bytes": nbytes,
        "workers": workers,
        "bus_factor": factor,
        "contestants": contestants,
        "disturbed_rounds": len(rounds) - len(quiet),
        "rounds": [asdict(each) | {"disturbed": each.disturbed} for each in rounds],
    }


def _times_baseline(name: str, rounds: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """How many times as fast as gloo, round by round."""
    if not rounds or name == BASELINE or BASELINE not in rounds[0]:
        return None
    return asdict(Spread.of(paired_ratios([each[BASELINE] for each in rounds], [each[name] for each in rounds])))


def told(case: Mapping[str, Any]) -> str:
    """One line per case, for the user who watches."""
    times = " · ".join(f"{name} {1e6 * facts['time_s']['median']:,.0f}" for name, facts in case["contestants"].items())
    disturbed = f"{case['disturbed_rounds']} of {len(case['rounds'])} rounds disturbed"
    return f"{case['operation']} {case['size']}: {times} µs · {disturbed}"


def main(comparison: str, result_file: str) -> None:
    world = read_world()
    result = compare(Comparison.from_json(comparison), world)
    if world.is_main:
        Path(result_file).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
