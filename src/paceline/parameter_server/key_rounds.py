"""One round of a deterministic clock, collected key by key: roots arrive in any order, the canonical sum comes out.

    OPEN   worker 0: lanes 0 1 2     worker 1: lanes 3 4      all there: the tree, and who is left with which roots
    PUSH   worker 0: roots 0, 2      worker 1: roots 3, 4     nodes, merged "left += right" as soon as both are there
    CLOSE  worker 0: weights, …      worker 1: weights, …     all there: the scale, and nothing is missing

A push's tensor becomes a node of the tree without a copy; a merge adds in place and hands the right one's memory back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from paceline.collectives.canonical_sum import Merge, SumPlan
from paceline.errors import ReplicaError
from paceline.optim.group_settings import GroupSettings
from paceline.parameter_server.key_ranges import KeyTable
from paceline.parameter_server.wire import Close, WireError

Recycle = Callable[[Tensor], None]


class KeySum:
    """The sum of one key in one round, on its way."""

    def __init__(self) -> None:
        self.nodes: dict[int, Tensor] = {}
        self.used = 0
        self._arrived: set[int] = set()
        self._to_merge: list[Merge] | None = None

    def has(self, lane: int) -> bool:
        return lane in self._arrived

    def add(self, lane: int, gradient: Tensor, used: int) -> None:
        self._arrived.add(lane)
        self.nodes[lane] = gradient
        self.used |= used

    def merge(self, plan: SumPlan, recycle: Recycle) -> None:
        """Perform the merges whose two nodes are finished; others wait, and what builds on them."""
        waiting: list[Merge] = []
        unfinished: set[int] = set()
        for merge in plan.between_workers if self._to_merge is None else self._to_merge:
            pair = {merge.left, merge.right}
            if pair <= self.nodes.keys() and not pair & unfinished:
                right = self.nodes.pop(merge.right)
                self.nodes[merge.left].add_(right)
                recycle(right)
            else:
                waiting.append(merge)
                unfinished |= pair
        self._to_merge = waiting

    @property
    def total(self) -> Tensor:
        (total,) = self.nodes.values()
        return total


class Round:
    """What the workers have said of one round."""

    def __init__(self, number: int, workers: int, keys: Iterable[int], recycle: Recycle) -> None:
        self.number = number
        self._workers = workers
        self._recycle = recycle
        self._lanes: dict[int, tuple[int, ...]] = {}
        self._closes: dict[int, Close] = {}
        self._plan: SumPlan | None = None
        self.sums = {key: KeySum() for key in keys}
        self.squares: list[float] | None = None  # of the block norms here, once known

    # -- what arrives ------------------------------------------------------------------------------------------------

    def open(self, worker: int, lanes: tuple[int, ...]) -> bool:
        """False: it was said before."""
        before = self._lanes.get(worker)
        if before is not None and before != lanes:
            raise WireError(f"worker {worker} opened round {self.number} with lanes {before} and now with {lanes}")
        for other, theirs in self._lanes.items():
            both = sorted(set(theirs) & set(lanes)) if other != worker else []
            if both:
                raise ReplicaError(
                    f"lanes {both} of round {self.number} are ridden by worker {other} and by worker {worker}; "
                    "their loaders deal lanes differently"
                )
        self._lanes[worker] = lanes
        if before is None and len(self._lanes) == self._workers:
            holders = tuple(self._lanes[rank] for rank in range(self._workers))
            self._plan = SumPlan(tuple(sorted(lane for held in holders for lane in held)), holders)
            for total in self.sums.values():
                total.merge(self._plan, self._recycle)
        return before is None

    def push(self, worker: int, key: int, lane: int, gradient: Tensor, used: int) -> bool:
        """False: it is here already."""
        total = self.sums[key]
        if total.has(lane):
            return False
        if lane not in self._lanes.get(worker, ()):
            raise WireError(
                f"worker {worker} pushed lane {lane} of round {self.number}, but opened the round with lanes "
                f"{list(self._lanes.get(worker, ()))}"
            )
        total.add(lane, gradient, used)
        if self._plan is not None:
            total.merge(self._plan, self._recycle)
        return True

    def close(self, worker: int, close: Close) -> bool:
        """False: it was said before."""
        if worker in self._closes:
            return False
        lanes = tuple(sorted(lane for lane, _ in close.lanes))
        if lanes != tuple(sorted(self._lanes.get(worker, ()))):
            raise WireError(
                f"worker {worker} closed round {self.number} with lanes {list(lanes)}, but opened it with "
                f"{sorted(self._lanes.get(worker, ()))}"
            )
        self._closes[worker] = close
        return True

    # -- when all is there -------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return len(self._closes) == self._workers

    def missing(self) -> list[int]:
        """The workers that have not closed it."""
        return [worker for worker in range(self._workers) if worker not in self._closes]

    @property
    def said(self) -> Close:
        """What all workers say alike (not their lanes)."""
        return self._closes[0]

    @property
    def empty(self) -> bool:
        """It changes nothing. One worker's word is enough: inside a group others don't hear of its loss."""
        return any(close.skip for close in self._closes.values()) or self.weight == 0

    @property
    def weight(self) -> float:
        return math.fsum(weight for close in self._closes.values() for _, weight in close.lanes)

    @property
    def scale(self) -> float:
        return self.said.samples / self.weight if self.weight > 0 else 0.0

    def check(self, table: KeyTable, settings: GroupSettings) -> None:
        """All workers closed it: nothing is missing, and they agree."""
        assert self._plan is not None
        for worker in range(self._workers):
            for lane in self._plan.roots(worker):
                for key, total in self.sums.items():
                    if not total.has(lane):
                        raise WireError(
                            f"worker {worker} closed round {self.number} without a push of its root {lane} for "
                            f"{table.name(key)}"
                        )
        for key, total in self.sums.items():
            if len(total.nodes) != bool(self._plan.present):
                raise WireError(
                    f"round {self.number}, {table.name(key)}: sums of lanes {sorted(total.nodes)} are left over; "
                    f"workers push their roots, which are {[self._plan.roots(w) for w in range(self._workers)]}"
                )
        for worker, close in self._closes.items():
            self._check_agrees(worker, close, settings)

    def _check_agrees(self, worker: int, close: Close, settings: GroupSettings) -> None:
        for field in ("samples", "max_norm"):
            mine, theirs = getattr(self.said, field), getattr(close, field)
            if mine != theirs:
                raise ReplicaError(
                    f"round {self.number}: {field} is {mine} on worker 0 but {theirs} on worker {worker}; "
                    "their loops took different turns"
                )
        if close.settings:
            settings.check(close.settings)
        different = settings.difference(self.said.settings, close.settings) if close.settings else None
        if different is not None or len(close.settings) != len(self.said.settings):
            name, mine, theirs = different or ("the number of settings", len(self.said.settings), len(close.settings))
            raise ReplicaError(
                f"round {self.number}: {name} is {mine} on worker 0 but {theirs} on worker {worker}; the update "
                "happens once, for all: set learning rates alike on every worker"
            )


def norm_of(squares: Mapping[int, list[float]]) -> float:
    """The global norm from the squares of all servers' block norms; the same bits in any order of servers."""
    flat = [square for part in squares.values() for square in part]
    if not all(map(math.isfinite, flat)):
        return math.nan if any(map(math.isnan, flat)) else math.inf
    return math.sqrt(math.fsum(flat))
