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
class Update:
    """One record of a key, and the items whose gradients it has."""

    record: Applied
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Application:
    record: Applied
    version: int  # that it makes
    keep_old: bool  # an item that is computed later read the version before it: copy that first


@dataclass(frozen=True, slots=True)
class Turn:
    """Compute one item from the versions it read, then apply what can be applied."""

    item: Item
    reads: Mapping[int, int]
    keys: tuple[int, ...]  # those whose gradient is applied, now or in a later turn; the others' are not needed
    forget: tuple[KeyVersion, ...]  # copies that nobody reads after this item
    applications: tuple[Application, ...]


def replay_order(run: RecordedRun) -> tuple[Turn, ...]:
    """The order for this log; CheckpointError when there is none. Pushes that were dropped are applied nowhere."""
    reads = _reads_by_item(run)
    updates = _updates_by_key(run, reads)
    _check_versions(reads, updates)
    return _Planner(reads, updates).plan()


class _Planner:
    """Walks the orders of all keys at once, one item at a time."""

    def __init__(self, reads: Mapping[Item, Mapping[int, int]], updates: Mapping[int, Sequence[Update]]) -> None:
        self._reads, self._updates = reads, updates
        self._version = dict.fromkeys(updates, 0)
        self._place = dict.fromkeys(updates, 0)  # in the key's records, the dropped ones included
        self._keys_of: dict[Item, list[int]] = defaultdict(list)
        for key, queue in updates.items():
            for update in queue:
                for item in update.items:
                    self._keys_of[item] += [] if update.record.outcome.dropped else [key]
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
        """Apply to the key what is computed, up to an update that lacks an item: that is wanted from now on."""
        done = []
        while self._place[key] < len(self._updates[key]):
            update = self._updates[key][self._place[key]]
            lacking = self._lacking(update)
            if lacking is not None:
                self._want(lacking, key)
                break
            self._place[key] += 1
            if not update.record.outcome.dropped:
                done.append(self._apply(key, update))
        return done

    def _lacking(self, update: Update) -> Item | None:
        return next((item for item in update.items if item not in self._computed), None)

    def _want(self, item: Item, key: int) -> None:
        if item not in self._wanted_by and not self._missing[item]:
            heapq.heappush(self._ready, item)
        self._wanted_by.setdefault(item, []).append(key)

    def _apply(self, key: int, update: Update) -> Application:
        old = self._version[key]
        keep_old = self._readers[key, old] > 0
        self._version[key] = old + 1
        for item in self._waiting.pop((key, old + 1), ()):
            self._missing[item] -= 1
            if not self._missing[item] and item in self._wanted_by:
                heapq.heappush(self._ready, item)
        return Application(update.record, old + 1, keep_old)

    def _circle(self) -> str:
        """Which keys wait for each other."""
        key = next(key for key, queue in self._updates.items() if self._place[key] < len(queue))
        seen: list[int] = []
        said: list[str] = []
        while key not in seen:
            seen.append(key)
            item = self._lacking(self._updates[key][self._place[key]])
            assert item is not None, "an update whose items are computed would have been applied"
            other, version = next(place for place in self._reads[item].items() if place[1] > self._version[place[0]])
            said.append(
                f"after version {self._version[key]} key {key} has the gradient of {item}, "
                f"which read version {version} of key {other}"
            )
            key = other
        return "; ".join(said[seen.index(key) :])


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


def _updates_by_key(run: RecordedRun, reads: Mapping[Item, object]) -> dict[int, list[Update]]:
    rounds: dict[int, list[Item]] = defaultdict(list)
    for item in reads:
        rounds[item.round].append(item)
    updates: dict[int, list[Update]] = {}
    for key, records in run.applied.items():
        updates[key] = []
        seen: dict[tuple[int, int | None], int] = {}
        for record in records:
            where = f"server {record.server}, key {key}, application {record.order}"
            whose = f"round {record.round}" + ("" if record.lane is None else f", lane {record.lane}")
            first = seen.setdefault((record.round, record.lane), record.order)
            if first != record.order:
                raise CheckpointError(
                    f"{where}: the gradient of {whose} was there already as application {first}; "
                    "it may be applied once: the log is of two runs, or the server has a fault"
                )
            if record.lane is None or record.worker is None:
                items = tuple(sorted(rounds[record.round]))
            else:
                item = Item(record.round, record.lane, record.worker)
                items = (item,) if item in reads else ()
            if not items:
                raise CheckpointError(
                    f"{where}: no worker's log says from which weights the gradient of {whose} was computed; "
                    "lines of it are missing"
                )
            updates[key].append(Update(record, items))
    return updates


def _check_versions(reads: Mapping[Item, Mapping[int, int]], updates: Mapping[int, Sequence[Update]]) -> None:
    made = {key: sum(not update.record.outcome.dropped for update in queue) for key, queue in updates.items()}
    for item, versions in reads.items():
        for key, version in versions.items():
            if version > made[key]:
                raise CheckpointError(
                    f"{item} read version {version} of key {key}, but its server's log has {made[key]} "
                    "updates; lines of it are missing"
                )
