"""Distant gradients: what `.grad` shows between backward and step() where the gradient itself is spread over workers.

    p.grad                       DistantGradient: the parameter's shape and dtype, no memory to speak of
    torch's clip_grad_norm_,     LoopError: the gradient of 'head.weight' is not here … use engine.clip_grad_norm_()
    p.grad.norm(), p.grad[0] …

None would be silent: torch's clipping takes it for "nothing to clip" and returns a norm of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import LoopError

# What the loop itself looks at.
_MAY_BE_SEEN = frozenset({"_version", "shape", "dtype", "device", "layout", "is_sparse", "requires_grad"})


class DistantGradient(Tensor):
    """A tensor that says where the gradient is instead of what it is."""

    told: str

    @classmethod
    def of(cls, parameter: Parameter, name: str, strategy: str) -> DistantGradient:
        nothing = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        made: DistantGradient = nothing.as_subclass(cls)
        made.told = (
            f"the gradient of {name!r} is not here: under strategy={strategy!r} every worker has its part of the "
            "summed gradient, and .grad has none of it. To clip, use engine.clip_grad_norm_(max_norm); to look at "
            "gradients, train with strategy='ddp'"
        )
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        read = getattr(getattr(func, "__self__", None), "__name__", None)
        if func.__name__ == "__get__" and read in _MAY_BE_SEEN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = next((tensor for tensor in _tensors(args) if isinstance(tensor, cls)), None)
        raise LoopError(
            found.told if found is not None else "a gradient that is spread over workers can't be used here"
        )


def _tensors(args: Any) -> list[Any]:
    out: list[Any] = []
    for arg in args:
        out += _tensors(arg) if isinstance(arg, list | tuple) else [arg]
    return out
