"""One step of training, told as the loop sees it: items are handed out, run backward, and end in one update.

    hand out item ─► backward ─► optimizer.step()        … once per item; only the step's last item acts
                        │
                        └─ on this worker's last item:  flush buckets ─► ballots ─► collect gradients

The body of the loop runs once per item, so `step()` and `zero_grad()` between items find `.grad` empty and do nothing:
the lane sums live out of their reach. After the last backward `.grad` holds the gradient of the global batch, under
strategies that keep it here; who runs the update is the strategy's affair.

In a round whose workers don't agree there is one ballot, this worker's own: means and a wish to stop are its affair.
Where they never agree a gradient may be applied as soon as it leaves, so a loss is judged before its lane's backward.

In an elastic job a step counts when the coordinator commits it. Until then it can be *lost*: the workers have changed,
what the step did is forgotten, calls of the loop's body do nothing more, and the loader hands its items out again.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.collectives.byte_count import Traffic
from paceline.collectives.communicator import Communicator
from paceline.data.sharded_sampler import WorkItem
from paceline.elastic.fault_injection import begin_step, fault_point, flips_due
from paceline.engine.ballot import Ballot, LaneReport, any_used, lanes_in_order, means_over, name_key
from paceline.engine.ballot_box import BallotBox
from paceline.engine.config import EngineConfig
from paceline.engine.lane_buffers import LaneBuffers
from paceline.engine.loop_rules import (
    Phase,
    check_backward_held,
    check_gradients_untouched,
    check_learning_rates,
    gradient_versions,
    item_of_backward,
    item_of_mean,
    learning_rates,
    must_leave_out,
)
from paceline.engine.parameter_places import ParameterPlaces
from paceline.engine.replicas import flip_a_bit
from paceline.engine.second_opinion import SecondOpinion
from paceline.engine.step_so_far import ItemSoFar, StepSoFar, Timing
from paceline.engine.stop_signals import StopSignals
from paceline.engine.strategy_table import StrategyTable, drop_gradients_of_others
from paceline.errors import GenerationEnded, LoopError, ReplicaError
from paceline.optim.loss_scale import MovingScale
from paceline.strategies.registry import Rides
from paceline.strategies.strategy import Agreement, ItemPlace, Strategy, Tally
from paceline.world.determinism import mix, seed_everything


class Commitment(Protocol):
    """Who decides whether a step counts, where workers may be lost."""

    @property
    def before_update(self) -> bool:
        """Every worker can make the update alone: it is made when the step counts. Otherwise it can be undone."""
        ...

    def commits(self, step: int, update: int, *, check: int) -> bool:
        """False: the workers have changed, and the step is to be done again."""
        ...


class TrainStep:
    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator | None,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        strategies: StrategyTable,
        stops: StopSignals,
    ) -> None:
        self._config = config
        self._stops = stops
        self._comm = comm
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._models = models
        self._buffers = LaneBuffers(models)
        self.strategies = strategies
        self._rides_of_table = strategies.rides
        self.loss_scale = None if config.loss_scale is None else MovingScale(config.loss_scale)
        self._box = BallotBox(comm, strategies.rides)
        self._places = ParameterPlaces(models, optimizers, strategies.name_of)
        self._original_steps: dict[int, Callable[..., Any]] = {}
        self._phase = Phase.BETWEEN_STEPS
        self._item: WorkItem | None = None
        self._so_far = ItemSoFar()
        self._updating = False
        self._stop_wanted = False
        self._clip: float | None = None
        self._clipped_by: float = math.nan
        self._now = StepSoFar()
        self._update = 0
        self._active: Strategy | None = None
        self._mean_names: dict[int, str] = {}
        self.step = 0
        self.left_out_steps = 0
        self._round = 0
        self.stepped = False
        self.stop_agreed = False
        self.means: dict[str, float] = {}
        self.timing = Timing()
        self.traffic = Traffic()  # of the last step
        self.broken: str | None = None
        self._in_body = False
        self._stepped_in_body: set[int] = set()
        self.on_step: Callable[[], None] = lambda: None
        self.on_settled: Callable[[], None] = lambda: None
        self.lost: Set[int] = frozenset()  # workers that the others go on without
        self.second_opinion: SecondOpinion | None = None
        self.again = False  # the step was lost for a second opinion, by the same workers
        self.commitment: Commitment | None = None  # until `commit_with`: a step counts when it has acted

    # -- items -------------------------------------------------------------------------------------------------------

    @property
    def inside_step(self) -> bool:
        return self._phase in (Phase.ITEM, Phase.RAN, Phase.COLLECTED)

    @property
    def item(self) -> WorkItem | None:
        return self._item

    @property
    def in_updates(self) -> bool:
        """The loop's body runs once per step, and calls `engine.update`."""
        return self._updating or self._update > 0

    @property
    def is_lost(self) -> bool:
        """The step has to be done again, by the workers that there are now."""
        return self._phase is Phase.LOST

    @property
    def left_out(self) -> set[tuple[int, int]]:
        return self._now.left_out

    @property
    def accumulate(self) -> int:
        return self._config.accumulate

    @property
    def rides(self) -> Rides:
        """The lanes of every worker."""
        return self.strategies.rides

    @property
    def votes(self) -> int:
        """Ballots that this worker took part in."""
        return self._box.votes

    @property
    def stop_wanted(self) -> bool:
        """The loop asked for it; agreed or not yet."""
        return self._stop_wanted

    @property
    def stops_alone(self) -> bool:
        """The loop ends by this worker's own wish; others may wait for it in a later round."""
        return self.stop_agreed and self._now.agreement is Agreement.LATER

    @property
    def never_agrees(self) -> bool:
        """As far as the last step tells: each worker goes at its own pace to the end."""
        return self._now.agreement is Agreement.NEVER

    def begin_item(self, item: WorkItem, *, optimizers: Sequence[Optimizer] | None = None) -> None:
        """Hand out `item`: the lane's buffers and random stream are in place when the body runs."""
        if optimizers is None or not self._updating:
            self.end_item()
        if self.is_lost:
            return
        if item.first_of_step:
            try:
                self._start_step(item, optimizers or self._optimizers)
            except GenerationEnded:
                self.lose()
                return
        self._item, self._so_far = item, ItemSoFar()
        self._updating = optimizers is not None
        self._in_body = True
        self.stepped = False
        if item.shadow:
            self._buffers.start_shadow()
        elif item.first_of_lane:
            self._buffers.start_lane(item.lane)
        fault_point("forward", self._round + 1)
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
        self._check_step_whole()
        try:
            if self._phase is Phase.ITEM:
                self._skip_item()
            if self._phase is Phase.APPLIED and self.broken is None:
                self._commit_update()
                self._end_step()
        except GenerationEnded:
            if not self._now.counted:
                self.lose()
                return
            self._phase, self._item, self._in_body = Phase.BETWEEN_STEPS, None, False  # it counts; others regroup

    def _check_step_whole(self) -> None:
        """Exceptions that the loop caught where nothing can be taken back any more."""
        in_update = self._updating and self._phase in (Phase.ITEM, Phase.RAN)
        if in_update or (self._so_far.failed and self._so_far.ran_last):
            raise LoopError(
                f"an exception in step {self.step + 1} ended engine.{'update' if in_update else 'backward'}(), and the "
                "loop caught it: a part of the step's gradients is under way or missing, and can't be taken back. Let "
                "the exception end the program"
            )

    def backward(self, loss: Tensor, weight: float | None, *, last: bool) -> None:
        if self.is_lost:
            return
        item = item_of_backward(self._item, self._phase, loss, self._so_far, self.step)
        weight = float(item.samples) if weight is None else float(weight)
        if not math.isfinite(weight) or weight < 0:
            raise LoopError(f"backward(weight={weight}): the weight is a number of samples or tokens, 0 or more")
        try:
            if self._comm is not None and self._comm.is_over:
                raise GenerationEnded("the workers have changed")  # forward may have had zeros for weights
            self._run_backward(item, loss, weight, last=last)
        except GenerationEnded:
            self.lose()
        except BaseException:
            self._so_far.failed = True  # if the loop catches it
            raise

    def _run_backward(self, item: WorkItem, loss: Tensor, weight: float, *, last: bool) -> None:
        if not item.shadow:
            self._report(item, loss, weight, last=last)
        if last:
            self._finish_forward(item)
        place = self._place(item)
        active = self._strategy()
        started = time.perf_counter()
        active.start_backward(place, last=last)
        fault_point("backward", self._round + 1)
        # The gradient is Σ w·∇loss / Σ w. Dividing by the step's samples before backward keeps small precisions in
        # range, and where w counts samples it is the whole scaling: no second pass over the gradient.
        torch.autograd.backward(loss, torch.full_like(loss, weight / item.step_samples * self._scale))
        ended = time.perf_counter()
        self.timing.backward_s = ended - started
        if not last:
            return
        self._so_far.ran_last, self._so_far.before = True, None
        active.finish_backward(place)
        drop_gradients_of_others(active, self._optimizers)
        self._phase = Phase.RAN
        if item.last_of_step:
            self._collect()
            self.timing.exposed_s = time.perf_counter() - ended

    def add_mean(self, name: str, value: Tensor | float, weight: float | None) -> None:
        if self.is_lost:
            return
        item = item_of_mean(self._item, self._phase, name)
        if item.shadow:
            return
        key = name_key(name)
        self._mean_names[key] = name
        report = self._now.reports.setdefault(item.lane, LaneReport(item.lane))
        report.add_mean(key, float(value), float(item.samples) if weight is None else float(weight))

    # -- the end of a step -------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Tell and hear the ballots, then let the strategy make the step's gradient of them."""
        assert self._item is not None
        active, now = self._strategy(), self._now
        agreed = now.agreement is Agreement.NOW
        ballot = self._ballot(active)
        fault_point("exchange", self._round + 1)
        ballots = self._box.cast(ballot) if agreed else [ballot]
        reports = lanes_in_order(ballots)
        flags = any_used(ballots)
        used, changed = flags[: len(active.parameters)], flags[len(active.parameters) :]
        tally = Tally(
            agreed,
            tuple((report.lane, report.weight) for report in reports),
            self._item.step_samples,
            used,
            self._scale,
            left_out=now.agreement is not Agreement.NEVER
            and must_leave_out(reports, self._config.on_nonfinite, self.step, "the step is skipped", 5),
        )
        active.collect(tally)
        if now.watched and self._wants_another_pass(active, reports):
            return
        if agreed and tally.weight == 0:
            warnings.warn(f"step {self.step + 1} is skipped: the weights of all its micro-batches are 0", stacklevel=4)
        if self.loss_scale is not None and not tally.empty:
            now.overflowed = self.loss_scale.drops(active.keeps_finite(), self._config.on_nonfinite, self.step)
        now.empty = tally.empty or now.overflowed
        self._finish_buffers(changed)
        self.means |= means_over(reports, self._mean_names)
        self.stop_agreed = self._stops.hear([ballot.stop for ballot in ballots])
        now.gradient_versions = gradient_versions(active.parameters)
        self.timing.left_during_backward = active.left_during_backward
        self.traffic = self._traffic_so_far() - now.traffic_before
        now.check = ballot.check
        self._phase = Phase.COLLECTED

    def _wants_another_pass(self, active: Strategy, reports: Sequence[LaneReport]) -> bool:
        """Compare the lanes' gradients with what other workers have made of them, if they have."""
        opinion, now = self.second_opinion, self._now
        assert opinion is not None
        verdict = opinion.hear({report.lane: report.check for report in reports}, now.holders, self.step + 1)
        mine = 0 if self._comm is None else self._comm.rank
        for worker, lane in verdict.wrong:
            text = f"worker {worker} computed lane {lane} of step {self.step + 1} otherwise than two other passes did"
            if worker == mine and self._comm is not None:
                raise ReplicaError(f"{text}: its processor or its memory is not to be trusted")
            warnings.warn(f"{text}; their result is used", stacklevel=6)
        if not verdict.again:
            opinion.forget()
            return False
        self._buffers.put_back()
        active.end_step()
        self._phase, self.again = Phase.LOST, True
        self._in_body = self._updating = False
        self._now = StepSoFar()
        return True

    def pass_lanes_on(self) -> None:
        """The lanes go to other workers for one pass; after the step they are where they were."""
        opinion = self.second_opinion
        assert opinion is not None
        rides = self._rides_of_table
        turn = opinion.rotation % len(rides)
        self.strategies.rides = (*rides[turn:], *rides[:turn])
        self.again = False
        if self.is_lost:
            self._phase, self._item = Phase.BETWEEN_STEPS, None

    @property
    def lanes_are_passed_on(self) -> bool:
        return self.strategies.rides != self._rides_of_table

    def _ballot(self, active: Strategy) -> Ballot:
        if self._now.watched:
            for lane, check in (getattr(active, "lane_checks", None) or {}).items():
                self._now.reports[lane].check = check
        return Ballot(
            step=self.step,
            update=self._update,
            stop=self._stops.vote(wanted=self._stop_wanted, later=self._now.agreement is Agreement.LATER),
            check=self._box.check(self.step) if self._now.agreement is Agreement.NOW else 0,
            used=(*active.used(), *self._buffers.changed(self._now.lowest)),
            lanes=tuple(self._now.reports.values()),
        )

    def _finish_forward(self, item: WorkItem) -> None:
        """The item's forward is done: its lane's buffers are what it leaves, and may travel while backward runs."""
        now, agreement = self._now, self._now.agreement
        if self._so_far.forward_done:
            return
        self._so_far.forward_done = True
        if item.last_of_lane and not item.shadow:
            keep = agreement is Agreement.NOW and item.lane == now.lowest
            if agreement is Agreement.NEVER:
                keep = not self._leaves_lane_out(now.reports[item.lane])
            self._buffers.finish_lane(item.lane, keep=keep)
        if item.last_of_step and agreement is Agreement.NOW and now.in_step:
            self._buffers.send_ahead(self._comm, now.owner, now.lowest)

    def _leaves_lane_out(self, report: LaneReport) -> bool:
        told = "the lane is left out of the step"
        report.left_out = must_leave_out([report], self._config.on_nonfinite, self.step, told, 6)
        if report.left_out:
            report.weight = 0.0
        return report.left_out

    def _finish_buffers(self, changed: Sequence[bool]) -> None:
        now = self._now
        if now.agreement is Agreement.NEVER:
            self._buffers.go_apart()
        elif now.empty or now.agreement is Agreement.LATER:
            self._buffers.put_back()
        else:
            self._buffers.finish_step(self._comm, now.owner, now.lowest, changed)

    def optimizer_step(self, optimizer: Optimizer, closure: Any) -> Any:
        """The prepared optimizer's `step()`: acts when the step's gradient is there, and only then."""
        if self.is_lost:
            return None
        if closure is not None:
            raise LoopError(
                "optimizer.step(closure) would run forward again inside the step; use engine.update(optimizer, loss_fn)"
            )
        if len(self._optimizers) > 1 and self.commitment is not None and not self.commitment.before_update:
            raise LoopError(
                "in an elastic job a sharded strategy counts a step after its last update, and can't know which of "
                f"{len(self._optimizers)} optimizers makes it: call engine.update(optimizer, loss_fn) for each, "
                "or use strategy='ddp'"
            )
        self._so_far.step_called = True
        if self._phase is Phase.ITEM and self._item is not None:
            check_backward_held(self._item, self._so_far, self.step)
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
            check_gradients_untouched(self._now.gradient_versions, self.strategies.name_of)
        return self._act(optimizer)

    def _act(self, optimizer: Optimizer) -> Any:
        try:
            return self._update_with(optimizer)
        except GenerationEnded:
            self.lose()
            return None
        except BaseException as error:
            # Nobody may count a step of which this worker has half an update.
            if self.commitment is not None:
                self.broken = f"the update of step {self.step + 1} ended with {type(error).__name__} on this worker"
            raise

    def _update_with(self, optimizer: Optimizer) -> Any:
        now, first = self._now, self._phase is Phase.COLLECTED
        if first and self.commitment is not None and (self.commitment.before_update or now.empty):
            self._commit()
        now.acted.add(id(optimizer))
        self._phase = Phase.APPLIED
        result = None
        if not now.empty:
            fault_point("apply", self._round + 1)
            result = self._strategy().apply(optimizer, self._original_steps[id(optimizer)])
            self.traffic = self._traffic_so_far() - now.traffic_before
            if len(now.acted) == len(self._optimizers) or self._updating:
                self._commit_update()
        if now.committed:
            self._count()
        return result

    def _commit_update(self) -> None:
        """Where updates can be undone, a step counts when its last one has been made."""
        if not self._now.committed:
            self._commit()
            self._count()

    def _commit(self) -> None:
        assert self.commitment is not None
        step = self._round + 1
        fault_point("ready", step)
        if not self.commitment.commits(step, self._update, check=self._now.check):
            raise GenerationEnded(f"the workers changed before step {step} was committed")
        self._now.committed = True
        fault_point("after_commit", step)

    def _count(self) -> None:
        """The step's update is one of the job's."""
        if self._now.counted:
            return
        self._now.counted = True
        self._buffers.step_counts()
        if self._now.empty:
            self.left_out_steps += self._update == 0
            return
        self.stepped = True
        self.step += self._update == 0
        self._box.updated(self.step)
        self.on_step()
        # What the user draws between steps must not depend on how many items this worker ran.
        seed_everything(mix(self._config.seed, "between", self.step, self._update))

    def commit_with(self, commitment: Commitment | None) -> None:
        self.commitment = commitment
        self._box = BallotBox(self._comm, self.strategies.rides, raises=commitment is None)

    def lose(self) -> None:
        """The workers have changed: as if the step had not begun, but for weights that the regrouping puts right."""
        if self.second_opinion is not None:
            self.second_opinion.forget()
        self._phase = Phase.LOST
        self.stepped = self.stop_agreed = self._in_body = self._updating = False
        self._stops.agreed = self._now.was_asked_to_stop
        if self.loss_scale is not None and self._now.loss_scale is not None:
            self.loss_scale.load_state_dict(self._now.loss_scale)
        self._buffers.forget_step()
        self._now = StepSoFar()

    def regrouped(self, comm: Communicator | None, strategies: StrategyTable) -> None:
        """There are other workers, and the state is that of the last step that counts."""
        self._comm, self.strategies, self._active = comm, strategies, None
        self._rides_of_table = strategies.rides
        self._box = BallotBox(comm, strategies.rides, raises=self.commitment is None)
        self._buffers.meet_others()
        self._places = ParameterPlaces(self._models, self._optimizers, strategies.name_of)
        self._phase, self._item = Phase.BETWEEN_STEPS, None

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
            try:
                self._skip_item()
            except GenerationEnded:
                self.lose()
        if self.is_lost:
            return
        self._check_learning_rates()
        self._act(optimizer)
        self._update += not self.is_lost
        self._updating = False

    def retract_item(self) -> None:
        """`engine.update` runs the items itself: take back the one that the loop was given."""
        if self._phase is Phase.APPLIED:
            return
        self._check_step_whole()
        if self._phase is not Phase.ITEM or self._so_far.has_run:
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
            self._so_far.take_back(self._now.reports.setdefault(item.lane, LaneReport(item.lane)))
            self._now.left_out.add((item.lane, item.micro_batch))
        self._finish_forward(item)
        active.skip(self._place(item))
        if not item.shadow:
            why = "had an exception in" if self._so_far.failed else "was left without"
            warnings.warn(
                f"lane {item.lane} of step {self.step + 1} {why} engine.backward(); it counts as empty", stacklevel=5
            )
        drop_gradients_of_others(active, self._optimizers)
        self._phase = Phase.RAN
        if item.last_of_step:
            self._collect()
            self._apply_as_usual()

    def _apply_as_usual(self) -> None:
        """The body skipped the step's last item, so nobody will call step(): do what it does on other items."""
        if self.is_lost:
            return
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
        if self._now.overflowed:
            self._clipped_by = math.inf
        if self._phase is not Phase.COLLECTED or self._now.overflowed:
            return self._clipped_by
        active = self._strategy()
        try:
            self._clipped_by = active.clip(max_norm)
        except GenerationEnded:
            self.lose()
            return self._clipped_by
        self._now.gradient_versions = gradient_versions(active.parameters)
        return self._clipped_by

    # -- boundaries --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """All workers stand between two steps: what is under way ends, and models and buffers are alike everywhere."""
        if self.inside_step:
            return
        self.strategies.settle()
        self.on_settled()
        left = [lanes for worker, lanes in enumerate(self.rides) if worker not in self.lost]
        lowest = min(lane for lanes in left for lane in lanes)
        owner = next(place for place, lanes in enumerate(left) if lowest in lanes)
        self._buffers.settle(self._comm, owner=owner, lowest=lowest)

    def item_done(self) -> WorkItem | None:
        """The item with which the step that is out ends, if it has got so far."""
        done = self._item is not None and self._item.last_of_step and self._phase in (Phase.COLLECTED, Phase.APPLIED)
        return self._item if done else None

    def kept_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.strategies.kept_state(optimizer)

    def load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.strategies.load(optimizer, state, round=self.step + self.left_out_steps)

    # -- parts -------------------------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer, original: Callable[..., Any]) -> None:
        self._original_steps[id(optimizer)] = original

    def _start_step(self, item: WorkItem, optimizers: Sequence[Optimizer]) -> None:
        self._places.check()
        active, remade = self.strategies.of(optimizers)
        self._active = active
        if self._update == 0:
            self._round = self.step + self.left_out_steps
        plan, lowest = self.strategies.plan(item.present), item.present[0]
        self._now = StepSoFar(
            agreement=active.agreement(self._round),
            lowest=lowest,
            owner=next(worker for worker, lanes in enumerate(plan.holders) if lowest in lanes),
            in_step=self.strategies.in_step(plan),
            traffic_before=self._traffic_so_far(),
            was_asked_to_stop=self._stops.agreed,
            loss_scale=None if self.loss_scale is None else self.loss_scale.state_dict(),
            committed=self.commitment is None,
        )
        begin_step(self._round + 1)
        for fault in flips_due(self._round + 1):
            flip_a_bit(fault.tensor, [(self.strategies.name_of(p), p) for p in active.parameters])
        opinion = self.second_opinion
        self._now.watched = opinion is not None and opinion.due(self._round) and hasattr(active, "watch_lanes")
        if opinion is not None and hasattr(active, "watch_lanes"):
            active.watch_lanes(self._now.watched)
        self._now.holders = plan.holders
        active.start_step(self._round, plan)
        self._buffers.start_step()
        if remade or not self._box.watching:
            self._box.watch([(self.strategies.name_of(p), p) for p in active.replicas])

    def _traffic_so_far(self) -> Traffic:
        if self._comm is not None:
            return self._comm.traffic
        with_servers: Traffic | None = getattr(self._active, "traffic", None)
        return with_servers or Traffic()

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _strategy(self) -> Strategy:
        assert self._active is not None
        return self._active

    def _report(self, item: WorkItem, loss: Tensor, weight: float, *, last: bool) -> None:
        report = self._now.reports.setdefault(item.lane, LaneReport(item.lane))
        self._so_far.note_start(report)
        value = float(loss.detach())
        if last:
            report.weight += weight
            report.samples += item.samples
        if report.finite:
            report.loss, report.finite = value, math.isfinite(value)

    def _place(self, item: WorkItem) -> ItemPlace:
        if item.shadow:
            return ItemPlace(item.lane, item.last_of_lane, item.last_of_step, shadow=True)
        report = self._now.reports[item.lane]
        told = report.weight, report.left_out, report.samples
        return ItemPlace(item.lane, item.last_of_lane, item.last_of_step, False, *told)

    def _check_learning_rates(self) -> None:
        rates = learning_rates(self._optimizers)
        if self._now.learning_rates is None:
            self._now.learning_rates = rates
        check_learning_rates(self._now.learning_rates, rates, self.step)

    def close(self) -> None:
        self.strategies.close()
