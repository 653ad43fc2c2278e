"""An order in which one process does again what many did at once: every gradient from the weights that it was made of.

    log      key 0   ← (round 0, lane 1) ← (0, 0) ← (1, 1)        (0, 0) read versions 0 and 0
             key 1   ← (round 0, lane 0) ← (0, 1) ← (1, 1)        (0, 1) read versions 0 and 1;   (1, 1) read 1 and 2

    order    turn    compute    then apply              kept for later
             1       (0, 0)     key 1: version 1        gradient of (0, 0) for key 0
             2       (0, 1)     key 0: 1, 2; key 1: 2   version 1 of key 0, which (1, 1) will read
             3       (1, 1)     key 0: 3; key 1: 3      –

Every key has its order of applications, and an item (a round and a lane) must follow the applications that made what it
read. An item is computed only when some key has nothing else to go on with, and its gradient is applied as soon as its
turn comes: so old versions, which items share, are kept rather than gradients, which they don't, and a version only
until its last reader is computed. While there is an order this finds one: keys that can't go on would otherwise wait
for each other in a circle.

A push that was dropped made no version, but its item ran: it has a turn all the same, since buffers such as BatchNorm's
went on from it.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import CheckpointError
from paceline.parameter_server.update_log import Applied, RecordedRun

KeyVersion = tuple[int, int]


@dataclass(frozen=True, order=True, slots=True)
class Item:
    """One lane's work of one round, and who did it."""

    round: int
    lane: int
    worker: int

    def __str__(self) -> str:
        return f"round {self.round}, lane {self.lane} of worker {self.worker}"


@dataclass(frozen=True, slots=True)
class Application:
    """A gradient becomes an update of one key."""

    record: Applied
    version: int  # that it makes
    keep_old: bool  # an item that is computed later read the version before it: copy that first


@dataclass(frozen=True, slots=True)
class Turn:
    """Compute one item from the versions it read, then apply what can be applied."""

    item: Item
    reads: Mapping[int, int]
    keys: tuple[int, ...]  # those whose gradient is applied, now or in a later turn; the others' are not needed
    forget: tuple[KeyVersion, ...]  # copies that no item reads after this one
    applications: tuple[Application, ...]


def replay_order(run: RecordedRun) -> tuple[Turn, ...]:
    """The order for this log; CheckpointError when there is none. Pushes that were dropped are applied nowhere."""
    reads = _reads_by_item(run)
    _check_updates(run, reads)
    _check_versions(run, reads)
    return _Planner(reads, run.applied).plan()


def item_of(record: Applied) -> Item:
    return Item(record.round, record.lane, record.worker)


