"""Calls that can't be interrupted, left behind when they take too long, or when nobody needs them any more.

gloo builds and takes apart its groups in C++, and waits for messages there. After a peer died in the middle of a build
it was seen to stay for good, a few times in a thousand; and of a message that had come or left in part when the
connection broke nobody tells the one who waits, who stays until the timeout. The thread that is stuck in such a call
stays behind, asleep.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_EVERY_S = 0.02


class GivenUpError(TimeoutError):
    """The call was left behind because its result is needed no more."""


def in_time(call: Callable[[], T], seconds: float, what: str, given_up: Callable[[], bool] | None = None) -> T:
    """What the call gives or raises; TimeoutError if it takes longer, or as soon as `given_up` says so."""
    job = _Job(call)
    _lend_thread(job)
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        if job.done.wait(left if given_up is None else min(left, LOOK_EVERY_S)):
            break
        if given_up is not None and given_up():
            raise GivenUpError(f"{what} was given up")
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} took longer than {seconds:g} s")
    if job.error is not None:
        raise job.error
    result: T = job.result
    return result


class _Job:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call: Callable[[], Any] | None = call
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


_idle: list[queue.SimpleQueue[_Job]] = []
"""Threads that wait for a call: to lend one takes some 25 µs, to start one several times that."""
os.register_at_fork(after_in_child=_idle.clear)


def _lend_thread(job: _Job) -> None:
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), name="paceline-in-time", daemon=True).start()
    jobs.put(job)


def _serve(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        job = jobs.get()
        assert job.call is not None
        try:
            job.result = job.call()
        except BaseException as error:
            job.error = error
        job.call = None  # whoever was left behind holds nothing
        _idle.append(jobs)
        job.done.set()
        del job
