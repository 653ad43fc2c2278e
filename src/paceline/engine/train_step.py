"""One step of training, told as the loop sees it: items are handed out, run backward, and end in one update.

    hand out item ─► backward ─► optimizer.step()        … once per item; only the step's last item acts
                        │
                        └─ on this worker's last item:  flush buckets ─► ballots ─► collect gradients

The body of the loop runs once per item, so `step()` and `zero_grad()` between items find `.grad` empty and do nothing:
the lane sums live out of their reach. After the last backward `.grad` holds the gradient of the global batch.
"""

from __future__ import annotations

import enum
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.byte_count import Traffic
from paceline.collectives.canonical_sum import sum_plan
from paceline.collectives.communicator import Communicator
from paceline.data.sharded_sampler import WorkItem
from paceline.engine.ballot import Ballot, LaneReport, any_used, lanes_in_order, name_key, pack, unpack
from paceline.engine.config import EngineConfig
from paceline.engine.lane_buffers import LaneBuffers
from paceline.engine.replicas import WeightsWatch, plain_name
from paceline.engine.strategy_table import StrategyTable, drop_gradients_of_others
from paceline.errors import LoopError, NonFiniteLossError, ReplicaError
from paceline.optim.gradient_norm import clip_coefficient, global_norm
from paceline.strategies.ddp import Ddp
from paceline.strategies.strategy import ItemPlace
from paceline.world.determinism import mix, seed_everything


class Phase(enum.Enum):
    """Where the loop is between two updates."""

    BETWEEN_STEPS = "between steps"
    ITEM = "an item is out, no backward yet"
    RAN = "the item's backward is done, others of the step follow"
    COLLECTED = "the step's gradient is in .grad, no optimizer has acted"
    APPLIED = "an optimizer has acted"


@dataclass
class Timing:
    """Seconds of the last step."""

    backward_s: float = 0.0
    exposed_s: float = 0.0  # from the end of the last backward until the gradient was there
    left_during_backward: int = 0  # buckets
    waited_for_data_s: float = 0.0


@dataclass
class _Step:
    """What accumulates over one step."""

    reports: dict[int, LaneReport] = field(default_factory=dict)
    learning_rates: list[float] | None = None
    gradient_versions: list[tuple[Parameter, int]] = field(default_factory=list)
    acted: set[int] = field(default_factory=set)
    traffic_before: Traffic = field(default_factory=Traffic)
    empty: bool = False  # Σ weight was 0, or the loss was not finite and is skipped
    left_out: set[tuple[int, int]] = field(default_factory=set)  # (lane, micro-batch) that had no backward


