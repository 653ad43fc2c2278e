"""Run a forward again as it ran: with the random numbers it drew and the buffers it found.

    first      note random states, copy buffers ─► forward ─► drop the copies of buffers that it left alone
    again      random states and copies in place ─► forward ─► put back what was there

So a second run gives the first one's bits and leaves no trace: BatchNorm's statistics move once. torch's checkpoint
takes care of torch's own random states; numpy's and Python's, from which people draw which layers to drop, are ours.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from paceline.errors import ConfigError

Keep = Literal["nothing", "matmuls"]
Forward = Callable[..., Any]

# Products with weights. Those of activations with each other, attention's scores, are large and quickly made again.
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default]


class RepeatableCall:
    """One forward of one module, and what it takes to run it again as it was."""

    def __init__(self, module: nn.Module, forward: Forward, names: tuple[str, ...], keep: Keep) -> None:
        self._module, self._forward, self._names = module, forward, names
        self._before: _Before | None = None
        self._keeping: AbstractContextManager[Any] = nullcontext()
        self._using_kept: AbstractContextManager[Any] = nullcontext()
        if keep == "matmuls":
            self._keeping, self._using_kept = create_selective_checkpoint_contexts(MATMULS)  # type: ignore[no-untyped-call]

    def __call__(self, *values: Any) -> Any:
        positional = len(values) - len(self._names)
        args, kwargs = values[:positional], dict(zip(self._names, values[positional:], strict=True))
        if self._before is None:
            before = _Before(self._module)
            with self._keeping:
                out = self._forward(*args, **kwargs)
            before.forget_unchanged()
            self._before = before
            return out
        with self._before.again(), self._explained(), self._using_kept:
            return self._forward(*args, **kwargs)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            raise ConfigError(
                f"activation_checkpointing keeps what matrix products give, but {type(self._module).__name__} changes "
                "such an output in place (as nn.ReLU(inplace=True) does); let it make a new tensor, or keep nothing"
            ) from error


class _Before:
    """What a forward finds besides its arguments and torch's random state."""

    def __init__(self, module: nn.Module) -> None:
        self._random = _random_states()
        self._buffers = [
            _Buffer(holder, name, buffer, buffer._version, buffer.detach().clone())
            for holder in module.modules()
            for name, buffer in holder._buffers.items()
            if buffer is not None
        ]

    def forget_unchanged(self) -> None:
        self._buffers = [buffer for buffer in self._buffers if not buffer.is_unchanged]

    @contextmanager
    def again(self) -> Iterator[None]:
        """As it was; afterwards as it is now."""
        now = _random_states()
        live = [buffer.holder._buffers[buffer.name] for buffer in self._buffers]
        _set_random_states(self._random)
        for buffer in self._buffers:
            buffer.holder._buffers[buffer.name] = buffer.value.clone()
        try:
            yield
        finally:
            _set_random_states(now)
            for buffer, tensor in zip(self._buffers, live, strict=True):
                buffer.holder._buffers[buffer.name] = tensor


@dataclass(frozen=True)
class _Buffer:
    holder: nn.Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor  # a copy

    @property
    def is_unchanged(self) -> bool:
        if self.holder._buffers.get(self.name) is not self.tensor or self.tensor._version != self.version:
            return False
        # Kernels update running statistics behind the version counter. On an accelerator looking would mean waiting.
        if not self.tensor.is_floating_point():
            return True
        return self.tensor.device.type == "cpu" and torch.equal(self.tensor, self.value)


def _random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
