"""Does a worker do anything? Time on a processor (world/processor_time.py) tells a busy worker from a hung one.

`ActivityCheck`, when others have ended: a worker that waits for a peer that has gone uses next to nothing, one that
saves, evaluates or compresses does not. Its children's work counts as its own.

`BusyCheck`, for elastic jobs: a worker misses its heartbeats; does it compute, or is it stopped?

    heartbeat   heartbeat   ── silence ──▶   a check, a check, …  by the supervisor of its host
                                              it used a processor since the last one ─▶ reported as busy
                                              stopped, swapped out, blocked, gone    ─▶ nothing: its deadline comes

A C function that keeps Python's lock lets no thread of its process run Python, the heartbeat's either: a large sort in
an extension, a parser, a tokenizer that was not made for threads. That is no reason to kill a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from paceline.launch.agents import Decider
from paceline.world.processor_time import own_processor_seconds, processor_seconds

IDLE_SHARE = 0.01
"""Of one processor. Waiting with a look every now and then (threads that poll) stays below, work does not."""

BUSY_SHARE = 0.05
"""Of one processor. Threads that poll stay far below; a computation stays above it, though many share the machine."""
BUSY_S = 0.025
"""At least: the kernel counts in hundredths of a second, and a thread that waits for Python's lock looks up often."""
LOOK_EVERY_S = 0.5


class ActivityCheck:
    """Remembers what a worker had used and printed at the last check."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looked_at = float("-inf")
        self._used_s = 0.0
        self._printed = 0

    def seen(self, printed: int, now: float) -> bool:
        """Whether it has done anything since the last check; at the first it has."""
        used_s = processor_seconds(self._pid)
        worked = used_s - self._used_s > IDLE_SHARE * (now - self._looked_at)
        first = self._looked_at == float("-inf")
        active = first or worked or printed != self._printed
        self._looked_at, self._used_s, self._printed = now, used_s, printed
        return active


class BusyCheck:
    """`silence_s` gives the time since the last heartbeat of a process."""

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

    async def run(self, running: Mapping[int, int], decider: Decider) -> None:
        """Check until cancelled, and report busy workers."""
        while True:
            await asyncio.sleep(self._every_s)
            for rank in self.check(running):
                decider.report(rank, "heartbeat", {"computing": True})

    def check(self, running: Mapping[int, int]) -> list[int]:
        """The ranks, of these with their process ids, that are silent and have computed since the last check."""
        now = self._clock()
        before, self._seen = self._seen, {}
        for pid in running.values():
            if self._silence_s(pid) >= self._every_s and (used := self._used_s(pid)) is not None:
                self._seen[pid] = (now, used)
        return [rank for rank, pid in running.items() if pid in before and self._worked(pid, *before[pid])]

    def _worked(self, pid: int, since: float, had_used: float) -> bool:
        now, used = self._seen.get(pid, (since, had_used))
        return used - had_used > max(BUSY_S, BUSY_SHARE * (now - since))
