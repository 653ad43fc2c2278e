"""The work of a step: lanes run forward and backward, and become one gradient and one update.

    start ─► for each item: buffers and random stream ─► backward ─► buckets leave
                                                            │
                                      the last one ─► ballots ─► collect: the gradient of the global batch ─► apply

Which calls of the loop's body are allowed when, and when a step counts, is told in `train_step`; here nothing waits for
the user. In a round whose workers don't agree there is one ballot, this worker's own: means and a wish to stop are its
affair. Where they never agree a gradient may be applied as soon as it leaves, so a loss is judged before its lane's
backward.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.collectives.byte_count import Traffic
from paceline.collectives.communicator import Communicator
from paceline.data.sharded_sampler import WorkItem
from paceline.elastic.faults import begin_step, fault_point, flips_due
from paceline.engine.ballot import Ballot, LaneReport, any_used, lanes_in_order, means_over, name_key
from paceline.engine.ballot_box import BallotBox
from paceline.engine.config import EngineConfig
from paceline.engine.lane_buffers import LaneBuffers
from paceline.engine.loop_rules import check_learning_rates, gradient_versions, learning_rates, must_leave_out
from paceline.engine.parameter_places import ParameterPlaces
from paceline.engine.replicas import flip_a_bit
from paceline.engine.second_opinion import Passes, SecondOpinion
from paceline.engine.step_count import StepCount
from paceline.engine.step_so_far import ItemSoFar, StepSoFar, Timing
from paceline.engine.stop_signals import StopSignals
from paceline.engine.strategy_table import StrategyTable, drop_gradients_of_others
from paceline.optim.loss_scale import MovingScale
from paceline.strategies.strategy import Agreement, Strategy, Tally
from paceline.world.determinism import mix, seed_everything


class StepWork:
    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator | None,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        strategies: StrategyTable,
        stops: StopSignals,
        count: StepCount,
        opinion: SecondOpinion | None,
    ) -> None:
        self._config, self.comm, self._stops, self._count = config, comm, stops, count
        self._models, self._optimizers = models, optimizers
        self.strategies = strategies
        self.active: Strategy | None = None
        self.now = StepSoFar()
        self.loss_scale = None if config.loss_scale is None else MovingScale(config.loss_scale)
        self.passes = Passes(opinion, strategies.rides)
        self.buffers = LaneBuffers(models)
        self.box = BallotBox(comm, strategies.rides)
        self._places = ParameterPlaces(models, optimizers, strategies.name_of)
        self._mean_names: dict[int, str] = {}
        self._clipped_by: float = math.nan
        self.stop_wanted = self.stop_agreed = False
        self.means: dict[str, float] = {}
        self.timing = Timing()
        self._ended: float | None = None  # the last backward
        self.traffic = Traffic()  # of the last step

    # -- items -------------------------------------------------------------------------------------------------------

    def start(self, item: WorkItem, optimizers: Sequence[Optimizer]) -> None:
        """The step's first item is about to be handed out, for an update by `optimizers`."""
        self._places.check()
        active, remade = self.strategies.of(optimizers)
        self.active = active
        self._count.begin_step()
        before, plan, lowest = self._count.rounds_before, self.strategies.plan(item.present), item.present[0]
        self.now = StepSoFar(
            agreement=active.agreement(before),
            lowest=lowest,
            owner=next(worker for worker, lanes in enumerate(plan.holders) if lowest in lanes),
            in_step=self.strategies.in_step(plan),
            traffic_before=self._traffic_so_far(),
            was_asked_to_stop=self._stops.agreed,
            loss_scale=None if self.loss_scale is None else self.loss_scale.state_dict(),
            committed=self._count.commitment is None,
            holders=plan.holders,
        )
        begin_step(before + 1)
        for fault in flips_due(before + 1):
            flip_a_bit(fault.tensor, self._could_flip(active))
        self.now.watched = self.passes.watch(active, before)
        active.start_step(before, plan)
        self.buffers.start_step()
        if remade or not self.box.watching:
            self.box.watch([(self.strategies.name_of(p), p) for p in active.replicas])

    def _could_flip(self, active: Strategy) -> list[tuple[str, Tensor]]:
        """What a bit may be flipped in: parameters, or where this worker has no whole ones its part of them."""
        part = () if active.replicas or self._count.commitment is None else self._count.commitment.part
        return [("", tensor) for tensor in part] or [(self.strategies.name_of(p), p) for p in active.parameters]

    def start_item(self, item: WorkItem) -> None:
        """The lane's buffers and random stream are in place when the body runs."""
        if item.shadow:
            self.buffers.start_shadow()
        elif item.first_of_lane:
            self.buffers.start_lane(item.lane)
        fault_point("forward", self._count.round)
        place = (item.epoch, item.step, item.lane, item.micro_batch, self._count.update)
        seed_everything(mix(self._config.seed, "model", *place))

    def add_mean(self, item: WorkItem, name: str, value: float, weight: float | None) -> None:
        if item.shadow:
            return
        key = name_key(name)
        self._mean_names[key] = name
        self.now.report(item.lane).add_mean(key, value, float(item.samples) if weight is None else float(weight))

    def run_backward(self, item: WorkItem, so_far: ItemSoFar, loss: Tensor, weight: float, *, last: bool) -> None:
        if not item.shadow:
            so_far.tell(self.now.report(item.lane), item, float(loss.detach()), weight, last=last)
        if last:
            self._finish_forward(item, so_far)
        place, active = self.now.place(item), self.strategy()
        started = time.perf_counter()
        active.start_backward(place, last=last)
        fault_point("backward", self._count.round)
        # The gradient is Σ w·∇loss / Σ w. Dividing by the step's samples before backward keeps small precisions in
        # range, and where w counts samples it is the whole scaling: no second pass over the gradient.
        torch.autograd.backward(loss, torch.full_like(loss, weight / item.step_samples * self._scale))
        self._ended = time.perf_counter()
        self.timing.backward_s = self._ended - started
        if last:
            so_far.ran_last, so_far.before = True, None
            active.finish_backward(place)
            drop_gradients_of_others(active, self._optimizers)

    def skip(self, item: WorkItem, so_far: ItemSoFar) -> None:
        """The body left the item without a backward: it counts as empty."""
        self._ended = None
        if not item.shadow:
            so_far.take_back(self.now.report(item.lane))
            self.now.left_out.add((item.lane, item.micro_batch))
        self._finish_forward(item, so_far)
        self.strategy().skip(self.now.place(item))
        if not item.shadow:
            why = "had an exception in" if so_far.failed else "was left without"
            step = self._count.step + 1
            warnings.warn(f"lane {item.lane} of step {step} {why} engine.backward(); it counts as empty", stacklevel=6)
        drop_gradients_of_others(self.strategy(), self._optimizers)

    def _finish_forward(self, item: WorkItem, so_far: ItemSoFar) -> None:
        """The item's forward is done: its lane's buffers are what it leaves, and may travel while backward runs."""
        now, agreement = self.now, self.now.agreement
        if so_far.forward_done:
            return
        so_far.forward_done = True
        if item.last_of_lane and not item.shadow:
            keep = agreement is Agreement.NOW and item.lane == now.lowest
            if agreement is Agreement.NEVER:
                keep = not self._leaves_lane_out(now.reports[item.lane])
            self.buffers.finish_lane(item.lane, keep=keep)
        if item.last_of_step and agreement is Agreement.NOW and now.in_step:
            self.buffers.send_ahead(self.comm, now.owner, now.lowest)

    def _leaves_lane_out(self, report: LaneReport) -> bool:
        told = "the lane is left out of the step"
        report.left_out = must_leave_out([report], self._config.on_nonfinite, self._count.step, told, 7)
        if report.left_out:
            report.weight = 0.0
        return report.left_out

    # -- the gradient ------------------------------------------------------------------------------------------------

    def collect(self, item: WorkItem) -> bool:
        """Tell and hear the ballots, then let the strategy make the step's gradient; False: another pass is wanted."""
        active, now = self.strategy(), self.now
        agreed = now.agreement is Agreement.NOW
        if self._count.commitment is not None:
            self._count.commitment.check_part(self._count.round)
        ballot = self._ballot(active)
        fault_point("exchange", self._count.round)
        ballots = self.box.cast(ballot) if agreed else [ballot]
        reports = lanes_in_order(ballots)
        flags = any_used(ballots)
        used, changed = flags[: len(active.parameters)], flags[len(active.parameters) :]
        tally = self._tally(item, reports, used, agreed=agreed)
        active.collect(tally)
        rank = None if self.comm is None else self.comm.rank
        if now.watched and self.passes.wants_another(reports, now.holders, self._count.step + 1, rank):
            self.buffers.put_back()
            active.end_step()
            self.now = StepSoFar()
            return False
        self._judge(active, tally)
        self._finish_buffers(changed)
        self.means |= means_over(reports, self._mean_names)
        self.stop_agreed = self._stops.hear([ballot.stop for ballot in ballots])
        now.gradient_versions = gradient_versions(active.parameters)
        self.timing.left_during_backward = active.left_during_backward
        self.traffic = self._traffic_so_far() - now.traffic_before
        now.check = ballot.check
        if self._ended is not None:
            self.timing.exposed_s = time.perf_counter() - self._ended
        return True

    def _ballot(self, active: Strategy) -> Ballot:
        now = self.now
        if now.watched:
            for lane, check in (getattr(active, "lane_checks", None) or {}).items():
                now.reports[lane].check = check
        return Ballot(
            step=self._count.step,
            update=self._count.update,
            stop=self._stops.vote(wanted=self.stop_wanted, later=now.agreement is Agreement.LATER),
            check=self.box.check(self._count.step) if now.agreement is Agreement.NOW else 0,
            used=(*active.used(), *self.buffers.changed(now.lowest)),
            lanes=tuple(now.reports.values()),
        )

    def _tally(self, item: WorkItem, reports: Sequence[LaneReport], used: Sequence[bool], *, agreed: bool) -> Tally:
        told = "the step is skipped"
        left_out = self.now.agreement is not Agreement.NEVER and must_leave_out(
            reports, self._config.on_nonfinite, self._count.step, told, 7
        )
        weights = tuple((report.lane, report.weight) for report in reports)
        return Tally(agreed, weights, item.step_samples, used, self._scale, left_out=left_out)

    def _judge(self, active: Strategy, tally: Tally) -> None:
        """Whether there is anything to apply."""
        now, step = self.now, self._count.step
        if tally.agreed and tally.weight == 0:
            warnings.warn(f"step {step + 1} is skipped: the weights of all its micro-batches are 0", stacklevel=6)
        if self.loss_scale is not None and not tally.empty:
            now.overflowed = self.loss_scale.drops(active.keeps_finite(), self._config.on_nonfinite, step)
        now.empty = tally.empty or now.overflowed

    def _finish_buffers(self, changed: Sequence[bool]) -> None:
        now = self.now
        if now.agreement is Agreement.NEVER:
            self.buffers.go_apart()
        elif now.empty or now.agreement is Agreement.LATER:
            self.buffers.put_back()
        else:
            self.buffers.finish_step(self.comm, now.owner, now.lowest, changed)

    def check_learning_rates(self) -> None:
        rates = learning_rates(self._optimizers)
        if self.now.learning_rates is None:
            self.now.learning_rates = rates
        check_learning_rates(self.now.learning_rates, rates, self._count.step)

    def clip(self, max_norm: float, *, collected: bool) -> float:
        """Clip the summed gradient, if it has been collected, by its global norm; otherwise tell the last norm."""
        if self.now.overflowed:
            self._clipped_by = math.inf
        elif collected:
            active = self.strategy()
            self._clipped_by = active.clip(max_norm)
            self.now.gradient_versions = gradient_versions(active.parameters)
        return self._clipped_by

    def apply(self, optimizer: Optimizer, original: Callable[..., Any]) -> Any:
        fault_point("apply", self._count.round)
        result = self.strategy().apply(optimizer, original)
        self.traffic = self._traffic_so_far() - self.now.traffic_before
        return result

    def counts(self) -> None:
        """What the step did stays."""
        self._count.add(self.now)
        self.buffers.step_counts()
        if not self.now.empty:
            self.box.updated(self._count.step)

    # -- other workers, and none -------------------------------------------------------------------------------------

    def lose(self) -> None:
        """As if the step had not begun, but for weights that the regrouping puts right."""
        self.passes.forget()
        self.stop_agreed = False
        self._stops.agreed = self.now.was_asked_to_stop
        if self.loss_scale is not None and self.now.loss_scale is not None:
            self.loss_scale.load_state_dict(self.now.loss_scale)
        self.buffers.forget_step()
        self.now = StepSoFar()

    def regrouped(self, comm: Communicator | None, strategies: StrategyTable) -> None:
        """There are other workers, and the state is that of the last step that counts."""
        self.comm, self.strategies, self.active = comm, strategies, None
        self.passes.regrouped(strategies.rides)
        self.open_box()
        self.buffers.meet_others()
        self._places = ParameterPlaces(self._models, self._optimizers, strategies.name_of)

    def open_box(self) -> None:
        self.box = BallotBox(self.comm, self.strategies.rides, raises=self._count.commitment is None)

    def pass_lanes_on(self) -> None:
        self.strategies.rides = self.passes.next_rides()

    def settle(self, lost: Set[int], on_settled: Callable[[], None]) -> None:
        """All workers stand between two steps: what is under way ends, and models and buffers are alike everywhere."""
        self.strategies.settle()
        on_settled()
        left = [lanes for worker, lanes in enumerate(self.strategies.rides) if worker not in lost]
        lowest = min(lane for lanes in left for lane in lanes)
        owner = next(place for place, lanes in enumerate(left) if lowest in lanes)
        self.buffers.settle(self.comm, owner=owner, lowest=lowest)

    # -- parts -------------------------------------------------------------------------------------------------------

    def strategy(self) -> Strategy:
        assert self.active is not None
        return self.active

    def _traffic_so_far(self) -> Traffic:
        if self.comm is not None:
            return self.comm.traffic
        with_servers: Traffic | None = getattr(self.active, "traffic", None)
        return with_servers or Traffic()

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value
