"""Footprint: the bytes that a strategy holds on one worker and moves in one step, from sizes alone.

    Ψ parameters, N workers     weights      gradients    optimizer state     sent in a step
    ddp                         w·Ψ          g·Ψ          s·Ψ                 2·(N-1)/N · g·Ψ
    star                        w·Ψ          g·Ψ          s·Ψ                 (N-1) · g·Ψ by the centre, g·Ψ by others
    zero1                       w·Ψ          g·Ψ          s·Ψ/N               (N-1)/N · (g·Ψ + w·Ψ)
    zero2                       w·Ψ          g·Ψ/N        s·Ψ/N               (N-1)/N · (g·Ψ + w·Ψ)
    zero3, fsdp                 w·Ψ/N        g·Ψ/N        s·Ψ/N               (N-1)/N · (g·Ψ + 2·w·Ψ)
    hybrid, n on each of H      w·Ψ/n        g·Ψ/n        s·Ψ/n               (n-1)/n · (g·Ψ + 2·w·Ψ) in the host,
    hosts                                                                     2·(H-1)/H · g·Ψ/n across
    local_sgd, m lanes on       (1+m)·w·Ψ    m·g·Ψ        m·s·Ψ               ddp's in a window's last step, or 0
    each worker
    diloco, likewise            (1+m)·w·Ψ    m·g·Ψ        m·s·Ψ + w·Ψ         likewise

    bytes per parameter         Adam in fp32: w 4, g 4, s 8     in mixed precision: w 2, g 2, s 12 (with a master copy)

That is one lane per worker, one micro-batch and one holder of each shard. Otherwise:

    lanes       a worker with m lanes adds them up in a binary counter: about log2 m + 1 gradients at once. zero2's
                owners hold one or two partial sums of their range, and its lanes are sent one by one; so are zero3's,
                which gathers weights for each of them. local_sgd and diloco have all of it once per lane
    accumulate  zero2's and zero3's lanes add up their micro-batches where they are made: a whole gradient as long as
                that takes. zero3 gathers weights for each of them, forward and backward
    copies      holders of each shard: state and sums as many times, and reduce-scatter to as many
    per_host    workers that share memory: where all do, sharded strategies have weights once for them all, and gather
                none
    shard_over  workers that share weights under hybrid: those of a host, n above; all, unless given

Compressed gradients add 2·g·Ψ for each lane of a worker, and owners of ranges 2·g·Ψ/N (`Residuals`). Weights that no
optimizer trains are whole on every worker; where weights are in shards, so are they.

Numbers are those of the busiest worker. Buffers for what is under way are not in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.collectives.canonical_sum import SumPlan, scatter_plans_by_lane, sum_plan
from paceline.errors import ConfigError
from paceline.world.lanes import neighbouring_lanes, strided_lanes


@dataclass(frozen=True)
class Model:
    """The number of parameters, and the bytes that each takes in its roles: Adam's in fp32, unless given."""

    parameters: int
    weight: int = 4
    gradient: int = 4
    state: int = 8
    frozen: int = 0
    """Bytes of what no optimizer trains, in all."""

    @classmethod
    def mixed(cls, parameters: int) -> Model:
        """Weights and gradients in half precision; Adam's state with a master copy in fp32."""
        return cls(parameters, weight=2, gradient=2, state=12)


