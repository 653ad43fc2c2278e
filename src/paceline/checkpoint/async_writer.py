"""A save in the background: the training thread goes on while a thread writes what it was given.

training   ── snapshot ── step ── step ── step ── step ──
writer                └── write ── flush ── publish ──┘       one at a time
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.errors import CheckpointError


class AsyncWriter:
    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Only when it is not busy."""
        assert not self.busy, "one save at a time"

        def run() -> None:
            try:
                work()
            except CheckpointError as error:
                self._failure = str(error)
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"

        self._thread = threading.Thread(target=run, name="paceline checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Until it is done, or so long; then it is still `busy`."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def take_failure(self) -> str | None:
        """What went wrong since the last call."""
        failure, self._failure = self._failure, None
        return failure
