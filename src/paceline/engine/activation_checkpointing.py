"""Activation checkpointing: keep a block's inputs, and compute the rest of it again when its backward needs it.

    forward     x0 ─► block 1 ─► x1 ─► block 2 ─► x2 ─► loss          kept: x0, x1, x2; not what blocks hold inside
    backward          block 1 ◄─ run again ◄─ block 2 ◄─ run again    one block's insides at a time

    Engine(activation_checkpointing="blocks")         every block; 2: every second one; Block or "Block": a class
    Engine(activation_checkpointing="blocks+matmuls") and keep what products of matrices give: little is computed again

A block runs again as it ran, with the random numbers it drew and the buffers it found, so no bit changes:

    first       note random states, copy buffers ─► forward ─► drop the copies of buffers that it left alone
    again       random states and copies in place ─► forward ─► put back what was there: BatchNorm's move once

torch's checkpoint takes care of torch's own random states; numpy's and Python's, from which people draw which layers to
drop, are ours. Modules stay what they are, under the names they
had: only their `forward` is another until the engine closes. Without gradients, and in eval mode, nothing is different.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from paceline.errors import ConfigError
from paceline.torch_compat import own_buffers, version_of
from paceline.world.known_names import recomputed

Class = type[nn.Module] | str

BLOCKS = "blocks"
KEEP_MATMULS = "+matmuls"


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which modules are run again in backward, and what of them is kept all the same."""

    modules: Class | tuple[Class, ...] | None = None  # None: blocks, which repeat in an nn.ModuleList or nn.Sequential
    every: int = 1  # of those the every-th
    keep: Keep = "nothing"

    def __post_init__(self) -> None:
        for wanted in self.classes:
            if not isinstance(wanted, str) and not (isinstance(wanted, type) and issubclass(wanted, nn.Module)):
                raise ConfigError(
                    f"activation_checkpointing: {wanted!r} is no class of modules; give a class such as "
                    "nn.TransformerEncoderLayer, or its name"
                )
        if isinstance(self.every, bool) or not isinstance(self.every, int) or not 1 <= self.every < 2**31:
            raise ConfigError(
                f"activation_checkpointing: every={self.every!r} is no count of blocks; 1 takes every block, 2 every "
                "second one; to take none leave activation_checkpointing out"
            )
        if self.keep not in ("nothing", "matmuls"):
            raise ConfigError(f"activation_checkpointing: keep={self.keep!r} is not known; choose nothing or matmuls")

    @property
    def classes(self) -> tuple[Class, ...]:
        if self.modules is None:
            return ()
        return self.modules if isinstance(self.modules, tuple) else (self.modules,)

    def __str__(self) -> str:
        what = ",".join(map(_name, self.classes)) or BLOCKS
        return what + (f"/{self.every}" if self.every > 1 else "") + (KEEP_MATMULS if self.keep == "matmuls" else "")


Wanted = ActivationCheckpointing | Class | tuple[Class, ...] | int | None


def parse(wanted: object) -> ActivationCheckpointing | None:
    """From a value of `Wanted`, or a flag's text: `blocks`, `2`, `Block,Head`, each perhaps with `+matmuls`."""
    if wanted is None or isinstance(wanted, ActivationCheckpointing):
        return wanted
    if isinstance(wanted, str):
        return _parse_text(wanted)
    if isinstance(wanted, bool) or not isinstance(wanted, int | tuple | type) or wanted == ():
        raise ConfigError(
            f"activation_checkpointing={wanted!r} names no modules; give 'blocks', a number k for every k-th block, a "
            "class of modules, several in a tuple, or an ActivationCheckpointing(…)"
        )
    return ActivationCheckpointing(every=wanted) if isinstance(wanted, int) else ActivationCheckpointing(wanted)


def _parse_text(text: str) -> ActivationCheckpointing:
    read = recomputed(text)
    keep: Keep = "matmuls" if read.keeps_matmuls else "nothing"
    return ActivationCheckpointing(read.classes or None, read.every, keep)


# -- which modules -----------------------------------------------------------------------------------------------------


def find_modules(wanted: ActivationCheckpointing, models: Sequence[nn.Module]) -> tuple[list[nn.Module], str]:
    """The modules to run again, and a line that says which; modules inside others that match are left out."""
    found = [
        module for model in models for module in (_of_classes(wanted, model) if wanted.classes else blocks_of(model))
    ]
    found = list({id(module): module for module in found}.values())
    _check_found(wanted, models, found)
    chosen = found[wanted.every - 1 :: wanted.every]
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(type(module).__name__ for module in chosen).items())
    of_how_many = f" (of {len(found)})" if len(chosen) < len(found) else ""
    kept = "; outputs of matrix products are kept" if wanted.keep == "matmuls" else ""
    return chosen, f"activations of {kinds}{of_how_many} are computed again in backward{kept}"


