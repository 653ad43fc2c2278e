"""Connections of whoever has not proved yet that it belongs to the job: short lines, a short time, and few of them.

    stranger ── at most LINE_LIMIT bytes, within PROOF_S ──▶ knows the secret?  ── yes ──▶ one of us
                                                                                └─ no ───▶ dropped, and seldom a line

Where there are more than MOST_STRANGERS, the oldest of the address that has most of them goes: an honest host proves
itself within milliseconds, and a crowd from elsewhere does not keep it out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

LINE_LIMIT = 4 * 2**10
PROOF_S = 10.0
MOST_STRANGERS = 128

SAY_EVERY_S = 60.0
MOST_SOURCES = 16

Connection = TypeVar("Connection")


def first_to_go(strangers: Mapping[Connection, str]) -> Connection:
    """Of connections in the order in which they came, with their addresses."""
    crowd = Counter(strangers.values())
    most = max(crowd.values())
    return next(connection for connection, address in strangers.items() if crowd[address] == most)


class SeldomSaid:
    """Lines about what others do: one per source and minute, and of so many sources, whatever they do."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._said: dict[str, tuple[float, int]] = {}  # when, and how many were left out since

    def __call__(self, source: str, line: str) -> None:
        now = self._clock()
        if source not in self._said and len(self._said) >= MOST_SOURCES:
            self._said = {one: known for one, known in self._said.items() if now - known[0] < SAY_EVERY_S}
            if len(self._said) >= MOST_SOURCES:
                return  # the lines about the others tell what goes on
        at, left_out = self._said.get(source, (float("-inf"), 0))
        if now - at < SAY_EVERY_S:
            self._said[source] = at, left_out + 1
            return
        self._said[source] = now, 0
        self._say(f"{line} ({left_out:,} more since the last such line)" if left_out else line)
