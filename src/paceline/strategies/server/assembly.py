"""How a job with servers is put together: the same on every process, up to the point where it is a worker or a server.

plan spaces and keys ─► join ─► agree ─► share memory ─┬─► serve()           a server process
                                                       ├─► lines()           a worker
                                                       └─► server_inside()   worker 0, without server processes
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.communicator import Communicator
from paceline.errors import ConfigError, PacelineError
from paceline.optim.group_settings import GroupSettings
from paceline.optim.range_optimizer import check_elementwise
from paceline.parameter_server import handshake
from paceline.parameter_server.channel import GONE, Channel, GroupChannel, LocalChannel, Rooms, local_channels
from paceline.parameter_server.client import Lines
from paceline.parameter_server.clock import Clock
from paceline.parameter_server.handshake import MeetingPoint
from paceline.parameter_server.key_ranges import KeyTable, plan_keys
from paceline.parameter_server.round_by_round import Mode
from paceline.parameter_server.server import GRACE_S, CoreMaker, Server, is_last, keys_of
from paceline.parameter_server.server_core import ServerCore
from paceline.parameter_server.server_key import hold_keys
from paceline.parameter_server.staleness_policy import Treatment
from paceline.parameter_server.staleness_stats import StalenessCounter, StalenessStats
from paceline.parameter_server.update_log import JobFacts, Role, RunLog, facts_of, next_attempt
from paceline.parameter_server.wire import (
    HEADER_TO_SERVER,
    HEADER_TO_WORKER,
    PAYLOAD_TO_SERVER,
    PAYLOAD_TO_WORKER,
    Header,
    Kind,
    Protocol,
)
from paceline.sharding.bucket import Bucket, GradientSpec, plan_buckets
from paceline.sharding.flat_layout import FlatLayout
from paceline.strategies.gradient_buckets import expected_order
from paceline.strategies.registry import Job

_TO_SERVER = (HEADER_TO_SERVER, PAYLOAD_TO_SERVER)
_TO_WORKER = (HEADER_TO_WORKER, PAYLOAD_TO_WORKER)
_MESSAGES_PER_KEY = 4  # that may be under way to one peer before sending waits: two rounds' worth, both ways


@dataclass(frozen=True)
class Plan:
    """What a user chose."""

    clock: Clock
    mode: Mode
    treatment: Treatment
    key_bytes: int | None = None
    record: Path | None = None
    devices: tuple[str, ...] = ("cpu",)  # where a server holds its keys

    @property
    def on_host(self) -> bool:
        return all(torch.device(device).type == "cpu" for device in self.devices)


@dataclass(frozen=True)
class Memory:
    """What this process lets the others see, of space 0; None: it can't, or the clock leaves no safe time for it."""

    gradients: list[Tensor] | None = None  # by bucket
    weights: dict[int, Tensor] | None = None  # by key
    sums: dict[int, Tensor] | None = None  # by key


