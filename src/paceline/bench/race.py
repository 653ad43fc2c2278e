"""A race: which contestants do the same work, in which order, and how many times.

    round 1   A A A   B B B   C C C          K steps each, timed between barriers; the slowest worker counts
    round 2   B B B   C C C   A A A          the order turns, so that none always comes first
    round 3   C C C   A A A   B B B
    round 4   C C C   B B B   A A A          and then backwards, so that none always follows the same one

All contestants live in the same worker processes, each with its own copy of the model, so that they meet the same
machine in the same minute. Plan, start and summary are here, without torch; `measure` runs the plan. For all of
them a step is one global batch on as many threads:

                     processes   threads of each   batch of each
    one-process          1              N               N·b          in worker 0, while the others wait
    all others           N              1                 b

The result is one JSON object, with the same keys for every race:

    workload  machine  race  steps_per_round     what was run, where
    rounds[]                                     every measured round, warm-up left out
    contestants{name}                            processes, threads, batch; speed; an Engine's exposed communication
    ratios[]                                     ours / peer, paired by round: over all rounds, and over quiet ones
    disturbed_rounds                             how many rounds other work had more than 8 % of the cores
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from paceline.bench.statistics import DISTURBED_ABOVE, Spread, is_disturbed, paired_ratios
from paceline.errors import ConfigError
from paceline.launch.job import Job
from paceline.launch.supervisor import supervise
from paceline.launch.worker_main import Script
from paceline.world.world import LaunchSettings

WORKLOADS = ("mlp25m", "gpt10m", "convnet")
THREADS_PER_WORKER = 1
WARM_UP_ROUNDS = 2
"""Rounds run like the others and dropped: caches, allocators and bucket orders become steady in them."""


@dataclass(frozen=True)
class EngineOptions:
    reduction: Literal["exact", "fast"]
    overlap: bool = True
    strategy: str = "ddp"
    servers: int = 0  # processes beside the workers


OURS = {
    "paceline-exact": EngineOptions("exact"),
    "paceline-fast": EngineOptions("fast"),
    "paceline-exact-no-overlap": EngineOptions("exact", overlap=False),
    "paceline-fast-no-overlap": EngineOptions("fast", overlap=False),
    "paceline-auto": EngineOptions("exact", strategy="auto"),
    "paceline-star": EngineOptions("exact", strategy="star"),
    "paceline-parameter-server": EngineOptions("exact", strategy="parameter_server", servers=1),
    "paceline-zero1": EngineOptions("exact", strategy="zero1"),
    "paceline-zero2": EngineOptions("exact", strategy="zero2"),
    "paceline-zero3": EngineOptions("exact", strategy="zero3"),
    "paceline-fsdp": EngineOptions("exact", strategy="fsdp"),
}
ONE_PROCESS = "one-process"
PEERS = ("torch-ddp", "torch-ddp-views", "torch-ddp-paceline", "torch-fsdp2", "no-communication", ONE_PROCESS)
BACKENDS = ("paceline", "gloo")


@dataclass(frozen=True)
class Race:
    """`ours` are compared with each of `against`; `steps_per_round=None` takes as many as fill about 0.75 s."""

    workload: str
    workers: int
    ours: tuple[str, ...]
    against: tuple[str, ...]
    rounds: int = 24
    steps_per_round: int | None = None
    backend: str = "paceline"  # ours; the peers' is gloo, except for torch-ddp-paceline
    bucket_mib: float | None = None
    samples_per_worker: int | None = None  # in a step; the workload's own batch size where it is None
    keep_memory: bool = False  # as `paceline run` does, and for all contestants alike

    def __post_init__(self) -> None:
        if self.workload not in WORKLOADS:
            raise ConfigError(f"workload {self.workload!r} is not known; choose one of {', '.join(WORKLOADS)}")
        for name in self.contestants:
            if name not in OURS and name not in PEERS:
                raise ConfigError(
                    f"contestant {name!r} is not known; choose one of {', '.join(PEERS)}, or of ours: {', '.join(OURS)}"
                )
        for side, names in (("for us", self.ours), ("to run against", self.against)):
            if not names:
                raise ConfigError(f"nobody {side}: a race has two sides")
        if both := sorted(set(self.ours) & set(self.against)):
            raise ConfigError(f"{both[0]!r} can't run against itself")
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: a race needs at least one worker")
        if self.rounds <= 0:
            raise ConfigError(f"--rounds {self.rounds}: at least one round is measured")
        if self.steps_per_round is not None and self.steps_per_round < 1:
            raise ConfigError(f"--steps-per-round {self.steps_per_round}: a round has at least one step")
        if self.backend not in BACKENDS:
            raise ConfigError(f"--backend {self.backend!r} is not known; choose one of {', '.join(BACKENDS)}")
        if self.bucket_mib is not None and self.bucket_mib <= 0:
            raise ConfigError(f"--bucket-mib {self.bucket_mib:g}: a bucket holds at least one gradient")
        if self.samples_per_worker is not None and self.samples_per_worker < 1:
            raise ConfigError(f"--batch-size {self.samples_per_worker}: a batch has at least one sample")

    @property
    def contestants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.ours, *self.against)))

    @property
    def servers(self) -> int:
        """Processes beside the workers; idle, except in the turn of who uses them."""
        return max(OURS[name].servers for name in self.contestants if name in OURS) if self.with_servers else 0

    @property
    def with_servers(self) -> tuple[str, ...]:
        return tuple(name for name in self.contestants if name in OURS and OURS[name].servers)

    def processes(self, name: str) -> int:
        """How many train in this contestant's turn."""
        return 1 if name == ONE_PROCESS else self.workers

    def threads(self, name: str) -> int:
        """Of each process of this contestant."""
        return self.workers * THREADS_PER_WORKER // self.processes(name)

    def batch_size(self, name: str, per_worker: int) -> int:
        """Of each process of this contestant, in one step."""
        return self.workers * per_worker // self.processes(name)

    @property
    def all_rounds(self) -> int:
        return WARM_UP_ROUNDS + self.rounds

    def order(self, number: int) -> tuple[str, ...]:
        """Who runs when in round `number`, counted from 0."""
        cycle, first = divmod(number, len(self.contestants))
        names = self.contestants if cycle % 2 == 0 else self.contestants[::-1]
        return names[first:] + names[:first]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Race:
        told = json.loads(text)
        if not isinstance(told, dict) or set(told) != {field.name for field in fields(cls)}:
            raise ConfigError(f"not a race: {text[:120]!r}; this module is started by `paceline bench`")
        return cls(**told | {"ours": tuple(told["ours"]), "against": tuple(told["against"])})


