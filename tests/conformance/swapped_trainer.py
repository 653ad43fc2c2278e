"""A pytest plugin: transformers' own tests of its Trainer get paceline's Trainer and TrainingArguments instead.

    python -m pytest -p swapped_trainer tests/trainer          in a checkout of transformers' tests

The default callbacks come with a Trainer, so those are ours too; all other objects (models, samplers, early stopping)
stay transformers'. With PACELINE_WHOSE_CLASSES=transformers nothing is swapped.
"""

from __future__ import annotations

import os
from typing import Any

import transformers
import transformers.trainer
import transformers.trainer_callback
import transformers.training_args

import paceline.trainer as ours

_MODULES: list[Any] = [
    transformers,
    transformers.trainer,
    transformers.trainer_callback,
    transformers.training_args,
]
_NAMES = (
    "Trainer",
    "TrainingArguments",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "DefaultFlowCallback",
    "ProgressCallback",
    "PrinterCallback",
)


def swap() -> None:
    for name in _NAMES:
        for module in _MODULES:
            if name in vars(module) or module is transformers:
                setattr(module, name, getattr(ours, name))
    transformers.trainer.DEFAULT_CALLBACKS[:] = [ours.DefaultFlowCallback]


def pytest_configure() -> None:
    """Before the tests import them by name."""
    if os.environ.get("PACELINE_WHOSE_CLASSES") != "transformers":
        swap()
    for gone in ("GlueDataset", "GlueDataTrainingArguments"):  # a newer transformers than its tests has them no more
        if not hasattr(transformers, gone):
            setattr(transformers, gone, None)
