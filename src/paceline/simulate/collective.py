"""A collective on a network: when each worker begins goes in, when each is done comes out.

    schedule ─► rounds ─► beats ─► what each link carries in a beat ─► how long each message takes ─► workers' clocks

A beat is what the executor works on at once: a hop, or where chunks are cut into segments those hops of several
segments that follow each other SKEW beats apart. In a beat

    a message is there   a latency after its sender has done the beat before. In segments the next hop is SKEW beats
                         away and receives are posted ahead, so that a beat has its part of the latency
    it then takes        further messages at its ends + bytes of the fullest link on its way / bandwidth
    a worker is done     when all it receives is in, which begins once its own beat before is done, and all it sends
                         could have left

What is on a link in the same beat shares it, whenever inside the beat it begins; no message is slowed by those of other
beats. Beats that are alike and rings of any length are taken in one step (`ring_time`), and a direct exchange by
levels, so that work grows with the workers and not with the messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.collectives.executor import SKEW
from paceline.collectives.rounds import Everyone, Pairs, Pattern, Ranks, Ring, Round
from paceline.collectives.schedule import Schedule
from paceline.errors import ConfigError
from paceline.simulate.network import Placed
from paceline.simulate.ring_time import Times, after_hops

STEADY = 1e-12
MOST_BY_HOPS = 1024
"""Ranks of a schedule that has no rounds: its hops are asked for rank by rank."""


@dataclass(frozen=True)
class Load:
    """`messages` of `nbytes` each between every two ranks of a pattern, at once."""

    pattern: Pattern
    messages: float
    nbytes: float


Beat = tuple[Load, ...]
Counts = tuple[float, ...]

LONG = 8
"""Turns of two kinds of beats from which on they are taken at their mean: a ring whose segments are odd in number."""


def rounds_of(schedule: Schedule, size: int) -> list[list[Round]]:
    """For each hop, or several that are alike, what is sent in it."""
    if schedule.rounds is not None:
        return [[each] for each in schedule.rounds(size) if each.times]
    if size > MOST_BY_HOPS:
        raise ConfigError(
            f"algorithm={schedule.name!r} with {size:,} workers: it is described rank by rank, which is followed up to "
            f"{MOST_BY_HOPS:,}; choose fewer, or hosts of equal size"
        )
    hops = zip(*(schedule.hops(rank, size) for rank in range(size)), strict=True)
    found = []
    for together in hops:
        sent: dict[int, list[tuple[int, int]]] = {}
        for rank, hop in enumerate(together):
            for send in hop.sends:
                sent.setdefault(len(send.chunks), []).append((rank, send.to))
        rounds = []
        for chunks, pairs in sorted(sent.items()):
            sources, targets = (np.asarray(ranks, dtype=np.int64) for ranks in zip(*pairs, strict=True))
            rounds.append(Round(Pairs(sources, targets), chunks))
        found.append(rounds)
    return found


def beats_of(
    rounds: Sequence[Sequence[Round]], chunk_bytes: float, segment_bytes: float | None
) -> Iterator[tuple[Beat, int]]:
    """Beats, each with how often it comes in a row. None: chunks are not cut."""
    segments = 1 if segment_bytes is None else max(1, int(-(-chunk_bytes // segment_bytes)))
    ends = list(itertools.accumulate(together[0].times if together else 1 for together in rounds))
    spans = list(zip([0, *ends[:-1]], ends, rounds, strict=True))
    if segments == 1:
        for first, end, together in spans:
            yield tuple(Load(each.pattern, 1, each.chunks * chunk_bytes) for each in together), end - first
        return

    def under_way(beat: int) -> Counts:
        """Hops of each span that this beat works on."""
        low, high = -((segments - 1 - beat) // SKEW), beat // SKEW
        return tuple(max(0, min(high + 1, end) - max(low, first)) for first, end, _ in spans)

    made: dict[Counts, Beat] = {}
    for counts, times in _smoothed(map(under_way, range(segments + SKEW * (ends[-1] - 1)))):
        if counts not in made:
            made[counts] = tuple(
                Load(each.pattern, count, each.chunks * chunk_bytes / segments)
                for count, (_, _, together) in zip(counts, spans, strict=True)
                if count
                for each in together
            )
        yield made[counts], times


def _smoothed(beats: Iterable[Counts]) -> Iterator[tuple[Counts, int]]:
    """Beats that are alike as one; of a long run in which two kinds take turns, so many of their mean."""
    runs = [(counts, sum(1 for _ in group)) for counts, group in itertools.groupby(beats)]
    here = 0
    while here < len(runs):
        end = here
        while end < len(runs) and runs[end] == (runs[here + (end - here) % 2][0], 1):
            end += 1
        turns = (end - here) // 2
        if turns < LONG:
            yield runs[here]
            here += 1
            continue
        mean = tuple((a + b) / 2 for a, b in zip(runs[here][0], runs[here + 1][0], strict=True))
        yield mean, 2 * turns
        here += 2 * turns


class Traffic:
    """Of one beat: bytes on every link in each direction, and messages that every rank starts and takes in."""

    def __init__(self, beat: Beat, placed: Placed) -> None:
        levels = range(len(placed.levels))
        count = [int(links.max()) + 1 if len(links) else 0 for links in placed.links]
        self.placed = placed
        self.out = [np.zeros(count[level]) for level in levels]
        self.into = [np.zeros(count[level]) for level in levels]
        self.started, self.taken = np.zeros(placed.ranks), np.zeros(placed.ranks)
        for load in beat:
            if isinstance(load.pattern, Everyone):
                self._add_everyone(load, load.pattern.members)
            else:
                self._add(load, *load.pattern.messages())

    def _add(self, load: Load, sources: Ranks, targets: Ranks) -> None:
        nbytes = load.messages * load.nbytes
        for level, links in enumerate(self.placed.links):
            a, b = links[sources], links[targets]
            crosses = a != b
            self.out[level] += nbytes * np.bincount(a[crosses], minlength=len(self.out[level]))
            self.into[level] += nbytes * np.bincount(b[crosses], minlength=len(self.into[level]))
        self.started += load.messages * np.bincount(sources, minlength=len(self.started))
        self.taken += load.messages * np.bincount(targets, minlength=len(self.taken))

    def _add_everyone(self, load: Load, members: Ranks) -> None:
        rows, size = members.shape
        nbytes = load.messages * load.nbytes
        for level, links in enumerate(self.placed.links):
            count = len(self.out[level])
            key, inside = np.unique(links[members] + count * np.arange(rows)[:, None], return_counts=True)
            moved = nbytes * np.bincount(key % count, weights=inside * (size - inside), minlength=count)
            self.out[level] += moved
            self.into[level] += moved
        for messages in (self.started, self.taken):
            np.add.at(messages, members.ravel(), load.messages * (size - 1.0))

    def durations(self, sources: Ranks, targets: Ranks) -> tuple[Times, Times]:
        """Of messages between these: until they are there, and while they come. 0 between ranks at one place."""
        placed = self.placed
        queued, further, latency = np.zeros((3, len(sources)))
        together = np.maximum(self.started[sources], self.taken[targets]) - 1
        for level, links in enumerate(placed.links):
            a, b = links[sources], links[targets]
            crosses = a != b
            carried = np.maximum(self.out[level][a], self.into[level][b]) / placed.bandwidths[level]
            queued = np.where(crosses, np.maximum(queued, carried), queued)
            about = placed.levels[level]
            latency = np.where(crosses, about.latency_s, latency)
            further = np.where(crosses, together * about.message_s, further)
        return latency, further + queued

    def by_level(self, messages: float) -> tuple[Times, Times]:
        """The same of a message whose highest level this is, where all links of a level carry as much."""
        found: list[float] = []
        queued = 0.0
        for level, about in enumerate(self.placed.levels):
            fullest = max(float(self.out[level].max(initial=0.0)), float(self.into[level].max(initial=0.0)))
            queued = max(queued, fullest / self.placed.bandwidths[level])
            found.append((messages - 1) * about.message_s + queued)
        return np.asarray([about.latency_s for about in self.placed.levels]), np.asarray(found)


class BeatTime:
    """One beat on a network, ready to be applied to any clocks."""

    def __init__(self, beat: Beat, placed: Placed, latency_share: float = 1.0) -> None:
        traffic = Traffic(beat, placed)
        self.traffic = traffic
        self._parts: list[_Messages | _Direct] = []
        for load in beat:
            if isinstance(load.pattern, Everyone):
                messages = float(max(traffic.started.max(), traffic.taken.max()))
                latency, takes = traffic.by_level(messages)
                self._parts.append(_Direct(load.pattern.members, latency_share * latency, takes, placed))
            else:
                ends = load.pattern.messages()
                latency, takes = traffic.durations(*ends)
                self._parts.append(_Messages(*ends, latency_share * latency, takes))
        self._ring = beat[0].pattern if len(beat) == 1 and isinstance(beat[0].pattern, Ring) else None

    def apply(self, clocks: Times, times: int) -> Times:
        if self._ring is not None:
            (part,) = self._parts
            assert isinstance(part, _Messages)
            return _around(clocks, self._ring.members, part.latency, part.takes, times)
        for turn in range(times):
            done = clocks.copy()
            for part in self._parts:
                part.pass_on(clocks, done)
            later = done - clocks
            clocks = done
            most = float(later.max())
            if times > 2 and most - float(later.min()) <= STEADY * most:
                return done + most * (times - 1 - turn)  # every clock moves on as far: so it will from here on
        return clocks


def _around(clocks: Times, members: Ranks, latency: Times, takes: Times, times: int) -> Times:
    """`latency` and `takes` are of each member's message to the next one."""
    takes, latency = takes.reshape(members.shape), latency.reshape(members.shape)
    taken = np.roll(takes, 1, axis=1)
    move = np.roll(latency, 1, axis=1) + taken
    done = clocks.copy()
    done[members] = after_hops(clocks[members], move, np.maximum(taken, takes), times)
    return done


