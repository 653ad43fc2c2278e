"""One after the other: a group's operations run in the order in which they were asked for, in the caller or a thread.

asked for with async_op, or while others are under way ──► the line's thread         the caller goes on
asked for to be waited for, with nothing under way     ──► the caller itself         no thread is woken
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from paceline.errors import CollectiveError

LINGER_S = 5.0


class LineWork(dist.Work):
    """What c10d calls a work: something under way, whose end and failure can be waited for."""

    def __init__(self, result: list[Any], *, source: int = -1) -> None:
        super().__init__()
        self._result, self._source = result, source
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: Future[list[Any]] = Future()
        self._deadline_s: float | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done.wait(seconds if seconds > 0 else None):
            raise CollectiveError(f"the operation was not done after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        return self._result

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[list[Any]]:
        return self._future


class WorkLine:
    """Runs operations in order. The thread starts with the first operation that needs it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[tuple[Callable[[], None], LineWork]] = deque()
        self._change = threading.Condition()
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    def run(self, operation: Callable[[], None], result: list[Any], *, at_once: bool) -> LineWork:
        """`at_once`: the caller will wait for it anyway."""
        work = LineWork(result)
        with self._change:
            if self._closed:
                raise CollectiveError("the group has been shut down")
            here = at_once and not self._busy and not self._jobs
            if here:
                self._busy = True
            else:
                self._jobs.append((operation, work))
                self._start()
                self._change.notify_all()
        if here:
            self._do(operation, work)
        return work

    def close(self) -> None:
        """Let what is under way end, and the thread with it."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LINGER_S)

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

    def _do(self, operation: Callable[[], None], work: LineWork) -> None:
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
