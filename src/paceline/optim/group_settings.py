"""Group settings: the numbers in an optimizer's groups as one vector, so that they can travel.

    groups   {lr 0.1, betas (0.9, 0.95), maximize False}   {lr 0.01, betas (0.9, 0.95), maximize False}
    vector   [0.1, 0.9, 0.95, 0.0,                          0.01, 0.9, 0.95, 0.0]

A schedule changes learning rates where the loop runs; the update happens elsewhere, on a copy of the optimizer. Which
numbers there are is fixed when training starts, from the groups that both sides built from the same script.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ConfigError

NamedSetting = float | int | bool | tuple[float, ...]

NUMBER = bool | int | float
"""An attribute of such a kind is one of an optimizer's own numbers."""
LARGEST_SETTING = 4096  # elements; a larger tensor in a group is something that it refers to

# How an update is computed, not what it computes; the two sides may run on different devices.
_WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})


class Settings(NamedTuple):
    """What an optimizer's `step` may change besides weights and state."""

    groups: list[dict[str, Any]]
    numbers: dict[str, float]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Settings:
        groups = [{n: _copied(v) for n, v in group.items() if n != "params"} for group in optimizer.param_groups]
        return cls(groups, numbers_of(optimizer))

    def put_back(self, optimizer: Optimizer) -> None:
        """A tensor stays the object that it is. A group that has come since stays as it is too."""
        for group, settings in zip(optimizer.param_groups, self.groups, strict=False):
            for name in group.keys() - settings.keys() - {"params"}:
                del group[name]
            for name, value in settings.items():
                if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                    group[name].detach().copy_(value)
                else:
                    group[name] = value
        set_numbers(optimizer, self.numbers)


def numbers_of(optimizer: Optimizer) -> dict[str, float]:
    """Attributes of its own: many that people write count their steps in one, which no state_dict has."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, NUMBER)}


def set_numbers(optimizer: Optimizer, numbers: Mapping[str, float]) -> None:
    """These and no others; of one that is gone the class may have the first value."""
    for name in numbers_of(optimizer).keys() - numbers.keys():
        delattr(optimizer, name)
    vars(optimizer).update(numbers)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= LARGEST_SETTING else value
    return copy.copy(value) if isinstance(value, list | dict | set) else value


@dataclass(frozen=True)
class _Number:
    """One number of the vector: `place` inside a tuple such as betas."""

    group: int
    name: str
    place: int | None
    kind: type[bool] | type[int] | type[float]

    def of(self, group: Mapping[str, Any]) -> float:
        value = group[self.name] if self.place is None else group[self.name][self.place]
        return float(value)

    @property
    def is_momentum(self) -> bool:
        return self.name == "momentum" or (self.name, self.place) == ("betas", 0)

    def __str__(self) -> str:
        return f"{self.name}{'' if self.place is None else f'[{self.place}]'} of group {self.group}"


class GroupSettings:
    """The numbers of all groups of the given optimizers; groups are counted through over the optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._numbers = [number for place, group in enumerate(self._groups()) for number in _numbers_of(place, group)]

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self) -> list[float]:
        """The numbers as they are now."""
        groups = self._groups()
        return [number.of(groups[number.group]) for number in self._numbers]

    def with_learning_rates(self, values: Sequence[float], factor: float) -> list[float]:
        """A vector whose learning rates are multiplied."""
        return [
            value * factor if number.name == "lr" else value
            for number, value in zip(self._numbers, values, strict=True)
        ]

    def put(
        self,
        values: Sequence[float],
        groups: Mapping[int, MutableMapping[str, Any]],
        *,
        lr_factor: float = 1.0,
        momentum: Callable[[float], float] | None = None,
    ) -> None:
        """Write a vector into the groups of a copy, given by their numbers.

        On the way learning rates are multiplied by `lr_factor`, and `momentum` makes another of each momentum.
        """
        self.check(values)
        for number, value in zip(self._numbers, values, strict=True):
            group = groups.get(number.group)
            if group is None:
                continue
            if number.name == "lr":
                value *= lr_factor
            elif momentum is not None and number.is_momentum:
                value = momentum(value)
            _write(group, number, value)

    def momentum(self, values: Sequence[float]) -> float | None:
        """The first momentum in a vector (Adam's is its first beta); None where the optimizer has none."""
        return next((v for number, v in zip(self._numbers, values, strict=True) if number.is_momentum), None)

    def check(self, values: Sequence[float]) -> None:
        if len(values) != len(self):
            raise ConfigError(
                f"the optimizer's groups have {len(self)} numeric settings here but {len(values)} came; build the "
                "same groups, with the same settings, in every process before engine.prepare()"
            )

    def by_group(self, values: Sequence[float]) -> tuple[dict[str, NamedSetting], ...]:
        """A vector as people and logs write it: names and values of each group."""
        self.check(values)
        groups: list[dict[str, Any]] = [{} for _ in self._groups()]
        for number, value in zip(self._numbers, values, strict=True):
            group, typed = groups[number.group], number.kind(value)
            group[number.name] = typed if number.place is None else (*group.get(number.name, ()), typed)
        return tuple(groups)

    def vector(self, groups: Sequence[Mapping[str, Any]]) -> list[float]:
        """The inverse of `by_group`."""
        found: list[float] = []
        taken: Counter[tuple[int, str]] = Counter()
        for number in self._numbers:
            value = groups[number.group][number.name]
            place = taken[number.group, number.name]
            taken[number.group, number.name] += 1
            found.append(float(value if number.place is None else value[place]))
        return found

    def difference(self, one: Sequence[float], other: Sequence[float]) -> tuple[str, float, float] | None:
        """The first setting in which two vectors differ, and both values."""
        for number, mine, theirs in zip(self._numbers, one, other, strict=True):
            if mine != theirs and not (math.isnan(mine) and math.isnan(theirs)):
                return str(number), mine, theirs
        return None

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def _numbers_of(place: int, group: Mapping[str, Any]) -> list[_Number]:
    found: list[_Number] = []
    for name in sorted(group.keys() - _WAYS - {"params", "param_names"}):
        value = group[name]
        several = isinstance(value, tuple | list)
        for inside, number in enumerate(value) if several else [(None, value)]:
            kind = _kind(number)
            if kind is not None:
                found.append(_Number(place, name, inside, kind))
    return found


def _kind(value: Any) -> type[bool] | type[int] | type[float] | None:
    if isinstance(value, Tensor):
        return float if value.numel() == 1 else None
    kinds: tuple[type[bool] | type[int] | type[float], ...] = (bool, int, float)
    return next((kind for kind in kinds if isinstance(value, kind)), None)


def _write(group: MutableMapping[str, Any], number: _Number, value: float) -> None:
    old = group[number.name]
    if number.place is None:
        if isinstance(old, Tensor):
            old.fill_(value)
        else:
            group[number.name] = number.kind(value)
        return
    inside = list(old)
    if isinstance(inside[number.place], Tensor):
        inside[number.place].fill_(value)
    else:
        inside[number.place] = number.kind(value)
    group[number.name] = type(old)(inside)
