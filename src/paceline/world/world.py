"""Who am I: a process's place in its job, as a value that is passed on and never looked up.

    host 0                                host 1
    workers          servers              workers
    ┌───┬───┐       ┌╌╌╌┬╌╌╌┐             ┌───┬───┐
    │ 0 │ 1 │       ╎ 4 ╎ 5 ╎             │ 2 │ 3 │      rank; size 4 counts the workers, servers=2
    └───┴───┘       └╌╌╌┴╌╌╌┘             └───┴───┘
      0   1           2   3                 0   1        local_rank; local_size 2 counts the host's workers

Only `paceline run --servers S` starts servers, all on the first host, with the ranks after the workers'. They take no
accelerator. Under every other launcher `servers` is 0, and worker 0 doubles as the server where a strategy needs one.

`environment.read_world()` makes a world from what the launcher left behind; a test makes one by hand and is rank 3 of
8 without a single process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from paceline.errors import ConfigError, WorldError
from paceline.world import known_names

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ControlSocket:
    """Meet through our own supervisor, which listens on this Unix socket."""

    path: str


@dataclass(frozen=True)
class TcpRendezvous:
    """Meet through a `TCPStore`: torchrun's agent serves it, otherwise rank 0 does."""

    address: str
    port: int
    served_by_agent: bool = False


Rendezvous = ControlSocket | TcpRendezvous


@dataclass(frozen=True)
class LaunchSettings:
    """What the launcher's flags fix for the whole job; None leaves the choice to the script."""

    lanes: int | None = None
    threads: int | None = None
    backend: str | None = None
    seed: int | None = None
    strategy: str | None = None
    precision: str | None = None
    activation_checkpointing: str | None = None
    offload: str | None = None
    replay: str | None = None  # a run folder: do again what its log says, instead of training
    plan: str | None = None  # an order of `paceline plan`: profile the loop's body, instead of training
    tp: int | None = None  # workers of a tensor-parallel group
    cp: int | None = None  # likewise, that share a sequence
    verify: str | None = None  # a folder: `paceline verify` compares what workers write there
    default_lanes: int | None = None  # where nobody says: as many as an elastic job began with workers

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("lanes", self.lanes, 1, known_names.MOST_LANES),
            ("default_lanes", self.default_lanes, 1, known_names.MOST_LANES),
            ("threads", self.threads, 1, known_names.MOST_THREADS),
            ("seed", self.seed, 0, known_names.SEEDS - 1),
            ("tp", self.tp, 1, known_names.MOST_LANES),
            ("cp", self.cp, 1, known_names.MOST_LANES),
        ):
            if value is not None and not least <= value <= most:
                bound = f"at least {least}" if value < least else f"at most {most:,}"
                raise WorldError(f"{_setting(name)} is {value}; it must be {bound}")
        for name, word, known in (
            ("strategy", self.strategy, (known_names.AUTO, *known_names.STRATEGIES)),
            ("backend", self.backend, known_names.BACKENDS),
            ("precision", self.precision, known_names.PRECISIONS),
            ("offload", self.offload, known_names.OFFLOADS),
        ):
            if word is not None and word not in known:
                raise WorldError(f"{_setting(name)} is {word!r}, which is not known; choose one of {', '.join(known)}")
        if self.activation_checkpointing is not None:
            try:
                known_names.recomputed(self.activation_checkpointing)
            except ConfigError as error:
                raise WorldError(f"{_setting('activation_checkpointing')}: {error}") from error


def _setting(name: str) -> str:
    return f"the launcher's setting {name} (--{name.replace('_', '-')} or PACELINE_{name.upper()})"


@dataclass(frozen=True)
class Elasticity:
    """What a worker of an elastic job needs to know. `rank` of its world is its *slot*: a dead worker's is given again.

    `incarnation` counts the processes that a slot has had; all but those that the job began with (0) join it later.
    `copies` of sharded state are kept in `memory_folder`, which outlives the workers of this host. `members` are the
    slots that begin together, each with its host, in a job that starts anew. With `across_hosts` there are several
    hosts, or may be later.
    """

    incarnation: int = 0
    memory_folder: str | None = None
    copies: int = 2
    members: tuple[tuple[int, int], ...] = ()
    across_hosts: bool = False

    @property
    def joins(self) -> bool:
        return self.incarnation > 0

    @property
    def begins_again(self) -> bool:
        """All workers were lost, or a part of the state, and the job starts anew."""
        return bool(self.members) and not self.joins


