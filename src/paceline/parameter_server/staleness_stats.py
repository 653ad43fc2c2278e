"""What was seen on the way: how stale pushes were, how long workers waited, what moved, and what was not applied.

    server     updates, their delays, duplicates, dropped, queue  ─┐
    worker     rounds, seconds waited at the clock                 ├─► sum ─► a few lines, JSON
    both       bytes to and from each peer                        ─┘

An update is counted for each key and reported for the whole model: N updates of each of K keys are N updates. Nothing
here reads a clock: a caller that waited says for how long.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MOST_BINS = 6
MOST_PEERS = 8


@dataclass(frozen=True)
class StalenessStats:
    """One process's numbers, or the sum of several's: a value, so that it can be kept, added and reported."""

    keys: int = 0  # on this server
    key_updates: int = 0
    delays: Mapping[int, int] = field(default_factory=dict)  # pushes by their delay in rounds, dropped ones too
    duplicates: int = 0
    dropped: int = 0
    rounds: int = 0  # of this worker
    waits: int = 0  # rounds that began with a wait at the clock
    waited_s: float = 0.0
    queue_most: int = 0
    queue_total: int = 0
    queue_looks: int = 0
    sent_bytes: Mapping[str, int] = field(default_factory=dict)  # by peer: "worker 0", "server 1"
    received_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def updates(self) -> float:
        """Of the whole model."""
        return self.key_updates / self.keys if self.keys else 0.0

    @property
    def updates_per_s(self) -> float:
        return self.updates / self.seconds if self.seconds else 0.0

    @property
    def mean_delay(self) -> float:
        pushes = sum(self.delays.values())
        return sum(delay * count for delay, count in self.delays.items()) / pushes if pushes else 0.0

    @property
    def most_delay(self) -> int:
        return max(self.delays, default=0)

    @property
    def queue_mean(self) -> float:
        return self.queue_total / self.queue_looks if self.queue_looks else 0.0

    def __add__(self, other: StalenessStats) -> StalenessStats:
        """Of both processes, which ran side by side."""
        mine, theirs = vars(self), vars(other)
        together = {name: _sum(value, theirs[name]) for name, value in mine.items()}
        together["queue_most"] = max(self.queue_most, other.queue_most)
        together["seconds"] = max(self.seconds, other.seconds)
        return StalenessStats(**together)

    # -- reported ----------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """For the end of a run."""
        ignored = self.duplicates + self.dropped
        rows = [
            ("updates", self.keys, f"{self.updates:,.0f} of the whole model, {self.updates_per_s:,.1f}/s"),
            (
                "staleness",
                self.delays,
                f"{self._bins()} (mean {self.mean_delay:.2f}, at most {self.most_delay} rounds)",
            ),
            ("clock", self.rounds, f"waited {self.waited_s:,.1f} s in {self.waits:,} of {self.rounds:,} rounds"),
            ("queue", self.queue_looks, f"{self.queue_mean:.1f} messages on average, at most {self.queue_most:,}"),
            ("ignored", ignored, f"{self.duplicates:,} duplicates, {self.dropped:,} pushes dropped"),
            ("traffic", self.sent_bytes or self.received_bytes, self._traffic()),
        ]
        return [f"{name:<11}{text}" for name, counted, text in rows if counted]

    def _bins(self) -> str:
        pushes = sum(self.delays.values())
        delays = sorted(self.delays)
        alone = delays if len(delays) <= MOST_BINS else delays[: MOST_BINS - 1]
        bins = {str(delay): self.delays[delay] for delay in alone}
        if len(alone) < len(delays):
            bins[f"{delays[len(alone)]} or more"] = sum(self.delays[delay] for delay in delays[len(alone) :])
        return ", ".join(f"{name}: {100 * count / pushes:.0f} %" for name, count in bins.items())

    def _traffic(self) -> str:
        peers = sorted({*self.sent_bytes, *self.received_bytes}, key=_by_number)
        traffic = [
            f"{_mib(self.sent_bytes.get(peer, 0))} to and {_mib(self.received_bytes.get(peer, 0))} from {peer}"
            for peer in peers[:MOST_PEERS]
        ]
        more = len(peers) - MOST_PEERS
        return "; ".join([*traffic, f"and {more} more"] if more > 0 else traffic)

    def to_json(self) -> dict[str, Any]:
        numbers = asdict(self) | {"delays": {str(delay): count for delay, count in sorted(self.delays.items())}}
        derived = ("updates", "updates_per_s", "mean_delay", "most_delay", "queue_mean")
        return numbers | {name: getattr(self, name) for name in derived}

    @classmethod
    def of_json(cls, numbers: Mapping[str, Any]) -> StalenessStats:
        known = {name: numbers[name] for name in cls.__dataclass_fields__}
        return cls(**known | {"delays": {int(delay): count for delay, count in numbers["delays"].items()}})


def sum_of(stats: Iterable[StalenessStats]) -> StalenessStats:
    return sum(stats, StalenessStats())


class StalenessCounter:
    """Where the threads of one process count."""

    def __init__(self, keys: int = 0) -> None:
        self._lock = threading.Lock()
        self._keys = keys
        self._counts: Counter[str] = Counter()
        self._delays: Counter[int] = Counter()
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._waited_s = 0.0
        self._queue_most = 0

    def applied(self, delay: int) -> None:
        """A key was updated with a gradient this many rounds old."""
        with self._lock:
            self._counts["key_updates"] += 1
            self._delays[delay] += 1

    def dropped(self, delay: int) -> None:
        with self._lock:
            self._counts["dropped"] += 1
            self._delays[delay] += 1

    def duplicate(self) -> None:
        with self._lock:
            self._counts["duplicates"] += 1

    def started_round(self, waited_s: float = 0.0) -> None:
        """A worker began a round, after so much time at the clock."""
        with self._lock:
            self._counts["rounds"] += 1
            self._counts["waits"] += waited_s > 0
            self._waited_s += waited_s

    def queued(self, length: int) -> None:
        """Messages that had arrived and were not handled yet, when the server looked."""
        with self._lock:
            self._counts["queue_total"] += length
            self._counts["queue_looks"] += 1
            self._queue_most = max(self._queue_most, length)

    def sent(self, peer: str, nbytes: int) -> None:
        with self._lock:
            self._sent[peer] += nbytes

    def received(self, peer: str, nbytes: int) -> None:
        with self._lock:
            self._received[peer] += nbytes

    def stats(self, seconds: float) -> StalenessStats:
        """What was counted until now, in so many seconds."""
        with self._lock:
            return StalenessStats(
                keys=self._keys,
                delays=dict(self._delays),
                waited_s=self._waited_s,
                queue_most=self._queue_most,
                sent_bytes=dict(self._sent),
                received_bytes=dict(self._received),
                seconds=seconds,
                **self._counts,
            )


def _sum(mine: Any, theirs: Any) -> Any:
    return dict(Counter(mine) + Counter(theirs)) if isinstance(mine, Mapping) else mine + theirs


def _by_number(peer: str) -> tuple[str, int]:
    role, _, number = peer.partition(" ")
    return role, int(number or 0)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
