"""The seal on a worker's own part of sharded state: what an update left must be there when the next one begins.

    update of step 7 ─► part to the vault ─► sum over it      sealed
    lanes and exchange of step 8                              nobody writes to it
    before the update of step 8 ─► the sum again              another: this worker's memory has lost a bit

Nobody else has a copy to compare with, but for the vault, which has the part as it was: the worker leaves, and another
goes on from there. Who changes weights by hand between two steps breaks the seal too, so it is put only where silent
corruption is looked for (`Engine(second_opinion=…)`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.engine.vote import WeightsWatch
from paceline.errors import ReplicaError


class Seal:
    def __init__(self, name: str) -> None:
        """`name` of the worker."""
        self.part: Sequence[Tensor] = ()
        self._name = name
        self._places: list[tuple[int, int]] = []
        self._watch = WeightsWatch([])
        self._sealed: tuple[int, int] | None = None

    def put(self, number: int, part: Sequence[Tensor]) -> None:
        """All of a small part, and of a large one the next pieces in turn."""
        places = [(tensor.data_ptr(), tensor.numel()) for tensor in part]
        if places != self._places:
            self._places, self.part = places, part
            self._watch = WeightsWatch([("", tensor.view(-1)) for tensor in part if tensor.is_contiguous()])
        self._sealed = number, self._watch.check_many(number)

    def forget(self) -> None:
        """The state is put right, or another."""
        self._sealed = None

    def check(self, step: int) -> None:
        if self._sealed is None:
            return
        number, there = self._sealed
        self._sealed = None
        if self._watch.check_many(number) != there:
            raise ReplicaError(
                f"{self._name}: its part of the weights and the optimizer's state has changed between the updates of "
                f"steps {step - 1} and {step}, where nothing writes to it: silent corruption of its memory, or a loop "
                "that changes weights by hand (then leave second_opinion out)"
            )
