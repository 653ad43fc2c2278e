"""Deterministic clocks: whole rounds are applied, in order, so nothing depends on who was first.

    OPEN   worker 0: lanes 0 1 2     worker 1: lanes 3 4      all there: the tree, and who is left with which roots
    PUSH   worker 0: roots 0, 2      worker 1: roots 3, 4     nodes, merged "left += right" as soon as both are there
    CLOSE  worker 0: weights, …      worker 1: weights, …     all there: the scale, and nothing is missing

    all workers closed round r ─► scale ─► (clip: norms of all servers ─► coefficient) ─► each key: update, answer pulls

Roots arrive in any order and the canonical sum comes out. A push's tensor becomes a node of the tree without a copy; a
merge adds in place and hands the right one's memory back.

Where pushes are compressed each lane's payload comes by itself, and a key's are decoded and added when all are there.

Keys are finished from the last to the first: keys are numbered as backward finishes gradients, and the next forward
wants the first layers first. Each is answered as it is done, while the others are still being updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from paceline.collectives.canonical_sum import Merge, SumPlan
from paceline.errors import ReplicaError
from paceline.optim.gradient_norm import clip_coefficient, norm_of_squares
from paceline.optim.group_settings import GroupSettings
from paceline.parameter_server.clock import Clock
from paceline.parameter_server.compressed_key import Decoder
from paceline.parameter_server.key_ranges import KeyTable
from paceline.parameter_server.server_key import ServerKey
from paceline.parameter_server.staleness_stats import StalenessCounter
from paceline.parameter_server.wire import Close, Header, WireError

Mode = Literal["update", "aggregate"]
Recycle = Callable[[Tensor], None]


class KeySum:
    """The sum of one key in one round, on its way."""

    def __init__(self, round: int, decoder: Decoder | None) -> None:
        self._round, self._decoder = round, decoder
        self.nodes: dict[int, Tensor] = {}
        self._codes: dict[int, Tensor] = {}  # by lane, until all are there
        self.decoder: Decoder | None = None  # of a sum whose pushes are compressed
        self.used = 0
        self._arrived: set[int] = set()
        self._to_merge: list[Merge] | None = None

    def has(self, lane: int) -> bool:
        return lane in self._arrived

    def add(self, lane: int, gradient: Tensor, used: int) -> None:
        coded = gradient.dtype == torch.uint8
        if self._arrived and coded != (self.decoder is not None):
            raise WireError(
                f"a push of lane {lane} of round {self._round} is {'' if coded else 'not '}compressed, those of "
                f"{sorted(self._arrived)} are{' not' if coded else ''}; start every process with the same compression"
            )
        self._arrived.add(lane)
        self.used |= used
        if coded:
            self.decoder = self._decoder
            self._codes[lane] = gradient
        else:
            self.nodes[lane] = gradient

    def merge(self, plan: SumPlan, recycle: Recycle) -> None:
        """Perform the merges whose two nodes are finished; others wait, and what builds on them."""
        if self.decoder is not None:
            self._decode(self.decoder, plan, recycle)
            return
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

    def _decode(self, decoder: Decoder, plan: SumPlan, recycle: Recycle) -> None:
        if self._codes and self._codes.keys() == set(plan.present):
            self.nodes = {plan.present[0]: decoder.add(self._round, self._codes)}
            for code in self._codes.values():
                recycle(code)
            self._codes = {}

    def pushed_by(self, worker: int, plan: SumPlan) -> tuple[int, ...]:
        """The lanes whose pushes a worker has to send."""
        return plan.roots(worker) if self.decoder is None else plan.holders[worker]

    @property
    def total(self) -> Tensor:
        (total,) = self.nodes.values()
        return total


class Round:
    """What the workers have sent of one round."""

    def __init__(
        self, number: int, workers: int, keys: Iterable[int], recycle: Recycle, decoders: Mapping[int, Decoder]
    ) -> None:
        self.number = number
        self._workers = workers
        self._recycle = recycle
        self._lanes: dict[int, tuple[int, ...]] = {}
        self._closes: dict[int, Close] = {}
        self._plan: SumPlan | None = None
        self.sums = {key: KeySum(number, decoders.get(key)) for key in keys}
        self.squares: list[float] | None = None  # of the block norms here, once known

    # -- what arrives ------------------------------------------------------------------------------------------------

    def open(self, worker: int, lanes: tuple[int, ...]) -> bool:
        """False: it came before."""
        before = self._lanes.get(worker)
        if before is not None and before != lanes:
            raise WireError(f"worker {worker} opened round {self.number} with lanes {before} and now with {lanes}")
        for other, theirs in self._lanes.items():
            both = sorted(set(theirs) & set(lanes)) if other != worker else []
            if both:
                raise ReplicaError(
                    f"lanes {both} of round {self.number} are assigned to worker {other} and to worker {worker}; "
                    "their loaders assign lanes differently"
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
        """False: it came before."""
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
    def agreed(self) -> Close:
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
        return self.agreed.samples / self.weight if self.weight > 0 else 0.0

    def check(self, table: KeyTable, settings: GroupSettings) -> None:
        """All workers closed it: nothing is missing, and they agree."""
        assert self._plan is not None
        for worker in range(self._workers):
            for key, total in self.sums.items():
                for lane in total.pushed_by(worker, self._plan):
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
        for name in ("samples", "max_norm"):
            mine, theirs = getattr(self.agreed, name), getattr(close, name)
            if mine != theirs:
                raise ReplicaError(
                    f"round {self.number}: {name} is {mine} on worker 0 but {theirs} on worker {worker}; "
                    "their loops took different turns"
                )
        if close.settings:
            settings.check(close.settings)
        different = settings.difference(self.agreed.settings, close.settings) if close.settings else None
        if different is not None or len(close.settings) != len(self.agreed.settings):
            name, mine, theirs = different or ("the number of settings", len(self.agreed.settings), len(close.settings))
            raise ReplicaError(
                f"round {self.number}: {name} is {mine} on worker 0 but {theirs} on worker {worker}; the update "
                "happens once, for all: set learning rates alike on every worker"
            )


@dataclass
class FinishedSum:
    """A round's sum of one key, kept until every worker has fetched it (mode aggregate)."""

    total: Tensor
    used: int
    wanted_by: set[int] = field(default_factory=set)


