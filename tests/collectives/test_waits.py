"""A wait that is made of short ones: what ends while a short one times out has ended."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from paceline.collectives.communicator import Communicator, Work
from paceline.errors import GenerationEnded, PeerLostError
from paceline.torch_compat import HashStore
from paceline.world.waiting import TIMED_OUT
from paceline.world.world import ControlSocket, World


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


class NeverEnds:
    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta | None = None) -> None:
        raise RuntimeError("the timeout of 0.1 s ended before the operation did")


def test_a_wait_whose_group_is_over_is_not_told_as_one_that_timed_out() -> None:
    told: list[str] = []

    def lost(cause: Exception, doing: str) -> GenerationEnded:
        told.append(str(cause))
        return GenerationEnded("the workers have changed")

    owner: Any = SimpleNamespace(is_quiet=True, timeout_s=5.0, lost=lost, raise_if_left=lambda vote: None)
    with pytest.raises(GenerationEnded):
        Work(NeverEnds(), cast("Communicator", owner), "in the vote of step 4").wait_for_vote(0)
    assert told == ["its group is over"]
    assert not TIMED_OUT.search(told[0])


def test_a_note_for_which_there_is_no_store_any_more_is_left_out() -> None:
    class GoneStore(HashStore):
        def set(self, key: str, value: Any) -> None:
            raise dist.DistNetworkError("failed to send: Broken pipe")

    world = World(0, 2, rendezvous=ControlSocket("/nowhere"), local_size=2)
    Communicator({}, GoneStore(), world, backend="gloo", timeout_s=1.0).leave_note("it left", votes=3)
