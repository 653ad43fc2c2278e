"""The workers that this one is with: how it reaches them, and what ends when they change.

seat        the place that the launcher gave; in an elastic job its rank is the slot
world       the place among those who are there now
among       the same, less the workers that an asynchronous strategy goes on without
supervisor  the control channel to the launcher, where one has started this process
store       where processes meet by names; comm is how tensors and words go between the workers
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.collectives.communicator import Communicator, SingleWorker
from paceline.context_parallel import ContextParallel
from paceline.elastic.decisions import Generation
from paceline.elastic.memory_checkpoint.replication import on_hosts
from paceline.elastic.recovery import NoRecovery, Parts, Recovery
from paceline.elastic.worker_agent import Abandonable, WorkerAgent
from paceline.engine.config import EngineConfig
from paceline.engine.default_group import DefaultGroup
from paceline.engine.evaluation import EvaluationCount, EvaluationLoader, note_collective
from paceline.engine.sequence_parts import SequenceParts, WholeSequences
from paceline.engine.serving import Serving, server_among
from paceline.errors import ConfigError
from paceline.mesh.mesh import world_of
from paceline.mesh.tensor_parallel import TensorParallel, own_group, torch_mesh
from paceline.torch_compat import PrefixStore, Store
from paceline.world import messages
from paceline.world.control import ControlClient, Supervisor, call_supervisor
from paceline.world.hang_board import HangBoard
from paceline.world.rendezvous_store import open_store
from paceline.world.waiting import WaitWatch
from paceline.world.world import TcpRendezvous, World


class RunningLoop(Protocol):
    """The training loop, while it is iterated."""

    def start_over(self) -> None: ...

    def check_collective(self, received: Sequence[Tensor]) -> None:
        """That one of the script's own, called in the loop's body, is called by all workers alike; what it gives."""
        ...


class Group:
    def __init__(self, seat: World, config: EngineConfig, device: torch.device) -> None:
        self.seat, self._config, self.device = seat, config, device
        self.place = config.mesh.place(seat.rank)
        self.everyone = among_members(seat)
        self.world = self.among = world_of(seat, self.place.replicas) if config.mesh.splits_model else self.everyone
        config.check_against(self.world)
        self.supervisor = call_supervisor(seat)
        self._opened_store, self._meeting = open_meeting(seat, self.supervisor, config.timeout_s)
        self.store = self._place_in_store(f"replicas/{self.place.tensor}") if config.mesh.tp > 1 else self._meeting
        self._watch = None if self._meeting is None else self._watch_waits(self._meeting)
        self.comm: Communicator = SingleWorker()
        self.tensor_peers: Communicator = SingleWorker()
        self._all: Communicator | None = None  # where `comm` has not all of them
        self.device_mesh: DeviceMesh | None = None
        self.sequences = WholeSequences()
        self.parallel: TensorParallel | None = None  # what is sharded over `tensor_peers`
        self._default_group = DefaultGroup(
            config.backend, config.timeout_s, self._connect_default_group, self._check_collective
        )
        self.recovery: NoRecovery = NoRecovery()
        self.serving: Serving | None = None
        self.lost: Set[int] = frozenset()  # as the strategy knows them
        self.evaluations: list[EvaluationLoader] = []  # whose batches are dealt to these workers
        self.evaluation_count = EvaluationCount()
        self.loop: RunningLoop | None = None
        self.after_step: list[Callable[[], None]] = []  # called when a step counts
        self.ends_with_it: list[Abandonable] = []  # besides what waits in `comm`

    @property
    def timeout_s(self) -> float:
        return self._config.timeout_s

    @property
    def is_main(self) -> bool:
        """One of all workers: the first, or when that one is lost the first of the others."""
        return self.place.speaks and self.recovery.is_main(self.among)

    @property
    def all(self) -> Communicator:
        """All workers of the job, of which `comm` has those with the same parameters."""
        return self._all or self.comm

    @property
    def all_world(self) -> World:
        """This worker's place among them."""
        return self.among if self._all is None else self.everyone

    def print(self, *values: object, **options: Any) -> None:
        if self.is_main:
            print(*values, **({"flush": True} | options))

    def note(self, text: str, area: str = "engine") -> None:
        """A message of ours, once, not once per worker."""
        if self.is_main:
            messages.logger(area).info(text)

    # -- meeting -----------------------------------------------------------------------------------------------------

    def connect(self, parts: Parts) -> None:
        """Meet the others; `parts` are what changes with them, in an elastic job."""
        self._join_elastic_job(parts)
        self.comm = self._connected(self.world, self.store)
        if self._config.mesh.tp > 1:
            self._all = self._connected(self.everyone, self._meeting)
            others = world_of(self.seat, self.place.tensor_group)
            self.tensor_peers = self._connected(others, self._place_in_store(f"peers/{self.place.tensor_group[0]}"))
        if self.comm.size > 1:
            self.recovery.watch(self)
        self._default_group.meet(self.everyone, self.store_of_generation() if self._all is None else self._meeting)
        if self._config.mesh.splits_model:
            self.device_mesh = torch_mesh(self._config.mesh, self.device)
            self.parallel = TensorParallel(self.device_mesh["tp"], self.place.tensor)
        if self._config.mesh.cp > 1 and self.device_mesh is not None:
            self.sequences = SequenceParts(ContextParallel(own_group(self.device_mesh["cp"])))

    def _watch_waits(self, store: Store) -> WaitWatch:
        if not isinstance(self.seat.rendezvous, TcpRendezvous):
            return WaitWatch(self.supervisor, self.seat.name, generation=lambda: self.generation)
        own: Store = PrefixStore("hang", store).clone()  # type: ignore[attr-defined]  # not in the stub
        board = HangBoard(own, self.seat.rank, self.seat.size)
        return WaitWatch(self.supervisor, self.seat.name, board)

    def _place_in_store(self, name: str) -> Store | None:
        return None if self._meeting is None else PrefixStore(f"mesh/{name}", self._meeting)

    def _connected(self, world: World, store: Store | None) -> Communicator:
        options = {"backend": self._config.backend, "device": self.device, "timeout_s": self.timeout_s}
        return connect_workers(world, store, **options)  # type: ignore[arg-type]

    def _check_collective(self, received: Sequence[Tensor]) -> None:
        note_collective(self.evaluations, of_torch=True)
        if self.loop is not None:
            self.loop.check_collective(received)

    def _connect_default_group(self, world: World, store: Store) -> Communicator:
        comm = Communicator.connect(
            world, store, backend=self._config.backend, device=self.device, timeout_s=self.timeout_s
        )
        self.recovery.watch(comm)
        return comm

    def _join_elastic_job(self, parts: Parts) -> None:
        """In an elastic job workers come and go: who commits steps, and how those that are left go on."""
        seat, config = self.seat, self._config
        if seat.elastic is None or not isinstance(self.supervisor, ControlClient):
            return
        if not config.strategy.bits_of_one_process:
            raise ConfigError(
                f"--elastic can't be combined with strategy {config.strategy}: its workers do not make every step "
                "together, and only a step of all workers can be committed, or done again. Start it without --elastic; "
                "under an asynchronous clock losing a worker that is no server does not end the job"
            )
        members = tuple(slot for slot, _ in seat.elastic.members) or tuple(range(seat.size))
        servers = tuple(range(seat.size, seat.size + seat.servers))
        first = Generation(0 if seat.elastic.joins else 1, members, main=members[0], servers=servers)
        agent = WorkerAgent(self.supervisor, seat.rank, seat.elastic.incarnation, first, self.timeout_s)
        if seat.is_server:
            self.serving = Serving(agent, seat, self._store_of, self.timeout_s)
        else:
            self.recovery = Recovery(agent, seat, parts, partial(self.note, area="elastic"))

    def meet(self, world: World) -> Communicator:
        """The workers of a new generation."""
        place = self.store_of_generation()
        self._default_group.meet(world, place)
        if world.size == 1:
            return self.comm
        assert place is not None
        self.comm = Communicator.connect(
            world, place, backend=self._config.backend, device=self.device, timeout_s=self.timeout_s
        )
        self.recovery.watch(self)
        return self.comm

    def go_on_without_the_lost(self) -> None:
        """Where an asynchronous strategy goes on without a worker, so does everything that workers do together."""
        lost = self.lost
        if len(lost) == self.world.size - self.among.size or self.store is None:
            return
        self.among = self.world.without(lost)
        named = ", ".join(map(str, sorted(lost)))
        place = PrefixStore(f"without/{named}", self.store)
        self.comm.reconnect(self.among, place)
        self._default_group.meet(self.among, place)
        for loader in self.evaluations:
            loader.deal_to(self.among)
        plural, whose = ("s", "their") if len(lost) > 1 else ("", "its")
        self.note(f"paceline: going on without worker{plural} {named}; samples left in {whose} lanes are not seen")

    def start_over(self) -> None:
        """Go on with the workers that there are now; a training loop that runs hands its items out again."""
        if self.loop is not None:
            self.loop.start_over()
        else:
            self.recovery.recover()

    # -- generations of an elastic job -------------------------------------------------------------------------------

    @property
    def generation(self) -> int | None:
        """The one that this process is in, or is about to be."""
        return self.recovery.now_in if self.serving is None else self.serving.now_in

    def store_of_generation(self) -> Store | None:
        """In an elastic job keys are those of one generation: nobody finds what an older one left there."""
        if self.generation is None or self.store is None:
            return self.store
        return self._store_of(self.generation)

    def _store_of(self, generation: int) -> Store:
        assert self.store is not None
        return PrefixStore(f"elastic/{generation}", self.store)

    def abandon(self, why: str) -> None:
        """The workers have changed: from this moment on nothing waits for those that are gone."""
        self.comm.abandon(why)
        for one in self.ends_with_it:
            one.abandon(why)

    def adopt(self, comm: Communicator) -> None:
        """A group of a strategy's own ends with the generation, where the workers have none that it could end with."""
        if self.serving is not None:
            self.serving.adopt(comm)
        else:
            self.recovery.watch(comm)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self.sequences.close()
        self._default_group.leave("the engine was closed")
        for comm in (self.tensor_peers, self._all, self.comm):
            if comm is not None:
                comm.close()
        self.recovery.close()
        self.supervisor.close()