class TrainStep:
    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator | None,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
    ) -> None:
        self._config = config
        self._comm = comm
        self._rank = comm.rank if comm is not None else 0
        self._workers = comm.size if comm is not None else 1
        self._models = models
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._names = {
            id(parameter): plain_name(name) for model in models for name, parameter in model.named_parameters()
        }
        self._buffers = LaneBuffers(models)
        self._strategies = StrategyTable(config, comm, self._names)
        self._original_steps: dict[int, Callable[..., Any]] = {}
        self._watch: WeightsWatch | None = None
        self._phase = Phase.BETWEEN_STEPS
        self._item: WorkItem | None = None
        self._step_called = False
        self._ran_last = False
        self._stop_wanted = False
        self._clip: float | None = None
        self._clipped_by: float = math.nan
        self._now = _Step()
        self._update = 0
        self._active: Ddp | None = None
        self._mean_names: dict[int, str] = {}
        self.step = 0
        self.stepped = False
        self.stop_agreed = False
        self.means: dict[str, float] = {}
        self.timing = Timing()
        self.traffic = Traffic()  # of the last step
        self.broken: str | None = None
        self.votes = 0
        self._in_body = False
        self._stepped_in_body: set[int] = set()
        self.on_step: Callable[[], None] = lambda: None

    # -- items -------------------------------------------------------------------------------------------------------

    @property
    def inside_step(self) -> bool:
        return self._phase in (Phase.ITEM, Phase.RAN, Phase.COLLECTED)

    @property
    def item(self) -> WorkItem | None:
        return self._item

    @property
    def left_out(self) -> set[tuple[int, int]]:
        return self._now.left_out

    @property
    def accumulate(self) -> int:
        return self._config.accumulate

    def begin_item(self, item: WorkItem, *, optimizers: Sequence[Optimizer] | None = None) -> None:
        """Hand out `item`: the lane's buffers and random stream are in place when the body runs."""
        self.end_item()
        if item.first_of_step:
            self._start_step(item, optimizers or self._optimizers)
        self._item = item
        self._step_called = self._ran_last = False
        self._in_body = True
        self.stepped = False
        if item.first_of_lane and not item.shadow:
            self._buffers.start_lane()
        seed_everything(
            mix(self._config.seed, "model", item.epoch, item.step, item.lane, item.micro_batch, self._update)
        )
        self._phase = Phase.ITEM

    def end_item(self) -> None:
        """The loop asks for more: settle what the last item left."""
        if self._phase is Phase.COLLECTED:
            raise LoopError(
                f"step {self.step + 1} has its gradient but no optimizer.step() was called before the next batch; call "
                "step() after every backward: it acts once per step. To accumulate k micro-batches, use "
                "Engine(accumulate=k)"
            )
        if self._phase is Phase.ITEM:
            self._skip_item()
        if self._phase is Phase.APPLIED:
            self._end_step()

    def backward(self, loss: Tensor, weight: float | None, *, last: bool) -> None:
        item = self._check_backward(loss)
        weight = float(item.samples) if weight is None else float(weight)
        if not math.isfinite(weight) or weight < 0:
            raise LoopError(f"backward(weight={weight}): the weight is a number of samples or tokens, 0 or more")
        place = _place(item)
        if last and item.last_of_lane and not item.shadow:
            self._buffers.finish_lane(keep=item.lane == item.present[0])
        if not item.shadow:
            self._report(item, loss, weight, last=last)
        if last and item.last_of_step:
            self._buffers.send_ahead(self._comm, self._rider_of(item.present[0]))
        active = self._strategy()
        started = time.perf_counter()
        active.start_backward(place, last=last)
        # The gradient is Σ w·∇loss / Σ w. Dividing by the step's samples before backward keeps small precisions in
        # range, and where w counts samples it is the whole scaling: no second pass over the gradient.
        torch.autograd.backward(loss, torch.full_like(loss, weight / item.step_samples))
        ended = time.perf_counter()
        self.timing.backward_s = ended - started
        if not last:
            return
        self._ran_last = True
        active.finish_backward(place)
        drop_gradients_of_others(active, self._optimizers)
        self._phase = Phase.RAN
        if item.last_of_step:
            self._collect()
            self.timing.exposed_s = time.perf_counter() - ended

    def add_mean(self, name: str, value: Tensor | float, weight: float | None) -> None:
        item = self._item
        if item is None or self._phase is Phase.BETWEEN_STEPS:
            raise LoopError(f"engine.mean({name!r}) collects values inside the training loop; there is no item now")
        if self._phase in (Phase.COLLECTED, Phase.APPLIED):
            raise LoopError(f"engine.mean({name!r}) comes too late: call it before engine.backward(), which sends it")
        if item.shadow:
            return
        key = name_key(name)
        self._mean_names[key] = name
        report = self._now.reports.setdefault(item.lane, LaneReport(item.lane))
        report.add_mean(key, float(value), float(item.samples) if weight is None else float(weight))

    # -- the end of a step -------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Tell and hear the ballots, then make `.grad` the gradient of the global batch."""
        assert self._item is not None
        active = self._strategy()
        ballots = self._vote(active)
        reports = lanes_in_order(ballots)
        flags = any_used(ballots)
        used, changed = flags[: len(active.parameters)], flags[len(active.parameters) :]
        self._judge_losses(reports)
        total = math.fsum(report.weight for report in reports)
        scale = self._item.step_samples / total if total > 0 else 0.0
        active.collect(scale, used)
        if total == 0:
            warnings.warn(f"step {self.step + 1} is skipped: the weights of all its micro-batches are 0", stacklevel=4)
            self._now.empty = True
        owner = self._rider_of(self._item.present[0])
        self._buffers.finish_step(self._comm, owner, changed, dropped=self._now.empty)
        self.means |= self._mean_over(reports)
        self.stop_agreed = any(ballot.stop for ballot in ballots)
        self._now.gradient_versions = [(p, p.grad._version) for p in active.parameters if p.grad is not None]
        self.timing.left_during_backward = active.left_during_backward
        self.traffic = self._traffic_so_far() - self._now.traffic_before
        self._phase = Phase.COLLECTED

    def _vote(self, active: Ddp) -> list[Ballot]:
        assert self._watch is not None
        ballot = Ballot(
            step=self.step,
            update=self._update,
            stop=self._stop_wanted,
            check=self._watch.check(self.step) if self._comm is not None else 0,
            used=(*active.used(), *self._buffers.changed()),
            lanes=tuple(self._now.reports.values()),
        )
        if self._comm is None:
            return [ballot]
        mine = pack(ballot, most_lanes=-(-self._config.lanes // self._workers))
        rows, handle = self._comm.all_gather(mine)
        handle.wait_for_vote(self.votes)
        self.votes += 1
        ballots = [unpack(row, len(ballot.used)) for row in rows]
        for rank, other in enumerate(ballots):
            if (other.step, other.update) != (ballot.step, ballot.update):
                raise ReplicaError(
                    f"worker {self._rank} is in step {ballot.step + 1} (update {ballot.update}) but worker {rank} "
                    f"is in step {other.step + 1} (update {other.update}); their loops took different turns"
                )
        self._watch.compare(self.step, [other.check for other in ballots])
        return ballots

    def _judge_losses(self, reports: Sequence[LaneReport]) -> None:
        bad = next((report for report in reports if not report.finite), None)
        if bad is None or self._config.on_nonfinite == "continue":
            return
        what = f"the loss of step {self.step + 1} is {bad.loss} in lane {bad.lane}"
        if self._config.on_nonfinite == "stop":
            raise NonFiniteLossError(
                f"{what}; training stops before the weights are touched "
                "(on_nonfinite='skip' leaves such steps out, 'continue' applies them)"
            )
        warnings.warn(f"{what}; the step is skipped", stacklevel=5)
        self._now.empty = True

    def optimizer_step(self, optimizer: Optimizer, closure: Any) -> Any:
        """The prepared optimizer's `step()`: acts when the step's gradient is there, and only then."""
        if closure is not None:
            raise LoopError(
                "optimizer.step(closure) would run forward again inside the step; use engine.update(optimizer, loss_fn)"
            )
        self._step_called = True
        if self._phase is Phase.ITEM and self._item is not None:
            raise LoopError(
                f"optimizer.step() was called before engine.backward() in step {self.step + 1}, lane {self._item.lane}"
                + (": the last backward of an item is called without last=False" if self._now.reports else "")
            )
        self._check_learning_rates()
        if self._phase not in (Phase.COLLECTED, Phase.APPLIED):
            return None
        if id(optimizer) in self._now.acted:
            raise LoopError(f"optimizer.step() was called twice in step {self.step + 1}")
        if self._phase is Phase.COLLECTED:
            self._check_gradients_untouched()
        return self._act(optimizer)

    def _act(self, optimizer: Optimizer) -> Any:
        first = self._phase is Phase.COLLECTED
        self._now.acted.add(id(optimizer))
        self._phase = Phase.APPLIED
        if self._now.empty:
            return None
        result = self._original_steps[id(optimizer)]()
        if first:
            self.stepped = True
            self.step += self._update == 0
            self.on_step()
            # What the user draws between steps must not depend on how many items this worker ran.
            seed_everything(mix(self._config.seed, "between", self.step, self._update))
        return result

    def scheduler_acts(self, scheduler: Any) -> bool:
        """A prepared scheduler follows the optimizer: it acts only when that did."""
        if self._phase is Phase.APPLIED and self.stepped and self._in_body:
            self._stepped_in_body.add(id(scheduler))
        return self._phase is Phase.BETWEEN_STEPS or (self._phase is Phase.APPLIED and self.stepped)

    def _end_step(self) -> None:
        if self._active is not None:
            self._active.end_step()
        self._phase = Phase.BETWEEN_STEPS
        self._item = None
        self._in_body = False

    def finish_update(self, optimizer: Optimizer) -> None:
        """The end of `engine.update`: act, then be ready for another optimizer on the same items."""
        if self._phase is Phase.ITEM:
            self._skip_item()
        self._check_learning_rates()
        self._act(optimizer)
        self._update += 1

    def retract_item(self) -> None:
        """`engine.update` runs the items itself: take back the one that the loop was given."""
        if self._phase is Phase.APPLIED:
            return
        if self._phase is not Phase.ITEM or self._ran_last:
            raise LoopError("engine.update() and engine.backward() can't be mixed in one item; use one form per loop")
        self._phase = Phase.BETWEEN_STEPS

    def new_items(self) -> None:
        self._update = 0

    def stop(self) -> None:
        self._stop_wanted = True

    def forget_untouched(self) -> None:
        """The loop was left with an item out and nothing of its step run, as to look at a batch: no harm is done."""
        item = self._item
        if self._phase is Phase.ITEM and item is not None and item.first_of_step and not self._now.reports:
            self._phase = Phase.BETWEEN_STEPS
            self._item = None
            self._in_body = False

    def stopped(self) -> None:
        """The loop has ended as wanted; another one may begin."""
        self._stop_wanted = self.stop_agreed = False

    def _skip_item(self) -> None:
        item = self._item
        assert item is not None
        active = self._strategy()
        if not item.shadow:
            warnings.warn(
                f"lane {item.lane} of step {self.step + 1} was left without engine.backward(); it counts as empty",
                stacklevel=5,
            )
            self._now.reports.setdefault(item.lane, LaneReport(item.lane))
            self._now.left_out.add((item.lane, item.micro_batch))
            if item.last_of_lane:
                self._buffers.finish_lane(keep=item.lane == item.present[0])
        if item.last_of_step:
            self._buffers.send_ahead(self._comm, self._rider_of(item.present[0]))
        active.skip(_place(item))
        self._phase = Phase.RAN
        if item.last_of_step:
            self._collect()
            self._apply_as_usual()

    def _apply_as_usual(self) -> None:
        """The body skipped the step's last item, so nobody will call step(): do what it does on other items."""
        if self._clip is not None:
            self.clip(self._clip)
        for optimizer in self._optimizers:
            self._act(optimizer)
        for scheduler in self._schedulers:
            if id(scheduler) in self._stepped_in_body:  # not one that is stepped once an epoch
                scheduler.step()

    # -- clipping ----------------------------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> float:
        """Clip the summed gradient by its global norm; before the step's last item there is nothing to clip yet."""
        self._clip = max_norm
        if self._phase is Phase.ITEM:
            raise LoopError("engine.clip_grad_norm_() belongs between engine.backward() and optimizer.step()")
        if self._phase is not Phase.COLLECTED:
            return self._clipped_by
        gradients = [p.grad for p in self._strategy().parameters if p.grad is not None]
        self._clipped_by = global_norm(gradients)
        if self._clipped_by > max_norm or not math.isfinite(self._clipped_by):
            torch._foreach_mul_(gradients, clip_coefficient(self._clipped_by, max_norm))
        self._now.gradient_versions = [(p, p.grad._version) for p in self._strategy().parameters if p.grad is not None]
        return self._clipped_by

    # -- rules of the loop -------------------------------------------------------------------------------------------

    def _check_backward(self, loss: Tensor) -> WorkItem:
        if self._item is None or self._phase is Phase.BETWEEN_STEPS:
            raise LoopError(
                "engine.backward() needs an item: call it inside `for batch in loader` of a prepared loader"
            )
        if self._step_called:
            raise LoopError(
                f"engine.backward() came after optimizer.step() in the same item (step {self.step + 1}): later lanes "
                "would see new weights. With several optimizers use engine.update(optimizer, loss_fn) for each"
            )
        if self._ran_last:
            raise LoopError(
                "a second engine.backward() in one item: its buckets have left; "
                "all but the last need engine.backward(loss, last=False)"
            )
        if loss.numel() != 1:
            raise LoopError(f"engine.backward() takes a scalar loss, got shape {tuple(loss.shape)}; average it first")
        return self._item

    def _check_learning_rates(self) -> None:
        rates = [float(group["lr"]) for o in self._optimizers for group in o.param_groups if "lr" in group]
        if self._now.learning_rates is None:
            self._now.learning_rates = rates
        elif rates != self._now.learning_rates:
            raise LoopError(
                f"the learning rate changed inside step {self.step + 1} (from {self._now.learning_rates} to {rates}): "
                "the body runs once per item, not once per step. Hand the scheduler to engine.prepare(), or change the "
                "rate only when engine.stepped is true"
            )

    def _check_gradients_untouched(self) -> None:
        for parameter, version in self._now.gradient_versions:
            if parameter.grad is None or parameter.grad._version != version:
                raise LoopError(
                    f"the gradient of {self._names.get(id(parameter), 'a parameter')!r} was changed between "
                    "engine.backward() and optimizer.step(); torch's clip_grad_norm_ and edits of .grad see only some "
                    "items of a step. Use engine.clip_grad_norm_(max_norm)"
                )

    # -- parts -------------------------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer, original: Callable[..., Any]) -> None:
        self._original_steps[id(optimizer)] = original

    def _start_step(self, item: WorkItem, optimizers: Sequence[Optimizer]) -> None:
        self._now = _Step(traffic_before=self._traffic_so_far())
        self._active, remade = self._strategies.of(optimizers)
        if remade:
            self._watch = None
        self._active.start_step(sum_plan(self._config.lanes, self._workers, item.present))
        self._buffers.start_step()
        if self._watch is None:
            self._watch = WeightsWatch([(self._names.get(id(p), "?"), p) for p in self._active.parameters])

    def _traffic_so_far(self) -> Traffic:
        return Traffic() if self._comm is None else self._comm.traffic

    def _strategy(self) -> Ddp:
        assert self._active is not None
        return self._active

    def _report(self, item: WorkItem, loss: Tensor, weight: float, *, last: bool) -> None:
        report = self._now.reports.setdefault(item.lane, LaneReport(item.lane))
        value = float(loss.detach())
        if last:
            report.weight += weight
        if report.finite:
            report.loss, report.finite = value, math.isfinite(value)

    def _rider_of(self, lane: int) -> int:
        plan = sum_plan(self._config.lanes, self._workers, self._item.present if self._item else ())
        return next(worker for worker, lanes in enumerate(plan.holders) if lane in lanes)

    def _mean_over(self, reports: Sequence[LaneReport]) -> dict[str, float]:
        totals: dict[int, list[tuple[float, float]]] = {}
        for report in reports:
            for key, pair in report.means.items():
                totals.setdefault(key, []).append(pair)
        return {
            self._mean_names[key]: math.fsum(value for value, _ in pairs) / weight
            for key, pairs in totals.items()
            if key in self._mean_names and (weight := math.fsum(weight for _, weight in pairs)) > 0
        }

    def close(self) -> None:
        self._strategies.close()


def _place(item: WorkItem) -> ItemPlace:
    return ItemPlace(item.lane, item.last_of_lane, item.last_of_step, item.shadow)
