"""From rounds to what is written down: one JSON object, the same keys for every race.

workload  machine  race  steps_per_round     what was run, where
rounds[]                                     every measured round, warm-up left out
contestants{name}                            processes, threads, batch; speed; an Engine's exposed communication
ratios[]                                     ours / peer, paired by round: over all rounds, and over quiet ones
disturbed_rounds                             how many rounds other work had more than 8 % of the cores
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.bench.machine_load import DISTURBED_ABOVE, is_disturbed
from paceline.bench.race import THREADS_PER_WORKER, WARM_UP_ROUNDS, Race, Round
from paceline.bench.statistics import Spread, paired_ratios


def summarise(
    race: Race, workload: Mapping[str, Any], machine: Mapping[str, Any], steps: int, all_rounds: Sequence[Round]
) -> dict[str, Any]:
    rounds = all_rounds[WARM_UP_ROUNDS:]
    return {
        "workload": dict(workload),
        "machine": dict(machine),
        "race": json.loads(race.to_json()),
        "threads_per_worker": THREADS_PER_WORKER,
        "steps_per_round": steps,
        "warm_up_rounds": WARM_UP_ROUNDS,
        "disturbed_above": DISTURBED_ABOVE,
        "disturbed_rounds": sum(_disturbed(each) for each in rounds),
        "contestants": {name: _contestant(name, race, workload, rounds, steps) for name in race.contestants},
        "ratios": [_ratio(ours, peer, rounds) for ours in race.ours for peer in race.against],
        "rounds": [asdict(each) | {"disturbed": _disturbed(each)} for each in rounds],
    }


def _contestant(
    name: str, race: Race, workload: Mapping[str, Any], rounds: Sequence[Round], steps: int
) -> dict[str, Any]:
    processes, batch_size = race.processes(name), race.batch_size(name, workload["batch_size"])
    units = steps * processes * batch_size * workload["units_per_sample"]
    facts: dict[str, Any] = {
        "processes": processes,
        "threads": race.threads(name),
        "batch_size": batch_size,
        "throughput": _spread([units / each.seconds[name] for each in rounds]),
        "step_s": _spread([each.seconds[name] / steps for each in rounds]),
    }
    timings = [each.timing[name] for each in rounds if name in each.timing]
    if timings:
        for what in ("exposed_s", "backward_s", "left_during_backward"):
            facts[what] = _spread([getattr(timing, what) for timing in timings])
    return facts


def _ratio(ours: str, peer: str, rounds: Sequence[Round]) -> dict[str, Any]:
    def throughput(some: Sequence[Round]) -> dict[str, float] | None:
        ratios = paired_ratios([each.seconds[peer] for each in some], [each.seconds[ours] for each in some])
        return _spread(ratios) if ratios else None

    def exposed(some: Sequence[Round]) -> dict[str, float] | None:
        both = [(each.timing[ours].exposed_s, each.timing[peer].exposed_s) for each in some if peer in each.timing]
        ratios = [mine / theirs for mine, theirs in both if theirs > 0]
        return _spread(ratios) if ratios else None

    quiet = [each for each in rounds if not _disturbed(each)]
    return {
        "ours": ours,
        "peer": peer,
        "throughput": throughput(rounds),
        "throughput_in_quiet_rounds": throughput(quiet),
        "exposed": exposed(rounds),
        "exposed_in_quiet_rounds": exposed(quiet),
    }


def _disturbed(measured: Round) -> bool:
    return is_disturbed(measured.foreign, measured.steal)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return asdict(Spread.of(values))