class Parts:
    def __init__(self, plan: Plan, job: Job) -> None:
        self.plan, self.job, world = plan, job, job.world
        self.servers = max(1, world.servers)
        self.spaces = plan_spaces(
            job.optimizers,
            job.names,
            workers=world.size,
            servers=self.servers,
            lanes=job.lanes,
            bucket_bytes=job.bucket_bytes,
            key_bytes=plan.key_bytes,
        )
        if plan.mode == "update":
            for optimizer in job.optimizers:
                check_elementwise(optimizer, "cpu")
        self.rooms = Rooms()
        self.meeting = MeetingPoint(job.store, world.rank, world.size, job.timeout_s)
        self.comm = handshake.connect(world, job.store, workers_use=job.backend, timeout_s=job.timeout_s)
        try:
            self._end_with_the_generation()
            told = self._agree()
            self._main = told[0]
            self.memory = self._share_memory(on_host=all(one["device"] == "cpu" for one in told))
        except BaseException:
            self.close()
            raise
        if job.client is not None and not plan.clock.deterministic:
            job.client.tell("policy", survive_worker_loss=True)

    def _end_with_the_generation(self) -> None:
        """Where the workers have a group, this one ends with it; one worker alone and servers ask the engine for it."""
        if self.comm is None:
            return
        if self.job.comm is not None:
            self.comm.counts_with(self.job.comm)
        elif self.job.adopt_group is not None:
            self.job.adopt_group(self.comm)

    def _agree(self) -> list[dict[str, Any]]:
        """What all processes say, workers first."""
        plan, space = self.plan, self.spaces[0]
        facts: dict[str, Any] = {
            "keys": [other.table.digest for other in self.spaces],
            "lanes": self.job.lanes,
            "clock": str(plan.clock),
            "mode": plan.mode,
            "treatment": str(plan.treatment),
            "optimizers": [type(optimizer).__name__ for optimizer in space.optimizers],
        }
        if self.job.generation == 1:  # later a schedule has changed them, which runs where the loop does
            facts["settings"] = list(space.settings.by_group(space.settings.read()))
        own = {
            "weights": handshake.weights_digest(space.parameters),
            "device": self.job.device.type,
            "recorded": facts_of(self.job.facts),
            "attempt": 0 if plan.record is None else next_attempt(plan.record),
        }
        told = handshake.check_same_job(self.comm, self.job.world, space.table.layout, facts, own)
        if self.comm is not None and len({one["weights"] for one in told}) > 1:
            handshake.take_over_weights(self.comm, space.parameters)
        return told

    def _share_memory(self, *, on_host: bool) -> Memory:
        space, clock, aggregates = self.spaces[0], self.plan.clock, self.plan.mode == "aggregate"
        sizes = [(bucket.elements, bucket.dtype) for bucket in space.buckets]
        shows_weights = clock.deterministic and self.plan.on_host
        return Memory(
            gradients=handshake.shared_gradients(self.comm, sizes) if clock.synchronous and on_host else None,
            weights=handshake.shared_keys(self.comm, space.table, sums=False) if shows_weights else None,
            sums=handshake.shared_keys(self.comm, space.table, sums=True) if clock.synchronous and aggregates else None,
        )

    def log_of(self, role: Role, number: int) -> RunLog | None:
        """A part of the log of the run; the main worker has counted the starts of the job in its folder."""
        plan, main, table = self.plan, self._main, self.spaces[0].table
        if plan.record is None:
            return None
        facts = main["recorded"] | {"keys": table.digest, "weights": main["weights"]}
        keys = len(table.keys)
        job = JobFacts(self.job.world.size, self.servers, self.job.lanes, keys, str(plan.clock), facts=facts)
        return RunLog(plan.record, main["attempt"], role, number, job)

    def abandon(self, why: str) -> None:
        """The workers have changed: nothing waits in this group any more."""
        if self.comm is not None:
            self.comm.abandon(why)

    def close(self) -> None:
        if self.comm is not None:
            self.comm.close()

    # -- a server ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until all workers have said goodbye."""
        index = self.job.world.server_index
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.servers))
        if self.job.client is not None:
            self.job.client.tell("holds", what=keys_of(self.spaces[0].table, index))
        server = self._server(index)
        server.start()
        try:
            server.join()
        except GONE as error:
            if self.job.next_group is not None:
                self.abandon(str(error))
                server.abandon(str(error))
            raise
        finally:
            self.close()

    def server_inside(self) -> tuple[Server, LocalChannel]:
        """The server that worker 0 doubles as, and the worker's line to it."""
        # A synchronous worker writes to a gradient again when all weights have come; sums go to others after that.
        copies = not self.plan.clock.synchronous or self.plan.mode == "aggregate"
        worker_end, server_end = local_channels(timeout_s=self.job.timeout_s, copies_pushes=copies)
        server = self._server(0, server_end)
        server.start()
        return server, worker_end

    def _server(self, index: int, inside: LocalChannel | None = None) -> Server:
        world = self.job.world
        self._check_devices(index)
        stats = StalenessCounter(len(self.spaces[0].table.of_server(index)))
        channels: dict[int, Channel] = {} if inside is None else {0: inside}
        if self.comm is not None:
            for rank in range(world.size + world.servers):
                if rank != self.comm.rank:
                    outgoing = _TO_WORKER if rank < world.size else _TO_SERVER
                    channels[rank] = self._channel(self.comm, rank, rank, outgoing, _TO_SERVER, index)
        log = self.log_of("server", index)
        makers = [CoreMaker(space.protocol, self._core_of(space, index, stats, log)) for space in self.spaces]

        def left(worker: int, so_far: StalenessStats) -> None:
            self.meeting.say_gone(worker)
            if worker == 0:
                self.meeting.leave(f"stats/server {index}", so_far.to_json())

        return Server(
            *(index, makers, channels, stats),
            timeout_s=self.job.timeout_s,
            grace_s=GRACE_S if world.elastic is None else 0.0,
            on_leave=left,
            log=log,
            sum_homes=self.memory.sums,
        )

    def _check_devices(self, index: int) -> None:
        for device in map(torch.device, self.plan.devices):
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                raise ConfigError(
                    f"ParameterServer(server_devices=…): server {index} is to hold keys on {device}, but sees "
                    f"{torch.cuda.device_count()} GPUs; name others, or cpu"
                )

    def _core_of(
        self, space: Space, index: int, stats: StalenessCounter, log: RunLog | None
    ) -> Callable[[], ServerCore]:
        def make() -> ServerCore:
            keys = space.table.of_server(index) if self.plan.mode == "update" else ()
            homes = self.memory.weights if space is self.spaces[0] else None
            ahead = self.plan.treatment.look_ahead and not self.plan.clock.deterministic
            held = hold_keys(
                *(keys, space.parameters, space.optimizers, space.settings, self.plan.devices, homes),
                look_ahead=ahead,
            )
            return ServerCore(
                *(space.protocol, index, held, space.settings, self.plan.clock),
                mode=self.plan.mode,
                treatment=self.plan.treatment,
                recycle=self.rooms.take_back,
                log=None if log is None else log.applied,
                stats=stats,
            )

        return make

    # -- a worker ----------------------------------------------------------------------------------------------------

    def lines(self, inside: LocalChannel | None) -> Lines:
        world = self.job.world
        channels: list[Channel] = [] if inside is None else [inside]
        for server in range(len(channels), self.servers):
            assert self.comm is not None
            peer = world.size + server if world.servers else 0
            channels.append(self._channel(self.comm, peer, world.size + server, _TO_SERVER, _TO_WORKER, server))
        elastic = world.elastic is not None
        return Lines(world.rank, channels, StalenessCounter(), timeout_s=self.job.timeout_s, elastic=elastic)

    def _channel(
        self,
        comm: Communicator,
        peer: int,
        named: int,
        outgoing: tuple[int, int],
        incoming: tuple[int, int],
        server: int,
    ) -> GroupChannel:
        """To `peer`, about `server`: the one that sends or receives."""

        def room(header: Header) -> Tensor:
            reused = header.kind in (Kind.PUSH, Kind.WEIGHTS, Kind.SUM)
            return self.rooms.lend(header) if reused else torch.empty(header.elements, dtype=header.dtype)

        return GroupChannel(
            comm,
            peer,
            named=named,
            outgoing=outgoing,
            incoming=incoming,
            check=lambda header: check_of(self.spaces, header, server=server),
            room=room,
            last=lambda header: is_last(header, from_server=named >= self.job.world.size),
            most_under_way=64 + _MESSAGES_PER_KEY * len(self.spaces[0].table.keys),
        )


