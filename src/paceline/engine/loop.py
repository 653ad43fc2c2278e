"""The training loop: `for batch in loader` runs once per work item of this worker, and retries what is lost.

    enter     was any worker asked to stop? the same data order? an elastic job may admit joining workers
    ┌► next item ─► begin_item ─► the body ─► … last item of the step: the place in the data moves on
    │     └─ the step was lost, or the workers have changed: recover, and hand the items out again        `_recovers`
    └──────
    leave     drain, tell the launcher; early (`break`, an exception): a note for those who wait for this worker

The place in the data moves when a step counts, so a state saved between two steps continues with the very next sample,
on any number of workers. What does not count when the workers change is handed out again, to those that there are then.
`_recovers` is the one place where a step is tried again (between two loops engine/boundary.py calls `start_over`); the
recovery itself is told in elastic/recovery.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.data.fetching import Prefetch
from paceline.data.sample_log import LogHeader, MicroBatch, SampleLog, next_attempt
from paceline.data.sharded_sampler import WorkItem
from paceline.data.work_source import WorkSource
from paceline.elastic.faults import fault_point, ordered
from paceline.engine.boundary import Boundary
from paceline.engine.config import EngineConfig, counted
from paceline.engine.facts import facts_of_process, job_facts
from paceline.engine.group import Group
from paceline.engine.replicas import weights_hash
from paceline.engine.rules import refuse_update_bn
from paceline.engine.sources import check_same_order
from paceline.engine.step import Phase, TrainStep
from paceline.engine.stop_signals import StopSignals
from paceline.errors import LoopError
from paceline.monitor.events import Part
from paceline.world import messages
from paceline.world.checked_values import whole_number
from paceline.world.determinism import mix, seed_everything


class PreparedLoader:
    """Iterating it is one epoch, or what is left of one after a resume; the epoch advances by itself."""

    def __init__(
        self,
        source: WorkSource,
        step: TrainStep,
        config: EngineConfig,
        group: Group,
        boundary: Boundary,
        stops: StopSignals,
        record_folder: Path | None,
        begun_elsewhere: Callable[[], bool] = lambda: False,
        new_schedules: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        """`record_folder`: of the samples used, if they are to be on record.

        `begun_elsewhere`: whether what is trained has been trained before, as the script loaded it by itself.
        `new_schedules`: the schedulers that have not moved yet.
        """
        self.source = source
        self._step, self._config, self._group, self._boundary, self._stops = step, config, group, boundary, stops
        self._items: Prefetch | None = None
        self._step_items: list[tuple[WorkItem, Any]] = []
        self._stepping: Generator[Any] | None = None  # the loop of `next_step`, which stands still after each step
        self._was_stopped = False
        self.in_loop = self.left_early = self.failed = False
        self._begun_elsewhere, self._new_schedules, self._epoch_is_set = begun_elsewhere, new_schedules, False
        self.was_measured = False  # by len(): what is made from that counts items
        self.knows_shadows = False  # the body leaves them out of what it adds up by hand
        self._record_folder = record_folder
        self._record: SampleLog | None = None
        self._handed_out: list[WorkItem] = []  # of the step that is under way, for the record

    @property
    def dataset(self) -> Any:
        return self.source.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples of an item: a lane's micro-batch. None where a sampler or stream of the user's own decides it."""
        return self.source.batch_size or None

    @property
    def epoch(self) -> int:
        if not self._group.recovery.admitted:  # it is the job's, and a loop over what is left of it follows
            self._join(any_loop=True)
        return self.source.epoch + (self._stepping is not None and self._ends_epoch())

    @property
    def position(self) -> int:
        """Samples of this epoch that committed steps have used."""
        return self.source.position

    @property
    def shadow(self) -> bool:
        """Whether the batch is a copy for a worker without samples in a short last step: sums by hand leave it out."""
        self.knows_shadows = True
        item = self._step.now.item
        return item is not None and item.shadow

    @property
    def sampler(self) -> PreparedLoader:
        """Scripts for DDP write `loader.sampler.set_epoch(epoch)`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch with the next loop, where the place is in another; all workers call it, between loops.

        Epochs advance by themselves: it is for a loop that begins elsewhere than at 0, or that leaves epochs early.
        """
        epoch = whole_number("set_epoch: epoch", epoch)
        if self._items is not None:
            raise LoopError(f"loader.set_epoch({epoch}) belongs before `for batch in loader`, not inside it")
        self._epoch_is_set = True
        if self._group.recovery.admitted and epoch != self.source.epoch:  # who joins gets the place of the others
            self.source.begin_epoch(epoch)

    def __len__(self) -> int:
        """How often the loop's body runs in a whole epoch, on this worker; `engine.steps_per_epoch` counts steps."""
        items, steps = self.source.own_items, self.source.steps
        if items is None or steps is None:
            raise TypeError(f"a {type(self.dataset).__name__} without __len__ gives a loader without length")
        if not self.was_measured:
            self._tell_length(items, steps)
        self.was_measured = True
        return items

    def _tell_length(self, items: int, steps: int) -> None:
        lanes, workers = self._config.lanes, self._group.world.size // self._config.mesh.cp
        alone = "A mean over it is this worker's alone; engine.mean() is all workers'"
        if lanes > workers:
            self._group.note(
                f"paceline: len(loader) is {items} on this worker, how often the loop's body runs, as {lanes} lanes "
                f"are on {counted(workers, 'worker')}; an epoch has {steps} steps on any number of workers: "
                f"engine.steps_per_epoch(loader). {alone}"
            )
        elif workers > 1:
            self._group.note(f"paceline: len(loader) is {items} on each of {workers} workers. {alone}")

    # -- the loop ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Any]:
        refuse_update_bn(sys._getframe(1))
        step, self._was_stopped = self._step, False
        if self._items is not None:
            raise LoopError("the training loader is already being iterated; a second loop over it would mix two epochs")
        if step.broken:
            raise LoopError(f"{step.broken}, so it can't start another; end a loop early with engine.stop()")
        if not self._enter():
            return
        early = True
        try:
            self._open_record()
            self._fetch()
            step.timing.enter(Part.OTHER)
            step.timing.begin()
            self._group.loop = self
            while (pair := self._next_pair()) is not None:
                item, batch = pair
                step.begin_item(item)
                if self._recovers():
                    continue
                self._step_items = [(item, batch)]
                self._hand_out(item)
                yield batch
                if self._recovers():
                    continue
                if step.now.item is not None and step.now.item.last_of_step:
                    self._end_step(step.now.item)
                if step.now.item is None:
                    if step.stop_agreed:
                        self._was_stopped = True
                        break
                    self._recovers(between_steps=True)
            early = self._group.recovery.left_early
        except GeneratorExit:  # a break, a return or an exception in the body
            whole = not step.inside_step and step.broken is None
            if step.now.item is not None and step.now.item.last_of_step and whole:
                self._end_step(step.now.item)  # a `break` after the step acted is a clean end: the step counts
            raise
        except BaseException:  # of the data, as of a sample that can't be read: the others may be in their next step
            self.failed = True
            raise
        finally:
            self._group.loop = None
            self._drop_items()
            self._leave(early)

    def next_step(self) -> Iterator[Any]:
        """The items of the next step alone, for loops that update behind them; one epoch follows the other.

            for batch in loader.next_step():
                engine.backward(loss_of(batch))
            optimizer.step()

        Without an item: the loop was ended by `engine.stop()` or a signal.
        """
        self._step.was_asked_for = self._step.checks.asks_for_last = True
        for _ in ("what is left of this epoch", "the next one"):
            if self._stepping is None:
                self._stepping = iter(self)
            for batch in self._stepping:
                yield batch
                if self._step.now.item is None or self._step.now.item.last_of_step:
                    return
            self._stepping = None
            if self._was_stopped or self._stops.agreed:
                return

    def end_steps(self) -> None:
        """No more of them are asked for: the last one counts, and the loop is left."""
        stepping, self._stepping = self._stepping, None
        if stepping is not None and self._ends_epoch():
            next(stepping, None)
        elif stepping is not None:
            stepping.close()

    def _ends_epoch(self) -> bool:
        """The step that has just acted is the epoch's last."""
        item, steps = self._step.item_done(), self.source.steps
        return item is not None and not self._step.inside_step and steps is not None and item.step + 1 >= steps

    def _next_pair(self) -> tuple[WorkItem, Any] | None:
        """The next item; None when the epoch is over, for the workers that there are now."""
        while True:
            assert self._items is not None
            self._step.timing.enter(Part.DATA)
            if self._group.recovery.loop_is_over:
                self._group.recovery.loop_is_over = False
                return None
            if ordered:
                fault_point("data", self._step.rounds + 1)
            pair = None
            with self._step.or_lost():
                pair = next(self._items, None)
            if pair is not None:
                return pair
            if self._step.now.phase is Phase.LOST:
                self._recovers()
            elif not self._recovers(between_steps=True):
                return None

    def _recovers(self, *, between_steps: bool = False) -> bool:
        """Whether the step was lost, or between two steps the workers have changed: then the next item is another."""
        step, recovery = self._step, self._group.recovery
        if step.passes.again or (between_steps and step.passes.are_on):
            self._pass_lanes_on()
            return True
        if step.now.phase is Phase.LOST or (between_steps and recovery.changed):
            self.start_over()
            return True
        return False

    def start_over(self) -> None:
        """With the workers that there are now, from the first item that does not count."""
        if (item := self._step.item_done()) is not None:
            self._end_step(item)  # it counts, and the body has not given it back yet
        self._handed_out.clear()
        with self._step.timing.inside(Part.RECOVERY):
            self._group.recovery.recover()
        self._fetch()

    def check_collective(self, received: Sequence[Tensor]) -> None:
        counts = [len(lanes) for lanes in self._step.now.holders]
        if self._step.inside_step and len(set(counts)) > 1:
            raise LoopError(
                "torch.distributed inside the training loop's body, which runs a different number of times on each "
                f"worker in step {self._step.step + 1} ({', '.join(map(str, counts))}): others would wait for ever. "
                "Call it where engine.stepped is true, take engine.mean() for a mean over the step, or choose lanes "
                f"that the {len(counts)} workers divide"
            )
        self._step.checks.received(received)

    def _pass_lanes_on(self) -> None:
        """The step once more with other lanes for every worker, or the next one with those that it had."""
        self._handed_out.clear()
        self._step.pass_lanes_on()
        self.source.reassign(self._step.strategies.assignment[self._group.world.rank])
        self._fetch()

    def _fetch(self) -> None:
        """Items from the committed place on, for the lanes that this worker has now."""
        self._drop_items()
        items = self._group.sequences.items(self.source.items(), self._group.device)
        self._items = Prefetch(items, self._group.device, ahead=self.source.fetches_ahead)

    def _drop_items(self) -> None:
        if self._items is not None:
            self._items.close()
            self._items = None

    def _end_step(self, item: WorkItem) -> None:
        """The step is done: its samples are used."""
        step, recovery = self._step, self._group.recovery
        step.end_item()
        if step.now.phase is Phase.LOST:
            return
        in_updates, step.update = step.in_updates, 0
        step.timing.enter(Part.OTHER)
        for listener in self._group.after_step:
            listener()
        step.timing.begin()
        self.write_record()
        self.source.commit(item)
        if in_updates:
            recovery.ends_updates(step.rounds)

    # -- engine.update -----------------------------------------------------------------------------------------------

    def run_update(self, optimizer: Optimizer, loss_fn: Callable[[Any], Any]) -> None:
        """`engine.update`: all items of the step that is under way, for an update by `optimizer`; until it counts."""
        step = self._step
        step.was_asked_for = True
        step.retract_item()
        while True:
            for item, batch in self._rest_of_step():
                step.begin_item(item, optimizers=[optimizer])
                if step.now.phase is Phase.LOST:
                    break
                result = loss_fn(batch)
                loss, weight = result if isinstance(result, tuple) else (result, None)
                step.backward(loss, weight, last=True)
            step.finish_update(optimizer)
            if step.now.phase is not Phase.LOST:
                return
            self._recovers()
            pair = self._next_pair()
            assert pair is not None
            self._step_items = [pair]
            self._hand_out(pair[0])

    def _rest_of_step(self) -> list[tuple[WorkItem, Any]]:
        """All items of the current step, fetching those not handed out yet."""
        assert self._items is not None
        self._step.timing.enter(Part.DATA)
        while not self._step_items[-1][0].last_of_step:
            self._step_items.append(next(self._items))
            self._hand_out(self._step_items[-1][0])
        return self._step_items

    # -- its ends ----------------------------------------------------------------------------------------------------

    def _enter(self) -> bool:
        """Whether there is a loop to run: all workers agree on that."""
        group, boundary = self._group, self._boundary
        if self.in_loop:  # it has joined the others in front of it
            return True
        self.tell_items_counted()
        group.recovery.loop += 1
        if not group.recovery.admitted:
            return self._join(any_loop=False)
        group.comm.take_back_note()
        if not self._stops.enter_loop(boundary.told):
            return False
        self.in_loop, self.failed = True, False
        elsewhere = not self._step.rounds and self._begun_elsewhere()
        if elsewhere and (new := self._new_schedules()):
            messages.warn(
                f"the optimizer has made steps before this job, but the {new[0]} begins at its first: where the script "
                "loads optimizer.state_dict() it has to save and load scheduler.state_dict() too (unless a new "
                "schedule is meant), or go on with engine.save_state() and engine.load_state()"
            )
        if elsewhere and not (self.source.epoch or self._epoch_is_set):
            messages.warn(
                "the optimizer or scheduler has made steps before this job, but the data begin with epoch 0, whose "
                "samples and random numbers come again; call loader.set_epoch(epoch) before the loop, or go on with "
                "engine.save_state() and engine.load_state()"
            )
        if self.source.digest is not None:
            check_same_order(boundary.told(self.source.digest))
        self._tell_phase("training")
        group.recovery.enter(self._step.rounds, self._facts)
        return True

    def _join(self, *, any_loop: bool) -> bool:
        """A worker that comes later, in front of its loop; False: the others are past it."""
        if not self._group.recovery.join(self._facts, any_loop=any_loop):
            return False
        self.in_loop = True
        self._tell_phase("training")
        return True

    def _leave(self, early: bool) -> None:
        self.in_loop = False
        step, recovery = self._step, self._group.recovery
        self.left_early, recovery.left_early = early, False
        if recovery.changed and not step.inside_step and step.broken is None:
            recovery.recover()  # a worker joins after the last step: it leaves the loop as well
        recovery.leave()
        if early:
            step.forget_untouched()
            if step.inside_step:
                step.broken = f"this worker left its training loop inside step {step.step + 1}"
            self.say_left()
        else:
            self._end_together()
        if not (early and step.inside_step):
            self._tell_phase("idle")

    def _end_together(self) -> None:
        step = self._step
        if step.stops_alone:
            self.say_left()
        self._boundary.drain(step)
        if step.never_agrees:  # inside the loop a signal was this worker's own affair
            self._stops.end_loop(self._boundary.told)
        for listener in step.strategies.loop_end_listeners:
            listener(step.step, lambda: weights_hash(step.models, step.strategies.full_tensor))
        step.stopped()
        seed_everything(mix(self._config.seed, "after the loop", step.step))

    def say_left(self) -> None:
        """To those who may wait for this worker in a step."""
        step = self._step
        where = f"inside step {step.step + 1}" if step.inside_step else f"after step {step.step}"
        self._group.comm.leave_note(f"it left its training loop {where}", votes=step.votes)

    def tell_items_counted(self) -> None:
        """The script goes on, or ends well, after a loop that it has left early without a look at steps."""
        lanes, workers = self._config.lanes, self._group.world.size // self._config.mesh.cp
        left = self.in_loop or self.left_early
        whole = left and not self._step.inside_step and self._step.broken is None
        if self._step.was_asked_for or lanes <= workers or not (whole and self._step.rounds and self._group.is_main):
            return
        self._step.was_asked_for = True  # said once
        messages.logger("engine").warning(
            f"paceline: the training loop was left early, after step {self._step.step}. If it counts items, that is "
            f"another step on another number of workers, as {lanes} lanes are on {counted(workers, 'worker')}. Count "
            "steps: `if engine.stepped and engine.step == …: break`, or call engine.stop()"
        )

    def _tell_phase(self, name: str) -> None:
        """What the launcher names when this worker fails: the step it is in, or the last one after the loop."""
        self._group.supervisor.tell("phase", name=name)
        self._group.supervisor.tell("step", step=self._step.step + self.in_loop)

    def _facts(self) -> dict[str, str | int]:
        """What has to be the same in all workers."""
        config = self._config
        facts = job_facts(config, self.source.facts(), self._group.device)
        more = {"threads": config.threads, "strategy": str(config.strategy), "backend": config.backend}
        return facts_of_process({**facts, **more})

    # -- its state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, counting a step that has acted but whose item the loop has not given back yet.

        With a stream, each worker's state holds the places of its own lanes.
        """
        item = None if self._step.inside_step else self._step.item_done()
        if item is not None:
            self.write_record()  # before the state is: what a job resumed from must be on record
        return self.source.state_after(item)

    def load_state_dict(self, state: Mapping[str, Any], *, changed: frozenset[str] = frozenset()) -> None:
        """Go on from `state_dict()`; `changed` names what is accepted to be different from when it was made."""
        if self._items is not None:
            raise LoopError("the training loader is being iterated; load its state before or after the loop")
        self.source.restore(state, changed=changed)
        if self._record is not None:
            self._record.close()
            self._record = None

    def close(self) -> None:
        self.source.close()
        if self._record is not None:
            self._record.close()

    # -- the sample log ----------------------------------------------------------------------------------------------

    def _open_record(self) -> None:
        self._handed_out.clear()
        if self._record is not None:
            if not (header := self.source.log_header())["stream"]:
                self._record.begin_epoch(header["epoch"], header["samples"], header["samples_per_epoch"])
        elif self._record_folder is not None:
            attempt = int(max(self._boundary.told(next_attempt(self._record_folder))))
            if self._record is None:  # else the workers have changed meanwhile, and it is that of those who are left
                self._record = self._start_record(self._record_folder, attempt)

    def record_anew(self) -> None:
        """The workers have changed: their record is another, from the committed place on."""
        if self._record is not None:
            self._record.close()
        if self._record_folder is not None:
            attempt = int(max(self._group.comm.gather_json(next_attempt(self._record_folder))))
            self._record = self._start_record(self._record_folder, attempt)

    def _start_record(self, folder: Path, attempt: int) -> SampleLog:
        world, about = self._group.world, self.source.log_header()
        header = LogHeader(worker=world.rank, workers=world.size, lanes=self._config.lanes, **about)
        return SampleLog.start(folder, attempt, header)

    def _hand_out(self, item: WorkItem) -> None:
        if item.shadow and not self.knows_shadows:
            self.knows_shadows = True  # said once
            first = next(rank for rank, lanes in enumerate(self._step.now.holders) if not lanes)
            if first == self._group.comm.rank:
                messages.logger("engine").info(
                    "paceline: the epoch's last step has no samples for this worker: it runs the body on a copy of "
                    "another one's batch, of which nothing is trained. Only a sum by hand in the body has to leave it "
                    "out (`if not loader.shadow`); engine.mean() does by itself"
                )
        if self._record is not None and not item.shadow:
            self._handed_out.append(item)

    def write_record(self) -> None:
        if self._record is None:
            return
        for item in self._handed_out:
            self._record.add(
                MicroBatch(
                    step=self._step.number,
                    epoch=item.epoch,
                    epoch_step=item.step,
                    lane=item.lane,
                    micro_batch=item.micro_batch,
                    position=item.position,
                    ids=item.sample_ids or None,
                    count=None if item.sample_ids else item.samples,
                    used=(item.lane, item.micro_batch) not in self._step.now.left_out,
                )
            )
        self._handed_out.clear()
        self._record.commit()
