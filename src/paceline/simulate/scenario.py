"""A scenario: what is trained, on how many workers, over which network, and what goes wrong meanwhile.

workers = 4096                     a file in TOML, YAML or JSON; flags of the command line go before it
strategy = "ddp"
algorithm = "hierarchical"
network = "dgx-a100"               a name, or a table with levels (network.py)
parameters = 7e9
compute_ms = 420                   forward and backward of one micro-batch
mtbf_hours = 50000                 of one worker

[[scenario]]                       several to compare: each has what differs
name = "elastic"
[[scenario]]
name = "restart"
recovery = "restart"
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.collectives.choice import check_algorithm
from paceline.errors import ConfigError
from paceline.input_file import cause_of, read_input
from paceline.sharding.footprint import FOOTPRINTS, Model
from paceline.simulate.network import Network, check_keys, network_named, network_of
from paceline.world.checked_values import number, one_word, whole_number

MOST_WORKERS = 2**20
MOST_PAIRS = 2**23
SERVER = "parameter_server"
STRATEGIES = (*FOOTPRINTS, SERVER)
RECOVERIES = ("elastic", "restart")
WINDOWS = {"local_sgd": 8, "diloco": 50}
"""Steps between two exchanges, unless given: the defaults of their configs."""


@dataclass(frozen=True)
class Scenario:
    """Times are in the units of their names; a step is `lanes` × `accumulate` micro-batches on every worker."""

    name: str = ""
    workers: int = 8
    network: Network | str = "ethernet-10g"
    strategy: str = "ddp"
    algorithm: str | None = None  # None: the exact sum, as the engine exchanges it
    parameters: int = 100_000_000
    layers: int = 24  # of equal size: the units of fsdp, and what buckets are filled with
    gradient_bytes: int = 4
    weight_bytes: int = 4
    bucket_mb: float = 16.0  # MiB, the engine's bucket_mib
    lanes: int = 1  # of each worker
    accumulate: int = 1
    servers: int = 0
    every: int | None = None  # local_sgd, diloco: steps of a window
    compute_ms: float = 100.0
    update_ms: float = 0.0  # the optimizer, of all parameters
    other_ms: float = 0.0  # of the loop's body after a step: data, logs
    steps: int = 100
    # what is slow
    jitter: float = 0.0  # standard deviation of a micro-batch's time, as a share of it
    slow_workers: int = 0
    slow_factor: float = 1.0
    pause_chance: float = 0.0  # of a worker in a step
    pause_ms: float = 0.0
    # what is lost
    hours: float = 24.0  # of the job that failures are looked at in
    mtbf_hours: float | None = None  # of one worker; None: nothing fails
    recovery: str = "elastic"
    detect_s: float = 0.02  # an exit is seen at once; a hang after the heartbeat's deadline
    regroup_s: float = 0.19
    commit_ms: float = 0.5  # elastic: what every step waits for its commit
    replace_s: float = 30.0  # until a fresh process has joined
    spares: int = 0  # workers that wait, and take over at once
    restart_s: float = 60.0  # all processes anew, and the checkpoint read
    checkpoint_every: int = 0  # steps; 0: none
    checkpoint_s: float = 0.0  # that a step waits for it
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("workers", 1, MOST_WORKERS), ("parameters", 1, 2**60), ("layers", 1, 10_000), ("gradient_bytes", 1, 8),
            ("weight_bytes", 1, 8), ("lanes", 1, 2**16), ("accumulate", 1, 10**6), ("servers", 0, 4096),
            ("steps", 1, 10**6), ("slow_workers", 0, MOST_WORKERS), ("spares", 0, MOST_WORKERS),
            ("checkpoint_every", 0, 10**9), ("seed", 0, 2**63 - 1),
        ):  # fmt: skip
            found = whole_number(name, _whole(getattr(self, name)), least=least, most=most)
            object.__setattr__(self, name, found)
        for name in (
            "compute_ms", "update_ms", "other_ms", "jitter", "pause_ms", "detect_s", "regroup_s", "commit_ms",
            "replace_s", "restart_s", "checkpoint_s",
        ):  # fmt: skip
            object.__setattr__(self, name, number(name, getattr(self, name), least=0))
        number("bucket_mb", self.bucket_mb, above=0)
        number("slow_factor", self.slow_factor, least=1, why="a slow worker takes at least as long as the others")
        number("pause_chance", self.pause_chance, least=0, most=1)
        number("hours", self.hours, above=0, most=24 * 366)
        if self.mtbf_hours is not None:
            number("mtbf_hours", self.mtbf_hours, above=0)
        one_word("strategy", self.strategy, STRATEGIES)
        one_word("recovery", self.recovery, RECOVERIES)
        if isinstance(self.network, str):
            object.__setattr__(self, "network", network_named(self.network))
        self._check_together()

    def _check_together(self) -> None:
        if self.algorithm is not None:
            check_algorithm(self.algorithm)
            if self.strategy not in ("ddp", "local_sgd", "diloco"):
                raise ConfigError(
                    f"algorithm={self.algorithm!r} with strategy={self.strategy!r}: only ddp, local_sgd and diloco "
                    "have an all-reduce to choose; leave it out"
                )
        if self.servers and self.strategy != SERVER:
            raise ConfigError(f"servers={self.servers} with strategy={self.strategy!r}: only {SERVER} has servers")
        if self.workers * max(1, self.servers) > MOST_PAIRS:
            raise ConfigError(
                f"servers={self.servers:,} with {self.workers:,} workers: each talks to each, and at most "
                f"{MOST_PAIRS:,} pairs are simulated"
            )
        if self.every is not None and self.strategy not in WINDOWS:
            raise ConfigError(f"every={self.every} with strategy={self.strategy!r}: only local_sgd and diloco have it")
        if self.every is not None:
            whole_number("every", self.every, least=1)
        if self.slow_workers > self.workers:
            raise ConfigError(f"slow_workers={self.slow_workers:,} of {self.workers:,} workers: there are fewer")
        if self.compute_ms + self.update_ms + self.other_ms == 0 and self.workers == 1:
            raise ConfigError("compute_ms=0 on one worker: a step would take no time")
        if self.algorithm == "hierarchical" and self.placed_hosts < 2:
            raise ConfigError(
                f"algorithm='hierarchical' with {self.workers:,} workers on network {self.net.name!r}: they are all on "
                "one host, and it needs two; choose ring"
            )
        self.net.for_workers(self.workers)  # refuses a number that does not fill its hosts

    @property
    def net(self) -> Network:
        assert isinstance(self.network, Network)
        return self.network

    @property
    def placed_hosts(self) -> int:
        return max(1, self.workers // (self.net.per_host or self.workers))

    @property
    def window(self) -> int:
        return self.every or WINDOWS.get(self.strategy, 1)

    @property
    def model(self) -> Model:
        """For footprints."""
        return Model(self.parameters, weight=self.weight_bytes, gradient=self.gradient_bytes)

    @property
    def title(self) -> str:
        if self.name:
            return self.name
        return " · ".join(
            [counted(self.workers, "worker"), self.strategy, *filter(None, [self.algorithm]), self.net.name]
        )


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _whole(value: Any) -> Any:
    """7e9 is a whole number too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# -- files -------------------------------------------------------------------------------------------------------------

