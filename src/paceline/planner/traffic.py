"""The bytes that each worker sends in a step, to the byte: the engine's own buckets, cuts and schedules, counted.

    ddp            every bucket by the schedule that the exchange chooses for it
    star           every bucket to worker 0 and back
    zero1, zero2   every node's ranges to their owners; then the owners' weights to all
    zero3, fsdp    the same for gradients; weights by unit, in forward, and again in backward where it reads them
    in shared memory nothing is sent: workers read each other's gradients, and weights, where they lie

Nothing here is a second formula: `plan_buckets`, `cut_buckets` and the schedules are what training runs.
What a backend's own collective moves can't be counted (`counted=False`); there it is the ring's 2·(N-1)/N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.collectives.canonical_sum import SumPlan, sum_plan
from paceline.collectives.direct_all_reduce import canonical_schedule
from paceline.collectives.gradient_exchange import HALVING_UP_TO
from paceline.collectives.halving_doubling import HALVING_DOUBLING
from paceline.collectives.schedule import Schedule
from paceline.planner.model_profile import ModelProfile, PassProfile
from paceline.sharding.bucket import Bucket, Shards, cut_buckets, plan_buckets
from paceline.sharding.footprint import Model, footprint
from paceline.sharding.unit import Unit, unit_buckets
from paceline.world.lanes import strided_lanes

REQUEST_BYTES = 16  # for a unit's weights: two numbers


@dataclass(frozen=True)
class StepTraffic:
    """`sent`: bytes of each worker in a step. `messages`: buckets and units that are exchanged, one after another.

    `across`: of `sent`, what leaves a group of workers that share weights (hybrid); None: there are no groups.
    """

    sent: tuple[int, ...]
    messages: int
    counted: bool = True
    across: int | None = None

    @property
    def most(self) -> int:
        return max(self.sent)


@dataclass(frozen=True)
class Sizes:
    """Of a job, as far as bytes depend on it."""

    workers: int
    lanes: int
    accumulate: int = 1
    backend: str = "gloo"
    bucket_bytes: int = 16 * 2**20
    weight_dtype: torch.dtype = torch.float32
    on_host: int | None = None  # workers of each host
    shares_memory: bool = False  # all workers are on one host, on the CPU, with backend "paceline"

    @property
    def plan(self) -> SumPlan:
        return sum_plan(self.lanes, self.workers, tuple(range(self.lanes)))


def step_traffic(strategy: str, model: ModelProfile, step: PassProfile, sizes: Sizes) -> StepTraffic:
    """`step` gives the order in which gradients become final, and which weights backward reads."""
    if sizes.workers == 1:
        return StepTraffic((0,), 0)
    if strategy in ("ddp", "star", "zero1", "zero2") or (strategy == "zero3" and sizes.shares_memory):
        buckets = plan_buckets(model.specs, full_order(step, len(model.specs)), sizes.bucket_bytes)
        if strategy == "ddp":
            return _ddp(buckets, sizes)
        if strategy == "star":
            return _star(buckets, sizes)
        return _whole_weights(strategy, buckets, sizes)
    if strategy in ("zero3", "fsdp"):
        return _in_units(model, step, sizes)
    told = Model(model.parameters, weight=sizes.weight_dtype.itemsize)
    sent = footprint(
        strategy,
        told,
        workers=sizes.workers,
        lanes=sizes.lanes,
        accumulate=sizes.accumulate,
        shard_over=sizes.on_host,
    ).sent
    across = None
    if strategy == "hybrid" and sizes.on_host:
        hosts = sizes.workers // sizes.on_host
        across = 2 * (hosts - 1) * -(-4 * model.parameters // sizes.on_host) // hosts
    return StepTraffic((sent,) * sizes.workers, sum(pulls_of(model, step)), counted=False, across=across)


def full_order(step: PassProfile, parameters: int) -> list[int]:
    """Backward's, then what it did not reach: the order that the engine agrees on after its first step."""
    order = list(step.order)
    return order + [number for number in range(parameters) if number not in set(order)]


def sent_by(schedule: Schedule, elements: int, size: int) -> list[int]:
    """Elements that each rank sends."""
    lengths = [high - low for low, high in schedule.ranges(elements, size)]
    return [
        sum(lengths[chunk] for hop in schedule.hops(rank, size) for send in hop.sends for chunk in send.chunks)
        for rank in range(size)
    ]