@dataclass(frozen=True)
class _Messages:
    sources: Ranks
    targets: Ranks
    latency: Times
    takes: Times

    def pass_on(self, clocks: Times, done: Times) -> None:
        sent = clocks[self.sources]
        np.maximum.at(done, self.targets, np.maximum(sent + self.latency, clocks[self.targets]) + self.takes)
        np.maximum.at(done, self.sources, sent + self.takes)


class _Direct:
    """Every member of a row waits for the last of the others, by how far they are."""

    def __init__(self, members: Ranks, latency: Times, takes: Times, placed: Placed) -> None:
        self._members, self._latency, self._takes = members, latency, takes
        self._levels = []
        rows = np.arange(len(members))[:, None]
        for level in range(len(takes)):
            inner = placed.links[level][members]
            outer = placed.links[level + 1][members] if level + 1 < len(takes) else np.zeros_like(inner)
            self._levels.append(_Elsewhere(inner + (inner.max() + 1) * rows, outer + (outer.max() + 1) * rows))

    def pass_on(self, clocks: Times, done: Times) -> None:
        mine = clocks[self._members].ravel()
        found = done[self._members].ravel()
        for elsewhere, latency, takes in zip(self._levels, self._latency, self._takes, strict=True):
            if elsewhere.any:
                others = elsewhere.latest(mine)  # -inf where there are none, and then it is no later than `mine`
                there = np.maximum(mine, others + latency) + takes
                found = np.where(others > -np.inf, np.maximum(found, there), found)
        done[self._members] = found.reshape(self._members.shape)


