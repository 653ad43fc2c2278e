"""The registry: a strategy is one file with a frozen config, found by name or by a config object.

    Engine(strategy="star")             the registered config with its defaults
    Engine(strategy=StarConfig())       a config of the user's own making

A file registers its `Registered` when it is imported; `strategies/__init__.py` lists the files. The tests of bits and
the fuzzer iterate over `STRATEGIES`, so a synchronous one is tested by existing.

To add one that differs from ddp only in how a bucket becomes a sum, write an `Exchange` for `DdpMaker` as star.py does.
To add another, write in a file of its own: a class with the members of `Strategy` (most come from `InBuckets` in
buckets.py, from `ShardedStrategy` in zero/sharded.py, or where replicas differ between steps from `LocalTraining` in
local/local_training.py), a `Maker` that makes it for some optimizers' parameters, a frozen config, and
`register(Registered(name, config, open))`. Either is named in `strategies/__init__.py`; where else its name belongs is
listed in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.communicator import Communicator
from paceline.collectives.gradient_exchange import Reduction
from paceline.compression import Compression
from paceline.errors import ConfigError
from paceline.optim.precision import Precision
from paceline.parameter_server.replay import Replay
from paceline.sharding.footprint import FOOTPRINTS, Footprint, Model, footprint
from paceline.strategies.meta_device import Given
from paceline.strategies.strategy import Strategy, TensorPeers
from paceline.torch_compat import Store
from paceline.world.control import Supervisor
from paceline.world.lanes import neighbouring_lanes
from paceline.world.world import World

SYNCHRONOUS = "synchronous"  # of strategies that give the bits of ddp, in saved states

LaneAssignment = tuple[tuple[int, ...], ...]  # the lanes of each worker
LoopEndListener = Callable[[int, Callable[[], str]], None]  # of (steps so far, a function that makes the weights' hash)


@dataclass(frozen=True)
class Job:
    """What a strategy builds on: who is there, how they talk, what is trained, and the constants it cares about."""

    world: World
    comm: Communicator  # between the workers; a `SingleWorker` where there is one, and on a server
    store: Store | None  # for groups of its own; None: there is no other process
    supervisor: Supervisor  # that started this process
    device: torch.device
    models: Sequence[nn.Module]
    names: Mapping[int, str]  # of the models' parameters, by id
    optimizers: Sequence[Optimizer]
    lanes: int
    reduction: Reduction
    algorithm: str | None
    backend: str
    bucket_bytes: int
    overlap: bool
    timeout_s: float
    seed: int = 0
    given: Given = field(default_factory=dict)  # first weights of a model that was built on the meta device, from files
    precision: Precision = field(default_factory=Precision)
    offload: bool = False  # to the host, of any kind; which one is a fact of the job
    whole: tuple[type[nn.Module], ...] = ()  # classes whose modules run with all of their weights: compiled ones
    compression: Compression | None = None  # of gradients
    parts: int = 1  # workers that share a sequence, each with lanes of its own
    peers: TensorPeers = field(default_factory=TensorPeers)  # with the other parts of sharded parameters
    facts: Mapping[str, Any] = field(default_factory=dict)  # what the bits depend on besides the objects, for records
    at_loop_end: list[LoopEndListener] = field(default_factory=list)  # a strategy adds its own
    replay: Replay | None = None  # do again what this has, instead of training
    lost: set[int] = field(default_factory=set)  # workers that a strategy goes on without; it adds them in `drain`
    generation: int = 1  # of the workers of an elastic job
    adopt_group: Callable[[Communicator], None] | None = None  # have a group end with this generation
    next_group: Callable[[str], Job] | None = None  # on a server of an elastic job: when, and why, a group is over


class Maker:
    """Makes a strategy for each set of optimizers that act together, and owns what these strategies share."""

    assignment: LaneAssignment | None = None  # where it depends on more than the number of workers

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Strategy:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def teardown(self) -> None:
        """In place of `close`, when the workers have changed: the group is over, so nothing is sent.

        Models and optimizers are left as `open` found them: parameters of their full shapes and first precision, in
        memory of their own, on the job's device. Their values are what the last step left in them where every worker
        has them whole (ddp), and otherwise anything.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Registered:
    """One strategy. `open` is called once on every process, in `prepare`: what can't work is refused there.

    On a server process `open` serves until the workers have gone, and ends the process by SystemExit.
    """

    name: str
    config: type[Any]
    open: Callable[[Any, Job], Maker]
    bits_of_one_process: Callable[[Any], bool] = lambda config: True
    """So configured, any number of workers gives the bits of one process. Then the tests of bits and the fuzzer try it,
    and elastic jobs take it; otherwise none of these."""
    adds_fast: bool = False
    """`reduction="fast"` changes how it adds: its buckets go through a `GradientExchange` of `job.reduction`. Others
    add exactly whatever is asked for, and the first line of the job says so."""
    bits_of_ddp: bool = True
    """A synchronous one gives the bits that ddp gives: then its checkpoints go on under every other that does.
    Otherwise it trains other numbers, and tests compare it with itself on one worker."""
    examples: tuple[Any, ...] = ()  # ways to configure it that tests should try, beside the defaults
    assign_lanes: Callable[[int, int], LaneAssignment] = neighbouring_lanes
    uses_servers: bool = False
    takes_offload: bool = False
    takes_compression: bool = False  # of lanes' gradients
    takes_low_precision: bool = False  # it lowers the models when it opens, and keeps their fp32 masters
    fills_meta: bool = False  # it gives models that were built on the meta device their first weights itself
    replicated: bool = False  # every worker has all of the state, and an update needs no other worker
    lanes_apart: bool = False
    """Every lane has weights, a gradient and optimizer state of its own. Only what says how much memory that takes
    (engine/memory_check.py) reads it, before the strategy is opened; the step reads `Strategy.lanes_apart`."""
    full_weights: bool = False  # on every worker between steps: it can run the model's forward without the others
    passes_lanes_on: bool = False  # a step's lanes may be with other workers than in the last one: for second opinions