@dataclass(frozen=True)
class EngineTiming:
    """Seconds of an average step of one part, averaged over the workers too; only an Engine tells them."""

    exposed_s: float
    backward_s: float
    left_during_backward: float


@dataclass(frozen=True)
class Round:
    """What one round measured. `seconds` are those of the slowest worker, for all steps of the part.

    `foreign` and `steal` are the shares of all cores that other programs and other virtual machines had meanwhile.
    """

    seconds: dict[str, float]
    timing: dict[str, EngineTiming]
    foreign: float
    steal: float


def steps_that_fill(target_s: float, step_s: Sequence[float], most: int) -> int:
    """How many steps of the contestants' middle speed take about `target_s`."""
    middle = sorted(step_s)[len(step_s) // 2]
    return min(most, max(1, round(target_s / middle)))


def run_in_workers(race: Race) -> dict[str, Any] | int:
    """The result, or the exit code of workers that failed; the supervisor has told why."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        result_file = Path(folder) / "result.json"
        job = Job(
            script=Script("paceline.bench.measure", (race.to_json(), str(result_file)), is_module=True),
            workers=race.workers,
            servers=race.servers,
            settings=LaunchSettings(lanes=race.workers, threads=THREADS_PER_WORKER, backend=race.backend),
            keep_memory=race.keep_memory,
        )
        code = asyncio.run(supervise(job))
        if code != 0:
            return code
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result


# -- from rounds to what is written down -------------------------------------------------------------------------------


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
