"""What units' backward passes leave, and its way to the owners of rows: unit after unit, in the order of their numbers.

    torch hands over a unit's gradient ─► added up over the backward passes of an item ─► over the items of a lane
    the lane's last backward is through with unit 0, 1, … ─► each is shipped, while backward goes on with the next

Workers must ship in one order, whatever order their backward takes: a unit waits for those with smaller numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import LoopError
from paceline.strategies.fsdp_models import ShardedModels, ShardedUnit
from paceline.strategies.fsdp_rows import RowShards
from paceline.strategies.owner_sums import OwnerSums
from paceline.strategies.strategy import ItemPlace


@dataclass
class _UnitGradient:
    """What one unit's backward has left so far in a lane."""

    rows: RowShards
    flat: Tensor | None = None
    seen: set[int] = field(default_factory=set)  # parameters, by id, with a gradient since torch last handed one over
    complete: bool = False  # of this item
    forwards: int = 0  # in this item


class UnitGradients:
    """`rows` are those of units with a parameter that is updated here, `index` the numbers of these, by id."""

    def __init__(
        self,
        models: ShardedModels,
        rows: Mapping[int, RowShards],
        index: Mapping[int, int],
        sums: OwnerSums,
        *,
        overlap: bool,
        rounded_to: torch.dtype | None,
    ) -> None:
        self._models, self._index, self._sums = models, index, sums
        self._overlap, self._rounded_to = overlap, rounded_to
        self._units = {number: _UnitGradient(found) for number, found in rows.items()}
        self.used = [False] * len(index)
        self.armed = False  # inside a backward
        self._left = 0
        self.left_during_backward = 0

    def start_step(self) -> None:
        self.used = [False] * len(self._index)
        self.left_during_backward = 0
        self._models.on_gradient, self._models.on_seen = self._take, self._saw

    def start_backward(self, place: ItemPlace, *, last: bool) -> None:
        self._place, self._last = place, last
        self.armed = True
        self._left = 0
        self._models.watch()
        for unit in self._models.units:
            if unit.number in self._units:
                gradient = self._units[unit.number]
                gradient.complete, gradient.forwards = False, max(gradient.forwards, unit.forwards)

    def finish_backward(self, place: ItemPlace) -> None:
        self.armed = False
        self._models.drop_gradients()
        if place.last_of_lane:
            self._ship(len(self._units))
        for unit in self._units.values():
            unit.forwards = 0
            unit.seen.clear()

    def _saw(self, parameter: Parameter) -> None:
        """Autograd has finished a gradient of the parameter."""
        number, unit = self._index.get(id(parameter)), self._models.unit_of(parameter)
        if not self.armed or not unit or unit.number not in self._units:
            return
        self._units[unit.number].seen.add(id(parameter))
        if number is not None and not self._place.shadow:
            self.used[number] = True

    def _take(self, unit: ShardedUnit, flat: Tensor) -> None:
        """torch hands over what a unit's backward has left; where a unit ran several times it does so each time."""
        gradient = self._units.get(unit.number)
        if not self.armed or gradient is None or self._place.shadow or not gradient.seen:
            self._models.take_back(flat)
        else:
            self._add(unit, gradient, flat)
        if gradient is not None and self.armed and self._last and gradient.forwards <= 1:
            gradient.complete = True
            if self._place.last_of_lane and self._overlap:
                self._ship(self._ready())

    def _add(self, unit: ShardedUnit, gradient: _UnitGradient, flat: Tensor) -> None:
        if gradient.complete:
            raise LoopError(
                f"unit {type(unit.module).__name__!r} got a second gradient after its first had left; when an item has "
                "several backward passes, all but the last need engine.backward(loss, last=False)"
            )
        if flat.numel() != gradient.rows.bucket.elements:  # torch leaves out what got no gradient
            there = [id(parameter) in gradient.seen for parameter in unit.trained]
            given, flat = flat, gradient.rows.spread(flat, there, self._models.room(gradient.rows))
            self._models.take_back(given)
        gradient.seen.clear()
        if gradient.flat is None:
            gradient.flat = flat
        else:
            gradient.flat.add_(flat)
            self._models.take_back(flat)

    def _ready(self) -> int:
        """How many of the first units are complete."""
        return next((place for place, unit in enumerate(self._units.values()) if not unit.complete), len(self._units))

    def _ship(self, up_to: int) -> None:
        for place, unit in enumerate(list(self._units.values())[self._left : up_to], start=self._left):
            self.left_during_backward += self.armed
            self._ship_unit(place, unit)
        self._left = max(self._left, up_to)

    def _ship_unit(self, place: int, unit: _UnitGradient) -> None:
        if self._place.shadow:
            self._sums.ship(place, {})
            return
        models = self._models
        flat, unit.flat = unit.flat, None
        if flat is None:  # nothing of it was used in this lane
            flat = models.room(unit.rows).zero_()
        elif self._rounded_to is not None:
            flat.copy_(flat.to(self._rounded_to))
        self._sums.ship(place, {self._place.lane: flat}, give_back=lambda: models.take_back(flat))
