"""Precision: a model computes in bf16 or fp16, and is trained in fp32.

    batch ─cast─► model in bf16 ─cast─► output in fp32 ─► loss          inputs and outputs are cast at the root module
                    ▲       │
              rounded       └─ gradients in bf16 ─► added in fp32       over micro-batches and lanes
                    │                                  │
            master weights in fp32 ◄── update ─────────┘                where the optimizer updates: whole, or in shards

    Precision("bf16")                     what most people want; Engine(precision="bf16") is the same
    Precision("bf16", keep_fp32=(nn.LayerNorm,))                modules of these classes compute in fp32
    Precision("bf16", reduction="bf16")   every lane's gradient is rounded to bf16, then lanes are added in fp32

`lower` changes a model. The values of its parameters before are kept as master weights (strategies/master_weights.py).
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.errors import ConfigError
from paceline.torch_compat import BATCH_NORMS

Name = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MIXTURE = re.compile(r"(BFloat16|Half).*\bfloat|\bfloat\b.*(BFloat16|Half)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Precision:
    """What each part of training is held in. `parameters` is what the model computes in; updates are always fp32's."""

    parameters: Name = "fp32"
    reduction: Name = "fp32"
    buffers: Name = "fp32"
    output: Name = "fp32"
    keep_fp32: tuple[type[nn.Module], ...] = ()

    def __post_init__(self) -> None:
        for field in ("parameters", "reduction", "buffers", "output"):
            value = getattr(self, field)
            if value not in DTYPES:
                raise ConfigError(f"Precision({field}={value!r}) is not known; choose {', '.join(get_args(Name))}")
        if self.reduction == "fp16":
            raise ConfigError(
                "Precision(reduction='fp16'): a large gradient would become infinite on its way; choose fp32 or bf16"
            )
        for field in ("buffers", "output"):
            value = getattr(self, field)
            if value not in ("fp32", self.parameters):
                raise ConfigError(
                    f"Precision(parameters={self.parameters!r}, {field}={value!r}): nothing is computed in {value}; "
                    f"choose {field}='fp32'" + (f" or {self.parameters!r}" if self.is_low else "")
                )
        if self.keep_fp32 and not self.is_low:
            raise ConfigError("Precision(keep_fp32=…) with parameters='fp32': all of them are in fp32 already")
        for kept in self.keep_fp32:
            if not (isinstance(kept, type) and issubclass(kept, nn.Module)):
                raise ConfigError(f"Precision(keep_fp32=({kept!r},)): give classes of modules, such as nn.LayerNorm")

    @property
    def is_low(self) -> bool:
        return self.parameters != "fp32"

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return DTYPES[self.parameters]

    @property
    def lanes_rounded_to(self) -> torch.dtype | None:
        """What each lane's gradient is rounded to before lanes are added; None: nothing."""
        return None if self.reduction == "fp32" else DTYPES[self.reduction]

    @property
    def kept(self) -> tuple[type[nn.Module], ...]:
        """Whose modules compute in fp32. BatchNorm's scale stays with its statistics: torch does not mix them."""
        statistics = BATCH_NORMS if self.buffers == "fp32" else ()
        return (*self.keep_fp32, *statistics)

    def emulated_on(self, device: torch.device) -> str | None:
        """What a device that has no arithmetic for it does instead, in a line."""
        if self.parameters != "bf16" or device.type != "cuda":
            return None
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return None
        major, minor = torch.cuda.get_device_capability(device)
        return (
            f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) has no bf16 arithmetic, which "
            "begins with 8.0: it is emulated and slow; precision='fp16' is fast there"
        )

    def lowers_all_of(self, model: nn.Module) -> bool:
        """No parameter of it stays as precise as it is."""
        kept = any(isinstance(module, self.kept) for module in model.modules())
        return self.is_low and not kept and all(_may_be_lowered(parameter) for parameter in model.parameters())

    def __str__(self) -> str:
        lowered = [f.name for f in dataclasses.fields(self)[1:-1] if getattr(self, f.name) != "fp32"]
        kept = [f"{', '.join(kept.__name__ for kept in self.keep_fp32)} in fp32"] if self.keep_fp32 else []
        return ", ".join([self.parameters, *(f"{name} {getattr(self, name)}" for name in lowered), *kept])


def precision_of(given: str | Precision) -> Precision:
    """What Engine(precision=…) means."""
    if isinstance(given, Precision):
        return given
    if not isinstance(given, str) or given not in DTYPES:
        raise ConfigError(f"precision={given!r} is not known; choose fp32, bf16, fp16, or give a paceline.Precision(…)")
    return Precision(parameters=given)  # type: ignore[arg-type]


# -- a model in low precision ------------------------------------------------------------------------------------------


