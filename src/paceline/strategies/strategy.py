"""A strategy says *when* tensors move. The loop calls it at the same points whatever it does there.

start_step(plan)
  start_backward(item)       once per item; gradients of the lane so far are put back
    (hooks)                  a gradient is final: its bucket may leave
  finish_backward()          the lane's gradients are put away, `.grad` is None again
collect(scale, used)         after the worker's last item: `.grad` is the gradient of the global batch
end_step()                   after the optimizer acted
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.collectives.canonical_sum import SumPlan


@dataclass(frozen=True)
class ItemPlace:
    """Where in the step an item stands, as far as moving gradients is concerned."""

    lane: int
    last_of_lane: bool
    last_of_step: bool
    shadow: bool


class Strategy(Protocol):
    def start_step(self, plan: SumPlan) -> None: ...

    def start_backward(self, place: ItemPlace, *, last: bool) -> None: ...

    def finish_backward(self, place: ItemPlace) -> None: ...

    def skip(self, place: ItemPlace) -> None:
        """The loop left this item without a backward."""
        ...

    def used(self) -> Sequence[bool]:
        """Which parameters got a gradient on this worker in this step."""
        ...

    def collect(self, scale: float, used: Sequence[bool]) -> None: ...

    def end_step(self) -> None: ...

    def close(self) -> None: ...
