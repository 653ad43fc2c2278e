"""The loader as the loop sees it: `for batch in loader` runs once per work item of this worker.

The place in the data moves when a step commits, so a state saved between two steps continues with the very next sample,
on any number of workers. In an elastic job the workers may change between two items: what is not committed by then is
handed out again, to those that are there (see `regrouping`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.data.fetching import Prefetch
from paceline.data.sample_log import MicroBatch, SampleLog
from paceline.data.sharded_sampler import WorkItem
from paceline.data.work_source import WorkSource
from paceline.elastic.fault_injection import fault_point
from paceline.engine.regrouping import Elastic
from paceline.engine.train_step import TrainStep
from paceline.errors import GenerationEnded, LoopError


class PreparedLoader:
    """Iterating it is one epoch, or what is left of one after a resume; the epoch advances by itself."""

    def __init__(
        self,
        source: WorkSource,
        train_step: TrainStep,
        device: torch.device,
        *,
        on_enter: Callable[[], bool],
        on_leave: Callable[[bool], None],
        attempt: Callable[[bool], int | None] = lambda regrouping: None,
        start_record: Callable[[int], SampleLog] | None = None,
        deal: Callable[[WorkSource], None] = lambda source: None,
        elastic: Elastic | None = None,
        join: Callable[[bool], bool] = lambda any_loop: True,
    ) -> None:
        """`join`: for a worker that comes later, to be one of the others; False if they are past this loop."""
        self.source = source
        self._elastic, self._join, self._deal = elastic, join, deal
        self._train_step = train_step
        self._device = device
        self._on_enter, self._on_leave = on_enter, on_leave
        self._items: Prefetch | None = None
        self._waited_s = 0.0  # before this step
        self._step_items: list[tuple[WorkItem, Any]] = []
        self._handed_out: list[WorkItem] = []
        self._attempt, self._start_record = attempt, start_record
        self._record: SampleLog | None = None

    @property
    def dataset(self) -> Any:
        return self.source.dataset

    @property
    def epoch(self) -> int:
        if not self._admitted:  # it is the job's, and a loop over what is left of it follows
            self._join(True)
        return self.source.epoch

    @property
    def in_loop(self) -> bool:
        return self._items is not None

    @property
    def _admitted(self) -> bool:
        return self._elastic is None or self._elastic.admitted

    @property
    def position(self) -> int:
        """Samples of this epoch that committed steps have used."""
        return self.source.position

    def __len__(self) -> int:
        """Micro-batches per lane and epoch, the same at any number of workers; the last step counts in full."""
        if self.source.steps is None:
            raise TypeError(f"a {type(self.dataset).__name__} without __len__ gives a loader without length")
        return self.source.steps * self._train_step.accumulate

    def __iter__(self) -> Iterator[Any]:
        if self._items is not None:
            raise LoopError("the training loader is already being iterated; a second loop over it would mix two epochs")
        if self._train_step.broken:
            raise LoopError(
                f"{self._train_step.broken}, so it can't start another; end a loop early with engine.stop()"
            )
        if not self._on_enter():
            return
        left_early = True
        self._open_record()
        self._items = self._fetched()
        try:
            while (pair := self._next_pair()) is not None:
                item, batch = pair
                self._train_step.begin_item(item)
                if self._starts_over():
                    continue
                self._train_step.work.timing.waited_for_data_s = self._items.waited_s - self._waited_s
                if item.last_of_step:
                    self._waited_s = self._items.waited_s
                self._step_items = [(item, batch)]
                self._hand_out(item)
                yield batch
                if self._starts_over():
                    continue
                if self._train_step.item is not None and self._train_step.item.last_of_step:
                    self._commit(self._train_step.item)
                if self._train_step.item is None:
                    if self._train_step.stop_agreed:
                        break
                    self._starts_over(between_steps=True)
            left_early = self._elastic is not None and self._elastic.left_early
        except GeneratorExit:  # a break, a return or an exception in the body
            item_out = self._train_step.item
            whole = not self._train_step.inside_step and self._train_step.broken is None
            if item_out is not None and item_out.last_of_step and whole:
                self._commit(item_out)  # a `break` after the step acted is a clean end: the step counts
            raise
        finally:
            self._items.close()
            self._items = None
            self._on_leave(left_early)

    # -- other workers ----------------------------------------------------------------------------------------------

    def _fetched(self) -> Prefetch:
        self._waited_s = 0.0
        return Prefetch(self.source.items(), self._device, ahead=self.source.fetches_ahead)

    def _next_pair(self) -> tuple[WorkItem, Any] | None:
        """The next item; None when the epoch is over, for the workers that there are now."""
        while True:
            assert self._items is not None
            if self._elastic is not None and self._elastic.loop_is_over:
                self._elastic.loop_is_over = False
                return None
            fault_point("data", self._train_step.step + 1)
            try:
                return next(self._items)
            except StopIteration:
                if not self._starts_over(between_steps=True):
                    return None
            except GenerationEnded:
                self._train_step.lose()
                self._starts_over()

    def _starts_over(self, *, between_steps: bool = False) -> bool:
        """Whether the step was lost, or between two steps the workers have changed: then the next item is another."""
        step = self._train_step
        if step.again or (between_steps and step.lanes_are_passed_on):
            self._pass_lanes_on()
            return True
        if not step.is_lost and not (between_steps and self._elastic is not None and self._elastic.changed):
            return False
        self.start_over()
        return True

    def _pass_lanes_on(self) -> None:
        """The step once more with other lanes for every worker, or the next one with those that it had."""
        self._handed_out.clear()
        before = self._items
        self._train_step.pass_lanes_on()
        self._deal(self.source)
        if before is not None:
            before.close()
            self._items = self._fetched()

    def start_over(self) -> None:
        """With the workers that there are now, from the first item that is not committed."""
        assert self._elastic is not None
        if (item := self._train_step.item_done()) is not None and not self._train_step.is_lost:
            self._commit(item)  # it counts, and the body has not given it back yet
        self._handed_out.clear()
        before = self._items
        self._elastic.start_over()
        if before is not None:
            before.close()
            self._items = self._fetched()

    def _restart_step(self) -> None:
        """The same inside `engine.update`, which wants the step's first item at once."""
        self._starts_over()
        pair = self._next_pair()
        assert pair is not None
        self._step_items = [pair]
        self._hand_out(pair[0])

    def run_update(self, optimizer: Optimizer, loss_fn: Callable[[Any], Any]) -> None:
        """`engine.update`: all items of the step that is out, for an update by `optimizer`; until it counts."""
        step = self._train_step
        step.retract_item()
        while True:
            for item, batch in self._rest_of_step():
                step.begin_item(item, optimizers=[optimizer])
                if step.is_lost:
                    break
                result = loss_fn(batch)
                loss, weight = result if isinstance(result, tuple) else (result, None)
                step.backward(loss, weight, last=True)
            step.finish_update(optimizer)
            if not step.is_lost:
                return
            self._restart_step()

    def _rest_of_step(self) -> list[tuple[WorkItem, Any]]:
        """All items of the current step, fetching those not handed out yet; for `engine.update`."""
        assert self._items is not None
        while not self._step_items[-1][0].last_of_step:
            self._step_items.append(next(self._items))
            self._hand_out(self._step_items[-1][0])
        return self._step_items

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, counting a step that has acted but whose item the loop has not given back yet.

        With a stream, each worker's state holds the places of its own lanes.
        """
        item = self._train_step.item
        acted = item is not None and item.last_of_step and not self._train_step.inside_step
        if acted:
            self.write_record()  # before the state is: what a job resumed from must be on record
        return self.source.state_after(item if acted else None)

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

    def _commit(self, item: WorkItem) -> None:
        self._train_step.end_item()
        if self._train_step.is_lost:
            return
        self.write_record()
        in_updates = self._train_step.in_updates
        self._train_step.new_items()
        self.source.commit(item)
        if in_updates and self._elastic is not None:
            self._elastic.ends_updates(self._train_step.count.rounds)

    # -- the sample log ---------------------------------------------------------------------------------------

    def _open_record(self) -> None:
        self._handed_out.clear()
        if self._record is None:
            attempt = self._attempt(False)
            if self._record is None:  # else the workers have changed meanwhile, and it is that of those who are left
                self._record = self._record_of(attempt)
        elif not (header := self.source.log_header())["stream"]:
            self._record.begin_epoch(header["epoch"], header["samples"], header["samples_per_epoch"])

    def record_anew(self) -> None:
        """The workers have changed: their record is another, from the committed place on."""
        if self._record is not None:
            self._record.close()
        self._record = self._record_of(self._attempt(True))

    def _record_of(self, attempt: int | None) -> SampleLog | None:
        return None if attempt is None or self._start_record is None else self._start_record(attempt)

    def _hand_out(self, item: WorkItem) -> None:
        if self._record is not None and not item.shadow:
            self._handed_out.append(item)

    def write_record(self) -> None:
        if self._record is None:
            return
        for item in self._handed_out:
            self._record.add(
                MicroBatch(
                    step=self._train_step.step + (not self._train_step.stepped),
                    epoch=item.epoch,
                    epoch_step=item.step,
                    lane=item.lane,
                    micro_batch=item.micro_batch,
                    position=item.position,
                    ids=item.sample_ids or None,
                    count=None if item.sample_ids else item.samples,
                    used=(item.lane, item.micro_batch) not in self._train_step.work.now.left_out,
                )
            )
        self._handed_out.clear()
        self._record.commit()
