"""Modules of the script around the prepared models, and beside them.

DistributedDataParallel(model)                     after `prepare`: its gradients would be summed twice. Refused when
                                                   it takes the model for its child, which torch tells
AveragedModel(model), ema = copy.deepcopy(model)   copies, found when a job's first step begins: rules.WeightsInStep
                                                   refuses one that changes inside a step
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter, UninitializedParameter
from torch.nn.modules.module import register_module_module_registration_hook

from paceline.engine.replicas import wrapper_of
from paceline.errors import ConfigError


class OutsideModules:
    """From an engine's beginning to its end; the models are prepared meanwhile."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        me = weakref.ref(self)

        def registered(parent: nn.Module, _: str, child: Any) -> None:
            if isinstance(child, nn.Module) and wrapper_of(parent) is not None and (watch := me()) is not None:
                watch._check_wrapper(parent, child)

        self.close = weakref.finalize(self, register_module_module_registration_hook(registered).remove)

    def _check_wrapper(self, wrapper: nn.Module, child: nn.Module) -> None:
        if not self._prepared().isdisjoint(map(id, child.modules())):
            raise ConfigError(
                f"a model that engine.prepare() was given is put into a {wrapper_of(wrapper)} of torch: its gradients "
                "would be summed twice. Leave that out: engine.backward() sums them, and Engine(strategy=…) says how"
            )

    def copies(self) -> list[tuple[str, Tensor]]:
        """Parameters of all modules that are like a prepared model, by name. It looks at every object that there is."""
        prepared, shapes = self._prepared(), [(type(model), _shapes(model)) for model in self._models]
        kinds = {kind for kind, _ in shapes}
        # Not isinstance, which asks some objects for a `__class__` that they import something for.
        like = [thing for thing in gc.get_objects() if type(thing) in kinds and id(thing) not in prepared]
        return [
            (f"{name} of a copy of the model", parameter)
            for module in like
            if (type(module), _shapes(module)) in shapes
            for name, parameter in module.named_parameters()
            if type(parameter) is Parameter
        ]

    def _prepared(self) -> set[int]:
        return {id(module) for model in self._models for module in model.modules()}


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...] | None]]:
    """A lazy module that has not run has none yet, and is a copy of no prepared one."""
    return [
        (name, None if isinstance(parameter, UninitializedParameter) else tuple(parameter.shape))
        for name, parameter in module.named_parameters()
    ]
