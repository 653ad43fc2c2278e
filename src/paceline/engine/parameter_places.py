"""Where parameters stand in their modules: one that was replaced after `prepare` would be used, and never trained.

optimizer ──► parameter ◄── module.weight             prepare
optimizer ──► parameter     module.weight ──► other   after load_state_dict(…, assign=True), model.layer.weight = …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import LoopError


class ParameterPlaces:
    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], name_of: Callable[[Parameter], str]
    ) -> None:
        """Where all stand that are trained."""
        trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self._name_of = name_of
        self._places = [
            (module, key, parameter)
            for model in models
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in trained
        ]

    def check(self) -> None:
        """One that has gone elsewhere, as under a parametrization, is none of our business."""
        for module, key, parameter in self._places:
            if module._parameters.get(key, parameter) is not parameter:
                raise LoopError(
                    f"another parameter stands where {self._name_of(parameter)!r} was in engine.prepare(), as after "
                    "load_state_dict(…, assign=True): the model would use it, and the optimizer train the old one. "
                    "Load without assign, or replace parameters before engine.prepare()"
                )