@dataclass(frozen=True)
class Residuals:
    """Bytes that compression keeps from step to step: as they are before one, and as they are after it."""

    lane: int = 0
    """Of each lane: what its gradients have lost, and the velocities of topk's momentum."""
    sums: int = 0
    """Of the owners of ranges together: what the sums have lost."""

    def on_worker(self, workers: int, lanes: int) -> int:
        return -(-lanes // workers) * self.lane + -(-self.sums // workers)


@dataclass(frozen=True)
class Footprint:
    """Bytes of one worker."""

    parameters: int
    gradients: int
    optimizer_state: int
    sent: int

    @property
    def held(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state


def footprint(
    strategy: str,
    model: Model,
    *,
    workers: int,
    lanes: int,
    accumulate: int = 1,
    copies: int = 1,
    per_host: int = 1,
    shard_over: int | None = None,
    shard_frozen: bool = True,
) -> Footprint:
    if strategy not in FOOTPRINTS:
        raise ConfigError(f"the footprint of strategy={strategy!r} is not known; known are {', '.join(FOOTPRINTS)}")
    job = _Job(model, workers, lanes, accumulate, copies, per_host, shard_over or workers)
    trained = FOOTPRINTS[strategy](job)
    shards = {"zero3": 1 if job.weights_once else workers, "fsdp": workers, "hybrid": job.shard_over}
    frozen = -(-model.frozen // (shards.get(strategy, 1) if shard_frozen else 1))
    return replace(trained, parameters=trained.parameters + frozen)


@dataclass(frozen=True)
class _Job:
    model: Model
    workers: int
    lanes: int
    accumulate: int
    copies: int
    per_host: int
    shard_over: int

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= self.lanes:
            raise ConfigError(f"{self.workers} workers and {self.lanes} lanes: every worker has at least one")
        if not 1 <= self.copies <= self.workers:
            raise ConfigError(f"{self.copies} holders of each shard, of {self.workers} workers: there are too few")
        if not 1 <= self.shard_over <= self.workers or self.workers % self.shard_over:
            raise ConfigError(
                f"weights shared by {self.shard_over} of {self.workers} workers: these are no equal groups"
            )

    @property
    def share(self) -> int:
        """Parameters that one worker owns."""
        return -(-self.model.parameters // self.workers)

    @property
    def foreign(self) -> int:
        """Parameters that it does not."""
        return self.model.parameters - self.model.parameters // self.workers

    @property
    def weights_once(self) -> bool:
        return 1 < self.workers <= self.per_host


def _ddp(job: _Job) -> Footprint:
    plan = _neighbours(job)
    roots = max(len(plan.roots(worker)) for worker in range(job.workers))
    sent = (roots * job.foreign + (job.workers - 1) * job.share) * job.model.gradient
    return _whole(job, plan, sent if job.workers > 1 else 0)


def _star(job: _Job) -> Footprint:
    plan = _neighbours(job)
    roots = [len(plan.roots(worker)) for worker in range(job.workers)]
    sent = max([job.workers - 1, *roots[1:]]) * job.model.parameters * job.model.gradient
    return _whole(job, plan, sent)


def _local_sgd(job: _Job) -> Footprint:
    model, most = job.model, max(map(len, neighbouring_lanes(job.lanes, job.workers)))
    weights = (1 + most) * model.parameters * model.weight
    gradients = most * model.parameters * model.gradient
    return Footprint(weights, gradients, most * model.parameters * model.state, _ddp(job).sent)


def _diloco(job: _Job) -> Footprint:
    """With the momentum of the outer optimizer."""
    apart = _local_sgd(job)
    momentum = job.model.parameters * job.model.weight
    return replace(apart, optimizer_state=apart.optimizer_state + momentum)


def _whole(job: _Job, plan: SumPlan, sent: int) -> Footprint:
    model = job.model
    gradients = _gradients_at_once(plan) * model.parameters * model.gradient
    return Footprint(model.parameters * model.weight, gradients, model.parameters * model.state, sent)


def _zero1(job: _Job) -> Footprint:
    plan = _neighbours(job)
    roots = max(len(plan.roots(worker)) for worker in range(job.workers))
    gradients = _gradients_at_once(plan) * job.model.parameters * job.model.gradient
    return _sharded(job, gradients, nodes=roots)


def _zero2(job: _Job) -> Footprint:
    return _by_lane(job, weights_whole=True)


def _zero3(job: _Job) -> Footprint:
    return _by_lane(job, weights_whole=False)


def _fsdp(job: _Job) -> Footprint:
    """Weights are gathered wherever the workers are."""
    return _by_lane(replace(job, per_host=1), weights_whole=False)


def _hybrid(job: _Job) -> Footprint:
    """Fsdp inside a group, for its lanes; then its owners' roots cross to the other groups as ddp's do."""
    groups = job.workers // job.shard_over
    spans = neighbouring_lanes(job.lanes, groups)
    inside = _fsdp(replace(job, workers=job.shard_over, lanes=max(map(len, spans))))
    if groups == 1:
        return inside
    assignment = [
        tuple(span[n] for n in lanes_of) for span in spans for lanes_of in strided_lanes(len(span), job.shard_over)
    ]
    plan = SumPlan(tuple(range(job.lanes)), tuple(assignment))
    members = [tuple(range(low, low + job.shard_over)) for low in range(0, job.workers, job.shard_over)]
    partial_sums = max(len(sent.sums) for group in members for sent in scatter_plans_by_lane(plan, group))
    share, gradient = -(-job.model.parameters // job.shard_over), job.model.gradient
    whole = job.model.parameters * gradient if job.accumulate > 1 else 0
    roots = max(len(scatter_plans_by_lane(plan, group)[-1].sums) for group in members)
    across = roots * (share - share // groups) + (groups - 1) * -(-share // groups)
    gradients = partial_sums * share * gradient + whole
    return replace(inside, gradients=gradients, sent=inside.sent + across * gradient)


def _by_lane(job: _Job, *, weights_whole: bool) -> Footprint:
    assignment = strided_lanes(job.lanes, job.workers)
    plans = scatter_plans_by_lane(SumPlan(tuple(range(job.lanes)), assignment))
    partial_sums = max(len(sent.sums) for sent in plans)
    gradients = job.copies * partial_sums * job.share * job.model.gradient
    if job.accumulate > 1:
        gradients += job.model.parameters * job.model.gradient
    most = max(map(len, assignment))
    # A worker that gathers weights to use them sends its part to all others each time, forward and backward.
    return _sharded(job, gradients, nodes=most, gathers=None if weights_whole else 2 * most * job.accumulate)


def _sharded(job: _Job, gradients: int, nodes: int, gathers: int | None = None) -> Footprint:
    """`gathers` of weights in a step, where no worker keeps them whole; otherwise there is one, after the update."""
    model = job.model
    weights = model.parameters * model.weight
    scattered = job.copies * nodes * job.foreign * model.gradient
    each = 0 if job.weights_once else (job.workers - 1) * job.share * model.weight
    gathered = each * (1 if gathers is None else gathers)
    return Footprint(
        parameters=-(-weights // job.workers) if job.weights_once or gathers is not None else weights,
        gradients=gradients,
        optimizer_state=job.copies * job.share * model.state,
        sent=scattered + gathered,
    )


def _neighbours(job: _Job) -> SumPlan:
    return sum_plan(job.lanes, job.workers, tuple(range(job.lanes)))


def _gradients_at_once(plan: SumPlan) -> int:
    """On the worker that has most: its partial sums, and the lane that runs."""
    most = 0
    for worker, lanes in enumerate(plan.holders):
        alive = 0
        for lane in lanes:
            alive += 1
            most = max(most, alive)
            alive -= len(plan.merges_after[worker][lane])
    return most


FOOTPRINTS: dict[str, Callable[[_Job], Footprint]] = {
    "ddp": _ddp,
    "star": _star,
    "zero1": _zero1,
    "zero2": _zero2,
    "zero3": _zero3,
    "fsdp": _fsdp,
    "hybrid": _hybrid,
    "local_sgd": _local_sgd,
    "diloco": _diloco,
}
