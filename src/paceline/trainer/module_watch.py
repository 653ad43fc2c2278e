"""`debug="underflow_overflow"`: training stops in the module that first gives a number which is NaN or infinite.

    NonFiniteLossError: the output of model.layers.3 (Linear) has 2 values that are NaN or infinite, of 64. Before it:
      model.layers.2 (ReLU)     smallest 0, largest 3.1e+38
      …

`on_nonfinite` looks at the loss alone, which tells the step and the lane but not where in the model it began. Looking
at every output takes time, and on a GPU a wait for each, so it is for finding a fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import NonFiniteLossError

SHOWN = 21  # modules before the one at fault


@contextmanager
def watched(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """While it is open, a module whose output is not finite raises."""
    if not wanted:
        yield
        return
    seen: deque[str] = deque(maxlen=SHOWN)
    handles = [
        module.register_forward_hook(_looking_at(f"{name or 'the model'} ({type(module).__name__})", seen))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _looking_at(name: str, seen: deque[str]) -> Any:
    def look(module: nn.Module, given: Any, output: Any) -> None:
        for value in _floats(output):
            if bad := int((~torch.isfinite(value)).sum()):
                before = "".join(f"\n  {line}" for line in seen) or " nothing"
                weights = [
                    own for own, weight in module.named_parameters(recurse=False) if not bool(weight.isfinite().all())
                ]
                theirs = f"; so has its {', '.join(weights)}" if weights else ""
                raise NonFiniteLossError(
                    f"the output of {name} has {bad:,} values that are NaN or infinite, of {value.numel():,}{theirs}. "
                    f"Before it:{before}"
                )
            size = value.detach().abs()
            seen.append(f"{name:<50} smallest {float(size.min()):.3g}, largest {float(size.max()):.3g}")

    return look


def _floats(tree: Any) -> Iterator[Tensor]:
    """The tensors of an output, a tree as models return them, in which a number can be other than finite."""
    if isinstance(tree, Tensor):
        if (tree.is_floating_point() or tree.is_complex()) and tree.numel():
            yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from _floats(part)
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _floats(part)
