"""Parameter server: workers push gradients to servers and read weights back, as far apart as a clock allows.

    Engine(strategy="parameter_server")                                          synchronous: the bits of ddp
    Engine(strategy=ParameterServer(clock=BoundedStaleness(steps=2)))            at most 2 rounds apart
    Engine(strategy=ParameterServer(clock=BoundedDelay(rounds=1)))               2 rounds on the same weights

    paceline run --workers 4 --servers 2 train.py        two processes hold the weights, the keys spread by size
    paceline run --workers 4 train.py                    worker 0 doubles as the server, as under other launchers

A server runs the same script as the workers, up to `engine.prepare`, where it begins to serve.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.communicator import Communicator
from paceline.compression import UNCOMPRESSED, PowerSgd
from paceline.errors import ConfigError, LoopError, PacelineError
from paceline.optim.range_optimizer import check_elementwise
from paceline.parameter_server import handshake
from paceline.parameter_server.channel import GONE, BufferPool, Channel, GroupChannel, LocalChannel, local_channels
from paceline.parameter_server.client import Client, ServerConnections
from paceline.parameter_server.clock import BoundedStaleness, Clock
from paceline.parameter_server.compressed_key import Decoder, decoders
from paceline.parameter_server.handshake import StoreBarrier
from paceline.parameter_server.round_by_round import Mode
from paceline.parameter_server.server import GRACE_S, CoreMaker, Server
from paceline.parameter_server.server_core import ServerCore
from paceline.parameter_server.server_key import hold_keys
from paceline.parameter_server.staleness_policy import StalenessPolicy
from paceline.parameter_server.staleness_stats import StalenessCounter, StalenessStats, sum_of
from paceline.parameter_server.update_log import JobFacts, NoLog, Role, UpdateLog, next_attempt, started_script
from paceline.parameter_server.wire import (
    HEADER_TO_SERVER,
    HEADER_TO_WORKER,
    PAYLOAD_TO_SERVER,
    PAYLOAD_TO_WORKER,
    is_last,
)
from paceline.strategies.registry import Job, Maker
from paceline.strategies.server.rounds import PushedRounds, SumsOnServers, UpdatesOnArrival, UpdatesOnServers, Wiring
from paceline.strategies.server.space import Space, check_of, plan_spaces
from paceline.strategies.strategy import Strategy
from paceline.world import messages
from paceline.world.checked_values import number, path_of

_TO_SERVER = (HEADER_TO_SERVER, PAYLOAD_TO_SERVER)
_TO_WORKER = (HEADER_TO_WORKER, PAYLOAD_TO_WORKER)
_MESSAGES_PER_KEY = 4  # that may be under way to one peer before sending waits: two rounds' worth, both ways
LAST_WORDS_S = 3.0  # that the main worker waits for what others have counted
UNCLEAR_S = 10.0  # that a server in an elastic job waits for the others when its own worker leaves in between


@dataclass(frozen=True)
class ParameterServer:
    """`clock` says how old the weights may be that a worker computes with.

    `mode`: servers "update" the weights, with the optimizer of the script, or only "aggregate" gradients, and every
    worker updates its own. `staleness_policy` is for pushes that come late. `key_mib` is the size of what servers hold,
    receive and send as one; by default 4, or less in a small model. `server_devices`: where a server holds its keys,
    spread over these by size; by default in the host's memory.

    `record`, for asynchronous clocks, is a run folder, in which every process writes what it read and applied. The run
    can be replayed from that, bit for bit; without it nothing is written, and the run can't be repeated.
    """

    clock: Clock = field(default_factory=BoundedStaleness)
    mode: Mode = "update"
    staleness_policy: StalenessPolicy = field(default_factory=StalenessPolicy)
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
        if self.record is not None and self.clock.deterministic:
            raise ConfigError(
                f"ParameterServer(record={str(self.record)!r}) with clock {self.clock}: its rounds are applied in "
                "order, so the run gives the same bits when it is simply run again; leave record out"
            )
        if self.key_mib is not None:
            number(
                "ParameterServer: key_mib", self.key_mib, above=0, most=2.0**20, why="a key holds at least one block"
            )
        if self.record is not None:
            path_of("ParameterServer: record", self.record)
        check_devices(self.server_devices)

    @property
    def key_bytes(self) -> int | None:
        return None if self.key_mib is None else int(self.key_mib * 2**20)

    @property
    def on_host(self) -> bool:
        """Whether servers hold their keys in the host's memory."""
        return all(torch.device(device).type == "cpu" for device in self.server_devices)


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