class _Elsewhere:
    """The latest clock among those of the same far group that are not in the same near group."""

    def __init__(self, near: Ranks, far: Ranks) -> None:
        _, self._near, size = np.unique(near.ravel(), return_inverse=True, return_counts=True)
        _, self._far = np.unique(far.ravel(), return_inverse=True)
        self._order = np.argsort(self._near, kind="stable")
        self._starts = np.concatenate([[0], size.cumsum()[:-1]])
        self._group = np.empty(len(size), dtype=np.int64)
        self._group[self._near] = self._far
        self.any = int(np.bincount(self._group).max()) > 1

    def latest(self, clocks: Times) -> Times:
        latest = np.maximum.reduceat(clocks[self._order], self._starts)
        first = np.full(int(self._group.max()) + 1, -np.inf)
        np.maximum.at(first, self._group, latest)
        holder = np.empty(len(first), dtype=np.int64)
        has_it = np.flatnonzero(latest == first[self._group])
        holder[self._group[has_it]] = has_it  # of several one
        latest[holder] = -np.inf
        second = np.full(len(first), -np.inf)
        np.maximum.at(second, self._group, latest)
        elsewhere = first[self._group]
        elsewhere[holder] = second
        return elsewhere[self._near]


class Collective:
    """One collective of `nbytes`, ready to be run again and again."""

    def __init__(self, beats: Sequence[tuple[Beat, int]], placed: Placed, latency_share: float = 1.0) -> None:
        made: dict[int, BeatTime] = {}  # by id: beats that are alike are one object
        self._beats: list[tuple[BeatTime, int]] = []
        for beat, times in beats:
            if beat:
                found = made.get(id(beat)) or made.setdefault(id(beat), BeatTime(beat, placed, latency_share))
                self._beats.append((found, times))
        self._placed = placed

    @classmethod
    def of(
        cls, schedule: Schedule, size: int, nbytes: float, placed: Placed, segment_bytes: float | None
    ) -> Collective:
        if size == 1:
            return cls([], placed)
        chunk_bytes = nbytes / schedule.chunks(size)
        cut = segment_bytes is not None and chunk_bytes > segment_bytes
        beats = list(beats_of(rounds_of(schedule, size), chunk_bytes, segment_bytes))
        return cls(beats, placed, 1 / SKEW if cut else 1.0)

    def run(self, clocks: Times) -> Times:
        if clocks[0] == clocks.max() == clocks.min():
            return clocks + self._together
        return self._run(clocks)

    def _run(self, clocks: Times) -> Times:
        if self._beats:
            clocks = clocks + self._placed.network.call_s
        for beat, times in self._beats:
            clocks = beat.apply(clocks, times)
        return clocks

    @cached_property
    def _together(self) -> Times:
        """When each is done, if all begin at 0."""
        return self._run(np.zeros(self._placed.ranks))

    @property
    def seconds(self) -> float:
        """When all begin together, until the last is done."""
        return float(self._together.max())

    def link_bytes(self, level: int) -> tuple[Times, Times]:
        """Sent and received over each link of a level, in all."""
        out = sum((times * beat.traffic.out[level] for beat, times in self._beats), np.zeros(1))
        into = sum((times * beat.traffic.into[level] for beat, times in self._beats), np.zeros(1))
        return out, into
