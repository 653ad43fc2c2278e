"""paceline: data-parallel training for PyTorch with the same bits on any number of workers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline import errors
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline import data
    from paceline.engine.engine import Engine
    from paceline.engine.stop_signals import StoppedOnRequest
    from paceline.optim.loss_scale import LossScale
    from paceline.optim.precision import Precision
    from paceline.trainer.callbacks import EarlyStoppingCallback, TrainerCallback
    from paceline.trainer.trainer import Trainer
    from paceline.trainer.training_arguments import TrainingArguments

__version__ = "0.1.0"
__all__ = [
    "EarlyStoppingCallback",
    "Engine",
    "LossScale",
    "Precision",
    "StoppedOnRequest",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "World",
    "__version__",
    "data",
    "errors",
]


_WHERE = {
    "EarlyStoppingCallback": "paceline.trainer",
    "Engine": "paceline.engine.engine",
    "LossScale": "paceline.optim.loss_scale",
    "Precision": "paceline.optim.precision",
    "StoppedOnRequest": "paceline.engine.stop_signals",
    "Trainer": "paceline.trainer",
    "TrainerCallback": "paceline.trainer",
    "TrainingArguments": "paceline.trainer",
}


def __getattr__(name: str) -> Any:
    """The launcher imports this package too, and must not wait seconds for torch: the Engine comes when asked for."""
    if name == "data":
        return importlib.import_module("paceline.data")
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
