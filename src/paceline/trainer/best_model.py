"""Which model is best: the one whose evaluation has the best value of `metric_for_best_model` so far."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.errors import ConfigError
from paceline.trainer.callbacks import TrainerState, full_metric_name
from paceline.trainer.training_arguments import TrainingArguments


def judged(
    metrics: Mapping[str, float], arguments: TrainingArguments, state: TrainerState
) -> tuple[float | None, bool]:
    """The value that counts, and whether it is the best yet; the state is told."""
    if arguments.metric_for_best_model is None:
        return None, False
    name = full_metric_name(arguments.metric_for_best_model)
    if name not in metrics:
        raise ConfigError(
            f"metric_for_best_model={arguments.metric_for_best_model!r}: there is no {name!r} among the metrics "
            f"{', '.join(sorted(metrics))}"
        )
    value, best = float(metrics[name]), state.best_metric
    better = best is None or (value > best if arguments.greater_is_better else value < best)
    is_best = better and not math.isnan(value)
    if is_best:
        state.best_metric, state.best_global_step = value, state.global_step
    return value, is_best