def check_compression(config: ParameterServer, job: Job) -> None:
    """What servers can't add up is refused."""
    compression = job.compression
    if compression is None:
        return
    if not config.clock.synchronous:
        raise ConfigError(
            f"compression with ParameterServer(clock={config.clock}): residuals are kept for rounds that all workers "
            "end together; choose the clock BoundedStaleness(0), or leave compression out"
        )
    if any(isinstance(compressor, PowerSgd) for _, compressor in compression.rules):
        raise ConfigError(
            "compression='powersgd' with strategy='parameter_server': its second factor is made of the sum of the "
            "first, and servers add once in a round; choose bf16, fp16, int8, sign or topk, or strategy='ddp'"
        )


@dataclass(frozen=True)
class Memory:
    """What this process lets the others see, of space 0; None: it can't, or the clock leaves no safe time for it."""

    gradients: list[Tensor] | None = None  # by bucket
    weights: dict[int, Tensor] | None = None  # by key
    sums: dict[int, Tensor] | None = None  # by key


class Assembly:
    """How a job with servers is put together: the same on every process, until it is a worker or a server.

    plan spaces and keys ─► connect ─► agree ─► share memory ─┬─► serve()           a server process
                                                              ├─► connections()     a worker
                                                              └─► server_inside()   worker 0, without server processes
    """

    def __init__(self, config: ParameterServer, job: Job) -> None:
        self.config, self.job, world = config, job, job.world
        self.servers = max(1, world.servers)
        self.spaces = plan_spaces(
            job.optimizers,
            job.names,
            workers=world.size,
            servers=self.servers,
            lanes=job.lanes,
            bucket_bytes=job.bucket_bytes,
            key_bytes=config.key_bytes,
            compression=job.compression or UNCOMPRESSED,
        )
        if config.mode == "update":
            for optimizer in job.optimizers:
                check_elementwise(optimizer, "cpu", is_told_settings=True)
        self.buffers = BufferPool()
        self.barrier = StoreBarrier(job.store, world.rank, world.size, job.timeout_s)
        self.comm = handshake.connect(world, job.store, workers_use=job.backend, timeout_s=job.timeout_s)
        try:
            self._end_with_the_generation()
            gathered = self._agree()
            self._main = gathered[0]
            self.memory = self._share_memory(on_host=all(one["device"] == "cpu" for one in gathered))
        except BaseException:
            self.close()
            raise
        if not config.clock.deterministic:
            job.supervisor.tell("policy", survive_worker_loss=True)

    def _end_with_the_generation(self) -> None:
        """Where the workers have a group, this one ends with it; one worker alone and servers ask the engine for it."""
        if self.comm is None:
            return
        if self.job.comm.size > 1:
            self.comm.counts_with(self.job.comm)
        elif self.job.adopt_group is not None:
            self.job.adopt_group(self.comm)

    def _agree(self) -> list[dict[str, Any]]:
        """What all processes say, workers first."""
        config, space = self.config, self.spaces[0]
        facts: dict[str, Any] = {
            "keys": [other.table.digest for other in self.spaces],
            "lanes": self.job.lanes,
            "compression": str(self.job.compression),
            "clock": str(config.clock),
            "mode": config.mode,
            "staleness policy": str(config.staleness_policy),
            "optimizers": [type(optimizer).__name__ for optimizer in space.optimizers],
        }
        if self.job.generation == 1:  # later a schedule has changed them, which runs where the loop does
            facts["settings"] = list(space.settings.by_group(space.settings.read()))
        own = {
            "weights": handshake.weights_digest(space.parameters),
            "device": self.job.device.type,
            "recorded": {"script": started_script(), "engine": dict(self.job.facts)},
            "attempt": 0 if config.record is None else next_attempt(Path(config.record)),
        }
        gathered = handshake.check_same_job(self.comm, space.protocol, facts, own)
        if self.comm is not None and len({one["weights"] for one in gathered}) > 1:
            handshake.take_over_weights(self.comm, space.parameters)
        return gathered

    def _share_memory(self, *, on_host: bool) -> Memory:
        space, clock, aggregates = self.spaces[0], self.config.clock, self.config.mode == "aggregate"
        sizes = [(bucket.elements, bucket.dtype) for bucket in space.buckets]
        shows_weights = clock.deterministic and self.config.on_host
        shows_gradients = clock.synchronous and self.job.compression is None  # payloads are messages, of any length
        return Memory(
            gradients=handshake.shared_gradients(self.comm, sizes) if shows_gradients and on_host else None,
            weights=handshake.shared_keys(self.comm, space.table, sums=False) if shows_weights else None,
            sums=handshake.shared_keys(self.comm, space.table, sums=True) if shows_gradients and aggregates else None,
        )

    def log_of(self, role: Role, number: int) -> UpdateLog | NoLog:
        """A part of the log of the run; the main worker has counted the starts of the job in its folder."""
        record, clock, main, table = self.config.record, self.config.clock, self._main, self.spaces[0].table
        if record is None:
            return NoLog()
        facts = main["recorded"] | {"keys": table.digest, "weights": main["weights"]}
        keys = len(table.keys)
        job = JobFacts(self.job.world.size, self.servers, self.job.lanes, keys, str(clock), facts=facts)
        return UpdateLog(Path(record), main["attempt"], role, number, job)

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
        self.job.supervisor.tell("holds", what=self.spaces[0].table.held_by(index))
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
        """The server that worker 0 doubles as, and the worker's channel to it."""
        # A synchronous worker writes to a gradient again when all weights have come; sums go to others after that.
        copies = not self.config.clock.synchronous or self.config.mode == "aggregate"
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
            self.barrier.mark_gone(worker)
            if worker == 0:
                self.barrier.publish(f"stats/server {index}", so_far.to_json())

        return Server(
            *(index, makers, channels, stats),
            timeout_s=self.job.timeout_s,
            grace_s=0.0 if world.is_elastic else GRACE_S,
            on_leave=left,
            log=log,
            shared_sums=self.memory.sums,
        )

    def _check_devices(self, index: int) -> None:
        for device in map(torch.device, self.config.server_devices):
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                raise ConfigError(
                    f"ParameterServer(server_devices=…): server {index} is to hold keys on {device}, but sees "
                    f"{torch.cuda.device_count()} GPUs; name others, or cpu"
                )

    def _core_of(
        self, space: Space, index: int, stats: StalenessCounter, log: UpdateLog | NoLog
    ) -> Callable[[], ServerCore]:
        def make() -> ServerCore:
            config = self.config
            keys = space.table.of_server(index) if config.mode == "update" else ()
            shared = self.memory.weights if space is self.spaces[0] else None
            held = hold_keys(
                *(keys, space.parameters, space.optimizers, space.settings, config.server_devices, shared),
                look_ahead=config.staleness_policy.look_ahead and not config.clock.deterministic,
            )
            return ServerCore(
                *(space.protocol, index, held, space.settings, config.clock),
                mode=config.mode,
                staleness_policy=config.staleness_policy,
                decoders=self._decoders(space, index),
                recycle=self.buffers.give_back,
                log=log.applied if isinstance(log, UpdateLog) else None,
                stats=stats,
            )

        return make

    def _decoders(self, space: Space, index: int) -> dict[int, Decoder]:
        feedback, names = (self.job.compression or UNCOMPRESSED).feedback, space.table.layout.names
        return decoders(space.table.of_server(index), names, seed=self.job.seed, feedback=feedback)

    # -- a worker ----------------------------------------------------------------------------------------------------

    def connections(self, inside: LocalChannel | None) -> ServerConnections:
        world = self.job.world
        channels: list[Channel] = [] if inside is None else [inside]
        for server in range(len(channels), self.servers):
            assert self.comm is not None
            peer = world.size + server if world.servers else 0
            channels.append(self._channel(self.comm, peer, world.size + server, _TO_SERVER, _TO_WORKER, server))
        elastic = world.is_elastic
        return ServerConnections(
            world.rank, channels, StalenessCounter(), timeout_s=self.job.timeout_s, elastic=elastic
        )

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
        return GroupChannel(
            comm,
            peer,
            named=named,
            outgoing=outgoing,
            incoming=incoming,
            check=lambda header: check_of(self.spaces, header, server=server),
            buffers=self.buffers,
            last=lambda header: is_last(header, from_server=named >= self.job.world.size),
            most_under_way=64 + _MESSAGES_PER_KEY * len(self.spaces[0].table.keys),
        )