_engines = itertools.count()


def open_meeting(world: World, supervisor: Supervisor, timeout_s: float) -> tuple[Store | None, Store | None]:
    """The store of all processes, to be kept as long as what is built on it, and this engine's place in it."""
    if world.size + world.servers == 1 and not world.is_elastic:
        return None, None
    store = open_store(world, supervisor, timeout_s)
    # Several engines in one process meet in several places; all processes make theirs in the same order.
    return store, PrefixStore(f"paceline/{next(_engines)}", store)


def connect_workers(
    world: World, store: Store | None, *, backend: str, device: torch.device, timeout_s: float
) -> Communicator:
    if store is None or world.size == 1 or world.is_server:
        return SingleWorker()
    if backend == "nccl":
        _check_own_devices(world, store, device)
    if world.is_elastic:  # keys by which nobody waits any more when the workers have changed
        store = PrefixStore("elastic/1", store)
    return Communicator.connect(world, store, backend=backend, device=device, timeout_s=timeout_s)


def _check_own_devices(world: World, store: Store, device: torch.device) -> None:
    """NCCL finds out that two workers share a GPU in the first collective, and says "invalid usage"."""
    store.set(f"device/{world.rank}", f"{device} of host {world.host_rank}")
    places = [store.get(f"device/{rank}").decode() for rank in range(world.size)]
    for rank, place in enumerate(places):
        if place in places[:rank]:
            raise ConfigError(
                f"workers {places.index(place)} and {rank} both use {place}, and NCCL needs a device for each worker; "
                "leave device out to give each its own, or let them share with Engine(backend='gloo')"
            )


def alone(seat: World) -> World:
    """A worker that joins a job prepares as if there were no other."""
    return replace(seat, rank=0, size=1, local_rank=0, local_size=1, host_rank=0, hosts=1, servers=0)


def among_members(seat: World) -> World:
    """A process's place as it begins: among all, or those of the hosts that are left; a worker that joins is alone."""
    if seat.elastic is None:
        return seat
    if seat.elastic.joins and not seat.is_server:
        return alone(seat)
    members = seat.elastic.members
    if not members:
        return seat
    if seat.is_server:
        return server_among(seat, len(members), seat.servers, seat.server_index)
    rank = [slot for slot, _ in members].index(seat.rank)
    world = replace(alone(seat), rank=rank, size=len(members), servers=seat.servers)
    return on_hosts(world, [host for _, host in members])
