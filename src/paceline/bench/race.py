"""A race: which contestants do the same work, in which order, and how many times.

    round 1   A A A   B B B   C C C          K steps each, timed between barriers; the slowest worker counts
    round 2   B B B   C C C   A A A          the order turns, so that nobody always comes first
    round 3   C C C   A A A   B B B
    round 4   C C C   B B B   A A A          and then backwards, so that nobody always follows the same one

All contestants live in the same worker processes, each with its own copy of the model, so that they meet the same
machine in the same minute. The plan is here, without torch; `measure` runs it. Whoever trains, a step is one global
batch on as many threads:

                     processes   threads of each   batch of each
    one-process          1              N               N·b          in worker 0, while the others wait
    everyone else        N              1                 b
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal

from paceline.errors import ConfigError

WORKLOADS = ("mlp25m", "gpt10m", "convnet")
THREADS_PER_WORKER = 1
WARM_UP_ROUNDS = 2
"""Rounds run like the others and dropped: caches, allocators and bucket orders settle in them."""


@dataclass(frozen=True)
class EngineOptions:
    reduction: Literal["exact", "fast"]
    overlap: bool = True
    strategy: str = "ddp"
    servers: int = 0  # processes beside the workers
    as_trainer: bool = False  # clips gradients and follows a schedule, as a Trainer does by itself


TRAINER = "paceline-trainer"


OURS = {
    "paceline-exact": EngineOptions("exact"),
    "paceline-fast": EngineOptions("fast"),
    "paceline-exact-no-overlap": EngineOptions("exact", overlap=False),
    "paceline-fast-no-overlap": EngineOptions("fast", overlap=False),
    "paceline-star": EngineOptions("exact", strategy="star"),
    "paceline-parameter-server": EngineOptions("exact", strategy="parameter_server", servers=1),
    "paceline-zero1": EngineOptions("exact", strategy="zero1"),
    "paceline-zero2": EngineOptions("exact", strategy="zero2"),
    "paceline-zero3": EngineOptions("exact", strategy="zero3"),
    "paceline-fsdp": EngineOptions("exact", strategy="fsdp"),
    "paceline-engine": EngineOptions("exact", as_trainer=True),
    TRAINER: EngineOptions("exact", as_trainer=True),
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
