"""Local training: lanes make `every` steps apart, then they meet in an outer step.

    round          0        1        …   every-1                   every
    lane 0      θ ─► θ₀    ─► θ₀    …   ─► θ₀ ┐                 θ ─► θ₀
    lane 1      θ ─► θ₁    ─► θ₁    …   ─► θ₁ ┴─ outer step ──► θ ─► θ₁
    agreement      LATER    LATER   …   NOW                       LATER

What lanes have is theirs, not the worker's: a worker with m lanes holds m copies of the weights, of the gradient and of
the optimizer's state, and runs `optimizer.step()` once for each. So the bits do not depend on the number of workers.

Between two steps the model holds the weights with which the window began. At a boundary (evaluation, a hash, saving,
the end of the loop) it holds what an outer step there would give; the lanes go on from their own, so that a boundary
changes nothing of what is trained. That costs one exchange, where it is not a window's end.

With *fragments* the lanes meet in one part of the parameters at a time, and compute meanwhile:

    round r    the lanes' moves in the fragment are on their way ║ forward, backward ─► the fragment's outer step
                                                                                     ─► the lanes' own steps
The gradients of round r were found with the lanes' old weights of the fragment. Nothing is under way between two steps.
An optimizer that does not act in round r meets the next time that the fragment is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.gradient_exchange import GradientExchange
from paceline.errors import ConfigError
from paceline.optim.gradient_norm import clip_, global_norm
from paceline.sharding.bucket import Bucket, plan_buckets
from paceline.strategies.buckets import GradientPlaceholder, LaneSums, expected_order, gradient_specs, half_is_gone
from paceline.strategies.local.lane_optimizer import LaneOptimizer
from paceline.strategies.local.outer_step import ExactSum, Int8Sum, OuterSteps, SumOfLanes, Wire
from paceline.strategies.registry import Job, Maker
from paceline.strategies.strategy import Agreement, ItemPlace, StrategyBase, Tally
from paceline.torch_compat import STEP_WAS_CALLED, foreach_mul_, version_of
from paceline.world.lanes import neighbouring_lanes

OuterOptimizer = Callable[[Sequence[Parameter]], Optimizer]
OfLanes = Mapping[int, Mapping[Parameter, Tensor]]


@dataclass(frozen=True)
class Windows:
    """How long lanes are apart, and who makes the outer step."""

    strategy: str
    every: int
    outer_optimizer: OuterOptimizer
    outer_gradients: Wire = "fp32"
    fragments: int = 1  # more: the lanes meet in one after another, each every so many steps
    start_after: int = 0  # steps that lanes make together

    def together(self, round: int) -> bool:
        """Lanes are not apart yet."""
        return round < self.start_after

    def ends_with(self, round: int) -> bool:
        """The lanes meet at the end of the round."""
        apart = round + 1 - self.start_after
        return self.fragments == 1 and apart > 0 and apart % self.every == 0

    def due_in(self, round: int) -> int | None:
        """The fragment in which the lanes meet while they compute the round."""
        apart = round - self.start_after
        if self.fragments == 1 or apart <= 0:
            return None
        places = [fragment * self.every // self.fragments for fragment in range(self.fragments)]
        return next((fragment for fragment, place in enumerate(places) if apart % self.every == place), None)

    def agreement(self, round: int) -> Agreement:
        meets = self.together(round) or self.ends_with(round) or self.due_in(round) is not None
        return Agreement.NOW if meets else Agreement.LATER


class LaneGradients:
    """The gradients of a step, lane by lane; inside a lane they add up in `.grad`, as everywhere in torch."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self.of_lanes: dict[int, dict[Parameter, Tensor]] = {}
        self._held: dict[Parameter, tuple[Tensor, int]] = {}  # of the lane that runs, with its version
        self._armed = False

    @property
    def held(self) -> list[Tensor]:
        """All of them, of lanes that are done and of the one that runs."""
        done = [tensor for gradients in self.of_lanes.values() for tensor in gradients.values()]
        return [*done, *(tensor for tensor, _ in self._held.values())]

    def start_backward(self) -> None:
        """Put the lane's gradients so far back, unless an earlier loss of the item has added to them already."""
        is_first, self._armed = not self._armed, True
        for parameter, (gradient, _) in self._held.items():
            if is_first or parameter.grad is None:
                parameter.grad = gradient

    def finish(self, place: ItemPlace) -> None:
        """The item's last backward is done."""
        if not place.shadow:
            self._held = {p: (p.grad, version_of(p.grad)) for p in self._parameters if p.grad is not None}
        self._end_item(place)

    def skip(self, place: ItemPlace) -> None:
        """The item had no backward, or a part of one, which is forgotten if that is possible."""
        if self._armed and any(version_of(gradient) != version for gradient, version in self._held.values()):
            raise half_is_gone(place)
        self._end_item(place)

    def _end_item(self, place: ItemPlace) -> None:
        self._armed = False
        for parameter in self._parameters:
            parameter.grad = None
        if place.last_of_lane and not place.shadow:
            if self._held and not place.left_out:
                found = {p: g.to_dense() if g.is_sparse else g for p, (g, _) in self._held.items()}
                self.of_lanes[place.lane] = found
            self._held = {}


