"""A wait that is made of short ones: what ends while a short one times out has ended."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.collectives.communicator import Communicator, Work
from paceline.errors import PeerLostError


class EndsAsTheWaitTimesOut:
    """In c10d: not over when it is looked at, over when the short wait has given up; `error` is what it ended with."""

    def __init__(self, error: str | None) -> None:
        self._error, self._over = error, False

    def is_completed(self) -> bool:
        return self._over

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._over:
            self._over = True
            raise RuntimeError("the timeout of 0.1 s ended before the operation did")
        if self._error is not None:
            raise RuntimeError(self._error)


def work(error: str | None) -> Work:
    def lost(cause: Exception, doing: str) -> PeerLostError:
        return PeerLostError(f"{doing}: {cause}")

    owner: Any = SimpleNamespace(is_quiet=False, timeout_s=5.0, lost=lost, raise_if_left=lambda vote: None)
    return Work(EndsAsTheWaitTimesOut(error), cast("Communicator", owner), "in an all-gather")


def test_what_has_ended_well_is_no_loss() -> None:
    work(None).wait_for_vote(0)


def test_what_has_failed_says_why_and_not_that_a_short_wait_timed_out() -> None:
    with pytest.raises(PeerLostError, match="in an all-gather: rank 1 has died"):
        work("rank 1 has died").wait_for_vote(0)
