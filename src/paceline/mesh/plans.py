"""Whose plan shards a model, and what is wrong with one, found before anything is changed.

{"layers.*.attention.q": ColwiseParallel(), …}     torch's styles, by names of modules; `*` is any part of a name
{"model.layers.*.mlp.up_proj": "colwise", …}       words, as Hugging Face's plans have them
a function of (model, device_mesh)                 it calls parallelize_module as it likes
None                                               what a Hugging Face model carries, or it is sharded already
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import Parameter

from paceline.errors import ConfigError
from paceline.mesh.tensor_parallel import TensorParallel
from paceline.torch_compat import own_parameters

Plan = Mapping[str, Any] | Callable[[nn.Module, Any], Any] | None

PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
"""Of a weight that is used on sharded activations, as a norm of each head: Hugging Face's word for it."""

STYLES: dict[str, Callable[[], ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}

HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "n_kv_heads", "num_kv_heads", "num_key_value_heads")
"""What modules and configurations call the number of attention heads."""


def shard(model: nn.Module, plan: Plan, parallel: TensorParallel) -> dict[int, Parameter]:
    """Shard the model; by id of each parameter that was replaced, the local one in its place."""
    before = _places(model)
    ties = {identity: places for identity, places in before.items() if len(places) > 1}
    partial: list[str] = []
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        if plan is not None:
            raise ConfigError(
                "engine.prepare(plan=…) got a model that is sharded already: some parameters are DTensors"
            )
    elif callable(plan):
        plan(model, parallel.mesh)
    else:
        named = _own_plan(model) if plan is None else dict(plan)
        _check_names(model, named)
        _check_heads(model, named, parallel.mesh.size())
        _check_ties(model, named, ties)
        partial = [f"{name}.{key}" for name, key in _partial(model, named)]
        _apply(model, {name: style for name, style in named.items() if style != PARTIAL_GRADIENT}, parallel)
    _tie_again(model, ties)
    if not partial and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError(
            f"tp={parallel.mesh.size()} and a plan that shards no parameter of {type(model).__name__}: every worker of "
            "a tensor-parallel group would compute all of it; name linear layers in the plan"
        )
    stood = {
        (id(module), key): p for module in model.modules() for key, p in own_parameters(module).items() if p is not None
    }
    localised = parallel.localise(model, partial)
    moved: dict[int, Parameter] = dict(localised)
    for identity, places in before.items():
        now = localised.get(id(stood[id(places[0][1]), places[0][2]]))
        if now is not None:
            moved[identity] = now
    return moved