class RoundByRound:
    """Rounds under way, and the updates of those that all workers have closed."""

    def __init__(
        self,
        table: KeyTable,
        server: int,
        held: Mapping[int, ServerKey],
        settings: GroupSettings,
        stats: StalenessCounter,
        *,
        clock: Clock,
        mode: Mode,
        workers: int,
        recycle: Recycle,
        decoders: Mapping[int, Decoder],
    ) -> None:
        self._table, self._server, self._held, self._settings = table, server, held, settings
        self._keys = [key.number for key in table.of_server(server)]
        self._clock, self._mode, self._workers = clock, mode, workers
        self._stats, self._recycle, self._decoders = stats, recycle, decoders
        self._next = 0
        self._rounds: dict[int, Round] = {}
        self._squares: dict[int, dict[int, list[float]]] = {}  # by round and server
        self._complete = dict.fromkeys(self._keys, -1)
        self._to_tell: list[tuple[int, Tensor]] = []  # (round, squares) for the other servers
        self.sums: dict[tuple[int, int], FinishedSum] = {}  # by key and round, until all workers have fetched them
        self.norm = math.nan  # of the last round, where it was clipped

    def complete(self, key: int) -> int:
        return self._complete[key]

    def needs_all_workers(self, round: int) -> bool:
        """A round that was applied before needs none: a worker sends again what it sent."""
        return round >= self._next

    def reset(self, key: int, complete: int) -> None:
        """Go on after round `complete`, from what was loaded."""
        self._complete[key] = complete
        self._next = complete + 1
        self._rounds.clear()
        self._squares.clear()
        self.sums.clear()

    # -- what arrives; each says whether it was new ------------------------------------------------------------------

    def open(self, worker: int, round: int, lanes: tuple[int, ...]) -> bool:
        return round >= self._next and self._round(round).open(worker, lanes)

    def push(self, header: Header, gradient: Tensor) -> bool:
        new = header.round >= self._next and self._round(header.round).push(
            header.sender, header.key, header.lane, gradient, header.flags
        )
        if not new:
            self._recycle(gradient)
        return new

    def close(self, worker: int, round: int, close: Close) -> bool:
        return round >= self._next and self._round(round).close(worker, close)

    def set(self, worker: int, settings: tuple[float, ...]) -> None:
        """A round's settings come with its end, not before its pushes."""

    def leave(self, worker: int) -> str | None:
        """It said goodbye and needs no more sums; why the job fails, where it has not taken part in a round."""
        for place, found in list(self.sums.items()):
            self._fetched(worker, place, found)
        left = self._not_closed_by(worker)
        if not left:
            return None
        return (
            f"worker {worker} said goodbye in round {left[0]}, which others are waiting for; all workers must take "
            "the same number of steps"
        )

    def lose(self, worker: int) -> str:
        left = self._not_closed_by(worker)
        where = f" in round {left[0]}, before it had pushed all of it" if left else " between two rounds"
        return (
            f"worker {worker} was lost{where}; a round needs the gradients of all workers, so training stops here: "
            "resume from the last saved state"
        )

    def _not_closed_by(self, worker: int) -> list[int]:
        """The rounds under way that wait for it."""
        return [number for number, found in sorted(self._rounds.items()) if worker in found.missing()]

    def hear_norms(self, server: int, round: int, squares: Sequence[float]) -> None:
        if round >= self._next:
            self._squares.setdefault(round, {})[server] = list(squares)

    def _round(self, number: int) -> Round:
        if number not in self._rounds:
            self._rounds[number] = Round(number, self._workers, self._keys, self._recycle, self._decoders)
        return self._rounds[number]

    # -- what is pulled ----------------------------------------------------------------------------------------------

    def weights_for(self, pull: Header, held: ServerKey) -> Tensor:
        """The live ones where they can be sent: a key is updated only after all workers have used what they pulled."""
        return held.weights if held.weights.device.type == "cpu" else held.copy()

    def sum_for(self, worker: int, key: int, round: int) -> FinishedSum | None:
        """A worker fetches the sum of a round once; None: it has, or there is none."""
        found = self.sums.get((key, round))
        if found is None or worker not in found.wanted_by:
            return None
        self._fetched(worker, (key, round), found)
        return found

    def _fetched(self, worker: int, place: tuple[int, int], found: FinishedSum) -> None:
        found.wanted_by.discard(worker)
        if not found.wanted_by:
            del self.sums[place]

    def norms_to_tell(self) -> Iterator[tuple[int, Tensor]]:
        """(round, squares) that the other servers have to hear."""
        news, self._to_tell = self._to_tell, []
        yield from news

    # -- what can be applied -----------------------------------------------------------------------------------------

    def advance(self, _: Sequence[int] | None = None) -> Iterator[int]:
        """Apply the rounds that are complete; gives the keys one by one, as they are done."""
        while self._next in self._rounds and self._rounds[self._next].closed:
            round = self._rounds[self._next]
            if round.squares is None:
                round.check(self._table, self._settings)
            if not self._norm_is_known(round):
                return
            for key in reversed(self._keys):
                self._finish(round, key)
                self._complete[key] = round.number
                yield key
            del self._rounds[self._next]
            self._squares.pop(self._next, None)
            self._next += 1

    def _norm_is_known(self, round: Round) -> bool:
        """Without clipping there is none to know."""
        if round.agreed.max_norm is None or self._mode == "aggregate" or round.empty:
            self.norm = math.nan
            return True
        if round.squares is None:
            round.squares = self._own_squares(round)
            self._to_tell.append((round.number, torch.tensor(round.squares, dtype=torch.float64)))
        known = self._squares.setdefault(round.number, {})
        known[self._server] = round.squares
        if len(known) < self._table.servers:
            return False
        self.norm = norm_of(known)
        return True

    def _own_squares(self, round: Round) -> list[float]:
        norms: list[Tensor] = []
        for key, total in round.sums.items():
            gradient = self._gradient(round, key)
            total.nodes = {0: gradient}
            norms += self._held[key].norms(gradient, total.used)
        if not norms:
            return []
        squares: list[float] = torch.cat([norm.to("cpu", torch.float64) for norm in norms]).square_().tolist()
        return squares

    def _gradient(self, round: Round, key: int) -> Tensor:
        """The round's gradient of a key, scaled, and in the weights' precision where they are updated here."""
        total = round.sums[key].total
        if round.scale != 1.0:
            total.mul_(round.scale)
        return self._held[key].as_gradient(total) if self._mode == "update" else total

    def _finish(self, round: Round, key: int) -> None:
        total = round.sums[key]
        if not total.nodes:
            return
        if total.decoder is not None:
            total.decoder.forget() if round.empty else total.decoder.commit(total.used)
        if self._mode == "aggregate":
            all_workers = set(range(self._workers))
            used = 0 if round.empty else total.used  # workers then have no gradient, and change nothing either
            rows = None if total.decoder is None else total.decoder.rows  # workers scale what they decode
            answer = self._gradient(round, key) if rows is None else rows
            self.sums[key, round.number] = FinishedSum(answer, used, all_workers)
            return
        if not round.empty:
            gradient = total.total if round.squares is not None else self._gradient(round, key)
            self._clip(round, gradient)
            self._held[key].update(gradient, total.used, round.agreed.settings)
            self._stats.applied(delay=round.number - 1 - self._clock.needs(round.number))
        self._recycle(total.total)

    def _clip(self, round: Round, gradient: Tensor) -> None:
        max_norm = round.agreed.max_norm
        if max_norm is not None and not self.norm <= max_norm:
            gradient.mul_(clip_coefficient(self.norm, max_norm))


def norm_of(squares: Mapping[int, list[float]]) -> float:
    """The global norm from the squares of all servers' block norms; the same bits in any order of servers."""
    flat = [square for part in squares.values() for square in part]
    return float(norm_of_squares(torch.tensor(flat, dtype=torch.float64)))
