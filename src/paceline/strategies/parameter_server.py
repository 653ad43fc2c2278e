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
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import ConfigError, LoopError, PacelineError
from paceline.parameter_server.bounded_staleness import BoundedStaleness
from paceline.parameter_server.client import Client
from paceline.parameter_server.clock import Clock
from paceline.parameter_server.link import LocalChannel
from paceline.parameter_server.round_by_round import Mode
from paceline.parameter_server.server import Server
from paceline.parameter_server.staleness_stats import StalenessStats, sum_of
from paceline.parameter_server.treatment import Treatment
from paceline.strategies.pushed_rounds import PushedRounds
from paceline.strategies.registry import Job, Maker, Registered, register
from paceline.strategies.replayed import ReplayedMaker
from paceline.strategies.server_parts import Parts, Plan, serve
from paceline.strategies.strategy import Strategy
from paceline.strategies.sums_on_servers import SumsOnServers
from paceline.strategies.updates_on_arrival import UpdatesOnArrival
from paceline.strategies.updates_on_servers import UpdatesOnServers
from paceline.world.checked_values import number, path_of

LAST_WORDS_S = 3.0  # that the main worker waits for what others have counted
UNCLEAR_S = 10.0  # that a server in an elastic job waits for the others when its own worker leaves in between


@dataclass(frozen=True)
class ParameterServer:
    """`clock` says how old the weights may be that a worker computes with.

    `mode`: servers "update" the weights, with the optimizer of the script, or only "aggregate" gradients, and every
    worker updates its own. `treatment` is for pushes that come late. `key_mib` is the size of what servers hold,
    receive and send as one; by default 4, or less in a small model. `server_devices`: where a server holds its keys,
    spread over these by size; by default in the host's memory.

    `record` is a run folder, in which every process writes what it read and applied. An asynchronous run can be
    replayed from that, bit for bit; without it nothing is written, and the run can't be repeated.
    """

    clock: Clock = field(default_factory=BoundedStaleness)
    mode: Mode = "update"
    treatment: Treatment = field(default_factory=Treatment)
    record: str | Path | None = field(default=None, compare=False)
    key_mib: float | None = field(default=None, compare=False)
    server_devices: tuple[str, ...] = field(default=("cpu",), compare=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"ParameterServer(mode={self.mode!r}) is not known; choose update or aggregate")
        if self.mode == "aggregate" and not self.clock.deterministic:
            raise ConfigError(
                f"ParameterServer(mode='aggregate') with clock {self.clock}: pushes that are applied on arrival need "
                "an optimizer on the server; use mode='update', or a clock whose rounds are summed (s=0, d=N)"
            )
        if self.mode == "aggregate" and self.record is not None:
            raise ConfigError(
                f"ParameterServer(mode='aggregate', record={str(self.record)!r}): servers that only add have no order "
                "of updates to record, and the run has one hash without it; leave record out"
            )
        if self.key_mib is not None:
            number(
                "ParameterServer: key_mib", self.key_mib, above=0, most=2.0**20, why="a key holds at least one block"
            )
        if self.record is not None:
            path_of("ParameterServer: record", self.record)
        check_devices(self.server_devices)

    @property
    def plan(self) -> Plan:
        key_bytes = None if self.key_mib is None else int(self.key_mib * 2**20)
        record = None if self.record is None else Path(self.record)
        return Plan(self.clock, self.mode, self.treatment, key_bytes, record, tuple(self.server_devices))


