"""Parameter server: workers push gradients to servers and read weights back, as far apart as a clock allows.

    Engine(strategy="parameter_server")                                          synchronous: the bits of ddp
    Engine(strategy=ParameterServer(clock=BoundedStaleness(steps=2)))            at most 2 rounds apart
    Engine(strategy=ParameterServer(clock=BoundedDelay(rounds=1)))               2 rounds on the same weights

    paceline run --workers 4 --servers 2 train.py        two processes hold the weights, the keys dealt by size
    paceline run --workers 4 train.py                    worker 0 doubles as the server, as under other launchers

A server runs the same script as the workers, up to `engine.prepare`, where it begins to serve.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import ConfigError, LoopError, PacelineError
from paceline.parameter_server.bounded_staleness import BoundedStaleness
from paceline.parameter_server.client import Client
from paceline.parameter_server.clock import Clock
from paceline.parameter_server.link import LocalChannel
from paceline.parameter_server.round_by_round import Mode
from paceline.parameter_server.server import Server
from paceline.parameter_server.treatment import Treatment
from paceline.strategies.registry import Job, Registered, register
from paceline.strategies.server_parts import Parts, Plan
from paceline.strategies.strategy import Strategy
from paceline.strategies.sums_on_servers import SumsOnServers
from paceline.strategies.updates_on_arrival import UpdatesOnArrival
from paceline.strategies.updates_on_servers import UpdatesOnServers


@dataclass(frozen=True)
class ParameterServer:
    """`clock` says how old the weights may be that a worker computes with.

    `mode`: servers "update" the weights, with the optimizer of the script, or only "aggregate" gradients, and every
    worker updates its own. `treatment` is for pushes that come late. `key_mib` is the size of what servers hold,
    receive and send as one; by default 4, or less in a small model.
    """

    clock: Clock = field(default_factory=BoundedStaleness)
    mode: Mode = "update"
    treatment: Treatment = field(default_factory=Treatment)
    key_mib: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"ParameterServer(mode={self.mode!r}) is not known; choose update or aggregate")
        if self.mode == "aggregate" and not self.clock.deterministic:
            raise ConfigError(
                f"ParameterServer(mode='aggregate') with clock {self.clock}: pushes that are applied on arrival need "
                "an optimizer on the server; use mode='update', or a clock whose rounds are summed (s=0, d=N)"
            )
        if self.key_mib is not None and self.key_mib <= 0:
            raise ConfigError(f"ParameterServer(key_mib={self.key_mib}): a key holds at least one block")

    @property
    def plan(self) -> Plan:
        key_bytes = None if self.key_mib is None else int(self.key_mib * 2**20)
        return Plan(self.clock, self.mode, self.treatment, key_bytes)


class ParameterServerMaker:
    """Strategies of one job share their lines to the servers, and the server that worker 0 may be."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._server: Server | None = None
        inside: LocalChannel | None = None
        if parts.job.world.servers == 0 and parts.job.world.is_main:
            self._server, inside = parts.server_inside()
        self._lines = parts.lines(inside)

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Strategy:
        parts = self._parts
        space = next((space for space in parts.spaces if space.is_of(optimizers)), None)
        if space is None or [id(p) for p in space.parameters] != [id(parameter) for _, parameter in named]:
            raise LoopError(
                "the optimizers hold other parameters than at engine.prepare() (unfrozen, or a new group), but the "
                "servers hold what was trained then: prepare with all of them, and freeze by a learning rate of 0"
            )
        client = Client(self._lines, space.protocol, parts.plan.clock, recycle=parts.rooms.take_back)
        homes = parts.memory.gradients if space is parts.spaces[0] else None
        kind = SumsOnServers if parts.plan.mode == "aggregate" else UpdatesOnServers
        if not parts.plan.clock.deterministic:
            kind = UpdatesOnArrival
        return kind(space, client, parts.plan.clock, parts.job, self._lines.stats, homes)

    def close(self) -> None:
        self._lines.close()
        if self._server is not None:
            with contextlib.suppress(PacelineError):  # it has told all workers, this one too
                self._server.join()
        self._parts.close()


def _open(config: ParameterServer, job: Job) -> ParameterServerMaker:
    parts = Parts(config.plan, job)
    if job.world.is_server:
        parts.serve()
        raise SystemExit(0)
    return ParameterServerMaker(parts)


register(
    Registered(
        "parameter_server",
        ParameterServer,
        _open,
        is_synchronous=lambda config: config.clock.synchronous,
        examples=(ParameterServer(mode="aggregate"),),
        uses_servers=True,
    )
)
