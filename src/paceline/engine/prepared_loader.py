"""The loader as the loop sees it: `for batch in loader` runs once per work item of this worker.

The place in the data is one integer, `position`: samples used since the job began. It moves when a step commits, so a
state saved between two steps continues with the very next sample, on any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.data.loader import ShardedLoader
from paceline.data.sharded_sampler import BatchPlan, WorkItem
from paceline.engine.train_step import TrainStep
from paceline.errors import LoopError


class PreparedLoader:
    """Iterating it is one epoch, or what is left of one after a resume; the epoch advances by itself."""

    def __init__(
        self,
        source: ShardedLoader,
        train_step: TrainStep,
        device: torch.device,
        *,
        on_enter: Callable[[], None],
        on_leave: Callable[[bool], None],
    ) -> None:
        self._source = source
        self._train_step = train_step
        self._device = device
        self._on_enter, self._on_leave = on_enter, on_leave
        self._items: Iterator[tuple[WorkItem, Any]] | None = None
        self._step_items: list[tuple[WorkItem, Any]] = []
        self.position = 0

    @property
    def plan(self) -> BatchPlan:
        return self._source.plan

    @property
    def dataset(self) -> Any:
        return self._source.dataset

    @property
    def epoch(self) -> int:
        """The epoch that `position` stands in."""
        return self.position // self.plan.samples_per_epoch

    def __len__(self) -> int:
        """Micro-batches per lane and epoch, the same at any number of workers; the last step counts in full."""
        return self.plan.steps * self.plan.accumulate

    def __iter__(self) -> Iterator[Any]:
        if self._items is not None:
            raise LoopError("the training loader is already being iterated; a second loop over it would mix two epochs")
        if self._train_step.broken:
            raise LoopError(
                f"{self._train_step.broken}, so it can't start another; end a loop early with engine.stop()"
            )
        epoch, done = divmod(self.position, self.plan.samples_per_epoch)
        left_early = True
        self._on_enter()
        self._items = self._source.items(epoch, done // self.plan.global_batch)
        try:
            for item, batch in self._items:
                self._train_step.begin_item(item)
                batch = self._to_device(batch)
                self._step_items = [(item, batch)]
                yield batch
                if self._train_step.item is not None and self._train_step.item.last_of_step:
                    self._train_step.end_item()
                    self._train_step.new_items()
                    self._advance(item.step, epoch)
                    if self._train_step.stop_agreed:
                        self._train_step.stopped()
                        break
            left_early = False
        except GeneratorExit:  # a break, a return or an exception in the body
            self._advance_if_applied(epoch)
            raise
        finally:
            self._items = None
            self._on_leave(left_early)

    def rest_of_step(self) -> list[tuple[WorkItem, Any]]:
        """All items of the current step, fetching those not handed out yet; for `engine.update`."""
        assert self._items is not None
        while not self._step_items[-1][0].last_of_step:
            item, batch = next(self._items)
            self._step_items.append((item, self._to_device(batch)))
        return self._step_items

    def position_after(self, train_step: TrainStep) -> int:
        """`position`, counting a step that has acted but whose item the loop has not given back yet."""
        item = train_step.item
        if item is None or train_step.inside_step or not item.last_of_step:
            return self.position
        return self._position_at(item.step, item.epoch)

    def _advance_if_applied(self, epoch: int) -> None:
        """A `break` after the step acted is a clean end: the step counts."""
        item = self._train_step.item
        if item is not None and item.last_of_step and not self._train_step.inside_step:
            self._train_step.end_item()
            self._train_step.new_items()
            self._advance(item.step, epoch)

    def _advance(self, step: int, epoch: int) -> None:
        self.position = self._position_at(step, epoch)

    def _position_at(self, step: int, epoch: int) -> int:
        high = min(self.plan.step_range(step)[1], self.plan.samples_per_epoch)
        return epoch * self.plan.samples_per_epoch + high

    def _to_device(self, batch: Any) -> Any:
        return batch if self._device.type == "cpu" else to_device(batch, self._device)


def to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