class ParameterServerMaker(Maker):
    """Strategies of one job share their lines to the servers, and the server that worker 0 may be."""

    def __init__(self, parts: Parts) -> None:
        self._parts, world = parts, parts.job.world
        self._server: Server | None = None
        inside: LocalChannel | None = None
        if world.servers == 0 and world.is_main:
            self._server, inside = parts.server_inside()
        self._lines = parts.lines(inside)
        if parts.job.comm is not None and parts.plan.clock.deterministic:
            parts.job.comm.explain_losses(self._lines.explain_loss)
        self._log = parts.log_of("worker", world.rank)
        parts.job.at_loop_end.append(self._note_loop_end)
        self._rounds_at_end = 0
        self._made: list[PushedRounds] = []
        self._loads: dict[int, tuple[dict[str, Any], int]] | None = {} if len(parts.spaces) > 1 else None

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Strategy:
        parts = self._parts
        space = next((space for space in parts.spaces if space.is_of(optimizers)), None)
        if space is None or [id(p) for p in space.parameters] != [id(parameter) for _, parameter in named]:
            raise LoopError(
                "the optimizers hold other parameters than at engine.prepare() (unfrozen, or a new group), but the "
                "servers hold what was trained then: prepare with all of them, and freeze by a learning rate of 0"
            )
        if self._log is not None and space is not parts.spaces[0]:
            raise LoopError(
                "ParameterServer(record=...) writes down one order of updates, but engine.update() makes one for each "
                "optimizer; record a loop that steps all optimizers together, or leave record out"
            )
        near = self._server if parts.plan.clock.deterministic and parts.plan.mode == "update" else None
        client = Client(self._lines, space.protocol, parts.plan.clock, recycle=parts.rooms.take_back, near=near)
        homes = parts.memory.gradients if space is parts.spaces[0] else None
        options: dict[str, Any] = {"log": self._log, "loads": self._loads, "joint": parts.comm}
        together = space, client, parts.plan.clock, parts.job, self._lines.stats, homes
        made: UpdatesOnArrival | UpdatesOnServers | SumsOnServers
        if not parts.plan.clock.deterministic:
            made = UpdatesOnArrival(*together, meeting=parts.meeting, **options)
        elif parts.plan.mode == "update":
            made = UpdatesOnServers(*together, **options)
        else:
            made = SumsOnServers(*together, **options)
        for optimizer in optimizers:
            if self._loads is not None and id(optimizer) in self._loads:
                state, round = self._loads[id(optimizer)]
                made.load(optimizer, state, round=round)
        self._made.append(made)
        return made

    @property
    def _speaks_for_all(self) -> bool:
        """The first of the workers that are left."""
        job = self._parts.job
        return all(worker in job.lost for worker in range(job.world.rank))

    @property
    def _loop_is_over(self) -> bool:
        """No round was begun after a loop's end: this worker leaves as all do."""
        return sum(made.rounds for made in self._made) == self._rounds_at_end

    def _note_loop_end(self, rounds: int, weights: Callable[[], str]) -> None:
        self._rounds_at_end = sum(made.rounds for made in self._made)
        if self._log is not None and self._speaks_for_all:
            self._log.loop_ended(rounds, weights)

    def close(self) -> None:
        """Say goodbye, serve the others to their end, and tell what was seen."""
        parts, world = self._parts, self._parts.job.world
        well = self._lines.failure is None and all(made.between_rounds for made in self._made)
        if world.elastic is not None and not (well and sys.exc_info()[0] is None):
            self.dismantle()  # the others go on without this worker, and are told so by the coordinator
            return
        parts.meeting.leave(f"stats/worker {world.rank}", self._lines.stats_so_far().to_json())
        self._lines.close()
        if self._server is not None:
            within_s = UNCLEAR_S if world.elastic is not None and not self._loop_is_over else None
            with contextlib.suppress(PacelineError):  # it has told all workers, this one too
                self._server.join(within_s)
            if within_s is not None:
                self._server.abandon("this worker has left its loop")
        if self._log is not None:
            self._log.end(well=well)
        if well and self._speaks_for_all:
            self._tell_what_was_seen()
        parts.close()

    def dismantle(self) -> None:
        """What servers held is gone with them, unless it was kept; the new world's worker 0 is the next to be one."""
        why = "the workers have changed"
        self._parts.abandon(why)
        self._lines.abandon(why)
        if self._server is not None:
            self._server.abandon(why)
        for made in self._made:
            made.forget_gradients()
        if self._log is not None:
            self._log.end(well=False)
        self._parts.close()

    def _tell_what_was_seen(self) -> None:
        parts, world = self._parts, self._parts.job.world
        others = set(range(world.size)) - parts.job.lost - {world.rank}
        names = [f"stats/worker {worker}" for worker in sorted(others)]
        names += [f"stats/server {server}" for server in range(world.servers)]
        found = parts.meeting.found(names, within_s=LAST_WORDS_S)
        seen = [self._lines.stats_so_far(), *map(StalenessStats.of_json, found.values())]
        if self._server is not None:
            seen.append(self._server.stats)
        plural = "" if parts.servers == 1 else "s"
        who = f"{world.servers} server{plural}" if world.servers else "worker 0 as the server"
        title = f"paceline: parameter server, {parts.plan.clock}, {parts.plan.mode}, {who}"
        print("\n    ".join([title, *sum_of(seen).lines()]), flush=True)


def check_devices(devices: object) -> None:
    if not isinstance(devices, tuple | list) or not devices:
        raise ConfigError(
            f"ParameterServer(server_devices={devices!r}): name at least one device, such as ('cpu',) or "
            "('cuda:0', 'cuda:1')"
        )
    for device in devices:
        try:
            torch.device(device)
        except (RuntimeError, TypeError):
            raise ConfigError(
                f"ParameterServer(server_devices=…): {device!r} is no device; write cpu, cuda:0 and the like"
            ) from None


def _open(config: ParameterServer, job: Job) -> Maker:
    if job.replay is not None:
        return ReplayedMaker(config.plan, job, job.replay)
    if job.world.is_server:
        serve(config.plan, job)
        raise SystemExit(0)
    return ParameterServerMaker(Parts(config.plan, job))


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
