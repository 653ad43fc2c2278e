"""What a strategy moves in a step, as collectives on the scenario's network.

    strategy              in forward            in backward                      after the update
    ddp, star             –                     all-reduce of each bucket        –
    zero1                 –                     reduce-scatter of each bucket    all-gather of each bucket's weights
    zero2                 –                     the same, of every lane          the same
    zero3, fsdp           all-gather per unit   all-gather, reduce-scatter       –
    hybrid                the same, in a host   the same, in a host; at its end  –
                                                all-reduce across hosts
    parameter_server      –                     push of each bucket              pull of each bucket
    local_sgd, diloco     –                     –                                all-reduce in a window's last step

Buckets are those that the engine would fill from layers of equal size. All-reduces are the engine's: without an
algorithm the exact sum (between two workers the backend's own, for small buckets on CPUs halving and doubling,
otherwise direct), with one its schedule in segments, as the executor runs it. Bytes are those of footprint.py in
`sharding`, which a test checks. Memory that workers of a host share is not modelled: each has a link of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from paceline.collectives.choice import AUTO, FLAT, HIERARCHICAL, schedule_named
from paceline.collectives.executor import SEGMENT_BYTES
from paceline.collectives.gradient_exchange import HALVING_UP_TO
from paceline.collectives.halving_doubling import HALVING_DOUBLING
from paceline.collectives.ring_all_reduce import RING
from paceline.collectives.rounds import Everyone, Pairs, Pattern, Ranks, Ring, all_ranks
from paceline.collectives.schedule import Schedule
from paceline.collectives.star_all_reduce import rounds as star_rounds
from paceline.sharding.bucket import GradientSpec, plan_buckets
from paceline.simulate.collective import Beat, Collective, Load
from paceline.simulate.network import Placed
from paceline.simulate.scenario import SERVER, Scenario
from paceline.world.world import Topology

BY_LANE = ("zero2", "zero3", "fsdp", "hybrid")
IN_SHARDS = ("zero3", "fsdp", "hybrid")
VOTE_BYTES = 128.0
"""What a worker tells every other at the end of a step: engine/vote.py's head, one lane and some flags."""
FEW = 1024
"""Workers up to which "auto" also tries algorithms whose busiest rank or number of messages grows with them."""


@dataclass(frozen=True)
class Bucket:
    parameters: float
    ready: float  # the share of backward after which it is full


