"""Something under way between workers: started by a `Communicator`, and waited for here.

A failure becomes an error that names the peer (`Owner.lost`). Where a wait may last although its end is known from
elsewhere, it is made of short ones with a look in between: at the peers' notes, or whether the group is over. gloo's
wait for a message can't be made of short ones (one that times out closes the group), so another thread has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from paceline.collectives.in_time import GivenUpError, in_time
from paceline.errors import PacelineError, WorldError
from paceline.world.waiting import Waiting

LOOK_UP_EVERY_S = 0.1
LONGER_S = 5.0
"""What a wait on another thread is given beyond its own timeout."""


class Handle(Protocol):
    """Something under way that can be waited for."""

    def wait(self) -> None: ...


class Owner(Protocol):
    """The communicator that has started it."""

    timeout_s: float

    @property
    def is_over(self) -> bool: ...

    @property
    def is_quiet(self) -> bool: ...

    def lost(self, error: Exception, doing: str) -> PacelineError: ...

    def raise_if_left(self, vote: int) -> None: ...


class Work:
    """Something under way in c10d whose failure names the peer."""

    def __init__(self, work: Any, owner: Owner, doing: str) -> None:
        self._work, self._owner, self._doing = work, owner, doing
        self.looks_up = False  # while it waits: whether its group is over
        self.is_gloo_message = False  # of a group that may be abandoned
        self.when_done: Callable[[], None] | None = None
        self._done = False  # gloo forgets a message that was waited for, and would wait for another

    def result(self) -> Any:
        """What the operation gave, once it has been waited for."""
        return self._work.result()

    def wait(self, timeout_s: float | None = None) -> None:
        """`timeout_s`: another one than the group's."""
        if not self._done:
            self._wait(timeout_s)
        if self.when_done is not None:
            self.when_done()
            self.when_done = None

    def _wait(self, timeout_s: float | None) -> None:
        try:
            with Waiting():
                self._wait_in_c10d(timeout_s)
        except (RuntimeError, TimeoutError, WorldError) as error:
            raise self._owner.lost(error, self._doing) from error
        self._done = True

    def _wait_in_c10d(self, timeout_s: float | None) -> None:
        if timeout_s is not None:
            self._work.wait(timedelta(seconds=timeout_s))
        elif self.is_gloo_message:
            _wait_for_messages([self])
        elif self.looks_up:
            self._wait_and_look_up()
        else:
            self._work.wait()

    def _wait_and_look_up(self) -> None:
        """In a group that is over gloo was seen to wait on, once in a while, for connections that are shut down."""
        deadline = time.monotonic() + self._owner.timeout_s
        while not self._work.is_completed():
            try:
                self._work.wait(timedelta(seconds=LOOK_UP_EVERY_S))
            except RuntimeError:
                if self._work.is_completed() or self._owner.is_quiet or time.monotonic() > deadline:
                    raise
        self._work.wait()

    def wait_for_vote(self, vote: int, look_every_s: float = 0.5) -> None:
        """Wait for ballot number `vote`, and look at the peers' notes while it takes long."""
        with Waiting():
            self._wait_for_vote(vote, look_every_s)
        self.wait()

    def _wait_for_vote(self, vote: int, look_every_s: float) -> None:
        begun = looked_at = time.monotonic()
        while not self._work.is_completed():
            try:
                self._work.wait(timedelta(seconds=LOOK_UP_EVERY_S))
            except RuntimeError as error:
                now = time.monotonic()
                if self._work.is_completed() or self._owner.is_quiet or now - begun > self._owner.timeout_s:
                    raise self._owner.lost(error, self._doing) from error
                if now - looked_at < look_every_s:
                    continue
                looked_at = now
                try:
                    self._owner.raise_if_left(vote)
                except WorldError as lost:  # the store knows of a new generation already
                    raise self._owner.lost(lost, self._doing) from error


class Done(Work):
    """Something that was over as soon as it began: what a worker without peers waits for."""

    def __init__(self, result: Any = None) -> None:
        self._result = result
        self.is_gloo_message = False

    def result(self) -> Any:
        return self._result

    def wait(self, timeout_s: float | None = None) -> None:
        """At once."""

    def wait_for_vote(self, vote: int, look_every_s: float = 0.5) -> None:
        """At once."""


def wait_all(handles: Sequence[Handle]) -> None:
    messages = [work for work in handles if isinstance(work, Work) and work.is_gloo_message and not work._done]
    if len(messages) > 1:  # lent to the other thread once
        try:
            with Waiting():
                _wait_for_messages(messages)
        except (RuntimeError, TimeoutError, WorldError) as error:
            late = next((work for work in messages if not work._done), messages[-1])
            raise late._owner.lost(error, late._doing) from error
    for handle in handles:
        handle.wait()


def _wait_for_messages(works: Sequence[Work]) -> None:
    """All of one group. It is told how long: by itself gloo waits as long as for the peers when it built the group."""
    owner = works[0]._owner
    if owner.is_quiet:
        raise GivenUpError("its group is over")

    def wait() -> None:
        for work in works:
            work._work.wait(timedelta(seconds=owner.timeout_s))
            work._done = True

    in_time(wait, owner.timeout_s + LONGER_S, works[0]._doing, given_up=lambda: owner.is_quiet)
