"""One step of training, told as the loop sees it: items are handed out, run backward, and end in one update.

    hand out item ─► backward ─► optimizer.step()        … once per item; only the step's last item acts
                        │
                        └─ on this worker's last item:  flush buckets ─► ballots ─► collect gradients

The body of the loop runs once per item, so `step()` and `zero_grad()` between items find `.grad` empty and do nothing:
the lane sums live out of their reach. After the last backward `.grad` holds the gradient of the global batch, under
strategies that keep it here; who runs the update is the strategy's affair. What is done for all that is `step_work`;
here is when: the phases of a step, and which call of the body belongs to which.

In an elastic job a step counts when the coordinator commits it. Until then it can be *lost*: the workers have changed,
what the step did is forgotten, calls of the loop's body do nothing more, and the loader hands its items out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.collectives.communicator import Communicator
from paceline.data.sharded_sampler import WorkItem
from paceline.engine import loop_rules as rules
from paceline.engine.config import EngineConfig
from paceline.engine.loop_rules import Phase
from paceline.engine.second_opinion import SecondOpinion
from paceline.engine.step_count import Commitment, StepCount
from paceline.engine.step_so_far import ItemSoFar
from paceline.engine.step_work import StepWork
from paceline.engine.stop_signals import StopSignals
from paceline.engine.strategy_table import StrategyTable
from paceline.errors import GenerationEnded, LoopError
from paceline.strategies.registry import Rides
from paceline.strategies.strategy import Agreement


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
        opinion: SecondOpinion | None = None,
    ) -> None:
        self.accumulate = config.accumulate
        self._optimizers, self._schedulers = optimizers, schedulers
        self.count = StepCount(config.seed)
        self.work = StepWork(config, comm, models, optimizers, strategies, stops, self.count, opinion)
        self._original_steps: dict[int, Callable[..., Any]] = {}
        self._phase = Phase.BETWEEN_STEPS
        self._item: WorkItem | None = None
        self._so_far = ItemSoFar()
        self._updating = False
        self._in_body = False
        self._stepped_in_body: set[int] = set()
        self._clip: float | None = None
        self.stepped = False
        self.broken: str | None = None
        self.on_step: Callable[[], None] = lambda: None
        self.on_settled: Callable[[], None] = lambda: None
        self.lost: Set[int] = frozenset()  # workers that the others go on without

    # -- where it is -------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.count.step

    @property
    def inside_step(self) -> bool:
        return self._phase in (Phase.ITEM, Phase.RAN, Phase.COLLECTED)

    @property
    def item(self) -> WorkItem | None:
        return self._item

    @property
    def in_updates(self) -> bool:
        """The loop's body runs once per step, and calls `engine.update`."""
        return self._updating or self.count.update > 0

    @property
    def is_lost(self) -> bool:
        """The step has to be done again, by the workers that there are now."""
        return self._phase is Phase.LOST

    @property
    def again(self) -> bool:
        """The step was lost for a second opinion, by the same workers."""
        return self.work.passes.again

    @property
    def lanes_are_passed_on(self) -> bool:
        return self.work.passes.are_on(self.rides)

    @property
    def stop_wanted(self) -> bool:
        """The loop asked for it; agreed or not yet."""
        return self.work.stop_wanted

    @property
    def stop_agreed(self) -> bool:
        return self.work.stop_agreed

    @property
    def stops_alone(self) -> bool:
        """The loop ends by this worker's own wish; others may wait for it in a later round."""
        return self.stop_agreed and self.work.now.agreement is Agreement.LATER

    @property
    def never_agrees(self) -> bool:
        """As far as the last step tells: each worker goes at its own pace to the end."""
        return self.work.now.agreement is Agreement.NEVER

    def item_done(self) -> WorkItem | None:
        """The item with which the step that is out ends, if it has got so far."""
        done = self._item is not None and self._item.last_of_step and self._phase in (Phase.COLLECTED, Phase.APPLIED)
        return self._item if done else None

    @property
    def strategies(self) -> StrategyTable:
        return self.work.strategies

    @property
    def rides(self) -> Rides:
        """The lanes of every worker."""
        return self.strategies.rides

    @property
    def votes(self) -> int:
        """Ballots that this worker took part in."""
        return self.work.box.votes

    # -- items -------------------------------------------------------------------------------------------------------

    def begin_item(self, item: WorkItem, *, optimizers: Sequence[Optimizer] | None = None) -> None:
        """Hand out `item`; `optimizers`: for an update by these alone, by `engine.update`."""
        if optimizers is None or not self._updating:
            self.end_item()
        if self.is_lost:
            return
        if item.first_of_step:
            try:
                self.work.start(item, optimizers or self._optimizers)
            except GenerationEnded:
                self.lose()
                return
        self._item, self._so_far = item, ItemSoFar()
        self._updating = optimizers is not None
        self._in_body = True
        self.stepped = False
        self.work.start_item(item)
        self._phase = Phase.ITEM

    def end_item(self) -> None:
        """The loop asks for more: settle what the last item left."""
        rules.check_step_applied(self._phase, self.step)
        self._check_step_whole()
        try:
            if self._phase is Phase.ITEM:
                self._skip_item()
            if self._phase is Phase.APPLIED and self.broken is None:
                self._commit_update()
                self.work.strategy().end_step()
                self._between_steps()
        except GenerationEnded:
            if not self.work.now.counted:
                self.lose()
                return
            self._between_steps()  # it counts; others regroup

    def backward(self, loss: Tensor, weight: float | Tensor | None, *, last: bool) -> None:
        if self.is_lost:
            return
        item = rules.item_of_backward(self._item, self._phase, loss, self._so_far, self.step)
        weight = rules.weight_of_backward(item, weight)
        try:
            if self.work.comm is not None and self.work.comm.is_over:
                raise GenerationEnded("the workers have changed")  # forward may have had zeros for weights
            self.work.run_backward(item, self._so_far, loss, weight, last=last)
            if last:
                self._ran(item)
        except GenerationEnded:
            self.lose()
        except BaseException:
            self._so_far.failed = True  # if the loop catches it
            raise

    def add_mean(self, name: str, value: Tensor | float, weight: float | None) -> None:
        if not self.is_lost:
            item = rules.item_of_mean(self._item, self._phase, name)
            self.work.add_mean(item, name, float(value), weight)

    def _ran(self, item: WorkItem) -> None:
        """The item's part of the step is done; with the last item's the step has its gradient."""
        self._phase = Phase.RAN
        if not item.last_of_step:
            return
        if self.work.collect(item):
            self._phase = Phase.COLLECTED
        else:  # another pass of its lanes is wanted
            self._phase = Phase.LOST
            self._in_body = self._updating = False

    def _skip_item(self) -> None:
        item = self._item
        assert item is not None
        self.work.skip(item, self._so_far)
        self._ran(item)
        if self._phase is Phase.COLLECTED:
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

    def _check_step_whole(self) -> None:
        in_update = self._updating and self._phase in (Phase.ITEM, Phase.RAN)
        rules.check_step_whole(self._so_far, self.step, in_update=in_update)

    # -- the update --------------------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer, original: Callable[..., Any]) -> None:
        self._original_steps[id(optimizer)] = original

    def clip(self, max_norm: float) -> float:
        """Clip the summed gradient by its global norm; before the step's last item there is nothing to clip yet."""
        self._clip = max_norm
        if self._phase is Phase.ITEM:
            raise LoopError("engine.clip_grad_norm_() belongs between engine.backward() and optimizer.step()")
        try:
            return self.work.clip(max_norm, collected=self._phase is Phase.COLLECTED)
        except GenerationEnded:
            self.lose()
            return self.work.clip(max_norm, collected=False)

    def optimizer_step(self, optimizer: Optimizer, closure: Any) -> Any:
        """The prepared optimizer's `step()`: acts when the step's gradient is there, and only then."""
        if self.is_lost:
            return None
        rules.check_no_closure(closure)
        if self.count.waits_for_update:
            rules.check_one_optimizer(len(self._optimizers))
        now, self._so_far.step_called = self.work.now, True
        if self._phase is Phase.ITEM and self._item is not None:
            rules.check_backward_came_first(self._item, self._so_far, self.step, held=bool(now.reports))
        self.work.check_learning_rates()
        if self._phase not in (Phase.COLLECTED, Phase.APPLIED):
            return None
        if id(optimizer) in now.acted:
            raise LoopError(f"optimizer.step() was called twice in step {self.step + 1}")
        if self._phase is Phase.COLLECTED:
            rules.check_gradients_untouched(now.gradient_versions, self.strategies.name_of)
        return self._act(optimizer)

    def _act(self, optimizer: Optimizer) -> Any:
        if self.is_lost:
            return None
        try:
            return self._update_with(optimizer)
        except GenerationEnded:
            self.lose()
            return None
        except BaseException as error:
            # Nobody may count a step of which this worker has half an update.
            if self.count.commitment is not None:
                self.broken = f"the update of step {self.step + 1} ended with {type(error).__name__} on this worker"
            raise

    def _update_with(self, optimizer: Optimizer) -> Any:
        now, first = self.work.now, self._phase is Phase.COLLECTED
        if first and self.count.commitment is not None and (now.empty or not self.count.waits_for_update):
            self.count.commit(now)
        now.acted.add(id(optimizer))
        self._phase = Phase.APPLIED
        result = None
        if not now.empty:
            result = self.work.apply(optimizer, self._original_steps[id(optimizer)])
            if len(now.acted) == len(self._optimizers) or self._updating:
                self._commit_update()
        if now.committed:
            self._count_step()
        return result

    def _commit_update(self) -> None:
        """Where updates can be undone, a step counts when its last one has been made."""
        if not self.work.now.committed:
            self.count.commit(self.work.now)
            self._count_step()

    def _count_step(self) -> None:
        now = self.work.now
        if now.counted:
            return
        self.work.counts()
        if not now.empty:
            self.stepped = True
            self.on_step()
            self.count.seed_between_steps()

    def _between_steps(self) -> None:
        self._phase, self._item, self._in_body = Phase.BETWEEN_STEPS, None, False

    def scheduler_acts(self, scheduler: Any) -> bool:
        """A prepared scheduler follows the optimizer: it acts only when that did."""
        if self._phase is Phase.APPLIED and self.stepped and self._in_body:
            self._stepped_in_body.add(id(scheduler))
        return self._phase is Phase.BETWEEN_STEPS or (self._phase is Phase.APPLIED and self.stepped)

    # -- engine.update: several updates of the same items ------------------------------------------------------------

    def retract_item(self) -> None:
        """`engine.update` runs the items itself: take back the one that the loop was given."""
        if self._phase is Phase.APPLIED:
            return
        self._check_step_whole()
        if self._phase is not Phase.ITEM or self._so_far.has_run:
            raise LoopError("engine.update() and engine.backward() can't be mixed in one item; use one form per loop")
        self._phase = Phase.BETWEEN_STEPS

    def finish_update(self, optimizer: Optimizer) -> None:
        """The end of `engine.update`: act, then be ready for another optimizer on the same items."""
        if self._phase is Phase.ITEM:
            try:
                self._skip_item()
            except GenerationEnded:
                self.lose()
        if self.is_lost:
            return
        self.work.check_learning_rates()
        self._act(optimizer)
        self.count.update += not self.is_lost
        self._updating = False

    def new_items(self) -> None:
        self.count.update = 0

    # -- the end of a loop -------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self.work.stop_wanted = True

    def stopped(self) -> None:
        """The loop has ended as wanted; another one may begin."""
        self.work.stop_wanted = self.work.stop_agreed = False

    def forget_untouched(self) -> None:
        """The loop was left with an item out and nothing of its step run, as to look at a batch: no harm is done."""
        item = self._item
        if self._phase is Phase.ITEM and item is not None and item.first_of_step and not self.work.now.reports:
            self._between_steps()

    def settle(self) -> None:
        """All workers stand between two steps: what is under way ends, and models and buffers are alike everywhere."""
        if not self.inside_step:
            self.work.settle(self.lost, self.on_settled)

    def load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.strategies.load(optimizer, state, round=self.count.rounds)

    def close(self) -> None:
        self.strategies.close()

    # -- other workers -----------------------------------------------------------------------------------------------

    def commit_with(self, commitment: Commitment | None) -> None:
        self.count.commitment = commitment
        self.work.open_box()

    def lose(self) -> None:
        """The workers have changed: as if the step had not begun, but for weights that the regrouping puts right."""
        self._phase = Phase.LOST
        self.stepped = self._in_body = self._updating = False
        self.work.lose()

    def regrouped(self, comm: Communicator | None, strategies: StrategyTable) -> None:
        """There are other workers, and the state is that of the last step that counts."""
        self.work.regrouped(comm, strategies)
        self._phase, self._item = Phase.BETWEEN_STEPS, None

    def pass_lanes_on(self) -> None:
        """The lanes go to other workers for one pass; after the step they are where they were."""
        self.work.pass_lanes_on()
        if self.is_lost:
            self._phase, self._item = Phase.BETWEEN_STEPS, None
