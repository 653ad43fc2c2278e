"""The loop, ready made: Trainer, its arguments and its callbacks, by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.trainer.callbacks import (
        DefaultFlowCallback,
        EarlyStoppingCallback,
        ExportableState,
        PrinterCallback,
        ProgressCallback,
        TrainerCallback,
        TrainerControl,
        TrainerState,
    )
    from paceline.trainer.evaluation import EvalPrediction
    from paceline.trainer.optimization import get_scheduler
    from paceline.trainer.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
    from paceline.trainer.trainer import PredictionOutput, Trainer
    from paceline.trainer.training_arguments import TrainingArguments
    from paceline.trainer.training_loop import TrainOutput

__all__ = [
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalPrediction",
    "ExportableState",
    "PredictionOutput",
    "PrinterCallback",
    "ProgressCallback",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "get_scheduler",
]

_HOMES = {
    "DefaultFlowCallback": "callbacks",
    "EarlyStoppingCallback": "callbacks",
    "EvalPrediction": "evaluation",
    "ExportableState": "callbacks",
    "PredictionOutput": "trainer",
    "PrinterCallback": "callbacks",
    "ProgressCallback": "callbacks",
    "Seq2SeqTrainer": "seq2seq",
    "Seq2SeqTrainingArguments": "seq2seq",
    "TrainOutput": "training_loop",
    "Trainer": "trainer",
    "TrainerCallback": "callbacks",
    "TrainerControl": "callbacks",
    "TrainerState": "callbacks",
    "TrainingArguments": "training_arguments",
    "get_scheduler": "optimization",
}


def __getattr__(name: str) -> Any:
    """Each name comes when it is asked for: reading a report does not wait for torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"paceline.trainer.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'paceline.trainer' has no attribute {name!r}")