def serve(plan: Plan, job: Job) -> None:
    """A server process, until the workers have said goodbye; in an elastic job to one group of them after the other."""
    while (why := _serve_group(plan, job)) is not None:
        assert job.next_group is not None
        gc.collect()  # the parts of a group hold each other, and its shared memory
        job = job.next_group(why)


def _serve_group(plan: Plan, job: Job) -> str | None:
    """Why the group is over, where it has a successor."""
    try:
        parts = Parts(plan, job)
    except (PacelineError, RuntimeError, OSError) as error:  # somebody may be lost while they meet
        if job.next_group is None or job.generation == 1:
            raise
        return f"{type(error).__name__}: {error}"
    try:
        parts.serve()
    except GONE as error:
        if job.next_group is None:
            raise
        return str(error)
    return None


@dataclass(frozen=True)
class Space:
    named: tuple[tuple[str, Parameter], ...]
    optimizers: tuple[Optimizer, ...]
    settings: GroupSettings  # which there are is known from here on: a schedule made later adds its own notes to groups
    buckets: tuple[Bucket, ...]
    protocol: Protocol

    @property
    def table(self) -> KeyTable:
        return self.protocol.table

    @cached_property
    def parameters(self) -> list[Parameter]:
        return [parameter for _, parameter in self.named]

    def is_of(self, optimizers: Sequence[Optimizer]) -> bool:
        return [id(one) for one in self.optimizers] == [id(one) for one in optimizers]


def plan_spaces(
    optimizers: Sequence[Optimizer],
    names: Mapping[int, str],
    *,
    workers: int,
    servers: int,
    lanes: int,
    bucket_bytes: int,
    key_bytes: int | None,
) -> list[Space]:
    """All optimizers together first; then, where there are several, each of them."""
    spaces: list[Space] = []
    for together in (tuple(optimizers), *([(one,) for one in optimizers] if len(optimizers) > 1 else [])):
        named = tuple(_trained(together, names))
        if not named and spaces:
            continue
        _check_one_device(named)
        layout = FlatLayout.of(named)
        # Where gradients are is no part of the plan: a server has them in the host's memory.
        specs = [GradientSpec(tuple(p.shape), p.dtype, torch.device("cpu")) for _, p in named]
        buckets = plan_buckets(specs, expected_order(len(specs)), bucket_bytes, aligned=False)
        table = plan_keys(layout, buckets, servers=servers, key_bytes=key_bytes)
        spaces.append(Space(named, together, GroupSettings(together), buckets, Protocol(table, workers, lanes)))
    return spaces


def _trained(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> Iterator[tuple[str, Parameter]]:
    unique = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
    for place, (number, parameter) in enumerate(unique.items()):
        yield names.get(number, f"unnamed {place}"), parameter


def _check_one_device(named: Sequence[tuple[str, Parameter]]) -> None:
    by_device = {parameter.device: name for name, parameter in reversed(named)}
    if len(by_device) > 1:
        (first, one), (second, other), *_ = by_device.items()
        raise ConfigError(
            f"strategy='parameter_server': {one!r} is on {first} but {other!r} on {second}; put the model on one device"
        )


def check_of(spaces: Sequence[Space], header: Header, *, server: int) -> None:
    """A header against the space it names; one that names none is refused with the reason."""
    space = next((space for space in spaces if space.table.digest == header.digest), spaces[0])
    space.protocol.check(header, server=server)
