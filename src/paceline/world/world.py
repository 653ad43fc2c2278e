"""Who am I: a worker's place among all workers, as a value that is passed on and never looked up.

    host 0              host 1
    ┌───┬───┐           ┌───┬───┐
    │ 0 │ 1 │           │ 2 │ 3 │      rank, of size 4
    └───┴───┘           └───┴───┘
      0   1               0   1        local_rank, of local_size 2

`environment.read_world()` makes one from what the launcher left behind; a test makes one by hand and is rank 3 of 8
without a single process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.errors import WorldError

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

    def __post_init__(self) -> None:
        for name, value, least in (("lanes", self.lanes, 1), ("threads", self.threads, 1), ("seed", self.seed, 0)):
            if value is not None and value < least:
                raise WorldError(f"the launcher's setting {name} is {value}; it must be at least {least}")


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

    def __post_init__(self) -> None:
        def check(ok: bool, what: str) -> None:
            if not ok:
                raise WorldError(f"the world found by {self.source} contradicts itself: {what}")

        check(self.size >= 1, f"{self.size} workers; a world has at least one")
        check(0 <= self.rank < self.size, f"rank {self.rank} of {self.size} workers (ranks count from 0)")
        check(
            0 <= self.local_rank < self.local_size,
            f"local rank {self.local_rank} of {self.local_size} workers on this host",
        )
        check(self.local_size <= self.size, f"{self.local_size} workers on this host but {self.size} in all")
        check(0 <= self.host_rank < self.hosts, f"host {self.host_rank} of {self.hosts} hosts")
        check(self.hosts <= self.size, f"{self.hosts} hosts but only {self.size} workers")
        check(self.host_address != "", "the host address is empty")
        check(
            self.size == 1 or self.rendezvous is not None,
            f"{self.size} workers and no place to meet (set MASTER_ADDR and MASTER_PORT, or start with `paceline run`)",
        )

    @property
    def is_main(self) -> bool:
        return self.rank == 0