class GradientOfAllLanes:
    """The first `start_after` steps: lanes are not apart yet, and every one makes its step on the gradient of all.

        lane 0    g₀ ┐                                    ┌─► step of lane 0 ─► θ'
        lane 1    g₁ ┴─ canonical sum, weighted mean ──► g ┴─► step of lane 1 ─► θ', to the last bit the same

    These are the steps of ddp, bit for bit, and send what ddp sends. A run that begins so loses far less by being apart
    later (docs/concepts/local_sgd.md has figures).
    """

    def __init__(self, exchange: GradientExchange, rank: int, bucket_bytes: int) -> None:
        self._exchange, self._rank, self._bucket_bytes = exchange, rank, bucket_bytes
        self._set = exchange.new_set()
        self._cut: tuple[tuple[int, ...], tuple[Bucket, ...]] = ((), ())

    def hand_out(self, parameters: Sequence[Parameter], of_lanes: OfLanes, plan: SumPlan, tally: Tally) -> None:
        """`.grad` becomes the gradient of the global batch, on every worker."""
        under_way = []
        for number, bucket in enumerate(self._buckets(parameters)):
            sums = LaneSums(bucket, parameters)
            for lane in plan.holders[self._rank]:
                gradients = of_lanes.get(lane)
                if gradients is None:
                    sums.take_nothing(lane)
                else:
                    sums.take(lane, [gradients.get(parameters[entry.parameter]) for entry in bucket.entries])
                sums.merge(plan.merges_after[self._rank][lane])
            under_way.append((sums, self._exchange.start(self._set, number, plan, sums.nodes, sums.buffer)))
        for sums, pending in under_way:
            total = pending.wait()
            if tally.scale != 1.0:
                total.mul_(tally.scale)
            sums.hand_out(total, tally.used)

    def _buckets(self, parameters: Sequence[Parameter]) -> tuple[Bucket, ...]:
        key = tuple(map(id, parameters))
        if self._cut[0] != key:
            if self._cut[1]:
                self._set = self._exchange.new_set(old=self._set)
            specs = gradient_specs(parameters)
            self._cut = key, plan_buckets(specs, expected_order(len(specs)), self._bucket_bytes)
        return self._cut[1]