def _of_classes(wanted: ActivationCheckpointing, module: nn.Module) -> Iterator[nn.Module]:
    if any(_is_a(module, kind) for kind in wanted.classes):
        yield module
        return
    for child in module.children():
        yield from _of_classes(wanted, child)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Outermost first: an expert's layers, or an attention's heads, repeat inside a block and are not meant."""
    repeats = set()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        counts = Counter(type(child) for child in module.children() if _may_be_block(child))
        repeats = {kind for kind, count in counts.items() if count > 1}
    for child in module.children():
        if type(child) in repeats:
            yield child
        else:
            yield from blocks_of(child)


def _may_be_block(module: nn.Module) -> bool:
    """A layer of torch's own has nothing inside but its input; of a stage of blocks, the blocks are meant."""
    if not _has_forward(module):
        return False
    if isinstance(module, nn.Sequential):
        return len(module) > 0 and next(blocks_of(module), None) is None
    return _has_children(module) or not type(module).__module__.startswith("torch.nn.")


def _check_found(wanted: ActivationCheckpointing, models: Sequence[nn.Module], found: Sequence[nn.Module]) -> None:
    where = f"activation_checkpointing={str(wanted)!r}"
    everything = [module for model in models for module in model.modules()]
    for module in everything:
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigError(
                f"{where} with a compiled {type(getattr(module, '_orig_mod', module)).__name__}: torch.compile decides "
                "by itself what to compute again; leave one of the two out"
            )
    candidates = {type(module).__name__ for module in everything if _has_children(module) and _has_forward(module)}
    known = ", ".join(sorted(candidates)) or type(models[0]).__name__
    for kind in wanted.classes:
        if not any(_is_a(module, kind) for module in everything):
            raise ConfigError(f"{where}: the model has no {_name(kind)}; it has {known}")
    if not found:
        raise ConfigError(
            f"{where}: the model has no blocks (modules of one class, with modules inside, that repeat in an "
            f"nn.ModuleList or nn.Sequential); name a class of its modules: {known}"
        )
    if without := next((module for module in found if not _has_forward(module)), None):
        raise ConfigError(f"{where}: {type(without).__name__} has no forward to run again; choose among {known}")
    if wanted.every > len(found):
        raise ConfigError(
            f"{where}: the model has only {len(found)} of them; choose a smaller number than {wanted.every}"
        )


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _is_a(module: nn.Module, kind: Class) -> bool:
    if isinstance(kind, str):
        return any(base.__name__ == kind for base in type(module).__mro__)
    return isinstance(module, kind)


def _name(kind: Class) -> str:
    return kind if isinstance(kind, str) else kind.__name__


# -- their forward -----------------------------------------------------------------------------------------------------


class Recomputed:
    """Modules whose forward is ours, until `close`."""

    def __init__(self, wanted: ActivationCheckpointing, models: Sequence[nn.Module]) -> None:
        self._modules, self.described = find_modules(wanted, models)
        self._own = [module.__dict__.get("forward") for module in self._modules]
        for module, own in zip(self._modules, self._own, strict=True):
            # A method of the module, so that a deep copy of it has one of its own.
            module.forward = MethodType(_recomputing(type(module).forward, own, wanted.keep), module)

    def close(self) -> None:
        give_back_forward(self._modules, self._own)
        self._modules, self._own = [], []


def give_back_forward(modules: Sequence[nn.Module], own: Sequence[Forward | None]) -> None:
    """What each had in place of its class's forward, if anything."""
    for module, before in zip(modules, own, strict=True):
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = before


def _recomputing(of_class: Forward, own: Forward | None, keep: Keep) -> Forward:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = own if own is not None else MethodType(of_class, module)
        if not (torch.is_grad_enabled() and module.training):
            return plain(*args, **kwargs)
        call = RepeatableCall(module, plain, tuple(kwargs), keep)
        # torch finds the device, whose random state it restores, by looking at positional arguments.
        return checkpoint(call, *args, *kwargs.values(), use_reentrant=False)

    return forward


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
                "such an output in place (as nn.ReLU(inplace=True) does, or torch's nn.LSTM and nn.GRU where they have "
                "no kernel of their own for this precision); let it make a new tensor, or keep nothing"
            ) from error


class _Before:
    """What a forward finds besides its arguments and torch's random state."""

    def __init__(self, module: nn.Module) -> None:
        self._random = _random_states()
        self._buffers = [
            _Buffer(holder, name, buffer, version_of(buffer), buffer.detach().clone())
            for holder in module.modules()
            for name, buffer in own_buffers(holder).items()
            if buffer is not None
        ]

    def forget_unchanged(self) -> None:
        self._buffers = [buffer for buffer in self._buffers if not buffer.is_unchanged]

    @contextmanager
    def again(self) -> Iterator[None]:
        """As it was; afterwards as it is now."""
        now = _random_states()
        live = [own_buffers(buffer.holder)[buffer.name] for buffer in self._buffers]
        _set_random_states(self._random)
        for buffer in self._buffers:
            own_buffers(buffer.holder)[buffer.name] = buffer.value.clone()
        try:
            yield
        finally:
            _set_random_states(now)
            for buffer, tensor in zip(self._buffers, live, strict=True):
                own_buffers(buffer.holder)[buffer.name] = tensor


@dataclass(frozen=True)
class _Buffer:
    holder: nn.Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor  # a copy

    @property
    def is_unchanged(self) -> bool:
        if own_buffers(self.holder).get(self.name) is not self.tensor or version_of(self.tensor) != self.version:
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