def _ddp(buckets: Sequence[Bucket], sizes: Sizes) -> StepTraffic:
    size = sizes.workers
    if sizes.shares_memory:
        return StepTraffic((0,) * size, len(buckets))
    if sizes.backend == "nccl" or (sizes.plan.is_pairwise and size == 2):
        z = sum(bucket.elements * bucket.dtype.itemsize for bucket in buckets)
        return StepTraffic((2 * (size - 1) * z // size,) * size, len(buckets), counted=False)
    sent = [0] * size
    for bucket in buckets:
        small = bucket.elements * bucket.dtype.itemsize <= HALVING_UP_TO * size
        schedule = HALVING_DOUBLING if sizes.plan.is_pairwise and small else canonical_schedule(sizes.plan)
        for rank, elements in enumerate(sent_by(schedule, bucket.elements, size)):
            sent[rank] += elements * bucket.dtype.itemsize
    return StepTraffic(tuple(sent), len(buckets))


def _star(buckets: Sequence[Bucket], sizes: Sizes) -> StepTraffic:
    z = sum(bucket.elements * bucket.dtype.itemsize for bucket in buckets)
    roots = [len(sizes.plan.roots(rank)) for rank in range(sizes.workers)]
    return StepTraffic(((sizes.workers - 1) * z, *(count * z for count in roots[1:])), len(buckets))


def _whole_weights(strategy: str, buckets: Sequence[Bucket], sizes: Sizes) -> StepTraffic:
    if sizes.shares_memory:
        return StepTraffic((0,) * sizes.workers, len(buckets))
    shards = cut_buckets(buckets, sizes.workers)
    nodes = _nodes(strategy, sizes)
    sent = _scattered(shards, nodes)
    for rank in range(sizes.workers):
        own = sum(piece.elements for piece in shards.pieces(rank))
        sent[rank] += (sizes.workers - 1) * own * sizes.weight_dtype.itemsize
    return StepTraffic(tuple(sent), len(buckets))


def _nodes(strategy: str, sizes: Sizes) -> list[int]:
    """That each worker sends: its roots, or its lanes one by one."""
    if strategy == "zero1":
        return [len(sizes.plan.roots(rank)) for rank in range(sizes.workers)]
    return [len(own) for own in strided_lanes(sizes.lanes, sizes.workers)]


def _scattered(shards: Shards, nodes: Sequence[int]) -> list[int]:
    sent = [0] * shards.workers
    for one in shards.buckets:
        for rank in range(shards.workers):
            foreign = one.bucket.elements - one.width(rank)
            sent[rank] += nodes[rank] * foreign * one.bucket.dtype.itemsize
    return sent


def _in_units(model: ModelProfile, step: PassProfile, sizes: Sizes) -> StepTraffic:
    units = [Unit(str(place), None, unit) for place, unit in enumerate(model.units)]
    cut_by_unit = [list(unit_buckets(model.specs, unit, sizes.bucket_bytes)) for unit in units]
    shards = cut_buckets([bucket for unit in reversed(cut_by_unit) for bucket in unit], sizes.workers)
    found = {one.bucket: one for one in shards.buckets}
    nodes = _nodes("fsdp", sizes)
    sent = [0] * sizes.workers if sizes.shares_memory else _scattered(shards, nodes)
    pulls = pulls_of(model, step)
    items = [len(own) * sizes.accumulate for own in strided_lanes(sizes.lanes, sizes.workers)]
    for rank in range(sizes.workers):
        for place, buckets in enumerate(cut_by_unit):
            mine = sum(found[bucket].width(rank) * sizes.weight_dtype.itemsize for bucket in buckets)
            asked = sum(items[other] for other in range(sizes.workers) if other != rank) * pulls[place]
            owners = sum(
                any(found[bucket].width(other) for bucket in buckets) for other in range(sizes.workers) if other != rank
            )
            sent[rank] += asked * mine + items[rank] * pulls[place] * owners * REQUEST_BYTES
    return StepTraffic(tuple(sent), sum(pulls) + len(shards.buckets))


def pulls_of(model: ModelProfile, step: PassProfile) -> list[int]:
    """How many times an item gathers each unit: in forward, and in backward if that reads weights of it again.

    The unit that forward uses last is still there when backward begins.
    """
    used = [place for number in step.used for place, unit in enumerate(model.units) if number in unit]
    last = used[-1] if used else None
    return [
        (1 if place in used else 0) + (1 if place != last and not step.read_again.isdisjoint(unit) else 0)
        for place, unit in enumerate(model.units)
    ]
