"""A training step, from the lanes of a global batch to one update.

    plan lanes ─► run items, exchange ─► vote ─► commit ─► update        (sharded: update ─► commit; it can be undone)

    the loop's body         what happens in the step                                                phase afterwards
    for batch in loader     begin_item: plan lanes (with the first item), buffers, random stream    ITEM
    engine.backward(loss)   backward: gradients join their lane's sum; full buckets leave           RAN
                            … on this worker's last item, collect: vote, then the exchange ends     COLLECTED
    optimizer.step()        act: commit, update                                                     APPLIED
    (the next batch)        end_item                                                                BETWEEN_STEPS

The body runs once per item, so `step()` and `zero_grad()` between two items find `.grad` empty and do nothing: the sums
of the lanes are out of their reach. After the last backward `.grad` holds the gradient of the global batch, under
strategies that keep it here; who runs the update is the strategy's affair.

In an elastic job a step counts when the coordinator commits it. Until then it can be *lost*: the group of workers is
over. The step only takes note of that (`or_lost`) and forgets what it did; calls of the body do nothing more, and the
loop, which is the one to retry, hands the items out again (`loop.py`).

A *round* is a step of the job's data, from 1; a step that all workers leave out (a loss that is not finite) is a round
but no step. An *update* (0, 1, …) is one of several in a step, where the body calls `engine.update` per optimizer.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.collectives.byte_count import Traffic
from paceline.data.sharded_sampler import WorkItem
from paceline.elastic.faults import begin_step, fault_point, flips_due, ordered
from paceline.engine import rules
from paceline.engine.config import EngineConfig
from paceline.engine.group import Group
from paceline.engine.lane_buffers import LaneBuffers
from paceline.engine.once_per_step import OncePerStep
from paceline.engine.stop_signals import StopSignals
from paceline.engine.strategy_table import StrategyTable
from paceline.engine.vote import (
    HostReading,
    LaneReport,
    StepVote,
    Stop,
    Voting,
    any_used,
    checksum_of_rates,
    flip_a_bit,
    lanes_in_order,
    means_over,
    name_key,
)
from paceline.errors import GenerationEnded, LoopError
from paceline.monitor.events import Part
from paceline.optim.group_settings import Settings, numbers_of
from paceline.optim.loss_scale import MovingScale
from paceline.strategies.registry import LaneAssignment
from paceline.strategies.strategy import Agreement, ItemPlace, Strategy, Tally
from paceline.world import messages
from paceline.world.determinism import mix, seed_everything
from paceline.world.waiting import waited


class Phase(enum.Enum):
    """Where the loop is between two updates."""

    BETWEEN_STEPS = "between steps"
    ITEM = "the loop has an item, without its last backward"
    RAN = "the item's backward is done, others of the step follow"
    COLLECTED = "the step's gradient is there, no optimizer has acted"
    APPLIED = "an optimizer has acted"
    LOST = "before it counted the workers changed, or want it computed once more: the loop gets its items again"


MOVES: dict[Phase, tuple[Phase, ...]] = {
    Phase.BETWEEN_STEPS: (Phase.ITEM,),
    Phase.ITEM: (Phase.RAN, Phase.BETWEEN_STEPS),  # back again: it was only looked at, or is for `engine.update`
    Phase.RAN: (Phase.ITEM, Phase.COLLECTED),
    Phase.COLLECTED: (Phase.APPLIED,),
    Phase.APPLIED: (Phase.APPLIED, Phase.BETWEEN_STEPS),  # by several optimizers, one after another
    Phase.LOST: (),
}
"""Besides these, a group that is over leads from anywhere to LOST, and a new group to BETWEEN_STEPS."""


class Timing:
    """Where the time of a step goes, of the one that is under way or the last: at every moment one part of it runs.

    So the parts add up to its wall time, which begins where the step before ended, or the loop.
    """

    def __init__(self) -> None:
        self.left_during_backward = 0  # buckets
        self._part, self._since = Part.OTHER, time.perf_counter()
        self.begin()

    def begin(self) -> None:
        """A step, at the moment of the last mark."""
        self.began, self._thread = self._since, threading.get_ident()
        self._waited = waited.get(self._thread, 0.0)
        self.parts = [0.0] * len(Part)
        self.arrived = self.voted = 0.0  # at the vote, and when all were there
        self.hidden_s = 0.0  # how much of backward ran while buckets were on their way
        self.left_at: Sequence[float] = ()  # when each bucket left

    def enter(self, part: Part) -> float:
        """From now on the time is this part's, less what it waits for others."""
        now, all_waits = time.perf_counter(), waited.get(self._thread, 0.0)
        waits, self._waited = all_waits - self._waited, all_waits
        self.parts[self._part] += max(0.0, now - self._since - waits)
        self.parts[Part.VOTE if self._part is Part.VOTE else Part.EXCHANGE] += waits
        self._part, self._since = part, now
        return now

    @contextmanager
    def inside(self, part: Part) -> Iterator[None]:
        before = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    @property
    def waited_for_data_s(self) -> float:
        return self.parts[Part.DATA]

    @property
    def backward_s(self) -> float:
        return self.parts[Part.BACKWARD]

    @property
    def exposed_s(self) -> float:
        """From the end of a backward until its gradient was there."""
        return self.parts[Part.EXCHANGE] + self.parts[Part.VOTE]


