"""Hybrid sharding: zero3 inside a host, replicas across hosts.

    host 0   worker 0 · worker 1       ranges 0 and 1 of every bucket    gathers and the sums of a host's lanes stay
    host 1   worker 2 · worker 3       ranges 0 and 1, the same          inside it: zero3 over its workers alone
             │          │
             └ range 0  └ range 1      once a step the owners of a range finish its canonical sum across hosts

What crosses is a host's roots: one for each range where its lanes are an aligned part of the tree, so hosts have
neighbouring lanes and the workers inside one every N-th of them. A worker holds 1/n of weights, gradients and optimizer
state, n being the workers of a host; slow links carry 2·(H-1)/H · Z/n bytes a step and no weights at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import ScatterPlan, SumPlan, scatter_plans_by_lane
from paceline.collectives.communicator import Communicator, SingleWorker
from paceline.collectives.gradient_exchange import GradientExchange, PendingSum
from paceline.errors import ConfigError
from paceline.sharding.local_shard import LocalShard, others_have_it
from paceline.strategies.fsdp.fsdp import Fsdp, Units, open_weights
from paceline.strategies.registry import Job, LaneAssignment, Maker, Registered, register
from paceline.strategies.strategy import Strategy
from paceline.strategies.zero.sharded_optimizer import LocalPieces
from paceline.strategies.zero.zero2 import Zero2
from paceline.torch_compat import PrefixStore
from paceline.world import messages
from paceline.world.checked_values import whole_number
from paceline.world.lanes import lanes_of_parts, neighbouring_lanes, strided_lanes
from paceline.world.world import Topology, World

Groups = tuple[tuple[int, ...], ...]  # the workers that share weights, group by group


@dataclass(frozen=True)
class HybridConfig:
    """`units`, `shard_frozen` as for fsdp.

    `shard_over`: as many neighbouring workers share weights; by default those of a host.
    """

    units: Units = None
    shard_over: int | None = None
    shard_frozen: bool = True

    def __post_init__(self) -> None:
        if self.shard_over is not None:
            whole_number("HybridConfig: shard_over", self.shard_over, least=1, why="a group has at least one worker")


def groups_of(topology: Topology, shard_over: int | None, *, elastic: bool = False) -> Groups:
    """`elastic`: workers come and go, so where they are no groups of that size, the largest smaller one is taken."""
    if elastic:
        sizes = [len(host) for host in topology.hosts]
        most = min(sizes) if shard_over is None else shard_over
        shard_over = max((n for n in range(1, most + 1) if not any(s % n for s in sizes)), default=most)
    if shard_over is None and not topology.is_even:
        counts = ", ".join(str(len(host)) for host in topology.hosts)
        raise ConfigError(
            f"strategy='hybrid': the hosts have {counts} workers, but the owners of a range meet across hosts in "
            "pairs; start as many on each host, or give HybridConfig(shard_over=n) with an n that divides all of them"
        )
    size = len(topology.hosts[0]) if shard_over is None else shard_over
    for host in topology.hosts:
        if size < 1 or len(host) % size:
            raise ConfigError(
                f"HybridConfig(shard_over={size}): a host has {len(host)} workers, which are no groups of {size}; "
                "choose a number that divides the workers of every host"
            )
    return tuple(host[low : low + size] for host in topology.hosts for low in range(0, len(host), size))


def hybrid_lanes(lanes: int, groups: Groups) -> LaneAssignment:
    """Groups have neighbouring lanes, the workers of a group every n-th of these."""
    found: dict[int, tuple[int, ...]] = {}
    for group, span in zip(groups, neighbouring_lanes(lanes, len(groups)), strict=True):
        for place, lanes_of in enumerate(strided_lanes(len(span), len(group))):
            found[group[place]] = tuple(span[number] for number in lanes_of)
    return tuple(found[worker] for worker in sorted(found))


def hybrid_lanes_of_parts(lanes: int, groups: Groups, parts: int) -> LaneAssignment:
    """Where `parts` neighbouring workers share each sample: they have the same lanes of the data, each its part.

    Groups of whole samples have neighbouring lanes of the data, and so of the sum. Where a group ends inside a sample,
    its workers have every so-manieth lane of the sum, and more roots cross.
    """
    if any(len(group) % parts for group in groups):
        return lanes_of_parts(neighbouring_lanes(lanes // parts, sum(map(len, groups)) // parts), parts)
    sharing = tuple(tuple(worker // parts for worker in group[::parts]) for group in groups)
    return lanes_of_parts(hybrid_lanes(lanes // parts, sharing), parts)


@lru_cache(maxsize=256)
def plan_across(plan: SumPlan, groups: Groups) -> SumPlan:
    """The same tree, each group seen as one worker that holds the lanes of all its workers."""
    holders = tuple(tuple(sorted(lane for worker in group for lane in plan.holders[worker])) for group in groups)
    return SumPlan(plan.present, holders)


class Across:
    """The owners of the same ranges, one in each group."""

    def __init__(self, groups: Groups, group: int, comm: Communicator) -> None:
        self.groups, self.group, self._comm = groups, group, comm
        self.exchange = GradientExchange(comm, "exact")

    def close(self) -> None:
        self.exchange.close()
        self._comm.close()


class _AcrossGroups(Zero2):
    """What differs for a strategy whose lanes are all inside one group: roots are left, and cross to the others."""

    def __init__(self, *given: Any, across: Across) -> None:
        self._across = across
        self._set_across: int | None = None
        self._speaks = across.group == 0
        super().__init__(*given)

    def _prepare_sums(self, pieces: LocalPieces) -> None:
        super()._prepare_sums(pieces)
        self._set_across = self._across.exchange.new_set(old=self._set_across)

    def start_step(self, round: int, plan: SumPlan) -> None:
        super().start_step(round, plan)
        self._speaks = self._across.group == 0 or self._parts.job.world.is_elastic

    def drain(self) -> None:
        super().drain()
        self._speaks = self._across.group == 0

    def local_shard(self, parameter: Parameter) -> Tensor | LocalShard:
        """The first group speaks for all. In an elastic job's step each does, until it is settled: others may die."""
        mine = super().local_shard(parameter)
        return mine if self._speaks else others_have_it(mine)

    def local_state(self, optimizer: Optimizer) -> dict[str, Any]:
        mine = super().local_state(optimizer)
        return mine if self._speaks else others_have_it(mine)

    def _scatter_plans_of(self, plan: SumPlan) -> tuple[Sequence[ScatterPlan], int]:
        across = self._across
        self._plan_across = plan_across(plan, across.groups)
        mine = self._plan_across.holders[across.group]
        return scatter_plans_by_lane(plan, across.groups[across.group]), min(mine, default=0)

    def _finished(self) -> list[Tensor | None]:
        """Roots of this group's lanes cross to the others, all buckets at once."""
        pending = [self._start_across(number, roots) for number, roots in enumerate(self._held)]
        return [None if total is None else total.wait() for total in pending]

    def _start_across(self, number: int, roots: dict[int, Tensor]) -> PendingSum | None:
        own = self._sums[number]
        if not own.numel():
            return None
        assert self._set_across is not None
        in_order = dict(sorted(roots.items()))
        return self._across.exchange.start(self._set_across, number, self._plan_across, in_order, lambda: own)


