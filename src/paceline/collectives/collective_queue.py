# mypy: disable-error-code="override,assignment"
"""The collective queue: runs operations in the order in which they were asked for, in the caller or in a thread.

    asked for with async_op, or while others are under way ──► the queue's thread        the caller goes on
    asked for to be waited for, with nothing under way     ──► the caller itself         no thread is woken
    asked for by a callback that the queue's thread runs   ──► there, after what came before: no other thread would

A group over shared memory has one for its collectives (shared_memory/group.py). The exchange of gradients has one on
every backend (gradient_exchange.py), for sums of CPU tensors that are made of messages. While a profiler records, all
operations run in the thread, and show as asynchronous events like those of torch's backends.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.errors import CollectiveError
from paceline.torch_compat import begin_record, end_record, never_traced, profiler_enabled


class Event(NamedTuple):
    """What a profiler shows: a name, and the shapes of some tensors."""

    name: str
    tensors: Sequence[Tensor] = ()


_ending = threading.Lock()  # the end of a work and the first question for its future


def _wait_only(work: QueuedWork) -> None:
    """Nothing is done for a work by whoever waits for it."""


class QueuedWork(dist.Work):
    """What c10d calls a work: something under way, whose end and failure can be waited for."""

    def __init__(self, result: list[Any], event: Event) -> None:
        super().__init__()
        self.source = -1
        self._result = result
        self._done = False
        self._gate = threading.Lock()  # taken until the end; an Event would be three objects on the way of every call
        self._gate.acquire()
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None
        self._outcome: Future[list[Any]] | None = None
        self._record = begin_record(event.name, *event.tensors) if profiler_enabled() else None
        self.help = _wait_only  # set by a queue whose thread may come to wait

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        if self._record is not None:  # before a thread that waits can stop the profiler
            end_record(self._record)
            self._record = None
        with _ending:
            self._done = True
            future = self._future
        self._gate.release()
        if future is not None:
            future.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.help(self)
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done:
            if not self._gate.acquire(timeout=seconds if seconds > 0 else -1):
                raise CollectiveError(f"the timeout of {seconds:g} s ended before the operation did")
            self._gate.release()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        return self._result

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[list[Any]]:
        with _ending:
            if self._outcome is None:
                self._future = Future()
                # An exception raised in a callback is an error for C++ too; one that is set is a value to it.
                self._outcome = self._future.then(self._result_or_error)
                done = self._done
            else:
                done = False
        if done and self._future is not None:
            self._future.set_result(None)
        return self._outcome

    def _result_or_error(self, _: Future[Any]) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._result


class CollectiveQueue:
    """Runs operations in order. The thread starts with the first operation that needs it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[tuple[Callable[[], None], QueuedWork]] = deque()
        self._change = threading.Condition()
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    def run(self, operation: Callable[[], None], result: list[Any], event: Event, *, at_once: bool) -> QueuedWork:
        """`at_once`: the caller will wait for it anyway."""
        with self._change:
            if self._closed:
                raise CollectiveError("the group has been shut down")
            work = QueuedWork(result, event)
            work.help = self._help
            here = at_once and not self._busy and not self._jobs and not profiler_enabled()
            if here:
                self._busy = True
            else:
                self._jobs.append((operation, work))
                self._start()
                self._change.notify_all()
        if here:
            self._do(operation, work)
        else:
            self._help(work)
        return work

    def close(self) -> None:
        """Take nothing more on; the thread ends after what is under way."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def join(self, seconds: float) -> bool:
        """Whether the thread, if there was one, has ended."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._closed and (self._busy or not self._jobs):
                    self._change.wait()
                if not self._jobs:
                    return
                operation, work = self._jobs.popleft()
                self._busy = True
            self._do(operation, work)
            del operation, work  # what it moved may be freed

    def _help(self, work: QueuedWork) -> None:
        """Called in the queue's own thread, by a callback that wants `work` to end: do what is waiting up to there."""
        if threading.current_thread() is not self._thread:
            return
        while not work.is_completed():
            with self._change:
                while self._busy:  # a caller's operation
                    self._change.wait()
                if not self._jobs:
                    return
                operation, next_work = self._jobs.popleft()
                self._busy = True
            self._do(operation, next_work)

    def _do(self, operation: Callable[[], None], work: QueuedWork) -> None:
        error: BaseException | None = None
        try:
            with torch.no_grad():
                operation()
        except BaseException as problem:
            error = problem
        with self._change:
            self._busy = False
            self._change.notify_all()
        work.finish(error)


for _one in vars(QueuedWork).values():
    if inspect.isfunction(_one):
        never_traced(_one)  # DDP's C++ calls them in the middle of a compiled forward
