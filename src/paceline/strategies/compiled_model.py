"""torch.compile rewrites what a model does when it runs, and with it the hooks that bring weights: one line says so.

A hook that looks here is traced itself. The look is one that torch can't trace, so it runs as it stands, and sees that
frames are being rewritten around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from paceline.errors import ConfigError, LoopError

_WHY = "strategy='zero3' gathers weights in the modules' hooks, which torch.compile does not see"


def check_not_compiled(models: Sequence[nn.Module]) -> None:
    """Before training."""
    if any(type(module).__name__ == "OptimizedModule" for model in models for module in model.modules()):
        raise ConfigError(
            f"{_WHY}; give engine.prepare() the model as it was before torch.compile, or use strategy='zero2'"
        )


def refuse_compiled(*_: Any) -> None:
    """Before a module runs."""
    if get_eval_frame_callback() is not None:
        raise LoopError(f"{_WHY}; use the model that engine.prepare() gave back as it is, or use strategy='zero2'")
