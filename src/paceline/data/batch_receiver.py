"""A thread that takes the next batch over from the loader processes while the loop works on this one.

    loop       step on batch 1 ▓▓▓▓▓▓▓▓▓▓▓   step on batch 2 ▓▓▓▓▓▓▓▓▓▓▓
    thread      batch 2 ▒▒                    batch 3 ▒▒                        handing over memory takes about 1 ms

torch has such a thread only where it pins memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class BatchReceiver:
    """`ask()` has the thread call `take`; `next()` is what it gave, or raises what it raised."""

    def __init__(self, take: Callable[[], Any]) -> None:
        self._take = take
        self._asks: SimpleQueue[bool] = SimpleQueue()
        self._taken: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-batch-receiver", daemon=True)
        self._thread.start()
        self.asked = False

    def ask(self) -> None:
        self.asked = True
        self._asks.put(True)

    def next(self) -> Any:
        batch, error = self._taken.get()
        self.asked = False
        if error is not None:
            raise error
        return batch

    def stop(self) -> None:
        """Returns when the thread has ended, which a `take` in progress delays."""
        self._asks.put(False)
        if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
            self._thread.join()

    def _run(self) -> None:
        while self._asks.get():
            try:
                self._taken.put((self._take(), None))
            except BaseException as error:
                self._taken.put((None, error))