FIELDS = {field.name for field in fields(Scenario)}
LARGEST_FILE = 2**20


def read_scenarios(path: Path, flags: Mapping[str, Any]) -> list[Scenario]:
    """Those of a file, or the one that it is; flags say more than the file does."""
    told = _read(path)
    several = told.pop("scenario", [{}])
    if not isinstance(several, list) or not several or not all(isinstance(each, dict) for each in several):
        raise ConfigError(f"{path}: scenario is a list of tables ([[scenario]]), each with what differs")
    for table in (told, *several):
        check_keys(str(path), table, FIELDS)
    named = len(several) == 1 and "name" not in told
    more = {"name": path.stem} if named else {}
    return [scenario_of(more | told | each | dict(flags)) for each in several]


def scenario_of(told: Mapping[str, Any]) -> Scenario:
    if isinstance(told.get("network"), dict):
        told = {**told, "network": network_of(str(told["network"].get("name", "own")), _unnamed(told["network"]))}
    return Scenario(**told)


def _unnamed(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "name"}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_input(path, LARGEST_FILE).decode()
        if path.suffix == ".toml":
            told = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            import yaml

            told = yaml.safe_load(text)
        elif path.suffix == ".json":
            told = json.loads(text)
        else:
            raise ConfigError(f"{path}: a scenario is a file that ends with .toml, .yaml or .json")
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {cause_of(error)}") from error
    except Exception as error:  # of PyYAML, which has a tree of its own
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise ConfigError(f"{path}: {cause_of(error)}") from error
    if not isinstance(told, dict):
        raise ConfigError(f"{path}: it holds a {type(told).__name__} and not a table of settings")
    return told
