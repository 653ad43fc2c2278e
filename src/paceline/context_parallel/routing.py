"""How attention inside a model comes to be attention over the group: routes, and what is refused on them.

    a module of one's own     F.scaled_dot_product_attention(q, k, v, is_causal=True) is seen by a TorchFunctionMode,
                              which every module of the model switches on for its forward, so that a part of the model
                              that activation checkpointing runs again in backward finds it too
    a transformers model      has `attn_implementation` set to a function of ours, registered with transformers

Whatever attention can do and this can't (a mask, dropout, a sliding window, …) is refused when it is asked for: it
would give wrong numbers. What does not come by a route at all is noticed by `ContextParallel`, which counts calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.errors import ConfigError
from paceline.torch_compat import never_traced


class Attend(Protocol):
    """Attention over the group."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> Tensor: ...


def refuse(what: str, instead: str) -> NoReturn:
    raise ConfigError(f"context parallel: {what}; {instead}")


# -- F.scaled_dot_product_attention ------------------------------------------------------------------------------------


class TorchAttention:
    """The route of modules that call torch's attention, until `close`."""

    def __init__(self, model: nn.Module, attend: Attend) -> None:
        unrouted = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        if found := next((name for name, module in model.named_modules() if isinstance(module, unrouted)), None):
            _refuse_multihead(f"the model has one at {found!r}" if found else "the model is one")
        self._mode = _Routed(attend)
        self._is_on = self._paused = False
        self._modules = [module for module in model.modules() if _may_attend(module)]
        self._own = [module.__dict__.get("forward") for module in self._modules]
        for module, own in zip(self._modules, self._own, strict=True):
            module.forward = MethodType(self._routed(type(module).forward, own), module)

    def _routed(self, of_class: Callable[..., Any], own: Callable[..., Any] | None) -> Callable[..., Any]:
        @wraps(of_class)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = MethodType(of_class, module) if own is None else own
            if self._is_on or self._paused:
                return run(*args, **kwargs)
            self._is_on = True
            try:
                with self._mode:
                    return run(*args, **kwargs)
            finally:
                self._is_on = False

        return forward

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def close(self) -> None:
        for module, own in zip(self._modules, self._own, strict=True):
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = own
        self._modules, self._own = [], []


def _may_attend(module: nn.Module) -> bool:
    """Not the leaves that torch has, and not what only holds other modules."""
    has_forward = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    return has_forward and not type(module).__module__.startswith("torch.nn.modules")


class _Routed(TorchFunctionMode):
    """While it is on, torch's attention is attention over the group."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _of_torch(self._attend, *args, **named)
        if func is F.multi_head_attention_forward:
            _refuse_multihead("the model calls F.multi_head_attention_forward")
        if getattr(func, "__name__", "") in ("flex_attention", "flex_attention_backward"):
            refuse("flex_attention is not routed over the group", "use F.scaled_dot_product_attention(is_causal=True)")
        return func(*args, **named)


def _of_torch(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None:
        refuse(
            f"scaled_dot_product_attention got an attn_mask of shape {tuple(attn_mask.shape)}, which a worker with a "
            "part of the sequence can't have whole",
            "use is_causal=True, or no mask for attention to all tokens",
        )
    _refuse_dropout(dropout_p)
    if not enable_gqa and query.dim() > 3 and query.shape[-3] != key.shape[-3]:
        refuse(f"{query.shape[-3]} query heads and {key.shape[-3]} key heads", "give enable_gqa=True")
    return attend(query, key, value, causal=is_causal, scale=scale)


def _refuse_dropout(probability: float) -> None:
    if probability > 0.0:
        refuse(
            f"attention dropout of {probability:g} is not supported",
            "set it to 0 (attention_dropout=0.0 in most configs); dropout elsewhere is fine",
        )


def _refuse_multihead(where: str) -> NoReturn:
    refuse(
        f"torch's multi-head attention layers are not routed over the group, and {where}",
        "write the layer with F.scaled_dot_product_attention(is_causal=True)",
    )


# -- transformers ------------------------------------------------------------------------------------------------------

NAME = "paceline_context_parallel"

_attends: WeakKeyDictionary[nn.Module, Attend] = WeakKeyDictionary()  # of every module of an attached model

NOT_KNOWN_HERE = ("softcap", "position_bias", "s_aux", "cu_seq_lens_q", "cu_seq_lens_k", "cache", "head_mask")
"""Arguments that change what attention gives."""


def outermost_of_transformers(model: nn.Module) -> list[nn.Module]:
    """Models of transformers in `model`, without those inside them."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    found, waiting = [], [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, library.PreTrainedModel):
            found.append(module)
        else:
            waiting += module.children()
    return found


class TransformersAttention:
    """The route of a transformers model, until `close`."""

    def __init__(self, model: Any, attend: Attend) -> None:
        _register()
        self._model, self._modules = model, list(model.modules())
        self._configs = {id(module.config): module.config for module in self._modules if _has_attention(module)}
        self._before = {key: config._attn_implementation for key, config in self._configs.items()}
        if not model._can_set_attn_implementation():
            refuse(
                f"{type(model).__name__} computes attention by itself, and not by a function that can be chosen",
                "take a model that has attn_implementation, or write one with F.scaled_dot_product_attention",
            )
        self._set(dict.fromkeys(self._configs, NAME))
        _attends.update(dict.fromkeys(self._modules, attend))

    def _set(self, implementations: dict[int, str]) -> None:
        for key, name in implementations.items():
            self._configs[key]._attn_implementation = name

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._set(self._before)
        try:
            yield
        finally:
            self._set(dict.fromkeys(self._configs, NAME))

    def close(self) -> None:
        self._set(self._before)
        for module in self._modules:
            _attends.pop(module, None)
        self._modules, self._configs = [], {}


def _has_attention(module: nn.Module) -> bool:
    return hasattr(getattr(module, "config", None), "_attn_implementation")


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _of_transformers)
    AttentionMaskInterface.register(NAME, _no_mask)


def _of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    attend = _attends.get(module)
    if attend is None:
        refuse(
            f"a {type(module).__name__} that is no part of the attached model runs with its attention",
            f"give a copy of the model another one: copy.set_attn_implementation({'sdpa'!r})",
        )
    if attention_mask is not None:
        refuse("attention got a mask", "leave attention_mask out of what the model is given")
    if sliding_window is not None:
        _refuse_window(sliding_window)
    for name in NOT_KNOWN_HERE:
        if others.get(name) is not None:
            refuse(f"{type(module).__name__} asks for attention with {name}", "take a model that does without")
    _refuse_dropout(dropout)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    return attend(query, key, value, causal=causal, scale=scaling).transpose(1, 2).contiguous(), None


never_traced(_of_transformers)


def _no_mask(*_: Any, **asked: Any) -> None:
    """In place of the mask that transformers would make; the positions it would make it from are not in a row."""
    if asked.get("local_size") is not None:
        _refuse_window(asked["local_size"])
    if asked.get("attention_mask") is not None:
        refuse(
            "the model got an attention_mask", "leave it out of what the model is given; shard() does so where it may"
        )
    if asked.get("use_vmap"):
        refuse("the model makes an attention mask of its own kind", "take a model with causal or full attention")


def _refuse_window(size: int) -> NoReturn:
    refuse(
        f"attention in a sliding window of {size} tokens is not supported",
        "use a model or config without it (sliding_window=None, use_sliding_window=False)",
    )