class HybridInTheModel(_AcrossGroups):
    """Weights are whole on every worker, or once for all workers of a group."""


class HybridInShards(_AcrossGroups, Fsdp):
    """Weights are in shards in each group."""


class HybridMaker(Maker):
    """Connects the workers of a group, and the owners of a range across groups; the strategies inside are zero3's."""

    def __init__(self, config: HybridConfig, job: Job) -> None:
        rank = job.comm.rank  # of those that there are now
        topology = Topology.of(job.comm.gather_json(job.world.host_rank))
        groups = groups_of(topology, config.shard_over, elastic=job.world.is_elastic)
        if rank == 0:
            say_if_smaller(topology, len(groups[0]), config.shard_over)
        number = next(n for n, group in enumerate(groups) if rank in group)
        self.assignment = hybrid_lanes_of_parts(job.lanes, groups, job.parts)
        place = groups[number].index(rank)
        peers = [group[place] for group in groups]
        self._groups: list[Communicator | Across] = []
        try:
            hosts = len(topology.hosts)
            inside = _connected(job, f"group {number}", place, groups[number], hosts, one_host=True)
            self._groups.append(inside)
            across = Across(
                groups, number, _connected(job, f"ranges {place}", number, peers, hosts, one_host=hosts == 1)
            )
            self._groups.insert(0, across)
            store = None if job.store is None else PrefixStore(f"hybrid/inside {number}", job.store)
            here = replace(job, comm=inside, store=store, backend=job.backend if inside.size == 1 else inside.backend)
            self._inside = open_weights(
                *(here, "hybrid", None, config.units),
                shard_frozen=config.shard_frozen,
                everyone=job.comm,
                whole=partial(HybridInTheModel, across=across),
                sharded=partial(HybridInShards, across=across),
            )
        except BaseException:
            self._leave_groups()
            raise

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> Strategy:
        return self._inside.make(named, optimizers)

    def close(self) -> None:
        self._inside.close()
        self._leave_groups()

    def teardown(self) -> None:
        self._inside.teardown()
        self._leave_groups()

    def _leave_groups(self) -> None:
        for group in self._groups:
            group.close()


def say_if_smaller(topology: Topology, size: int, shard_over: int | None) -> None:
    """Groups are smaller than configured only in an elastic job; then each worker holds more than it was thought to."""
    wanted = shard_over or max(len(host) for host in topology.hosts)
    if size < wanted:
        counts = " and ".join(str(len(host)) for host in topology.hosts)
        shared = "every worker holds all weights" if size == 1 else f"weights are shared by {size} workers"
        text = f"paceline: {counts} workers are no groups of {wanted}: {shared} until there are others"
        messages.logger("strategies").info(text)


def _connected(job: Job, name: str, rank: int, workers: Sequence[int], hosts: int, *, one_host: bool) -> Communicator:
    """A group of these workers; inside one of several hosts they can share memory, whatever goes across."""
    size = len(workers)
    if size == 1 or job.store is None:
        return SingleWorker()
    local = (rank, size, 0, 1) if one_host else (0, 1, rank, size)
    world: World = replace(job.world, rank=0, size=1, local_rank=0, local_size=1, host_rank=0, hosts=1, servers=0)
    world = replace(
        world, rank=rank, size=size, local_rank=local[0], local_size=local[1], host_rank=local[2], hosts=local[3]
    )
    shares_memory = one_host and hosts > 1 and job.device.type == "cpu"
    comm = Communicator.connect(
        world, PrefixStore(f"hybrid/{name}", job.store),
        backend="paceline" if shares_memory else job.backend, device=job.device, timeout_s=job.timeout_s,
    )  # fmt: skip
    comm.counts_with(job.comm, workers)
    return comm


register(
    Registered(
        "hybrid",
        HybridConfig,
        HybridMaker,
        examples=(HybridConfig(shard_over=1),),
        assign_lanes=strided_lanes,
        fills_meta=True,
        takes_low_precision=True,
    )
)