@dataclass(frozen=True)
class World:
    """`host_address` is where this host's tensors travel; None: not known here, ask `environment.tensor_address`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host_rank: int = 0
    hosts: int = 1
    source: str = "alone"
    rendezvous: Rendezvous | None = None
    host_address: str | None = LOOPBACK
    settings: LaunchSettings = field(default_factory=LaunchSettings)
    servers: int = 0
    elastic: Elasticity | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, what: str) -> None:
            if not ok:
                raise WorldError(f"the world found by {self.source} contradicts itself: {what}")

        check(self.size >= 1, f"{self.size} workers; a world has at least one")
        check(self.servers >= 0, f"{self.servers} servers; a world has none or more")
        among = f"{self.size} workers" + (f" and {self.servers} servers" if self.servers else "")
        check(0 <= self.rank < self.size + self.servers, f"rank {self.rank} of {among} (ranks count from 0)")
        if self.is_server:
            check(self.host_rank == 0, f"server {self.server_index} on host {self.host_rank}; servers are on host 0")
            check(
                self.local_rank == self.local_size + self.server_index,
                f"server {self.server_index} has local rank {self.local_rank} beside {self.local_size} workers; "
                f"it comes after them and is {self.local_size + self.server_index}",
            )
        else:
            check(
                0 <= self.local_rank < self.local_size,
                f"local rank {self.local_rank} of {self.local_size} workers on this host",
            )
        check(self.local_size <= self.size, f"{self.local_size} workers on this host but {self.size} in all")
        check(0 <= self.host_rank < self.hosts, f"host {self.host_rank} of {self.hosts} hosts")
        check(self.hosts <= self.size, f"{self.hosts} hosts but only {self.size} workers")
        check(self.host_address != "", "the host address is empty")
        check(
            self.size + self.servers == 1 or self.rendezvous is not None,
            f"{among} and no place to meet (set MASTER_ADDR and MASTER_PORT, or start with `paceline run`)",
        )

    @property
    def is_main(self) -> bool:
        """Worker 0, which logs and saves for the job; never a server."""
        return self.rank == 0

    @property
    def is_server(self) -> bool:
        return self.rank >= self.size

    @property
    def is_elastic(self) -> bool:
        """Workers may come and go."""
        return self.elastic is not None

    @property
    def server_index(self) -> int:
        """Which of the servers this is, from 0."""
        if not self.is_server:
            raise WorldError(f"{self.name} is no server; the servers are the ranks from {self.size} on")
        return self.rank - self.size

    @property
    def name(self) -> str:
        return f"server {self.server_index}" if self.is_server else f"worker {self.rank}"

    def without(self, lost: Collection[int]) -> World:
        """The workers that are left, under new ranks."""
        left = [rank for rank in range(self.size) if rank not in lost]
        rank, size = left.index(self.rank), len(left)
        # Who is on which host is not known here; it matters only where all are on one.
        here = (rank, size) if self.local_size == self.size else (0, 1)
        alone = replace(self, rank=0, size=1, local_rank=0, local_size=1, host_rank=0, hosts=1, servers=0)
        return replace(alone, rank=rank, size=size, local_rank=here[0], local_size=here[1])

    def joint(self) -> World:
        """Workers and servers as one group with the same ranks, to connect their traffic with each other."""
        servers_here = self.servers if self.host_rank == 0 else 0
        return replace(self, size=self.size + self.servers, local_size=self.local_size + servers_here, servers=0)


@dataclass(frozen=True)
class Topology:
    """Which ranks share a host, the one fact about the network that every launcher knows.

    host 0      host 1            Topology(((0, 1), (2, 3)))
    0   1       2   3
    """

    hosts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for host in self.hosts for rank in host)
        if ranks != list(range(len(ranks))) or not all(self.hosts):
            raise WorldError(
                f"hosts with the ranks {self.hosts}: each rank from 0 on is on one host, and none is empty"
            )

    @classmethod
    def one_host(cls, size: int) -> Topology:
        return cls((tuple(range(size)),))

    @classmethod
    def of(cls, host_of_rank: Sequence[int]) -> Topology:
        """From the host number of each rank."""
        numbers = sorted(set(host_of_rank))
        return cls(tuple(tuple(r for r, host in enumerate(host_of_rank) if host == number) for number in numbers))

    @property
    def size(self) -> int:
        return sum(len(host) for host in self.hosts)

    @property
    def is_even(self) -> bool:
        """Every host has as many ranks."""
        return len({len(host) for host in self.hosts}) == 1

    @cached_property
    def host_of(self) -> dict[int, int]:
        return {rank: number for number, host in enumerate(self.hosts) for rank in host}