def _places(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """Of each parameter, by id: its names, and where it stands."""
    found: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for key, parameter in own_parameters(module).items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((f"{name}.{key}" if name else key, module, key))
    return found


def _own_plan(model: nn.Module) -> dict[str, Any]:
    carried = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not carried:
        raise ConfigError(
            f"tp > 1, and {type(model).__name__} carries no plan: give engine.prepare(…, plan=…) a dict of names of "
            "modules and torch's styles (ColwiseParallel(), RowwiseParallel()), or a function of (model, device_mesh)"
        )
    names = [re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.named_modules()]
    # A plan of Hugging Face names modules that only some of the models of a class have.
    return {name: style for name, style in dict(carried).items() if name in names}


def _matches(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Modules of that name, part by part as torch's parallelize_module looks for them."""
    parts = pattern.split(".")
    return [
        (name, module)
        for name, module in model.named_modules()
        if len(own := name.split(".")) == len(parts) and all(map(fnmatchcase, own, parts))
    ]


def _check_names(model: nn.Module, plan: Mapping[str, Any]) -> None:
    for pattern, style in plan.items():
        if not _matches(model, pattern):
            known = ", ".join(
                sorted({re.sub(r"\.\d+", ".*", name) for name, m in model.named_modules() if isinstance(m, nn.Linear)})[
                    :6
                ]
            )
            raise ConfigError(
                f"the plan names {pattern!r}, but {type(model).__name__} has no such module; its linear "
                f"layers are {known}"
            )
        if not isinstance(style, ParallelStyle | str):
            raise ConfigError(
                f"the plan gives {pattern!r} a {type(style).__name__}; a style is torch's, such as ColwiseParallel(), "
                "or a word of Hugging Face's plans, such as 'colwise'"
            )


def _check_heads(model: nn.Module, plan: Mapping[str, Any], workers: int) -> None:
    """A layer that is cut between two heads computes something else, and says nothing."""
    owners: dict[str, Any] = {}
    for pattern in plan:
        for name, _ in _matches(model, pattern):
            above = name.rpartition(".")[0]
            owners[above or type(model).__name__] = model.get_submodule(above)
    holders = [*owners.items(), ("its config", getattr(model, "config", None))]
    for where, holder in holders:
        for attribute in HEADS:
            heads = getattr(holder, attribute, None)
            if isinstance(heads, int) and heads % workers:
                raise ConfigError(
                    f"tp={workers} does not divide the {heads} heads of {where} ({attribute}): a head is on one "
                    "worker; choose a tp that divides them"
                )
    for pattern, style in plan.items():
        for name, module in _matches(model, pattern):
            is_row = isinstance(style, RowwiseParallel) or (isinstance(style, str) and style.startswith("rowwise"))
            width = getattr(module, "in_features" if is_row else "out_features", None)
            if isinstance(width, int) and width % workers and not style == PARTIAL_GRADIENT:
                raise ConfigError(
                    f"tp={workers} does not divide the {'in' if is_row else 'out'}put of {name!r}, {width} wide; "
                    "choose another tp, or leave that module out of the plan"
                )


def _check_ties(
    model: nn.Module, plan: Mapping[str, Any], ties: Mapping[int, list[tuple[str, nn.Module, str]]]
) -> None:
    """One parameter in two modules is sharded in both, and alike, or it would be two from now on."""
    styles = {id(module): style for pattern, style in plan.items() for _, module in _matches(model, pattern)}
    for places in ties.values():
        given = [(name, styles.get(id(module))) for name, module, _ in places]
        if any(style is not None for _, style in given) and len({_kind(style) for _, style in given}) > 1:
            told = ", ".join(f"{name} {'is not in it' if style is None else _kind(style)}" for name, style in given)
            raise ConfigError(
                f"the plan splits tied weights differently ({told}): they are one parameter; give both modules the "
                "same style, leave both out, or build the model without the tie"
            )


def _kind(style: Any) -> str:
    return style if isinstance(style, str) else type(style).__name__


def _partial(model: nn.Module, plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (name, key)
        for pattern, style in plan.items()
        if style == PARTIAL_GRADIENT
        for name, module in _matches(model, pattern)
        for key in own_parameters(module)
    ]


def _apply(model: nn.Module, plan: Mapping[str, Any], parallel: TensorParallel) -> None:
    words = {style for style in plan.values() if isinstance(style, str)}
    if words and hasattr(model, "config") and hasattr(model, "tp_plan"):  # by the styles of its own library
        try:
            library = importlib.import_module("transformers.distributed.tensor_parallel")
            library.apply_tensor_parallelism(model, parallel.mesh, dict(plan))
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"transformers can't apply the plan of {type(model).__name__}: {error}") from error
        return
    if unknown := sorted(words - STYLES.keys()):
        raise ConfigError(
            f"the plan has the style {unknown[0]!r}; of words there are {', '.join(STYLES)}, and torch's classes"
        )
    styles = {name: STYLES[style]() if isinstance(style, str) else style for name, style in plan.items()}
    parallelize_module(model, parallel.mesh, styles)


def _tie_again(model: nn.Module, ties: Mapping[int, list[tuple[str, nn.Module, str]]]) -> None:
    """Sharding makes a parameter of its own for each of its modules."""
    for places in ties.values():
        name, first, key = places[0]
        parameter = own_parameters(first)[key]
        for other, module, its in places[1:]:
            there = own_parameters(module)[its]
            if there is parameter:
                continue
            if getattr(parameter, "placements", None) != getattr(there, "placements", ()):
                raise ConfigError(
                    f"{name} and {other} were one parameter and are sharded differently now: shard both alike, or "
                    "build the model without the tie"
                )
            own_parameters(module)[its] = parameter
