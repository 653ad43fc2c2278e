"""Calls that can't be interrupted, left behind when they take too long.

gloo builds and takes apart its groups in C++, without a timeout of its own there: after a peer died in the middle of
either it was seen to stay for good, a few times in a thousand. The thread that is stuck in it stays behind, asleep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_time(call: Callable[[], T], seconds: float, what: str) -> T:
    """What the call gives or raises; TimeoutError if it takes longer."""
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="paceline-in-time", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise TimeoutError(f"{what} took longer than {seconds:g} s")
    return found[0]