class Lowered:
    """Models that compute in low precision, and what their trained parameters were before."""

    def __init__(self, models: Sequence[nn.Module], precision: Precision) -> None:
        self.low: list[Parameter] = []
        self.originals: dict[int, Tensor] = {}  # by id, in fp32; of parameters that are trained
        self._hooks: list[Any] = []
        for model in models:
            self._lower(model, precision)

    def _lower(self, model: nn.Module, precision: Precision) -> None:
        dtype = precision.dtype
        kept = list(outermost(model, precision.kept))
        of_kept = {id(parameter) for module in kept for parameter in module.parameters()}
        _check_not_in_both(model, kept, of_kept)
        known = {id(parameter) for parameter in self.low}
        for parameter in model.parameters():
            done = id(parameter) in of_kept or id(parameter) in known
            if not done and _may_be_lowered(parameter):
                if parameter.requires_grad:
                    self.originals[id(parameter)] = parameter.data.float()  # .detach() would share version counters
                parameter.data = parameter.data.to(dtype)
                parameter.grad = None
                self.low.append(parameter)
        self._lower_buffers(model, kept, DTYPES[precision.buffers])
        self._hooks += _casts(model, dtype, DTYPES[precision.output])
        self._hooks.append(model.register_forward_hook(_explain_mixtures(precision), always_call=True))
        for module in kept:
            self._hooks += _casts(module, torch.float32, dtype)

    def _lower_buffers(self, model: nn.Module, kept: Sequence[nn.Module], dtype: torch.dtype) -> None:
        if dtype == torch.float32:
            return
        of_kept = {id(module) for outer in kept for module in outer.modules()}
        for module in model.modules():
            if id(module) not in of_kept:
                for name, buffer in module.named_buffers(recurse=False):
                    if _may_be_lowered(buffer):
                        setattr(module, name, buffer.to(dtype))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def lower(models: Sequence[nn.Module], precision: Precision) -> Lowered | None:
    """Let models compute in low precision from now on; None if they shall not."""
    return Lowered(models, precision) if precision.is_low else None


def _may_be_lowered(tensor: Tensor) -> bool:
    """What a model keeps in fp64 it keeps there for a reason."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def outermost(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    if isinstance(model, classes):
        yield model
        return
    for child in model.children():
        yield from outermost(child, classes)


def _check_not_in_both(model: nn.Module, kept: Sequence[nn.Module], of_kept: set[int]) -> None:
    inside = {id(module) for outer in kept for module in outer.modules()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in of_kept and id(module) not in inside:
                raise ConfigError(
                    f"parameter {f'{path}.{name}'.lstrip('.')!r} is shared with a module that is kept in fp32, and "
                    "would have to be in two precisions: keep both modules in fp32 (keep_fp32), or neither"
                )


# -- casts around forward ----------------------------------------------------------------------------------------------


def _casts(module: nn.Module, before: torch.dtype, after: torch.dtype) -> list[Any]:
    def cast_inputs(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        return cast_tensors(args, before), cast_tensors(options, before)

    def cast_output(module: nn.Module, args: Any, output: Any) -> Any:
        loss = _own_loss(output) if module.training else None
        if loss is None:
            return cast_tensors(output, after)
        return _mapped(output, lambda tensor: tensor.to(after) if tensor is loss else tensor)

    return [
        module.register_forward_pre_hook(cast_inputs, with_kwargs=True),
        module.register_forward_hook(cast_output),
    ]


def _own_loss(output: Any) -> Tensor | None:
    """Of a model that makes its loss itself. In training nothing else of what it returns is cast, for it is not used.

    A language model's logits may be the largest tensor of a step, with tens of thousands of numbers for every token.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else None
    return loss if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1 else None


def _explain_mixtures(precision: Precision) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that says more about an error of torch's, where the model's buffers are in another precision."""

    def explain(module: nn.Module, args: Any, output: Any) -> None:
        error = sys.exception()
        if output is not None or not isinstance(error, RuntimeError) or not _MIXTURE.search(str(error)):
            return
        others = [n for n, b in module.named_buffers() if _may_be_lowered(b) and b.dtype != precision.dtype]
        if others:
            error.add_note(
                f"paceline: in {precision.parameters} the model's buffers are in {precision.buffers} "
                f"({', '.join(map(repr, others[:3]))}{', …' if len(others) > 3 else ''}), and torch does not mix the "
                f"two here; choose paceline.Precision({precision.parameters!r}, buffers={precision.parameters!r}), or "
                "cast them in forward: buffer.to(x.dtype)"
            )

    return explain


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in other precisions, in whatever tuples, lists, dicts and dataclasses they come."""
    return _mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: _mapped(inside, change) for key, inside in value.items()}
        if all(changed[key] is inside for key, inside in value.items()):
            return value
        like = copy.copy(value)  # a dict of the caller's own class stays one
        for key, inside in changed.items():
            like[key] = inside
        return like
    if isinstance(value, tuple | list):
        parts = [_mapped(inside, change) for inside in value]
        if all(part is inside for part, inside in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, _mapped(getattr(value, field.name), change))
        return made
    return value
