"""How long a run is: steps, epochs, and samples of a step, from the data and the arguments."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError
from paceline.trainer.training_arguments import TrainingArguments


@dataclass(frozen=True)
class RunPlan:
    max_steps: int
    epochs: int
    samples_per_step: int


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
        return RunPlan(arguments.max_steps, epochs, samples)
    if per_epoch is None:
        raise ConfigError("a stream without a length has no epochs to count; set max_steps")
    return RunPlan(math.ceil(arguments.num_train_epochs * per_epoch), math.ceil(arguments.num_train_epochs), samples)
