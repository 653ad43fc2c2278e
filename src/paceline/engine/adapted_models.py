"""Models with adapters (LoRA and the others of peft): what is trained, and the base that it is trained for.

    in the model                                      in its checkpoint
    h.0.attn.c_attn.base_layer.weight, frozen         a reference: dtype, shape, digest
    h.0.attn.c_attn.lora_A.default.weight             the weights, of all adapters
    score.modules_to_save.default.weight              likewise, and of all else that is trained, and buffers

A script builds the base before it resumes, from where it always comes, so a checkpoint need not hold it: it holds what
tells whether that is still the same. A base is what is frozen below a module with a `peft_config`, without adapters:
those are under their names, and stay in the checkpoint when another one is trained. A plain model with frozen layers is
saved whole: its frozen weights may come from anywhere, as from an earlier phase of the same training.

Workers that join and those that recover are given all of it: they don't read it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn import Parameter

from paceline.checkpoint.tensor_file import as_bytes, best_checksum, code_of, digest_of
from paceline.engine.replicas import FullTensorOf, plain_name
from paceline.errors import CheckpointError

Reference = dict[str, list[Any]]
"""By name: dtype, shape, and a digest with its kind."""


def adapters_of(module: nn.Module) -> set[str]:
    """Their names, where it is one that has adapters below."""
    config = getattr(module, "peft_config", None)
    return set(config) if isinstance(config, Mapping) else set()


def saves_adapters(model: nn.Module) -> bool:
    """Whether its `save_pretrained` writes adapters alone, as a PeftModel's does."""
    return bool(adapters_of(model)) and callable(getattr(model, "save_pretrained", None))


def base_parameters(model: nn.Module) -> dict[str, Parameter]:
    """Those of a base, under all their names; none where there is no adapter."""
    found: dict[str, Parameter] = {}
    for prefix, module in model.named_modules():
        if adapters := adapters_of(module):
            for name, parameter in module.named_parameters(prefix, remove_duplicate=False):
                if not parameter.requires_grad and not adapters & set(name.split(".")):
                    found[plain_name(name)] = parameter
    return found


def reference_to_base(model: nn.Module, full_tensor: FullTensorOf) -> Reference:
    """One tensor after another: all of them together may not fit into memory."""
    return _described(base_parameters(model), full_tensor, dict.fromkeys(base_parameters(model), best_checksum()))


def other_base(saved: Mapping[str, Any], model: nn.Module, full_tensor: FullTensorOf) -> str | None:
    """In what the base that is here is not the one that was there; the first difference, or None."""
    there = dict(model.named_parameters(remove_duplicate=False))
    mine = {plain_name(name): parameter for name, parameter in there.items() if plain_name(name) in saved}
    for name, (dtype, shape, digest) in saved.items():
        if name not in mine:
            return f"the model has no {name!r}"
        if tuple(shape) != tuple(mine[name].shape):
            return f"{name!r} is {tuple(shape)} there and {tuple(mine[name].shape)} here"
        now = _described({name: mine[name]}, full_tensor, {name: digest.partition(":")[0]})[name]
        if dtype != now[0]:
            return f"{name!r} is of {dtype} there and {now[0]} here"
        if digest != now[2]:
            return f"{name!r} has other values here"
    return None


def check_base(folder: Path, differences: list[str | None]) -> None:
    """Raise what a worker has found, on all of them."""
    first = next((text for text in differences if text is not None), None)
    if first is not None:
        raise CheckpointError(
            f"the checkpoint in {folder} holds adapters of another base: {first}; build the base that it was trained "
            "on, from the same files"
        )


def _described(parameters: Mapping[str, Parameter], full_tensor: FullTensorOf, kinds: Mapping[str, str]) -> Reference:
    known: dict[int, list[Any]] = {}
    for name, parameter in parameters.items():
        if id(parameter) not in known:
            full, kind = full_tensor(parameter), kinds[name]
            digest = f"{kind}:{digest_of(kind, as_bytes(full))}"
            known[id(parameter)] = [code_of(full.dtype, name), list(full.shape), digest]
    return {name: known[id(parameter)] for name, parameter in parameters.items()}


def are_references(found: Any, models: int) -> bool:
    """Whether a checkpoint's bases are what they should be: none of any model, or one for each of so many."""
    return (
        isinstance(found, list)
        and len(found) in (0, models)
        and all(isinstance(base, dict) and all(_is_row(row) for row in base.values()) for base in found)
    )


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, list)
        and [type(part) for part in row] == [str, list, str]
        and all(type(length) is int for length in row[1])
    )
