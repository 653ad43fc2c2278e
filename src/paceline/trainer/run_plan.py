"""How long a run is: steps, epochs, and samples of a step, from the data and the arguments.

    num_train_epochs=3, 40 samples            steps
    batch size 4 throughout                   10 + 10 + 10
    batch size 8 from step 15 on              10 + 5 + 3 + 5         shift: 23 - 3 · 5

A run counted in epochs that goes on with another batch size has as many steps as its data still gives.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import ConfigError
from paceline.trainer.training_arguments import TrainingArguments


@dataclass(frozen=True)
class RunPlan:
    max_steps: int
    epochs: int
    samples_per_step: int
    steps_per_epoch: int | None = None
    shift: int = 0  # steps beyond those of the epochs: steps were made with another batch size

    def saved(self) -> dict[str, int]:
        """What a checkpoint has to say of it."""
        return {"samples_per_step": self.samples_per_step, "shift": self.shift}


def plan_run(loader: Any, arguments: TrainingArguments, lanes: int) -> RunPlan:
    """`loader` is a prepared one: its length is the same at any number of workers."""
    per_epoch = loader.source.steps
    deal = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    samples = deal * lanes
    if per_epoch is not None and per_epoch == 0:
        raise ConfigError(
            f"an epoch has no step: the {len(loader.dataset):,} samples don't fill a global batch of {samples}, and "
            "dataloader_drop_last drops what is left; give more samples or smaller batches"
        )
    if arguments.max_steps > 0:
        epochs = sys.maxsize if per_epoch is None else math.ceil(arguments.max_steps / per_epoch)
        return RunPlan(arguments.max_steps, epochs, samples, per_epoch)
    if per_epoch is None:
        raise ConfigError("a stream without a length has no epochs to count; set max_steps")
    epochs = math.ceil(arguments.num_train_epochs)
    return RunPlan(math.ceil(arguments.num_train_epochs * per_epoch), epochs, samples, per_epoch)


def resumed(plan: RunPlan, saved: Mapping[str, int], loader: Any, arguments: TrainingArguments, step: int) -> RunPlan:
    """The plan of a run that goes on: `loader` stands where the checkpoint says, after `step` steps."""
    if arguments.max_steps > 0 or plan.steps_per_epoch is None:
        return plan
    shift = saved.get("shift", 0)
    if saved.get("samples_per_step", plan.samples_per_step) != plan.samples_per_step:
        whole = math.ceil((arguments.num_train_epochs - loader.epoch) * plan.steps_per_epoch)
        left = max(0, whole - plan.steps_per_epoch + loader.source.steps_left)
        shift = step + left - plan.max_steps
    return replace(plan, max_steps=plan.max_steps + shift, shift=shift)
