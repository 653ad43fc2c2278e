"""The shard checksum: what an update left in a worker's own part of sharded state must be there when the next begins.

    update of step 7 ─► part to the in-memory checkpoint ─► sum over it      taken
    lanes and exchange of step 8                                             nothing writes to it
    before the update of step 8 ─► the sum again                             another: this worker's memory lost a bit

No other worker has a copy to compare with, but the in-memory checkpoint has the part as it was: the worker leaves, and
another goes on from there. A loop that changes weights by hand between two steps breaks it too, so it is taken only
where silent corruption is looked for (`Engine(second_opinion=…)`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paceline.errors import ReplicaError


class RotatingSum(Protocol):
    """A checksum over all of a small number of tensors, and of many the next pieces in turn."""

    def check_many(self, step: int) -> int: ...


class NoShardChecksum:
    """Silent corruption is not looked for."""

    part: Sequence[Tensor] = ()
    """What the checksum is taken of."""

    def take(self, number: int, part: Sequence[Tensor]) -> None:
        """Of a part that an update has just left, in the state of this number."""

    def forget(self) -> None:
        """The state is put right, or another."""

    def check(self, step: int) -> None:
        """Before the update of `step`; an error where the part has changed."""


class ShardChecksum(NoShardChecksum):
    """`name` is the worker's; `sum_over` makes the sum of named tensors."""

    def __init__(self, name: str, sum_over: Callable[[Sequence[tuple[str, Tensor]]], RotatingSum]) -> None:
        self._name, self._sum_over = name, sum_over
        self._places: list[tuple[int, int]] = []
        self._sum = sum_over([])
        self._taken: tuple[int, int] | None = None

    def take(self, number: int, part: Sequence[Tensor]) -> None:
        places = [(tensor.data_ptr(), tensor.numel()) for tensor in part]
        if places != self._places:
            self._places, self.part = places, part
            self._sum = self._sum_over([("", tensor.view(-1)) for tensor in part if tensor.is_contiguous()])
        self._taken = number, self._sum.check_many(number)

    def forget(self) -> None:
        self._taken = None

    def check(self, step: int) -> None:
        if self._taken is None:
            return
        number, there = self._taken
        self._taken = None
        if self._sum.check_many(number) != there:
            raise ReplicaError(
                f"{self._name}: its part of the weights and the optimizer's state has changed between the updates of "
                f"steps {step - 1} and {step}, where nothing writes to it: silent corruption of its memory, or a loop "
                "that changes weights by hand (then leave second_opinion out)"
            )