class _Planner:
    """Walks the orders of all keys at once, one item at a time."""

    def __init__(self, reads: Mapping[Item, Mapping[int, int]], updates: Mapping[int, Sequence[Applied]]) -> None:
        self._reads, self._updates = reads, updates
        self._version = dict.fromkeys(updates, 0)
        self._place = dict.fromkeys(updates, 0)  # in the key's records, the dropped ones included
        self._keys_of: dict[Item, list[int]] = defaultdict(list)
        for key, queue in updates.items():
            for record in queue:
                self._keys_of[item_of(record)] += [] if record.outcome.dropped else [key]
        self._computed: set[Item] = set()
        self._readers: Counter[KeyVersion] = Counter()  # items that are not computed yet, by what they read
        self._missing: dict[Item, int] = {}  # how many versions that it read do not exist yet
        self._waiting: dict[KeyVersion, list[Item]] = defaultdict(list)
        for item in self._keys_of:
            later = [place for place in reads[item].items() if place[1] > 0]
            self._missing[item] = len(later)
            self._readers.update(reads[item].items())
            for place in later:
                self._waiting[place].append(item)
        self._wanted_by: dict[Item, list[int]] = {}  # the keys that can't go on without it
        self._ready: list[Item] = []  # those wanted that can be computed

    def plan(self) -> tuple[Turn, ...]:
        for key in self._updates:
            self._go_on(key)
        turns = []
        while self._ready:
            turns.append(self._turn(heapq.heappop(self._ready)))
        if any(self._place[key] < len(queue) for key, queue in self._updates.items()):
            raise CheckpointError(f"the log has no order: {self._circle()}; lines are missing, or of another run")
        return tuple(turns)

    def _turn(self, item: Item) -> Turn:
        self._computed.add(item)
        reads = self._reads[item]
        self._readers.subtract(reads.items())
        forget = tuple(
            (key, version)
            for key, version in reads.items()
            if not self._readers[key, version] and version < self._version[key]
        )
        applications = tuple(step for key in self._wanted_by.pop(item) for step in self._go_on(key))
        return Turn(item, reads, tuple(self._keys_of[item]), forget, applications)

    def _go_on(self, key: int) -> list[Application]:
        """Apply to the key what is computed, up to an item that is not: that is wanted from now on."""
        done = []
        while self._place[key] < len(self._updates[key]):
            record = self._updates[key][self._place[key]]
            if item_of(record) not in self._computed:
                self._want(item_of(record), key)
                break
            self._place[key] += 1
            if not record.outcome.dropped:
                done.append(self._apply(key, record))
        return done

    def _want(self, item: Item, key: int) -> None:
        if item not in self._wanted_by and not self._missing[item]:
            heapq.heappush(self._ready, item)
        self._wanted_by.setdefault(item, []).append(key)

    def _apply(self, key: int, record: Applied) -> Application:
        old = self._version[key]
        keep_old = self._readers[key, old] > 0
        self._version[key] = old + 1
        for item in self._waiting.pop((key, old + 1), ()):
            self._missing[item] -= 1
            if not self._missing[item] and item in self._wanted_by:
                heapq.heappush(self._ready, item)
        return Application(record, old + 1, keep_old)

    def _circle(self) -> str:
        """Which keys wait for each other."""
        key = next(key for key, queue in self._updates.items() if self._place[key] < len(queue))
        seen: list[int] = []
        steps: list[str] = []
        while key not in seen:
            seen.append(key)
            item = item_of(self._updates[key][self._place[key]])
            other, version = next(place for place in self._reads[item].items() if place[1] > self._version[place[0]])
            steps.append(
                f"after version {self._version[key]} key {key} has the gradient of {item}, "
                f"which read version {version} of key {other}"
            )
            key = other
        return "; ".join(steps[seen.index(key) :])


# -- what is wrong with a log ------------------------------------------------------------------------------------------


def _reads_by_item(run: RecordedRun) -> dict[Item, Mapping[int, int]]:
    reads: dict[Item, Mapping[int, int]] = {}
    for read in run.reads:
        for lane in read.lanes:
            item = Item(read.round, lane, read.worker)
            if item in reads:
                raise CheckpointError(f"the log of worker {read.worker} has {item} twice; lines are of another run")
            reads[item] = read.versions
    return reads


def _check_updates(run: RecordedRun, reads: Mapping[Item, object]) -> None:
    for key, records in run.applied.items():
        seen: dict[tuple[int, int], int] = {}
        for record in records:
            where = f"server {record.server}, key {key}, application {record.order}"
            whose = f"round {record.round}, lane {record.lane}"
            first = seen.setdefault((record.round, record.lane), record.order)
            if first != record.order:
                raise CheckpointError(
                    f"{where}: the gradient of {whose} was there already as application {first}; "
                    "it may be applied once: the log is of two runs, or the server has a fault"
                )
            if item_of(record) not in reads:
                raise CheckpointError(
                    f"{where}: no worker's log says from which weights the gradient of {whose} was computed; "
                    "lines of it are missing"
                )


def _check_versions(run: RecordedRun, reads: Mapping[Item, Mapping[int, int]]) -> None:
    made = {key: sum(not record.outcome.dropped for record in records) for key, records in run.applied.items()}
    for item, versions in reads.items():
        for key, version in versions.items():
            if version > made[key]:
                raise CheckpointError(
                    f"{item} read version {version} of key {key}, but its server's log has {made[key]} "
                    "updates; lines of it are missing"
                )
