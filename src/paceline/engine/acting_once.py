"""The user's optimizer and scheduler, with a `step()` that acts once per step of the job, not once per item."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.engine.train_step import TrainStep


def let_optimizer_act_once(optimizer: Optimizer, step: TrainStep) -> None:
    original = optimizer.step
    step.adopt(optimizer, original)

    def acts_once_per_step(self: Optimizer, closure: Any = None) -> Any:
        return step.optimizer_step(self, closure)

    # A scheduler made before prepare() has wrapped step() already and warns when the mark of that is gone.
    if getattr(original, "_wrapped_by_lr_sched", False):
        acts_once_per_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    # A bound method, because a scheduler made later looks at `step.__func__`.
    optimizer.step = types.MethodType(acts_once_per_step, optimizer)  # type: ignore[method-assign]


def let_scheduler_follow(scheduler: Any, step: TrainStep) -> None:
    original = scheduler.step

    def acts_with_the_optimizer(self: Any, *args: Any, **options: Any) -> Any:
        return original(*args, **options) if step.scheduler_acts(self) else None

    scheduler.step = types.MethodType(acts_with_the_optimizer, scheduler)


def is_scheduler(thing: Any) -> bool:
    return isinstance(thing, torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau)
