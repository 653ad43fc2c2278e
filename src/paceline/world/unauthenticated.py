"""Limits for connections that have not proved the job's secret: short lines, a short time, and few of them.

    peer ── at most LINE_LIMIT bytes, within PROOF_S ──▶ knows the secret?  ── yes ──▶ part of the job
                                                                            └─ no ───▶ dropped; one log line a minute

Where there are more than MOST_CONNECTIONS, the oldest of the address that has most of them is dropped: an honest host
proves the secret within milliseconds, and a crowd from another address does not keep it out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

LINE_LIMIT = 4 * 2**10
PROOF_S = 10.0
MOST_CONNECTIONS = 128

LOG_EVERY_S = 60.0
MOST_SOURCES = 16

Connection = TypeVar("Connection")


def to_drop(connections: Mapping[Connection, str]) -> Connection:
    """Of connections in the order in which they came, with their addresses."""
    crowd = Counter(connections.values())
    most = max(crowd.values())
    return next(connection for connection, address in connections.items() if crowd[address] == most)


class RateLimitedLog:
    """Log lines about unauthenticated peers: one per source and minute, and of MOST_SOURCES sources at most."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._logged: dict[str, tuple[float, int]] = {}  # when, and how many were left out since

    def __call__(self, source: str, line: str) -> None:
        now = self._clock()
        if source not in self._logged and len(self._logged) >= MOST_SOURCES:
            self._logged = {one: known for one, known in self._logged.items() if now - known[0] < LOG_EVERY_S}
            if len(self._logged) >= MOST_SOURCES:
                return  # the lines about the other sources are enough to see what goes on
        at, dropped = self._logged.get(source, (float("-inf"), 0))
        if now - at < LOG_EVERY_S:
            self._logged[source] = at, dropped + 1
            return
        self._logged[source] = now, 0
        self._log(f"{line} ({dropped:,} more since the last such line)" if dropped else line)