def buckets_of(scenario: Scenario) -> list[Bucket]:
    """As the engine cuts them, last layers first."""
    layers = min(scenario.layers, scenario.parameters)
    cuts = [layer * scenario.parameters // layers for layer in range(layers + 1)]
    sizes = [high - low for low, high in itertools.pairwise(cuts)]
    specs = [GradientSpec((size,), torch.float32, torch.device("cpu")) for size in sizes]
    order = list(reversed(range(layers)))
    place = {layer: number for number, layer in enumerate(order)}
    # `bucket_mb` counts bytes on the wire; plan_buckets those of sums in fp32.
    limit = max(1, round(scenario.bucket_mb * 2**20 * 4 / scenario.gradient_bytes))
    planned = plan_buckets(specs, order, limit, aligned=False)
    return [
        Bucket(
            parameters=float(sum(entry.elements for entry in bucket.entries)),
            ready=(1 + max(place[entry.parameter] for entry in bucket.entries)) / layers,
        )
        for bucket in planned
    ]


def roots_of(lanes: int, workers: int) -> int:
    """Partial sums that the worker with most is left with: its lanes as the fewest aligned parts of the tree."""
    most = 1
    for worker in {*range(min(workers, 1 << lanes.bit_length())), workers - 1}:  # from there on places repeat
        low, high, parts = worker * lanes, (worker + 1) * lanes, 0
        while low < high:
            length = low & -low or 1 << high.bit_length()
            while low + length > high and worker < workers - 1:  # behind the last lane none are missing
                length //= 2
            low, parts = low + length, parts + 1
        most = max(most, parts)
    return most


class Exchange:
    """The collectives of a scenario, each made once for each number of bytes."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.placed = scenario.net.for_workers(scenario.workers)
        self.buckets = buckets_of(scenario)
        self._made: dict[tuple[str, float], Collective] = {}

    # -- by strategy -----------------------------------------------------------------------------------------------

    def of_bucket(self, bucket: Bucket) -> Collective:
        """What a full bucket does in backward."""
        strategy, nbytes = self.scenario.strategy, bucket.parameters * self.scenario.gradient_bytes
        if strategy in ("zero1", *BY_LANE):
            nodes = 1 if strategy in BY_LANE else roots_of(self.scenario.lanes, self.scenario.workers)
            return self._once("reduce-scatter", nbytes, lambda: self._scatter(nbytes, nodes))
        return self.all_reduce(nbytes)

    def of_weights(self, parameters: float) -> Collective:
        """All-gather of their shards: the backend's own, or where weights are in shards pulls from their owners."""
        nbytes = parameters * self.scenario.weight_bytes
        if self.scenario.strategy in IN_SHARDS:
            return self._once("pulls", nbytes, lambda: self._scatter(nbytes, 1))
        return self._once("all-gather", nbytes, lambda: self._collective([self._ring_gather(self.groups, nbytes)]))

    def across_hosts(self, bucket: Bucket) -> Collective:
        """Of hybrid: the owners of a range finish its sum, and all of them get it."""
        nbytes = bucket.parameters * self.scenario.gradient_bytes / self.groups.shape[1]
        across, groups = self.groups.T, len(self.groups)
        roots = roots_of(self.scenario.lanes * self.groups.shape[1], groups)
        return self._once("across", nbytes, lambda: self._direct(across, nbytes, roots, gathers=True))

    @cached_property
    def vote(self) -> Collective:
        workers = self.scenario.workers
        return self._collective([self._ring_gather(all_ranks(workers), workers * VOTE_BYTES)])

    def all_reduce(self, nbytes: float) -> Collective:
        return self._once("all-reduce", nbytes, lambda: self._all_reduce(nbytes))

    @cached_property
    def groups(self) -> Ranks:
        """The workers that share weights, a row each."""
        workers = self.scenario.workers
        return self.placed.hosts(workers) if self.scenario.strategy == "hybrid" else all_ranks(workers)

    # -- collectives -----------------------------------------------------------------------------------------------

    def _once(self, kind: str, nbytes: float, make: Callable[[], Collective]) -> Collective:
        key = kind, nbytes
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _collective(self, beats: Sequence[tuple[Beat, int]]) -> Collective:
        return Collective(beats if self.scenario.workers > 1 else [], self.placed)

    def _ring_gather(self, members: Ranks, nbytes: float) -> tuple[Beat, int]:
        """NCCL's and gloo's all-gather: neighbours pass on what they have got."""
        size = members.shape[1]
        return (Load(Ring(members), 1, nbytes / size),), size - 1

    def _scatter(self, nbytes: float, nodes: int) -> Collective:
        """Slices of `nodes` tensors to the owners of their ranges; backwards these are pulls."""
        return self._direct(self.groups, nbytes, nodes, gathers=False)

    def _direct(self, members: Ranks, nbytes: float, nodes: int, *, gathers: bool) -> Collective:
        """Slices to their owners, and sums back: on GPUs an all-to-all and an all-gather, otherwise messages."""
        size, pattern = members.shape[1], Everyone(members)
        beats: list[tuple[Beat, int]] = [((Load(pattern, nodes, nbytes / size),), 1)]
        if gathers and self.scenario.net.gpu:
            beats.append(self._ring_gather(members, nbytes))
        elif gathers:
            beats.append(((Load(pattern, 1, nbytes / size),), 1))
        return self._collective(beats if size > 1 else [])

    def _all_reduce(self, nbytes: float) -> Collective:
        scenario = self.scenario
        workers, roots = scenario.workers, roots_of(scenario.lanes, scenario.workers)
        if scenario.strategy == "star":
            gather, back = (each.pattern for each in star_rounds(workers))
            return self._collective([((Load(gather, roots, nbytes),), 1), ((Load(back, 1, nbytes),), 1)])
        if scenario.algorithm is not None:
            return self._of_schedule(scenario.algorithm, nbytes)
        if workers == 2 and roots == 1:
            return Collective.of(RING, workers, nbytes, self.placed, None)
        pairwise = roots == 1 and workers & (workers - 1) == 0 and not scenario.net.gpu
        if pairwise and nbytes <= HALVING_UP_TO * workers:
            return Collective.of(HALVING_DOUBLING, workers, nbytes, self.placed, SEGMENT_BYTES)
        return self._direct(all_ranks(workers), nbytes, roots, gathers=True)

    def _of_schedule(self, name: str, nbytes: float) -> Collective:
        workers = self.scenario.workers
        if name != AUTO:
            return Collective.of(self._schedule(name), workers, nbytes, self.placed, SEGMENT_BYTES)
        names = list(FLAT) if workers <= FEW else ["ring", "halving-doubling", "direct", "tree"]
        if self.scenario.placed_hosts > 1:
            names.append(HIERARCHICAL)
        made = [Collective.of(self._schedule(each), workers, nbytes, self.placed, SEGMENT_BYTES) for each in names]
        return min(made, key=lambda each: each.seconds)

    def _schedule(self, name: str) -> Schedule:
        if name != HIERARCHICAL:
            return FLAT[name]
        hosts = tuple(tuple(row) for row in self.placed.hosts(self.scenario.workers).tolist())
        return schedule_named(name, Topology(hosts))


# -- parameter servers -------------------------------------------------------------------------------------------------


class ServedExchange(Exchange):
    """Workers and servers as one group of ranks; worker 0 doubles as the server where there is none."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        workers, servers = scenario.workers, scenario.servers
        extra = np.arange(workers, workers + servers)  # hosts of their own, behind the workers'
        self.placed = self.placed.with_places(np.concatenate([self.placed.places, extra]))
        self._servers = extra if servers else np.zeros(1, dtype=np.int64)

    def of_bucket(self, bucket: Bucket) -> Collective:
        nbytes = bucket.parameters * self.scenario.gradient_bytes
        roots = roots_of(self.scenario.lanes, self.scenario.workers)
        return self._once("push", nbytes, lambda: self._served(self.placed, self._servers, nbytes, roots)[0])

    def of_weights(self, parameters: float) -> Collective:
        nbytes = parameters * self.scenario.weight_bytes
        return self._once("pull", nbytes, lambda: self._served(self.placed, self._servers, nbytes, 1)[1])

    def _served(self, placed: Placed, servers: Ranks, nbytes: float, roots: int) -> tuple[Collective, Collective]:
        return push_and_pull(placed, self.scenario.workers, servers, nbytes, roots)


def push_and_pull(
    placed: Placed, workers: int, servers: Ranks, nbytes: float, roots: int = 1
) -> tuple[Collective, Collective]:
    """Every worker sends each server its part of `nbytes`, and gets it back."""
    sources, targets = np.repeat(np.arange(workers), len(servers)), np.tile(servers, workers)
    others = sources != targets
    there: Pattern = Pairs(sources[others], targets[others])
    back: Pattern = Pairs(targets[others], sources[others])
    part = nbytes / len(servers)
    push = Collective([((Load(there, roots, part),), 1)] if others.any() else [], placed)
    pull = Collective([((Load(back, 1, part),), 1)] if others.any() else [], placed)
    return push, pull


def exchange_of(scenario: Scenario) -> Exchange:
    return ServedExchange(scenario) if scenario.strategy == SERVER else Exchange(scenario)
