"""A worker of an elastic job says nothing: does it compute, or is it stopped?

    heartbeat   heartbeat   ── silence ──▶   a look, a look, …  by the supervisor of its host
                                              it has used a processor since the last one ─▶ told on its behalf
                                              stopped, swapped out, blocked, gone        ─▶ nothing: its deadline comes

A C function that keeps Python's lock lets no thread of its process run Python, the heartbeat's either: a large sort in
an extension, a parser, a tokenizer that was not made for threads. That is no reason to kill a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from paceline.launch.activity import own_processor_seconds
from paceline.launch.decision import Decider

BUSY_SHARE = 0.05
"""Of one processor. Threads that poll stay far below; a computation stays above it, though many share the machine."""
BUSY_S = 0.025
"""At least: the kernel counts in hundredths of a second, and a thread that waits for Python's lock looks up often."""
LOOK_EVERY_S = 0.5


class Vigil:
    """`silence_s` tells how long a process has not been heard."""

    def __init__(
        self,
        timeout_s: float,
        silence_s: Callable[[int], float],
        clock: Callable[[], float],
        used_s: Callable[[int], float | None] = own_processor_seconds,
    ) -> None:
        self._every_s = min(LOOK_EVERY_S, timeout_s / 4)
        self._silence_s, self._clock, self._used_s = silence_s, clock, used_s
        self._seen: dict[int, tuple[float, float]] = {}

    async def keep(self, running: Mapping[int, int], decider: Decider) -> None:
        """Look until cancelled, and tell whoever decides."""
        while True:
            await asyncio.sleep(self._every_s)
            for rank in self.look(running):
                decider.told(rank, "heartbeat", {"computing": True})

    def look(self, running: Mapping[int, int]) -> list[int]:
        """The ranks, of these with their processes, that are silent and have computed since the last look."""
        now = self._clock()
        before, self._seen = self._seen, {}
        for pid in running.values():
            if self._silence_s(pid) >= self._every_s and (used := self._used_s(pid)) is not None:
                self._seen[pid] = (now, used)
        return [rank for rank, pid in running.items() if pid in before and self._worked(pid, *before[pid])]

    def _worked(self, pid: int, since: float, had_used: float) -> bool:
        now, used = self._seen.get(pid, (since, had_used))
        return used - had_used > max(BUSY_S, BUSY_SHARE * (now - since))
