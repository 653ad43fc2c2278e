"""The pulse between two supervisors of an elastic job: a word every second, and too long a silence ends the link.

    coordinator ── ping ─▶ host 1          host 1 is silent: its workers count as dead, the others go on
                ◀─ ping ──                 the coordinator is silent: host 1 stops its own workers

So of two sides that are cut from each other only the one with the coordinator trains on. A look of our own that comes
late (this process was stopped, or starved) proves nothing about the other side, and the deadline is counted anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline.launch.sealed_link import SealedLink

PING_EVERY_S = 1.0


class Pulse:
    def __init__(self, link: SealedLink, timeout_s: float, clock: Callable[[], float]) -> None:
        self.silence = ""
        """Why the link was closed, once it was."""
        self._link = link
        self._timeout_s = timeout_s
        self._every_s = min(PING_EVERY_S, timeout_s / 4)
        self._clock = clock
        self._heard_at = self._looked_at = clock()

    def heard(self) -> None:
        self._heard_at = self._clock()

    @property
    def is_late(self) -> bool:
        """A word or two are missing; not long enough to give it up."""
        return self._clock() - self._heard_at > 1.5 * self._every_s

    def look(self) -> bool:
        """Whether the other side has been silent for too long."""
        now = self._clock()
        late, self._looked_at = now - self._looked_at > self._every_s + 1.0, now
        if late:
            self._heard_at = now
        return now - self._heard_at > self._timeout_s

    async def keep(self) -> None:
        """Ping until the other side falls silent; then the link is closed, and whoever reads it hears its end."""
        while not self.look():
            self._link.send({"kind": "ping"})
            await asyncio.sleep(self._every_s)
        self.silence = f"nothing was heard from it for {self._timeout_s:g} s"
        self._link.abort()
