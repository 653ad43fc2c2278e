"""The mesh of a job: how many workers each kind of parallelism has, and which of them this one is with.

    Mesh(dp=2, cp=1, tp=2)             tp 0        tp 1          rank = (data · cp + context) · tp + tensor
                          data 0     worker 0    worker 1
                          data 1     worker 2    worker 3

    a row      one tensor-parallel group: the same samples, each worker a part of the wide layers
    a column   one group of replicas: an engine's own group, with lanes, canonical sums and strategies, over dp × cp

The tensor coordinate changes fastest: its groups send the most, and neighbours share a host. Data is sharded over dp
alone. The workers of a column hold the same parameters, so everything that this library promises holds along it; two
columns hold different parts of the same layers, and meet where a plan lets them.

Pipeline stages would be a further axis, before data; there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from paceline.errors import ConfigError
from paceline.world.checked_values import whole_number
from paceline.world.world import Topology, World

AXES = ("dp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes; one of them may be -1, which is what the others leave of the workers.

    `dp` leaves it to the strategy what data parallelism is. `dp_replicate` and `dp_shard`, in its place, say it: over
    how many workers weights are sharded, and how many such groups there are.
    """

    dp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in AXES:
            size = getattr(self, name)
            if size is not None and size != -1:
                whole_number(f"Mesh: {name}", size, least=1, why="an axis has at least one worker; -1 infers it")
        if self.dp is not None and (self.dp_replicate, self.dp_shard) != (None, None):
            raise ConfigError(f"{self}: dp is dp_replicate × dp_shard; give dp, or these two")
        inferred = [name for name in AXES if getattr(self, name) == -1]
        if len(inferred) > 1:
            raise ConfigError(f"{self}: {' and '.join(inferred)} are both to be inferred; give all but one")

    def __str__(self) -> str:
        given = ((name, getattr(self, name)) for name in AXES)
        return f"Mesh({', '.join(f'{name}={size}' for name, size in given if size not in (None, 1))})"

    @property
    def splits_model(self) -> bool:
        """Workers differ in more than their samples."""
        return self.tp > 1 or self.cp > 1

    def of_workers(self, workers: int) -> Mesh:
        """With every size known, or an error: sizes multiply to the number of workers."""
        sizes = {name: getattr(self, name) for name in AXES if getattr(self, name) is not None}
        if "dp" not in sizes and not {"dp_replicate", "dp_shard"} & set(sizes) and -1 not in sizes.values():
            sizes["dp"] = -1
        known = 1
        for size in sizes.values():
            known *= 1 if size == -1 else size
        inferred = next((name for name, size in sizes.items() if size == -1), None)
        if inferred is not None and workers % known == 0:
            sizes[inferred] = workers // known
        elif known != workers or inferred is not None:
            told = " × ".join(f"{name} {size}" for name, size in sizes.items() if size != -1) or "1"
            fits = f"{known} worker{'s' if known > 1 else ''}" + (" or a multiple of it" if inferred else "")
            raise ConfigError(
                f"{self}: its sizes ({told}) make {fits}, but the job has {workers}; start as many, or give one axis -1"
            )
        found = Mesh(**{"dp": None, **sizes})
        return (
            found
            if "dp" in sizes
            else replace(found, dp_replicate=sizes.get("dp_replicate", 1), dp_shard=sizes.get("dp_shard", 1))
        )

    @property
    def data(self) -> int:
        """Workers with samples of their own."""
        return self.dp if self.dp is not None else (self.dp_replicate or 1) * (self.dp_shard or 1)

    @property
    def model(self) -> int:
        """Workers that share one sample."""
        return self.cp * self.tp

    def place(self, rank: int) -> Place:
        return Place(self, rank)


@dataclass(frozen=True)
class Place:
    """One worker of a mesh whose sizes are known."""

    mesh: Mesh
    rank: int

    @property
    def tensor(self) -> int:
        return self.rank % self.mesh.tp

    @property
    def context(self) -> int:
        return self.rank // self.mesh.tp % self.mesh.cp

    @property
    def data(self) -> int:
        return self.rank // self.mesh.model

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The workers with this one's parameters, over dp × cp: the engine's own group."""
        return tuple(range(self.tensor, self.mesh.data * self.mesh.model, self.mesh.tp))

    @cached_property
    def tensor_group(self) -> tuple[int, ...]:
        first = self.rank - self.tensor
        return tuple(range(first, first + self.mesh.tp))

    @property
    def speaks(self) -> bool:
        """For its tensor-parallel group, in what all of its workers know."""
        return self.tensor == 0


def world_of(seat: World, ranks: tuple[int, ...]) -> World:
    """A worker's place among some of the job's workers, whose ranks these are."""
    if ranks == tuple(range(seat.size)):
        return seat
    if seat.size != seat.hosts * seat.local_size:
        raise ConfigError(
            f"Engine(mesh=…): {seat.size} workers on {seat.hosts} hosts, {seat.local_size} of them on this one; a mesh "
            "needs as many on each host"
        )
    hosts = Topology.of([rank // seat.local_size for rank in ranks])
    rank = ranks.index(seat.rank)
    host = hosts.host_of[rank]
    here = hosts.hosts[host]
    alone = replace(seat, rank=0, size=1, local_rank=0, local_size=1, host_rank=0, hosts=1)
    return replace(
        alone,
        rank=rank,
        size=len(ranks),
        local_rank=here.index(rank),
        local_size=len(here),
        host_rank=host,
        hosts=len(hosts.hosts),
    )