@dataclass
class ItemState:
    """What has happened with the item that the loop has."""

    step_called: bool = False
    ran_last: bool = False
    forward_done: bool = False  # its buffers are taken
    before: LaneReport | None = None  # its lane's report before the first backward, until the last one is done
    failed: bool = False  # a backward raised

    @property
    def has_run(self) -> bool:
        """Some backward, or a part of one."""
        return self.ran_last or self.failed or self.before is not None

    def add(self, report: LaneReport, item: WorkItem, weight: float, *, last: bool) -> None:
        """What a backward of the item adds to its lane's report, besides its loss."""
        if self.before is None:
            self.before = replace(report)
        if last:
            report.weight += weight
            report.samples += item.samples

    def take_back(self, report: LaneReport) -> None:
        """The item counts as empty: its lane reports nothing about it. Means stay, as for an item without backward."""
        if self.before is not None:
            report.weight, report.samples, report.left_out = (
                self.before.weight, self.before.samples, self.before.left_out
            )  # fmt: skip
            report.loss, report.finite = self.before.loss, self.before.finite
            self.before = None


@dataclass
class StepState:
    """What a step knows until it ends; what the loop's calls leave on `TrainStep` itself, `lose` takes back."""

    phase: Phase = Phase.BETWEEN_STEPS
    item: WorkItem | None = None
    of_item: ItemState = field(default_factory=ItemState)
    agreement: Agreement = Agreement.NOW
    lanes_apart: bool = False  # each lane goes on from its own buffers, and is left out by itself
    lowest: int = 0  # lane that has samples
    owner: int = 0  # the worker that computes it
    in_step: bool = True  # what workers send before their last backward is in the same order everywhere
    holders: Sequence[Sequence[int]] = ()  # of its lanes, by worker
    reports: dict[int, LaneReport] = field(default_factory=dict)
    losses: list[tuple[ItemState, LaneReport, HostReading]] = field(default_factory=list)  # on their way to the host
    means: list[tuple[LaneReport, int, HostReading, float]] = field(default_factory=list)  # likewise
    left_out: set[tuple[int, int]] = field(default_factory=set)  # (lane, micro-batch) that had no backward
    seen: rules.SeenInStep = field(default_factory=rules.SeenInStep)
    acted: set[int] = field(default_factory=set)  # optimizers
    empty: bool = False  # all workers leave it out: Σ weight was 0, or the loss was not finite and is skipped
    overflowed: bool = False  # the scaled gradient was not finite: no worker applies it
    check: int = 0  # of what all workers must have alike
    watched: bool = False  # its lanes' gradients are hashed, to be computed again by other workers
    committed: bool = (
        False  # it counts, whatever happens to workers from now on; in a job that is not elastic from its start
    )
    counted: bool = False
    seen_by: str = ""  # the call that looked at the job's state since some of the step's updates were made
    traffic_before: Traffic = field(default_factory=Traffic)
    was_asked_to_stop: bool = False  # before this step
    loss_scale: dict[str, Any] | None = None  # likewise
    settings: Sequence[Settings] = ()  # likewise, by optimizer, in a job that may lose the step

    def move(self, to: Phase) -> None:
        assert to in MOVES[self.phase], f"a step can't go from {self.phase.name} to {to.name}"
        self.phase = to

    def report(self, lane: int) -> LaneReport:
        return self.reports.setdefault(lane, LaneReport(lane))

    def read_losses(self) -> None:
        """Those that were on their way, and means."""
        for _, report, loss in self.losses:
            if report.finite:
                report.loss = loss.number()
                report.finite = math.isfinite(report.loss)
        for report, key, value, weight in self.means:
            report.add_mean(key, value.number(), weight)
        self.losses, self.means = [], []

    def take_item_back(self, report: LaneReport) -> None:
        """The item that the loop has counts as empty."""
        self.losses = [one for one in self.losses if one[0] is not self.of_item]
        self.of_item.take_back(report)

    def place(self, item: WorkItem, loss_scale: float) -> ItemPlace:
        if item.shadow:
            return ItemPlace(item.lane, item.last_of_lane, item.last_of_step, shadow=True)
        report = self.reports[item.lane]
        so_far = report.weight, report.left_out, report.samples
        return ItemPlace(item.lane, item.last_of_lane, item.last_of_step, False, *so_far, loss_scale)


class Means(dict[str, float]):
    """By the names that `engine.mean` was told."""

    def __missing__(self, name: str) -> float:
        raise LoopError(
            f"engine.means has no {name!r} of the last step: call engine.mean({name!r}, value) before engine.backward()"
        )


class Blocks(Protocol):
    def begin_item(self) -> None: ...


class NotCompiled:
    """Modules run as they are. `engine/compilation.py` has blocks that are compiled."""

    def begin_item(self) -> None: ...