@dataclass(frozen=True)
class Chosen:
    """A registered strategy and how it is configured."""

    entry: Registered
    config: Any

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def bits_of_one_process(self) -> bool:
        return self.entry.bits_of_one_process(self.config)

    @property
    def updates(self) -> str:
        """What two strategies have in common when they train the same numbers."""
        return SYNCHRONOUS if self.bits_of_one_process and self.entry.bits_of_ddp else str(self)

    @property
    def has_footprint(self) -> bool:
        return self.name in FOOTPRINTS

    def footprint(
        self,
        model: Model,
        *,
        workers: int,
        lanes: int,
        accumulate: int = 1,
        copies: int = 1,
        per_host: int = 1,
        on_host: int | None = None,
    ) -> Footprint:
        """What it holds on one worker and moves in one step, by formula: for the planner, and for tests of both.

        `per_host` workers could share memory; whether they keep their weights there is the configuration's affair.
        `on_host`: the workers of each host; by default all are on one.
        """
        if getattr(self.config, "weights", None) not in (None, "per host"):
            per_host = 1
        sizes = {"workers": workers, "lanes": lanes, "accumulate": accumulate, "copies": copies, "per_host": per_host}
        shard_over = getattr(self.config, "shard_over", None) or on_host
        shard_frozen = getattr(self.config, "shard_frozen", True)
        return footprint(self.name, model, **sizes, shard_over=shard_over, shard_frozen=shard_frozen)

    def assign_lanes(self, lanes: int, workers: int) -> LaneAssignment:
        return self.entry.assign_lanes(lanes, workers)

    def __str__(self) -> str:
        default = self.entry.config()
        given = [f for f in fields(self.config) if f.compare]  # not what changes nothing about the result
        changed = [f.name for f in given if getattr(self.config, f.name) != getattr(default, f.name)]
        return " ".join([self.name, *(f"{name}={_shown(getattr(self.config, name))}" for name in changed)])


def _shown(value: Any) -> str:
    """A class, as units are given, by its name."""
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return value.__name__ if isinstance(value, type) else str(value)


_registered: dict[str, Registered] = {}
STRATEGIES: Mapping[str, Registered] = MappingProxyType(_registered)


def register(entry: Registered) -> Registered:
    known = _registered.setdefault(entry.name, entry)
    if known != entry:
        raise ConfigError(f"two strategies are called {entry.name!r}: choose another name for one of them")
    return entry


def choose(strategy: str | object) -> Chosen:
    """The strategy of that name, or the one whose config this is."""
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise ConfigError(f"strategy={strategy!r} is not known; choose one of {', '.join(STRATEGIES)}")
        entry = STRATEGIES[strategy]
        return Chosen(entry, entry.config())
    for entry in STRATEGIES.values():
        if type(strategy) is entry.config:
            return Chosen(entry, strategy)
    raise ConfigError(
        f"strategy={strategy!r} is no strategy; give one of the names {', '.join(STRATEGIES)}, "
        f"or a config such as {' or '.join(f'{entry.config.__name__}()' for entry in STRATEGIES.values())}"
    )


def synchronous_strategies() -> list[Chosen]:
    """Every strategy, in the ways that tests should try, where it gives the bits of one process."""
    ways = [Chosen(e, config) for e in STRATEGIES.values() for config in (e.config(), *e.examples)]
    return [chosen for chosen in ways if chosen.bits_of_one_process]
