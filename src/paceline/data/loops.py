"""A loop over a work source, which may go on with other items when workers come or go.

    items()  item, item ┊ interrupt()   items()  item, item, …  (no item is left) ┊ close()
    └───────────────────────────── one loop ──────────────────────────────────────┘

A loop lasts until it is closed or forgotten, also where it has come to its end: a worker may learn only then that the
others have changed. It belongs to one epoch. Interrupted behind the last step of that, it has nothing left, and does
not run on into the next one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from paceline.data.sharded_sampler import WorkItem

Pairs = Generator[tuple[WorkItem, Any], None, None]


class Loop(Pairs):
    """What `items()` gives."""

    def __init__(self, pairs: Pairs, epoch: int) -> None:
        self._pairs = pairs
        self.epoch: int | None = epoch
        self.closed = False

    def __next__(self) -> tuple[WorkItem, Any]:
        return next(self._pairs)

    def send(self, value: None) -> tuple[WorkItem, Any]:
        return self._pairs.send(value)

    def throw(
        self, kind: Any, value: BaseException | object = None, traceback: TracebackType | None = None
    ) -> tuple[WorkItem, Any]:
        return self._pairs.throw(kind)

    def close(self) -> None:
        self.closed = True
        self._pairs.close()


class Loops:
    """The loop under way, if there is one."""

    def __init__(self) -> None:
        self._current: weakref.ref[Loop] | None = None
        self._goes_on = False
        self._epoch: int | None = None  # of the one that goes on

    def begin(self, epoch: int, pairs: Callable[[bool], Pairs]) -> Loop:
        """A loop, or the interrupted one again, of `pairs(whether its epoch is over)`."""
        of = self._epoch if self._goes_on and self._epoch is not None else epoch
        self._goes_on = False
        loop = Loop(pairs(of != epoch), of)
        self._current = weakref.ref(loop)
        return loop

    def interrupt(self) -> None:
        """End what was given for the loop under way; it goes on with the next `begin`."""
        loop = self._current() if self._current is not None else None
        if loop is not None and not loop.closed:
            self._goes_on, self._epoch = True, loop.epoch
            loop.close()

    def moved(self) -> None:
        """The place is another one: the loop under way goes on there, in whichever epoch that is."""
        self._epoch = None
        loop = self._current() if self._current is not None else None
        if loop is not None:
            loop.epoch = None