class NoPeers:
    """Every worker has whole parameters and whole items. `engine/peer_checks.py` is about those that share them."""

    def loss(self, item: WorkItem, loss: Any) -> Any:
        """Of a loss, or another value of the item, that may be spread over them."""
        return loss

    def weight(self, item: WorkItem) -> float:
        """Of the item, where the loop gives it none."""
        return float(item.samples)

    def agree(self, vote: StepVote, stops: Sequence[Stop]) -> Sequence[Stop]:
        """What was said about stopping by the workers of this column of the mesh, and of the others."""
        return stops

    def compare_weights(self, strategies: StrategyTable) -> None:
        """After the first update: what is not sharded has got the same gradients."""


class OnePass:
    """How often a step's lanes are computed: once. `second_opinion` has those that are computed by two workers."""

    again = False  # the step is to be done once more, by the same workers
    are_on = False  # some lanes are with other workers, for a pass

    def regrouped(self, assignment: LaneAssignment) -> None: ...

    def forget(self) -> None: ...

    def check_part(self, round: int) -> None:
        """That this worker's part of sharded state is what the last update left."""

    def next_assignment(self) -> LaneAssignment:
        """Which worker has which lanes in the next pass."""
        raise NotImplementedError

    def watch(self, active: Strategy, round: int) -> bool:
        """Whether the lanes of the step that begins are hashed."""
        return False

    def wants_another(
        self, reports: Sequence[LaneReport], holders: Sequence[Sequence[int]], step: int, rank: int
    ) -> bool:
        return False


class ReplayedSteps(Protocol):
    """The one point at which a replay touches a step: it runs rounds in the order of a log."""

    def acted(self) -> None: ...