class LocalTraining(StrategyBase):
    lanes_apart = True
    left_during_backward = 0  # nothing leaves before the outer step

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        optimizers: Sequence[Optimizer],
        windows: Windows,
        everything: Sequence[LaneOptimizer],
        outer_steps: OuterSteps,
        of_all_lanes: GradientOfAllLanes,
        rank: int,
    ) -> None:
        """`everything`: of all optimizers of the job, of which `optimizers` act here."""
        self.parameters = self.replicas = [parameter for _, parameter in named]
        self._windows, self._everything, self._outer_steps, self._rank = windows, everything, outer_steps, rank
        self._of_all_lanes = of_all_lanes
        self._mine = [lanes for lanes in everything if any(lanes.optimizer is one for one in optimizers)]
        self._placeholders = [(p, GradientPlaceholder.saying(p, _not_here(name, windows))) for name, p in named]
        self._gradients = LaneGradients(self.parameters)
        self._weights: dict[int, float] = {}  # of this worker's lanes in this step
        self._round = 0

    def agreement(self, round: int) -> Agreement:
        return self._windows.agreement(round)

    # -- one step --------------------------------------------------------------------------------------------------

    def start_step(self, round: int, plan: SumPlan) -> None:
        self._round, self._plan, self._lanes = round, plan, plan.holders[self._rank]
        self._gradients = LaneGradients(self.parameters)
        for parameter in self.parameters:  # a backward of the user's own before this step is none of its gradient
            parameter.grad = None
        if self._windows.ends_with(round - 1):
            for lanes in self._mine:  # an optimizer that did not act in the window's last step
                if lanes.in_window:
                    self._outer_steps.synchronise(lanes)
        for lanes in self._everything:
            lanes.open_window()
        fragment = self._windows.due_in(round)
        for lanes in self._mine:
            if lanes.meeting is not None and lanes.meeting.round != round:
                lanes.forget_meeting()
            if lanes.meeting is None and fragment is not None:  # `engine.update` starts a step of all optimizers too
                lanes.meeting = self._outer_steps.begin(lanes, fragment, round)

    def start_lane(self, lane: int) -> None:
        for lanes in self._everything:
            lanes.show(lane)

    def start_backward(self, place: ItemPlace, *, last: bool) -> None:
        self._gradients.start_backward()

    def finish_backward(self, place: ItemPlace) -> None:
        self._gradients.finish(place)
        self._end_item(place)

    def skip(self, place: ItemPlace) -> None:
        self._gradients.skip(place)
        self._end_item(place)

    def _end_item(self, place: ItemPlace) -> None:
        """The vote compares the weights that all workers have alike."""
        if place.last_of_step:
            for lanes in self._everything:
                lanes.show_outer()

    def used(self) -> Sequence[bool]:
        used = {parameter for gradients in self._gradients.of_lanes.values() for parameter in gradients}
        return [parameter in used for parameter in self.parameters]

    def collect(self, tally: Tally) -> None:
        """Every lane's gradient becomes that of its own micro-batches: backward has divided by all lanes' samples."""
        if self._windows.together(self._round):
            self._of_all_lanes.hand_out(self.parameters, self._gradients.of_lanes, self._plan, tally)
            return
        for lanes in self._mine:
            if lanes.meeting is not None:
                self._outer_steps.finish(lanes, lanes.meeting)
        weights = dict(tally.weights)
        self._weights = {lane: weights[lane] for lane in self._lanes if weights.get(lane, 0.0) > 0}
        for lane, weight in self._weights.items():
            gradients = self._gradients.of_lanes.get(lane, {})
            if tally.samples != weight and gradients:
                foreach_mul_(list(gradients.values()), tally.samples / weight)
        if not tally.empty:
            for (parameter, placeholder), used in zip(self._placeholders, self.used(), strict=True):
                parameter.grad = placeholder if used else None

    def clip(self, max_norm: float) -> float:
        """Each lane's gradient by its own norm; the largest of this worker's lanes comes back."""
        norms = [0.0]
        for gradients in self._whole_or_of_lanes():
            norms.append(float(clip_(list(gradients.values()), global_norm(gradients.values()), max_norm)))
        return math.nan if any(map(math.isnan, norms)) else max(norms)

    def _whole_or_of_lanes(self) -> list[dict[Parameter, Tensor]]:
        """As long as lanes are together there is one gradient of them all."""
        if self._windows.together(self._round):
            return [{parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}]
        return list(self._gradients.of_lanes.values())

    def apply(self, optimizer: Optimizer, original_step: Callable[[], Any]) -> Any:
        (lanes,) = [lanes for lanes in self._mine if lanes.optimizer is optimizer]
        result = None
        if self._windows.together(self._round):
            (whole,) = self._whole_or_of_lanes()
            for lane in lanes.lanes:  # with a gradient of its own: an optimizer may write to it
                own = whole if lane == lanes.lanes[-1] else {p: gradient.clone() for p, gradient in whole.items()}
                result = lanes.step(lane, own, original_step)
            lanes.go_on_together()
            setattr(optimizer, STEP_WAS_CALLED, True)
            return result
        for lane, weight in self._weights.items():
            result = lanes.step(lane, self._gradients.of_lanes.get(lane, {}), original_step)
            lanes.count(lane, weight)
        lanes.show_outer()
        setattr(optimizer, STEP_WAS_CALLED, True)  # also by a worker whose lanes have no samples in this step
        if self._windows.ends_with(self._round):
            self._outer_steps.synchronise(lanes)
        return result

    def end_step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self._gradients = LaneGradients(self.parameters)

    # -- between steps -----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        for lanes in self._mine:
            lanes.forget_meeting()  # of a step that was begun and never made
            self._outer_steps.preview(lanes)

    def local_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._of(optimizer).local_state()

    def load(self, optimizer: Optimizer, state: dict[str, Any], *, round: int) -> None:
        self._of(optimizer).load(state)

    def load_full(self, parameter: Parameter, full: Tensor) -> None:
        """The state that follows says whether a window is open."""
        for lanes in self._everything:
            if parameter in lanes.outer:
                lanes.show_outer()
                lanes.close_windows()
        super().load_full(parameter, full)

    def _of(self, optimizer: Optimizer) -> LaneOptimizer:
        return next(lanes for lanes in self._everything if lanes.optimizer is optimizer)

    def close(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _not_here(name: str, windows: Windows) -> str:
    return (
        f"the gradient of {name!r} is not here: under strategy={windows.strategy!r} every lane has a gradient of its "
        "own, and there is none of the global batch. To clip each lane's, use engine.clip_grad_norm_(max_norm)"
    )


class LocalMaker(Maker):
    """Lanes are swapped in whole, so optimizers that act one by one share what their lanes have."""

    def __init__(self, job: Job, windows: Windows) -> None:
        self._job, self._windows = job, windows
        assignment = neighbouring_lanes(job.lanes, job.world.size)
        plan = SumPlan(tuple(range(job.lanes)), assignment)
        kind = Int8Sum if windows.outer_gradients == "int8" else ExactSum
        exchange = GradientExchange(job.comm, job.reduction, job.algorithm)
        self._of_all_lanes = GradientOfAllLanes(exchange, job.world.rank, job.bucket_bytes)
        self._sums: SumOfLanes = kind(job.comm, exchange, plan)
        self._outer_steps = OuterSteps(job.comm, self._sums, job.lanes, job.bucket_bytes)
        held: set[int] = set()
        for optimizer in job.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if id(parameter) in held:
                    raise ConfigError(
                        f"strategy={windows.strategy!r} with two optimizers that hold one parameter: each would have "
                        "weights of its own for every lane; give each parameter to one optimizer"
                    )
                held.add(id(parameter))
        own, how = assignment[job.world.rank], (windows.strategy, windows.fragments)
        self._everything = [LaneOptimizer(o, own, _outer(windows, o), *how) for o in job.optimizers]

    def make(self, named: Sequence[tuple[str, Parameter]], optimizers: Sequence[Optimizer]) -> LocalTraining:
        for lanes in self._everything:  # groups may have been added
            lanes.outer_optimizer.param_groups[0]["params"] = lanes.parameters
        return LocalTraining(
            named,
            optimizers,
            self._windows,
            self._everything,
            self._outer_steps,
            self._of_all_lanes,
            self._job.world.rank,
        )

    def close(self) -> None:
        for lanes in self._everything:
            lanes.close()
        self._sums.close()

    def teardown(self) -> None:
        for lanes in self._everything:
            lanes.teardown()
        self._sums.close()


def _outer(windows: Windows, optimizer: Optimizer) -> Optimizer:
    return windows.outer_optimizer([parameter for group in optimizer.param_groups for parameter in group["params"]])
