"""Something under way between workers: started by a `Communicator`, and waited for here.

A failure becomes an error that names the peer (`Owner.lost`). Where a wait may last although its end is known from
elsewhere, it is made of short ones with a look in between: at the peers' notes, or whether the group is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from paceline.errors import PacelineError, WorldError

LOOK_UP_EVERY_S = 0.5


class Handle(Protocol):
    """Something under way that can be waited for."""

    def wait(self) -> None: ...


class Owner(Protocol):
    """The communicator that has started it."""

    timeout_s: float

    @property
    def is_over(self) -> bool: ...

    def lost(self, error: Exception, doing: str) -> PacelineError: ...

    def raise_if_left(self, vote: int) -> None: ...


class Work:
    """Something under way in c10d whose failure names the peer."""

    def __init__(self, work: Any, owner: Owner, doing: str) -> None:
        self._work, self._owner, self._doing = work, owner, doing
        self.looks_up = False  # while it waits: whether its group is over
        self.when_done: Callable[[], None] | None = None

    def result(self) -> Any:
        """What the operation gave, once it has been waited for."""
        return self._work.result()

    def wait(self, timeout_s: float | None = None) -> None:
        """`timeout_s`: another one than the group's."""
        try:
            if timeout_s is None and self.looks_up:
                self._wait_and_look_up()
            elif timeout_s is None:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=timeout_s))
        except (RuntimeError, WorldError) as error:
            raise self._owner.lost(error, self._doing) from error
        if self.when_done is not None:
            self.when_done()
            self.when_done = None

    def _wait_and_look_up(self) -> None:
        """In a group that is over gloo was seen to wait on, once in a while, for connections that are shut down."""
        deadline = time.monotonic() + self._owner.timeout_s
        while not self._work.is_completed():
            try:
                self._work.wait(timedelta(seconds=LOOK_UP_EVERY_S))
            except RuntimeError:
                if self._work.is_completed() or self._owner.is_over or time.monotonic() > deadline:
                    raise
        self._work.wait()

    def wait_for_vote(self, vote: int, look_every_s: float = 0.5) -> None:
        """Wait for ballot number `vote`, and look at the peers' notes while it takes long."""
        deadline = time.monotonic() + self._owner.timeout_s
        while not self._work.is_completed():
            try:
                self._work.wait(timedelta(seconds=look_every_s))
            except RuntimeError as error:
                if self._work.is_completed() or time.monotonic() > deadline:
                    raise self._owner.lost(error, self._doing) from error
                try:
                    self._owner.raise_if_left(vote)
                except WorldError as lost:  # the store knows of a new generation already
                    raise self._owner.lost(lost, self._doing) from error
        self.wait()


def wait_all(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()
