"""paceline: data-parallel training for PyTorch with the same bits on any number of workers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import compression, context_parallel, data, errors, hooks, strategies, tracking, trainer
    from paceline.engine.activation_checkpointing import ActivationCheckpointing
    from paceline.engine.compilation import Compile
    from paceline.engine.engine import Engine
    from paceline.engine.stop_signals import StoppedOnRequest
    from paceline.launch.notebook import notebook_launcher
    from paceline.mesh.mesh import Mesh
    from paceline.optim.loss_scale import LossScale
    from paceline.optim.precision import Precision
    from paceline.trainer.callbacks import EarlyStoppingCallback, TrainerCallback
    from paceline.trainer.chunked_loss import linear_cross_entropy
    from paceline.trainer.trainer import Trainer
    from paceline.trainer.training_arguments import TrainingArguments
    from paceline.world.environment import read_world
    from paceline.world.world import World

__version__ = "0.1.0"
__all__ = [
    "ActivationCheckpointing",
    "Compile",
    "EarlyStoppingCallback",
    "Engine",
    "LossScale",
    "Mesh",
    "Precision",
    "StoppedOnRequest",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "World",
    "__version__",
    "compression",
    "context_parallel",
    "data",
    "errors",
    "hooks",
    "linear_cross_entropy",
    "notebook_launcher",
    "read_world",
    "strategies",
    "tracking",
    "trainer",
]


_WHERE = {
    "ActivationCheckpointing": "paceline.engine.activation_checkpointing",
    "Compile": "paceline.engine.compilation",
    "EarlyStoppingCallback": "paceline.trainer",
    "Engine": "paceline.engine.engine",
    "LossScale": "paceline.optim.loss_scale",
    "Mesh": "paceline.mesh.mesh",
    "Precision": "paceline.optim.precision",
    "StoppedOnRequest": "paceline.engine.stop_signals",
    "Trainer": "paceline.trainer",
    "TrainerCallback": "paceline.trainer",
    "TrainingArguments": "paceline.trainer",
    "World": "paceline.world.world",
    "linear_cross_entropy": "paceline.trainer.chunked_loss",
    "notebook_launcher": "paceline.launch.notebook",
    "read_world": "paceline.world.environment",
}
_MODULES = ("compression", "context_parallel", "data", "errors", "hooks", "strategies", "tracking", "trainer")


def __getattr__(name: str) -> Any:
    """Each name comes when it is asked for: the launcher doesn't wait seconds for torch.

    Nothing is imported before, because `import torch` imports this package (`backend.py`) and has to work even where
    something in it can't be imported.
    """
    if name in _MODULES:
        return importlib.import_module(f"paceline.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
