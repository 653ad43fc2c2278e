"""A pytest plugin: transformers' own tests of its Trainer get paceline's Trainer and TrainingArguments instead.

    python -m pytest -p swapped_trainer tests/trainer          in a checkout of transformers' tests

The default callbacks come with a Trainer, so those are ours too; all other objects (models, samplers, early stopping)
stay transformers'. Messages take another channel here than there, so what paceline's Trainer logs or warns of is handed
on to the loggers of transformers' modules, where its tests look for it. With PACELINE_WHOSE_CLASSES=transformers
nothing is swapped.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import transformers
import transformers.trainer
import transformers.trainer_callback
import transformers.training_args

import paceline.trainer as ours
from paceline.world import messages

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


class ToTransformers(logging.Handler):
    """A message of ours, at its level, as one of the library's."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("transformers").log(record.levelno, "%s", record.getMessage())


def hand_on_messages() -> None:
    plain = messages.warn

    def warn(text: str) -> None:
        for module in (transformers.trainer, transformers.trainer_callback):
            module.logger.warning(text)
        plain(text)

    messages.warn = warn
    logging.getLogger(messages.NAME).addHandler(ToTransformers())


def pytest_runtest_teardown() -> None:
    """A test puts the level of transformers' logger back; it does not know of ours."""
    messages.obey_environment()


def pytest_configure() -> None:
    """Before the tests import them by name."""
    if os.environ.get("PACELINE_WHOSE_CLASSES") != "transformers":
        swap()
        hand_on_messages()
    for gone in ("GlueDataset", "GlueDataTrainingArguments"):  # a newer transformers than its tests has them no more
        if not hasattr(transformers, gone):
            setattr(transformers, gone, None)