class TrainStep:
    """One for the life of an engine; `now` is the step that is under way, or the last one."""

    def __init__(
        self,
        config: EngineConfig,
        group: Group,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        strategies: StrategyTable,
        stops: StopSignals,
        passes: OnePass,
        compiled: Blocks,
        peers: NoPeers,
        copies: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
        joiners_lack_it: Callable[[], bool] = lambda: False,
    ) -> None:
        """`copies` finds those of the models, by name: they must not change inside a step either.

        `joiners_lack_it`: nothing of what the script keeps is handed to workers that join.
        """
        self._config, self._group, self._stops = config, group, stops
        self._compiled, self._peers = compiled, peers
        self.models, self._optimizers, self._schedulers = models, optimizers, schedulers
        self.strategies, self.passes = strategies, passes
        self.active: Strategy | None = None
        self.loss_scale = None if config.loss_scale is None else MovingScale(config.loss_scale)
        self.buffers = LaneBuffers(models)
        self.voting = self._new_voting()
        self.checks = rules.BodyChecks(
            config, models, optimizers, schedulers, copies, joiners_lack_it, strategies.name_of
        )
        self.prepared = OncePerStep(self, config)
        self._first_numbers = [numbers_of(optimizer) for optimizer in optimizers]
        self.now = StepState()
        self.step = self.left_out_steps = 0
        self.number = 1  # of the step that is under way, or of the last one
        self.update = 0
        self._rounds_before = 0  # the step that is under way
        self.stepped = False
        self._updating = self._in_body = False
        self._stepped_in_body: dict[int, bool] = {}  # schedulers, and whether they are given a metric
        self._clip: float | None = None
        self._norm: float | Tensor = math.nan
        self._mean_names: dict[int, str] = {}
        self.means = Means()
        self.stop_wanted = self.stop_agreed = False
        self.broken: str | None = None
        self.was_asked_for = False  # by the script, which does not count the loop's items alone
        self.replayed: ReplayedSteps | None = None
        self.timing = Timing()
        self._traffic = Traffic(), Traffic()  # before the last step, and after it

    # -- where it is -------------------------------------------------------------------------------------------------

    @property
    def inside_step(self) -> bool:
        return self.now.phase in (Phase.ITEM, Phase.RAN, Phase.COLLECTED)

    @property
    def rounds(self) -> int:
        return self.step + self.left_out_steps

    @property
    def before(self) -> int:
        """Steps before the one that is under way, also when an optimizer of several has acted in it."""
        return self.number - 1

    @property
    def round(self) -> int:
        """Of the step that is under way, from 1."""
        return self._rounds_before + 1

    @property
    def accumulate(self) -> int:
        return self._config.accumulate

    @property
    def in_updates(self) -> bool:
        """The loop's body runs once per step, and calls `engine.update`."""
        return self._updating or self.update > 0

    @property
    def own_lanes(self) -> Sequence[int]:
        return self.strategies.assignment[self._group.world.rank]

    @property
    def stops_alone(self) -> bool:
        """The loop ends by this worker's own wish; others may wait for it in a later round."""
        return self.stop_agreed and self.now.agreement is Agreement.LATER

    @property
    def never_agrees(self) -> bool:
        """As far as the last step tells: each worker goes at its own pace to the end."""
        return self.now.agreement is Agreement.NEVER

    @property
    def traffic(self) -> Traffic:
        """Of the last step. The difference is made when it is asked for: most steps are not."""
        before, after = self._traffic
        return after - before

    @property
    def changed_numbers(self) -> list[dict[str, float]]:
        """Of each optimizer the attributes in which it counts; what its constructor was given is the script's."""
        pairs = zip(self._optimizers, self._first_numbers, strict=True)
        return [{n: v for n, v in numbers_of(one).items() if first.get(n) != v} for one, first in pairs]

    def is_seen_by(self, call: str, *, saves: bool) -> None:
        """No further optimizer may act in this step: `call` has saved the state, or waits for all workers in an elastic
        job, where a worker that is lost meanwhile ends the step."""
        if self.now.phase is Phase.APPLIED and (saves or self._group.recovery.is_elastic):
            self.now.seen_by = call

    def item_done(self) -> WorkItem | None:
        """The item with which the step ends that the loop is in, if it has got so far."""
        item = self.now.item
        done = item is not None and item.last_of_step and self.now.phase in (Phase.COLLECTED, Phase.APPLIED)
        return item if done else None

    @property
    def votes(self) -> int:
        """That this worker took part in."""
        return self.voting.votes

    def strategy(self) -> Strategy:
        assert self.active is not None
        return self.active

    # -- plan lanes --------------------------------------------------------------------------------------------------

    def begin_item(self, item: WorkItem, *, optimizers: Sequence[Optimizer] | None = None) -> None:
        """Hand out `item`; `optimizers`: for an update by these alone, by `engine.update`."""
        if optimizers is None or not self._updating:
            self.end_item()
        self.timing.enter(Part.FORWARD)
        with self.or_lost():
            if item.first_of_step and self.now.phase is not Phase.LOST:
                self._plan_lanes(item, optimizers or self._optimizers)
        if self.now.phase is Phase.LOST:
            return
        self.now.move(Phase.ITEM)
        self.now.item, self.now.of_item = item, ItemState()
        self._updating = optimizers is not None
        self._in_body, self.stepped = True, False
        self._compiled.begin_item()
        self._fault_point("forward")
        if item.first_of_step:
            self.buffers.start_step()
        if item.shadow:
            self.buffers.start_shadow()
        elif item.first_of_lane:
            self.buffers.start_lane(item.lane)
            if self.now.lanes_apart:
                self.strategy().start_lane(item.lane)
        self.checks.before_forward(item)
        place = (item.epoch, item.step, item.lane, item.micro_batch, self.update)
        seed_everything(mix(self._config.seed, "model", *place))

    def _plan_lanes(self, item: WorkItem, optimizers: Sequence[Optimizer]) -> None:
        """The step begins, for an update by `optimizers`: who computes which of its lanes, and from which state."""
        if self.update == 0:
            self._rounds_before, self.number = self.rounds, self.step + 1
        before, traffic_before = self._rounds_before, self._traffic_so_far()
        self.checks.begin_step()
        active, made = self.strategies.of(optimizers)
        plan = self.strategies.plan(item.present)
        self.active = active
        agreement = active.agreement(before)
        self.now = StepState(
            agreement=agreement,
            lanes_apart=active.lanes_apart or agreement is Agreement.NEVER,
            lowest=plan.lowest,
            owner=plan.owner,
            in_step=plan.in_step,
            holders=plan.sums.holders,
            traffic_before=traffic_before,
            was_asked_to_stop=self._stops.agreed,
            loss_scale=None if self.loss_scale is None else self.loss_scale.state_dict(),
            settings=[Settings.of(o) for o in self._optimizers] if self._group.recovery.is_elastic else (),
            committed=not self._group.recovery.is_elastic,
        )
        if ordered:
            self._begin_faults(active)
        self.now.watched = self.passes.watch(active, before)
        active.start_step(before, plan.sums)
        if made or not self.voting.watching:
            self.voting.watch([(self.strategies.name_of(p), p) for p in self.strategies.replicas])
            self.checks.watch(self._still_in_step(active))

    def _still_in_step(self, active: Strategy) -> list[tuple[str, Parameter]]:
        """Weights that no lane may change for the others: all that are whole here."""
        replicas = self.strategies.replicas
        known = {id(p) for p in (*replicas, *active.parameters, *active.frozen)}
        others = [p for model in self.models for p in model.parameters() if id(p) not in known]
        return [(repr(self.strategies.name_of(p)), p) for p in (*replicas, *others)]

    # -- run items ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, weight: float | Tensor | None, *, last: bool) -> None:
        """`engine.backward`; with this worker's last item the step gets its gradient."""
        now = self.now
        if now.phase is Phase.LOST:
            return
        if self._item_of_body() is not None and self._group.comm.is_over:
            self.lose()  # the workers have changed: forward may have had zeros for weights
            return
        item, weight = rules.check_backward(self._item_of_body(), loss, weight, now.of_item, self.before)
        only_one = last and now.of_item.before is None and not (self._updating or self.update)
        self.checks.loss(item, loss, self._group.among.size, only_one=only_one)
        if item.shadow:  # nothing comes of it
            weight = float(item.samples)
        else:
            loss = self._peers.loss(item, loss)
            weight = self._peers.weight(item) if weight is None else weight
        with self.or_lost():
            try:
                self._run_backward(item, loss, weight, last=last)
                if last:
                    self._ran(item)
            except BaseException:
                now.of_item.failed = True  # if the loop catches it
                raise

    def _run_backward(self, item: WorkItem, loss: Tensor, weight: float, *, last: bool) -> None:
        now, of_item, active, scale = self.now, self.now.of_item, self.strategy(), self._scale
        may_have = item.shadow or of_item.before is not None or self._is_as_in_torch(item, weight)
        empty = () if may_have else active.parameters  # of a gradient
        self.checks.after_forward(item, loss, now.seen, empty, self.before, lanes_apart=now.lanes_apart)
        if not item.shadow:
            report = now.report(item.lane)
            of_item.add(report, item, weight, last=last)
            now.losses.append((of_item, report, HostReading(loss)))
        if last:
            self._finish_forward(item)
        place = now.place(item, scale)
        self._fault_point("backward")
        self.timing.enter(Part.BACKWARD)
        active.start_backward(place, last=last)
        # The gradient is Σ w·∇loss / Σ w. Dividing by the step's samples before backward keeps small precisions in
        # range, and where w counts samples it is the whole scaling: no second pass over the gradient.
        torch.autograd.backward(loss, torch.full_like(loss, weight / item.step_samples * scale))
        ended = self.timing.enter(Part.EXCHANGE if last else Part.FORWARD)
        if last:
            if active.first_left:
                self.timing.hidden_s += ended - active.first_left
            of_item.ran_last, of_item.before = True, None
            active.finish_backward(place)
            self._drop_gradients_of_others(active)

    def _is_as_in_torch(self, item: WorkItem, weight: float) -> bool:
        """The item is all of the step, and its gradient is not scaled: one of torch's own adds up with it."""
        whole = item.first_of_step and item.last_of_step and weight == item.step_samples
        return whole and self._scale == 1.0 and self._group.among.size == 1

    def _drop_gradients_of_others(self, active: Strategy) -> None:
        """A loss may reach parameters of an optimizer that is not being updated; those gradients are nobody's."""
        if len(self._optimizers) == 1:
            return
        mine = {id(parameter) for parameter in active.parameters}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in mine:
                        parameter.grad = None

    def _finish_forward(self, item: WorkItem) -> None:
        """The item's forward is done: its lane's buffers are what it leaves, and may travel while backward runs."""
        now = self.now
        if now.of_item.forward_done:
            return
        now.of_item.forward_done = True
        if item.last_of_lane and not item.shadow:
            keep = now.agreement is Agreement.NOW and item.lane == now.lowest
            if now.lanes_apart:
                now.read_losses()
                keep = not self._leaves_lane_out(now.reports[item.lane])
            self.buffers.finish_lane(item.lane, keep=keep)
        if item.last_of_step and now.agreement is Agreement.NOW and now.in_step and not now.lanes_apart:
            self.buffers.send_ahead(self._group.comm, now.owner, now.lowest)

    def _leaves_lane_out(self, report: LaneReport) -> bool:
        """Where lanes are apart, a gradient may be applied as soon as it leaves: a loss is judged before that."""
        why = "the lane is left out of the step"
        report.left_out = rules.must_leave_out([report], self._config.on_nonfinite, self.before, why)
        if report.left_out:
            report.weight = 0.0
        return report.left_out

    def add_mean(self, name: str, value: Tensor | float, weight: float | None) -> None:
        if self.now.phase is Phase.LOST:
            return
        sent = self.now.phase in (Phase.COLLECTED, Phase.APPLIED)
        item = rules.item_of_mean(self._item_of_body(), name, sent=sent)
        key = name_key(name)
        self._mean_names[key] = name  # of a shadow too: other workers' lanes give its mean a value
        if not item.shadow:
            value = self._peers.loss(item, value)
            weight = self._peers.weight(item) if weight is None else float(weight)
            report, is_here = self.now.report(item.lane), not isinstance(value, Tensor)
            report.add_mean(key, float(value) if is_here else 0.0, weight if is_here else 0.0)
            if isinstance(value, Tensor):
                self.now.means.append((report, key, HostReading(value), weight))

    def _ran(self, item: WorkItem) -> None:
        """The item's part of the step is done; with the last item's the step has its gradient."""
        self.now.move(Phase.RAN)
        if not item.last_of_step:
            self.timing.enter(Part.OTHER)
            return
        if self._collect(item):
            self.now.move(Phase.COLLECTED)
        else:  # another pass of its lanes is wanted
            self.now = StepState(Phase.LOST, item)
            self._in_body = self._updating = False

    # -- exchange, vote ----------------------------------------------------------------------------------------------

    def _collect(self, item: WorkItem) -> bool:
        """Vote, then let the strategy end the exchange: the step's gradient is there. False: another pass is wanted.

        In a round whose workers don't agree there is one vote, this worker's own: means and a wish to stop are its
        affair.
        """
        active, now = self.strategy(), self.now
        self.passes.check_part(self.round)
        self._fault_point("exchange")
        vote = self._vote(active)
        votes, reports, flags = self._cast(vote)
        used, changed = flags[: len(active.parameters)], flags[len(active.parameters) :]
        tally = self._tally(item, reports, used)
        active.collect(tally)
        self.timing.left_during_backward, self.timing.left_at = active.left_during_backward, active.left_at
        if now.watched and self.passes.wants_another(reports, now.holders, self.step + 1, self._group.comm.rank):
            self.buffers.put_back()
            active.end_step()
            return False
        self._judge(active, tally)
        told = [one.stop for one in votes]
        stops = self._peers.agree(replace(vote, stop=max(told)), told)
        self.stop_agreed = any(stops)
        self._stops.agreed = self._stops.agreed or Stop.REQUESTED in stops
        self._finish_buffers(changed)
        if self._mean_names:
            self.means |= means_over(reports, self._mean_names)
        now.check = vote.check
        self.checks.gradient_is_final(active.parameters, now.seen)
        self.timing.enter(Part.OTHER)
        return True

    def _vote(self, active: Strategy) -> StepVote:
        now = self.now
        now.read_losses()
        settings = self.checks.end_items(now.seen, self.before)
        if now.watched:
            for lane, check in (active.lane_checks or {}).items():
                now.reports[lane].check = check
        asked, agreement, evaluations = self._stops.asked is not None, now.agreement, self._group.evaluation_count
        return StepVote(
            step=self.step,
            update=self.update,
            used=(*active.used(), *self.buffers.changed(now.lowest)),
            lanes=tuple(now.reports.values()),
            rates=checksum_of_rates(settings),
            stop=Stop.vote(asked=asked, wanted=self.stop_wanted, later=agreement is Agreement.LATER),
            check=self.voting.check(self.step) if agreement is Agreement.NOW else 0,
            evaluations=(evaluations.begun, evaluations.whole),
        )

    def _cast(self, vote: StepVote) -> tuple[list[StepVote], list[LaneReport], list[bool]]:
        """All votes; the lanes' reports in them; and of each parameter and buffer, whether any worker used it."""
        timing, agrees = self.timing, self.now.agreement is Agreement.NOW
        if agrees:
            timing.arrived = timing.enter(Part.VOTE)
        votes = self.voting.cast(vote) if agrees else [vote]
        found = votes, lanes_in_order(votes), any_used(votes)
        if agrees:
            timing.voted = timing.enter(Part.EXCHANGE)
        return found

    def _tally(self, item: WorkItem, reports: Sequence[LaneReport], used: Sequence[bool]) -> Tally:
        why, agreed, loss_scale = "the step is skipped", self.now.agreement is Agreement.NOW, self._scale
        weights = tuple((report.lane, report.weight) for report in reports)
        total = math.fsum(weight for _, weight in weights)
        # backward has divided by the samples, and multiplied by the loss scale
        scale = item.step_samples / total / loss_scale if total > 0 else 0.0
        on_nonfinite = self._config.on_nonfinite
        left_out = not self.now.lanes_apart and rules.must_leave_out(reports, on_nonfinite, self.before, why)
        empty = agreed and (left_out or total == 0)
        return Tally(agreed, weights, item.step_samples, used, scale, empty, left_out, loss_scale)

    def _judge(self, active: Strategy, tally: Tally) -> None:
        """Whether there is anything to apply."""
        now = self.now
        if tally.agreed and tally.scale == 0:
            messages.warn(f"step {self.number} is skipped: the weights of all its micro-batches are 0")
        if self.loss_scale is not None and not tally.empty:
            now.overflowed = self.loss_scale.drops(active.keeps_finite(), self._config.on_nonfinite, self.before)
        now.empty = tally.empty or now.overflowed

    def _finish_buffers(self, changed: Sequence[bool]) -> None:
        now = self.now
        if now.lanes_apart:
            self.buffers.go_apart()
            if now.agreement is Agreement.NOW:
                self.buffers.meet(self._group.comm, *self._lowest_lane())
        elif now.empty or now.agreement is Agreement.LATER:
            self.buffers.put_back()
        else:
            self.buffers.finish_step(self._group.comm, now.owner, now.lowest, changed)

    def clip(self, max_norm: float) -> float | Tensor:
        """Clip the summed gradient by its global norm; before the step's last item there is nothing to clip yet."""
        self._clip = max_norm
        if self.now.phase is Phase.ITEM:
            raise LoopError(
                "engine.clip_grad_norm_() came before engine.backward(loss) in this item: write engine.backward(loss) "
                "in place of loss.backward(), and clip between it and optimizer.step()"
            )
        with self.timing.inside(Part.OPTIMIZER), self.or_lost():
            if self.now.overflowed:
                self._norm = math.inf
            elif self.now.phase is Phase.COLLECTED:
                active = self.strategy()
                self._norm = active.clip(max_norm)
                self.checks.gradient_is_final(active.parameters, self.now.seen)
        return self._norm

    # -- commit, update ----------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Optimizer, closure: Any) -> Any:
        """The prepared optimizer's `step()`: acts when the step's gradient is there, and only then."""
        now, before = self.now, self.before
        if now.phase is Phase.LOST:
            return None
        if closure is not None:
            raise rules.closure_given()
        if not self._group.recovery.before_update:
            rules.check_one_optimizer(len(self._optimizers))
        now.of_item.step_called = True
        if self.now.phase is Phase.ITEM and now.item is not None:
            rules.check_backward_came_first(now.item, now.of_item, before, held=bool(now.reports))
        self.checks.settings(now.item, now.seen, before)
        if self.now.phase not in (Phase.COLLECTED, Phase.APPLIED):
            return None
        if id(optimizer) in now.acted:
            raise LoopError(f"optimizer.step() was called twice in step {self.number}")
        rules.check_not_seen(now.seen_by, self.number)
        self.checks.before_update(now.seen, before, is_first=self.now.phase is Phase.COLLECTED)
        return self._act(optimizer)

    def _act(self, optimizer: Optimizer) -> Any:
        if self.now.phase is Phase.LOST:
            return None
        result = None
        with self.timing.inside(Part.OPTIMIZER), self.or_lost():
            try:
                result = self._update_with(optimizer)
            except BaseException as error:
                # Half an update can't be taken back: this worker counts no such step, and makes none after it.
                if not isinstance(error, GenerationEnded):
                    self.broken = f"the update of step {self.number} ended with {type(error).__name__} on this worker"
                raise
        return result

    def _update_with(self, optimizer: Optimizer) -> Any:
        """Commit, then update; or where updates can be undone, commit when the step's last one has been made."""
        now = self.now
        if now.phase is Phase.COLLECTED and not now.empty:
            self.strategy().keep_residuals()
        if now.phase is Phase.COLLECTED and (now.empty or self._group.recovery.before_update):
            self._commit()
        now.acted.add(id(optimizer))
        now.move(Phase.APPLIED)
        result = None
        if not now.empty:
            self._fault_point("apply")
            result = self.strategy().apply(optimizer, self.prepared.original_steps[id(optimizer)])
            if len(now.acted) == len(self._optimizers) or self._updating:
                self._commit()
        if now.committed:
            self._count()
        self._traffic = now.traffic_before, self._traffic_so_far()
        return result

    def _commit(self) -> None:
        """From here on the step is one of the job's, whatever happens to workers."""
        now = self.now
        if now.committed:
            return
        self._fault_point("ready")
        if not self._group.recovery.commits(self.round, self.update, check=now.check):
            raise GenerationEnded(f"the workers changed before step {self.round} was committed")
        now.committed = True
        self._fault_point("after_commit")

    def _count(self) -> None:
        """What the step did stays."""
        now = self.now
        if now.counted:
            return
        now.counted = True
        self.buffers.step_counts()
        if now.empty:
            self.left_out_steps += self.update == 0
            return
        self.step += self.update == 0
        self.stepped = True
        if self.replayed is not None:
            self.replayed.acted()
        elif not self._group.recovery.is_elastic:  # otherwise READY has said it
            self._group.supervisor.tell("step", step=self.step + 1)
        # What the user draws between steps must not depend on how many items this worker ran.
        seed_everything(mix(self._config.seed, "between", self.step, self.update))

    def end_item(self) -> None:
        """The loop asks for more: end what the last item left."""
        if self.now.phase is Phase.BETWEEN_STEPS:
            return
        if self.broken is not None:
            raise rules.update_failed(self.broken)
        if self.now.phase is Phase.COLLECTED:
            raise rules.step_not_applied(self.before)
        self._check_step_whole()
        self.now.seen.items_without_step += self.now.phase is Phase.RAN and not self.now.of_item.step_called
        with self.or_lost(unless_counted=True):
            if self.now.phase is Phase.ITEM:
                self._skip_item()
            if self.now.phase is Phase.APPLIED:
                self.strategy().end_step()
                self.voting.updated(self.step)
                self._peers.compare_weights(self.strategies)
                self._between_steps()

    def _skip_item(self) -> None:
        """The body left the item without a backward: it counts as empty."""
        now, item, active = self.now, self.now.item, self.strategy()
        assert item is not None
        if not item.shadow:
            now.take_item_back(now.report(item.lane))
            now.left_out.add((item.lane, item.micro_batch))
        self._finish_forward(item)
        active.skip(now.place(item, self._scale))
        if not item.shadow:
            why = "had an exception in" if now.of_item.failed else "was left without"
            text = f"lane {item.lane} of step {self.number} {why} engine.backward(); it counts as empty"
            messages.warn(text)
        self._drop_gradients_of_others(active)
        self._ran(item)
        if self.now.phase is Phase.COLLECTED:
            self._act_as_usual()

    def _act_as_usual(self) -> None:
        """The body skipped the step's last item and won't call step() in it: do what it does on other items."""
        if self._clip is not None:
            self.clip(self._clip)
        for optimizer in self._optimizers:
            self._act(optimizer)
        for scheduler in self._schedulers:
            if (given := self._stepped_in_body.get(id(scheduler))) is not None:  # not one that is stepped once an epoch
                if given:
                    raise rules.metric_missing(type(scheduler).__name__, self.number)
                scheduler.step()

    def scheduler_acts(self, scheduler: Any, *, given: bool) -> bool:
        """A prepared scheduler follows the optimizer: it acts only when that did. `given`: a metric, as arguments."""
        acted = self.now.phase is Phase.APPLIED and self.stepped
        if acted and self._in_body:
            self._stepped_in_body[id(scheduler)] = given
        return self.now.phase is Phase.BETWEEN_STEPS or acted

    # -- engine.update: several updates of the same items ------------------------------------------------------------

    def retract_item(self) -> None:
        """`engine.update` runs the items itself: take back the one that the loop was given."""
        if self.now.phase is Phase.APPLIED:
            rules.check_not_seen(self.now.seen_by, self.number)
            return
        self._check_step_whole()
        if self.now.phase is not Phase.ITEM or self.now.of_item.has_run:
            raise LoopError("engine.update() and engine.backward() can't be mixed in one item; use one form per loop")
        self.now.move(Phase.BETWEEN_STEPS)

    def finish_update(self, optimizer: Optimizer) -> None:
        """The end of `engine.update`: act, then be ready for another optimizer on the same items."""
        with self.or_lost():
            if self.now.phase is Phase.ITEM:
                self._skip_item()
        if self.now.phase is not Phase.LOST:
            self.checks.settings(self.now.item, self.now.seen, self.before)
            self._act(optimizer)
        if self.now.phase is not Phase.LOST:
            self.update += 1
            self._updating = False

    # -- a step that is lost, and other workers ----------------------------------------------------------------------

    @contextmanager
    def or_lost(self, *, unless_counted: bool = False) -> Iterator[None]:
        """The one place where a step meets the end of its group: it takes note, and the loop retries."""
        try:
            yield
        except GenerationEnded:
            if unless_counted and self.now.counted:
                self._between_steps()  # it counts; the others regroup
            else:
                self.lose()

    def lose(self) -> None:
        """As if the step had not begun, but for weights that the recovery puts right."""
        was, item = self.now, self.now.item
        self.now = StepState(Phase.LOST, item)
        self.stepped = self._in_body = self._updating = self.stop_agreed = False
        if not was.counted:  # otherwise the group ended between two steps, and there is nothing to take back
            self._stops.agreed = was.was_asked_to_stop
            if self.loss_scale is not None and was.loss_scale is not None:
                self.loss_scale.load_state_dict(was.loss_scale)
            # An update that is taken back may have changed some: schedule-free optimizers count their steps there.
            for optimizer, settings in zip(self._optimizers, was.settings, strict=bool(was.settings)):
                settings.put_back(optimizer)
        self.passes.forget()
        self.buffers.forget_step()

    def regrouped(self, strategies: StrategyTable) -> None:
        """There are other workers, and the state is that of the last step that counts."""
        self.strategies, self.active = strategies, None
        self.passes.regrouped(strategies.assignment)
        self.voting = self._new_voting()
        self.buffers.meet_others()
        self.checks.regrouped(strategies.name_of)
        self._between_steps()

    def pass_lanes_on(self) -> None:
        """The lanes go to other workers for one pass; after the step they are where they were."""
        self.strategies.assignment = self.passes.next_assignment()
        if self.now.phase is Phase.LOST:
            self._between_steps()

    # -- between steps, and the end of a loop ------------------------------------------------------------------------

    def stop(self) -> None:
        self.stop_wanted = True

    def stopped(self) -> None:
        """The loop has ended as wanted; another one may begin."""
        self.stop_wanted = self.stop_agreed = False

    def forget_untouched(self) -> None:
        """The loop was left with an item of which nothing has run, as to look at a batch: no harm is done."""
        item = self.now.item
        if self.now.phase is Phase.ITEM and item is not None and item.first_of_step and not self.now.reports:
            self._between_steps()

    def drain(self) -> None:
        """All workers stand between two steps: what is under way ends, and models and buffers are alike everywhere."""
        if self.inside_step:
            return
        self.strategies.drain()
        self._group.go_on_without_the_lost()
        self.buffers.drain(self._group.comm, *self._lowest_lane())

    def _lowest_lane(self) -> tuple[int, int]:
        """Which worker has the lowest lane of those that there are, and which that is."""
        lost: Set[int] = self._group.lost
        left = [lanes for worker, lanes in enumerate(self.strategies.assignment) if worker not in lost]
        lowest = min(lane for lanes in left for lane in lanes)
        return next(place for place, lanes in enumerate(left) if lowest in lanes), lowest

    def load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.strategies.load(optimizer, state, round=self.rounds)

    def close(self) -> None:
        self.checks.close()
        self.strategies.close()
        self.prepared.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _item_of_body(self) -> WorkItem | None:
        return None if self.now.phase is Phase.BETWEEN_STEPS else self.now.item

    def _between_steps(self) -> None:
        self.now.phase, self.now.item, self._in_body = Phase.BETWEEN_STEPS, None, False

    def _check_step_whole(self) -> None:
        """Exceptions that the loop caught where nothing can be taken back any more."""
        of_item, in_update = self.now.of_item, self._updating and self.now.phase in (Phase.ITEM, Phase.RAN)
        if in_update or (of_item.failed and of_item.ran_last):
            raise rules.step_not_whole(self.before, in_update=in_update)

    def _new_voting(self) -> Voting:
        return Voting(self._group.comm, self.strategies.assignment, raises=not self._group.recovery.is_elastic)

    def _fault_point(self, phase: str) -> None:
        if ordered:
            fault_point(phase, self.round)

    def _begin_faults(self, active: Strategy) -> None:
        """A bit is flipped in a parameter, or where this worker has no whole ones in its part of the state."""
        begin_step(self.round)
        part = () if active.replicas else self._group.recovery.part
        named = [("", tensor) for tensor in part] or [(self.strategies.name_of(p), p) for p in active.parameters]
        for fault in flips_due(self.round):
            flip_a_bit(fault.tensor, named)

    def _traffic_so_far(self) -> Traffic:
        if self._group.comm.size > 1:
            return self._group.comm.traffic
        return Traffic() if self.active is None else self.active.traffic

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value
