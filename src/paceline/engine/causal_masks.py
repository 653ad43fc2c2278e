"""Attention in models of transformers: a mask that is causal and nothing else is not made, nor one that masks nothing.

Under torch.compile transformers can't look into tensors, so it makes a mask for every batch, in case something in it is
padded or packed. A mask keeps torch from its flash kernels, and where algorithms have to be deterministic, which rules
cuDNN out, the memory-efficient kernels are left: 3.5 ms a layer instead of 1.1 (H200, 134 M parameters). In eager mode
transformers does look, and so waits for the device in every forward.

    model(input_ids)         a hook sees that neither a mask nor position_ids are given: nothing is padded or packed.
                             The model gets a mask of ones, which says so, and `_unpadded` says it too
    mask for "sdpa"          only causal, or none at all, and nothing is padded: None, so the kernel gets `is_causal`
                             alone; otherwise what transformers makes
    forward ends             `_unpadded` says nothing any more: models that are not prepared make their masks by the
                             same function, as a frozen teacher, whose batch may be padded

`_unpadded` is a variable of the module because compiled code is guarded by it: a batch with a mask gets other code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_unpadded = False
_ones: dict[tuple[torch.Size, torch.device], Tensor] = {}
MOST_KEPT = 16  # shapes of batches whose ones are kept


class CausalMasks:
    """Hooks of some models; `close` takes them off."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._hooks: list[RemovableHandle] = []
        for model in _outermost_of_transformers(models):
            self._hooks.append(model.register_forward_pre_hook(_before_forward, with_kwargs=True))
            self._hooks.append(model.register_forward_hook(_after_forward, always_call=True))  # were it to raise, too
        if self._hooks:
            _register()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            _tell(unpadded=False)
        self._hooks = []


def _outermost_of_transformers(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Models that take an attention_mask and use torch's attention."""
    library = sys.modules.get("transformers.modeling_utils")
    found: list[nn.Module] = []
    if library is None:
        return found
    waiting = list(models)
    while waiting:
        module = waiting.pop()
        if not isinstance(module, library.PreTrainedModel):
            waiting += module.children()
        elif not module.config.is_encoder_decoder and "attention_mask" in inspect.signature(module.forward).parameters:
            found.append(module)
    return found


def _before_forward(model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any] | None:
    ids = given[0] if given else named.get("input_ids")
    lays_out = any(value is not None and (name in _LAY_OUT or "mask" in name) for name, value in named.items())
    plain = isinstance(ids, Tensor) and ids.dim() == 2 and len(given) < 2 and not lays_out
    _tell(unpadded=plain)
    return (given, {**named, "attention_mask": _ones_of(ids)}) if plain and isinstance(ids, Tensor) else None


_LAY_OUT = {"position_ids", "past_key_values", "cache_position", "inputs_embeds"}
"""Arguments that say how sequences lie in a batch, besides every mask."""


def _after_forward(*_: Any) -> None:
    _tell(unpadded=False)


def _tell(*, unpadded: bool) -> None:
    global _unpadded
    _unpadded = unpadded


def _ones_of(ids: Tensor) -> Tensor:
    if type(ids) is not Tensor:  # a fake tensor, as `paceline plan` has it: no other batch can use its ones
        return torch.ones_like(ids)
    kind = ids.shape, ids.device
    if kind not in _ones:
        if len(_ones) == MOST_KEPT:
            _ones.clear()
        _ones[kind] = torch.ones_like(ids)
    return _ones[kind]


def _register() -> None:
    """For the "sdpa" implementation, once for the process."""
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        bidirectional_mask_function,
        causal_mask_function,
    )

    before: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(before, "leaves_causal_masks_out", False):
        return

    def mask(*given: Any, **named: Any) -> Any:
        causal = named.get("mask_function") is causal_mask_function and named.get("allow_is_causal_skip", True)
        of_all = named.get("mask_function") is bidirectional_mask_function
        empty = of_all and named.get("allow_is_bidirectional_skip", False)
        square = named.get("q_length") == named.get("kv_length") and named.get("local_size") is None
        if _unpadded and square and (causal or empty):
            return None
        return before(*given, **named)

    mask.leaves_causal_masks_out = True  # type: ignore[attr-defined]
    ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", mask)
