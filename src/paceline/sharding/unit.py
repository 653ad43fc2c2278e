"""Units: parameters that are gathered together before a module needs them, and released after it.

    gpt              unit 0   gpt itself: pos                 a module is a unit, with all that is below it, if it is
    ├─ tok           unit 1   tok                             of a named class, or small enough
    ├─ blocks        (a list is never called)
    │  ├─ 0          unit 2   all of block 0                  otherwise its own parameters are one, held while it
    │  └─ 1          unit 3   all of block 1                  runs, and its children are looked at
    └─ head          (head.weight is tok.weight)              a shared parameter belongs to the first unit that has it

What a unit's size changes is memory (the largest is whole while it is used) and the number of messages, never a bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.sharding.bucket import ALIGNED, Bucket, BucketEntry, GradientSpec, packed

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
Classes = tuple[type[nn.Module] | str, ...]


@dataclass(frozen=True)
class Unit:
    """`module` runs with all of the unit's parameters; None: they belong to no module."""

    name: str
    module: nn.Module | None
    parameters: tuple[int, ...]


def cut_units(
    models: Sequence[nn.Module],
    index: Mapping[int, int],
    specs: Sequence[GradientSpec],
    *,
    classes: Classes | None,
    unit_bytes: int,
) -> tuple[Unit, ...]:
    """Every parameter of `index` (its number, by id) in one unit, in the order in which modules register them."""
    cut = _Cut(index, specs, classes, unit_bytes)
    units = [unit for model in models for unit in cut.units("", model)]
    if classes is not None and not cut.met_class:
        named = ", ".join(wanted if isinstance(wanted, str) else wanted.__name__ for wanted in classes)
        raise ConfigError(f"units={named}: the model has no module of that class; name one that it repeats")
    units += [Unit("no module", None, (number,)) for number in sorted(cut.free)]
    return tuple(units)


class _Cut:
    def __init__(
        self, index: Mapping[int, int], specs: Sequence[GradientSpec], classes: Classes | None, unit_bytes: int
    ) -> None:
        self.free = set(index.values())
        self.met_class = False
        self._index, self._specs, self._classes, self._unit_bytes = index, specs, classes, unit_bytes

    def units(self, name: str, module: nn.Module) -> Iterator[Unit]:
        if not isinstance(module, NEVER_CALLED) and self._is_one(module):
            yield from self._claimed(name, module, recurse=True)
            return
        yield from self._claimed(name, module, recurse=False)
        for child, below in module.named_children():
            yield from self.units(f"{name}.{child}" if name else child, below)

    def _is_one(self, module: nn.Module) -> bool:
        if self._classes is not None:
            found = any(
                type(module).__name__ == wanted if isinstance(wanted, str) else isinstance(module, wanted)
                for wanted in self._classes
            )
            self.met_class |= found
            return found
        return next(module.children(), None) is None or self._bytes(module) <= self._unit_bytes

    def _bytes(self, module: nn.Module) -> int:
        specs = [self._specs[self._index[id(p)]] for p in module.parameters() if id(p) in self._index]
        return sum(spec.elements * spec.dtype.itemsize for spec in specs)

    def _claimed(self, name: str, module: nn.Module, *, recurse: bool) -> Iterator[Unit]:
        numbers = [self._index[id(p)] for p in module.parameters(recurse) if id(p) in self._index]
        mine = tuple(number for number in dict.fromkeys(numbers) if number in self.free)
        self.free.difference_update(mine)
        if mine:
            yield Unit(name or type(module).__name__, module, mine)


def unit_buckets(
    specs: Sequence[GradientSpec], unit: Unit, bucket_bytes: int, uncut: Collection[int] = ()
) -> Iterator[Bucket]:
    """A unit's buckets: a large or uncut parameter alone, small ones of a dtype together where memory is aligned."""
    small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number in unit.parameters:
        spec = specs[number]
        if spec.elements * spec.sum_dtype.itemsize * 2 >= bucket_bytes or number in uncut:
            yield Bucket((BucketEntry(number, 0, spec.shape),), spec.sum_dtype, spec.device)
        else:
            small.setdefault((spec.dtype, spec.device), []).append(number)
    for numbers in small.values():
        yield packed(specs, numbers, ALIGNED)