# -- a worker ----------------------------------------------------------------------------------------------------------


class ParameterServerMaker(Maker):
    """Strategies of one job share their connections to the servers, and the server that worker 0 may be."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly, world = assembly, assembly.job.world
        self._server: Server | None = None
        inside: LocalChannel | None = None
        if world.servers == 0 and world.is_main:
            self._server, inside = assembly.server_inside()
        self._connections = assembly.connections(inside)
        if assembly.job.comm.size > 1 and assembly.config.clock.deterministic:
            assembly.job.comm.explain_losses(self._connections.explain_loss)
        self._log = assembly.log_of("worker", world.rank)
        assembly.job.at_loop_end.append(self._note_loop_end)
        self._rounds_at_end = 0
        self._made: list[PushedRounds] = []
        self._loads: dict[int, tuple[dict[str, Any], int]] | None = {} if len(assembly.spaces) > 1 else None

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Strategy:
        assembly = self._assembly
        space = next((space for space in assembly.spaces if space.is_of(optimizers)), None)
        if space is None or [id(p) for p in space.parameters] != [id(parameter) for _, parameter in named]:
            raise LoopError(
                "the optimizers hold other parameters than at engine.prepare() (unfrozen, or a new group), but the "
                "servers hold what was trained then: prepare with all of them, and freeze by a learning rate of 0"
            )
        if assembly.config.record is not None and space is not assembly.spaces[0]:
            raise LoopError(
                "ParameterServer(record=...) writes down one order of updates, but engine.update() makes one for each "
                "optimizer; record a loop that steps all optimizers together, or leave record out"
            )
        clock, mode = assembly.config.clock, assembly.config.mode
        local_server = self._server if clock.deterministic and mode == "update" else None
        client = Client(
            *(self._connections, space.protocol, clock), recycle=assembly.buffers.give_back, local_server=local_server
        )
        wiring = Wiring(
            *(space, client, clock, assembly.job, self._connections.stats),
            gradients=assembly.memory.gradients if space is assembly.spaces[0] else None,
            log=self._log,
            group=assembly.comm,
            barrier=assembly.barrier,
            loads=self._loads,
        )
        made: UpdatesOnServers | SumsOnServers
        if not clock.deterministic:
            made = UpdatesOnArrival(wiring)
        else:
            made = UpdatesOnServers(wiring) if mode == "update" else SumsOnServers(wiring)
        for optimizer in optimizers:
            if self._loads is not None and id(optimizer) in self._loads:
                state, round = self._loads[id(optimizer)]
                made.load(optimizer, state, round=round)
        self._made.append(made)
        return made

    @property
    def _speaks_for_all(self) -> bool:
        """The first of the workers that are left."""
        job = self._assembly.job
        return all(worker in job.lost for worker in range(job.world.rank))

    @property
    def _loop_is_over(self) -> bool:
        """No round was begun after a loop's end: this worker leaves as all do."""
        return sum(made.rounds for made in self._made) == self._rounds_at_end

    def _note_loop_end(self, rounds: int, weights: Callable[[], str]) -> None:
        self._rounds_at_end = sum(made.rounds for made in self._made)
        if self._speaks_for_all:
            self._log.loop_ended(rounds, weights)

    def close(self) -> None:
        """Say goodbye, serve the others to their end, and tell what was seen."""
        assembly, world = self._assembly, self._assembly.job.world
        well = self._connections.failure is None and all(made.between_rounds for made in self._made)
        if world.is_elastic and not (well and sys.exc_info()[0] is None):
            self.teardown()  # the others go on without this worker; the coordinator tells them
            return
        assembly.barrier.publish(f"stats/worker {world.rank}", self._connections.stats_so_far().to_json())
        self._connections.close()
        if self._server is not None:
            within_s = UNCLEAR_S if world.is_elastic and not self._loop_is_over else None
            with contextlib.suppress(PacelineError):  # it has told all workers, this one too
                self._server.join(within_s)
            if within_s is not None:
                self._server.abandon("this worker has left its loop")
        self._log.end(well=well)
        if well and self._speaks_for_all:
            self._tell_what_was_seen()
        assembly.close()

    def teardown(self) -> None:
        """What servers held is gone with them, unless it was kept; the new world's worker 0 is the next to be one."""
        why = "the workers have changed"
        self._assembly.abandon(why)
        self._connections.abandon(why)
        if self._server is not None:
            self._server.abandon(why)
        for made in self._made:
            made.forget_gradients()
        self._log.end(well=False)
        self._assembly.close()

    def _tell_what_was_seen(self) -> None:
        assembly, world = self._assembly, self._assembly.job.world
        others = set(range(world.size)) - assembly.job.lost - {world.rank}
        names = [f"stats/worker {worker}" for worker in sorted(others)]
        names += [f"stats/server {server}" for server in range(world.servers)]
        found = assembly.barrier.published(names, within_s=LAST_WORDS_S)
        seen = [self._connections.stats_so_far(), *map(StalenessStats.of_json, found.values())]
        if self._server is not None:
            seen.append(self._server.stats)
        plural = "" if assembly.servers == 1 else "s"
        who = f"{world.servers} server{plural}" if world.servers else "worker 0 as the server"
        title = f"paceline: parameter server, {assembly.config.clock}, {assembly.config.mode}, {who}"
        messages.logger("strategies").info("\n    ".join([title, *sum_of(seen).lines()]))


# -- a server process --------------------------------------------------------------------------------------------------


def serve(config: ParameterServer, job: Job) -> None:
    """A server process, until the workers have said goodbye; in an elastic job to one group of them after the other."""
    while (why := _serve_group(config, job)) is not None:
        assert job.next_group is not None
        gc.collect()  # objects of a group refer to each other, and hold its shared memory
        job = job.next_group(why)


def _serve_group(config: ParameterServer, job: Job) -> str | None:
    """Why the group is over, where it has a successor."""
    try:
        assembly = Assembly(config, job)
    except (PacelineError, RuntimeError, OSError) as error:  # a process may be lost during the handshake
        if job.next_group is None or job.generation == 1:
            raise
        return f"{type(error).__name__}: {error}"
    try:
        assembly.serve()
    except GONE as error:
        if job.next_group is None:
            raise
        return str(error)
    return None
