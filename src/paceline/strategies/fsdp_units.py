"""Which modules are units of `fully_shard`: what is gathered together before it runs, and released after it.

    gpt                        root: what no other unit has (embedding, head, last norm), gathered for the whole item
    ├─ embedding, head
    └─ blocks
       ├─ 0                    a unit              by default: modules that repeat in a ModuleList or Sequential
       └─ 1                    a unit              units=Block, units="Block": by class      AtLeast(1_000_000): by size

Parameters that `fully_shard` can't cut into rows stay whole on every worker, as under zero2: those with memory that is
not row-major, without dimensions or elements, not in fp32, and those that several units share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import Parameter

from paceline.errors import ConfigError

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Class = type[nn.Module] | str


@dataclass(frozen=True)
class AtLeast:
    """Modules become units from below, whenever what is not yet in one has this many elements."""

    elements: int

    def __post_init__(self) -> None:
        if self.elements < 1:
            raise ConfigError(f"units of AtLeast({self.elements}) elements: give the size of a unit, 1 or more")


Units = Class | tuple[Class, ...] | AtLeast | None


def unit_modules(model: nn.Module, wanted: Units) -> list[nn.Module]:
    """The units below `model`, outer ones before those inside them; not the model itself."""
    if wanted is None:
        found = list(_repeated(model))
    elif isinstance(wanted, AtLeast):
        found = _from_size(model, wanted.elements)
    else:
        classes = wanted if isinstance(wanted, tuple) else (wanted,)
        found = [module for module in model.modules() if _is_of(module, classes)]
        if not found:
            names = ", ".join(c if isinstance(c, str) else c.__name__ for c in classes)
            raise ConfigError(f"units={names}: the model has no module of that class; name one that it repeats")
    return with_units(model, found, ())


def with_units(model: nn.Module, units: Sequence[nn.Module], more: Sequence[nn.Module]) -> list[nn.Module]:
    """Units and more of them, in the same order: a unit has one precision, so what has another is one of its own."""
    places = {id(module): place for place, module in enumerate(model.modules())}
    own = {id(module): module for module in (*units, *more) if module is not model and _has_parameters(module)}
    return sorted(own.values(), key=lambda module: places[id(module)])


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    counted = Counter(type(child) for child in children if _has_parameters(child))
    for child in children:
        if isinstance(module, LISTS) and counted[type(child)] > 1 and not isinstance(child, NEVER_CALLED):
            yield child
        else:
            yield from _repeated(child)


def _from_size(model: nn.Module, elements: int) -> list[nn.Module]:
    found: list[nn.Module] = []

    def left_of(module: nn.Module) -> int:
        """Elements of the module that are in no unit below it."""
        left = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(left_of, module.children()))
        if left < elements or isinstance(module, NEVER_CALLED):
            return left
        found.append(module)
        return 0

    left_of(model)
    return found


def _is_of(module: nn.Module, classes: Sequence[Class]) -> bool:
    return any(type(module).__name__ == c if isinstance(c, str) else isinstance(module, c) for c in classes)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def kept_whole(model: nn.Module, units: Sequence[nn.Module]) -> set[Parameter]:
    """The parameters that `fully_shard` is not to touch."""
    homes: dict[Parameter, set[int]] = {}

    def visit(module: nn.Module, unit: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            homes.setdefault(parameter, set()).add(id(unit))
        for child in module.children():
            visit(child, child if any(child is other for other in units) else unit)

    visit(model, model)
    return {p for p, found in homes.items() if len(found) > 1 or not _can_be_cut(p)}


def _can_be_cut(parameter: Parameter) -> bool:
    return (
        parameter.stride() == torch.empty(parameter.shape, device="meta").stride()
        and parameter.dim() > 0
        and parameter.numel() > 0
        and parameter.dtype == torch.float32
    )
