"""What an Engine is told, checked at birth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.collectives.choice import check_algorithm
from paceline.collectives.gradient_exchange import Reduction
from paceline.engine.activation_checkpointing import ActivationCheckpointing
from paceline.errors import ConfigError
from paceline.optim.loss_scale import LossScale, OnNonFinite
from paceline.optim.offload import OffloadName
from paceline.optim.precision import Precision
from paceline.strategies.registry import STRATEGIES, Chosen
from paceline.world.checked_values import number, one_word, seconds, switch, whole_number
from paceline.world.known_names import BACKENDS, MOST_LANES, MOST_THREADS, SEEDS
from paceline.world.world import World

_T = TypeVar("_T")

MOST_ACCUMULATED = 10**6
LARGEST_BUCKET_MIB = 2.0**20


def check_lanes(lanes: Any) -> None:
    whole_number("lanes", lanes, least=1, most=MOST_LANES, why="a job has at least one lane")


def check_threads(threads: Any) -> None:
    whole_number("threads", threads, least=1, most=MOST_THREADS, why="a worker computes with at least one thread")


def check_seed(seed: Any) -> None:
    whole_number("seed", seed, most=SEEDS - 1, why="seeds are whole numbers from 0 to 2**63 - 1")


@dataclass(frozen=True)
class EngineConfig:
    """The job's constants. Lanes and threads are for life: the bits depend on them, never on the number of workers."""

    lanes: int
    accumulate: int
    seed: int
    strategy: Chosen
    reduction: Reduction
    algorithm: str | None
    backend: str
    threads: int
    bucket_mib: float
    overlap: bool
    global_batch_size: int | None
    on_nonfinite: OnNonFinite
    timeout_s: float
    activation_checkpointing: ActivationCheckpointing | None = None
    precision: Precision = field(default_factory=Precision)
    loss_scale: LossScale | None = None
    offload: OffloadName | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, text: str) -> None:
            if not ok:
                raise ConfigError(text)

        check_lanes(self.lanes)
        check_threads(self.threads)
        check_seed(self.seed)
        why = "a lane has at least one micro-batch per step"
        whole_number("accumulate", self.accumulate, least=1, most=MOST_ACCUMULATED, why=why)
        number("bucket_mib", self.bucket_mib, above=0, why="a bucket holds at least one gradient")
        number("bucket_mib", self.bucket_mib, most=LARGEST_BUCKET_MIB)
        seconds("timeout_s", self.timeout_s, why="a wait of no time always fails")
        switch("overlap", self.overlap)
        one_word("backend", self.backend, BACKENDS)
        if self.global_batch_size is not None:
            whole_number("global_batch_size", self.global_batch_size, least=1, why="a step has at least one sample")
        one_word("reduction", self.reduction, ("exact", "fast"))
        if self.algorithm is not None:
            check_algorithm(self.algorithm)
            check(
                self.reduction == "fast",
                f"algorithm={self.algorithm!r} with reduction={self.reduction!r}: the exact sum has an order of its "
                "own, whichever way its bytes take; choose reduction='fast' to train over an algorithm",
            )
        one_word("on_nonfinite", self.on_nonfinite, ("stop", "skip", "continue"))
        check(
            self.precision == Precision() or self.strategy.entry.takes_low_precision,
            f"precision={str(self.precision)!r} with strategy={self.strategy.name!r}, which keeps no fp32 masters of "
            "weights in low precision; choose one of "
            + ", ".join(entry.name for entry in STRATEGIES.values() if entry.takes_low_precision),
        )

    def check_against(self, world: World) -> None:
        if world.servers and not self.strategy.entry.uses_servers:
            raise ConfigError(
                f"{counted(world.servers, 'server')} and strategy={self.strategy.name!r}, which "
                "has no use for them; start without --servers"
                + "".join(f", or choose strategy={entry.name!r}" for entry in STRATEGIES.values() if entry.uses_servers)
            )
        if world.settings.replay is not None and not self.strategy.entry.uses_servers:
            raise ConfigError(
                f"replay of {world.settings.replay}: strategy={self.strategy.name!r} has no order of updates to do "
                "again; the script has changed, or the folder is of another run"
            )
        if world.size > self.lanes:
            raise ConfigError(
                f"{world.size} workers but only {counted(self.lanes, 'lane')}: "
                f"{world.size - self.lanes} of them would have "
                f"nothing to do; start with --lanes {world.size} or more, or with --workers {self.lanes}"
            )


def one_of(name: str, in_script: _T | None, by_launcher: _T | None) -> _T | None:
    """A value that both the script and the launcher may give, but not differently."""
    if in_script is not None and by_launcher is not None and in_script != by_launcher:
        raise ConfigError(
            f"the script says {name}={in_script} and the launcher says --{name.replace('_', '-')} {by_launcher}; give "
            "one of them"
        )
    return in_script if in_script is not None else by_launcher


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
