"""Asynchronous clocks: every push is applied when it arrives, once, and a key counts up to which round it has them all.

    key 3    round 4   lanes 0 1 2 3      all in                 complete = 4
             round 5   lanes 0 . 2 3      lane 1 is missing      a push of (5, 1) makes complete 6: 6 has all of its own
             round 6   lanes 0 1 2 3      all in                 a second (4, 2) or (5, 0) is a duplicate

A round is complete for a key when every worker that is still there has opened it, and all lanes that it opened it with
are in. Channels keep their order, so what a worker has not pushed when it closes the round will never come (a lane that
was skipped). A worker that is lost takes what it has not pushed with it: no worker waits for that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from paceline.optim.group_settings import GroupSettings
from paceline.parameter_server.round_by_round import FinishedSum, Recycle
from paceline.parameter_server.server_key import ServerKey
from paceline.parameter_server.staleness_policy import Outcome, StalenessPolicy, corrected_momentum, delay_in_rounds
from paceline.parameter_server.staleness_stats import StalenessCounter
from paceline.parameter_server.update_log import Applied
from paceline.parameter_server.wire import AS_THEY_ARE, Close, Header, WireError


@dataclass
class _Worker:
    """What one worker has sent."""

    lanes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by round, of those that are not complete
    opened: int = -1  # the last round
    closed: int = -1
    settings: tuple[float, ...] = ()


class OnArrival:
    """The same questions as `RoundByRound` answers, for pushes that are updates of their own."""

    def __init__(
        self,
        server: int,
        held: Mapping[int, ServerKey],
        settings: GroupSettings,
        stats: StalenessCounter,
        *,
        staleness_policy: StalenessPolicy,
        workers: int,
        lanes: int,
        recycle: Recycle,
        log: Callable[[Applied], None] | None,
    ) -> None:
        self._server, self._held, self._settings, self._stats = server, held, settings, stats
        self._log, self._order = log, Counter[int]()  # what is applied and dropped, by key
        self._policy, self._lanes, self._recycle = staleness_policy, lanes, recycle
        self._workers = {worker: _Worker() for worker in range(workers)}
        self._complete = dict.fromkeys(held, -1)
        self._in: dict[int, set[tuple[int, int]]] = {key: set() for key in held}  # (round, lane) after `complete`

    def complete(self, key: int) -> int:
        return self._complete[key]

    def reset(self, key: int, complete: int) -> None:
        """Go on after round `complete`, from what was loaded."""
        self._complete[key] = complete
        self._in[key].clear()
        for worker in self._workers.values():
            worker.lanes.clear()
            worker.opened = worker.closed = complete

    # -- what arrives; each says whether it was new ------------------------------------------------------------------

    def open(self, worker: int, round: int, lanes: tuple[int, ...]) -> bool:
        state = self._workers[worker]
        if round <= state.opened:
            return False
        state.opened, state.lanes[round] = round, lanes
        return True

    def set(self, worker: int, settings: tuple[float, ...]) -> None:
        self._settings.check(settings)
        self._workers[worker].settings = settings

    def push(self, header: Header, gradient: Tensor) -> bool:
        """Apply it, unless it was applied before."""
        key, place = header.key, (header.round, header.lane)
        if header.round <= self._complete[key] or place in self._in[key]:
            self._recycle(gradient)
            return False
        state = self._workers[header.sender]
        if header.lane not in state.lanes.get(header.round, ()):
            raise WireError(
                f"worker {header.sender} pushed lane {header.lane} of round {header.round}, but opened the round with "
                f"lanes {list(state.lanes.get(header.round, ()))}"
            )
        self._in[key].add(place)
        self._apply(header, gradient, state.settings or tuple(self._settings.read()))
        self._recycle(gradient)
        return True

    def close(self, worker: int, round: int, _: Close) -> bool:
        state = self._workers[worker]
        if round <= state.closed:
            return False
        state.closed = round
        return True

    def leave(self, worker: int) -> str | None:
        """It said goodbye, or is lost: what it has not pushed will not come, and the others go on."""
        self._workers.pop(worker, None)
        return None

    lose = leave

    def _apply(self, header: Header, gradient: Tensor, values: tuple[float, ...]) -> None:
        held = self._held[header.key]
        delay = delay_in_rounds(held.version, header.version, self._lanes)
        updates = held.version - header.version
        outcome = self._policy.of(delay, self._settings.momentum(values), updates)
        if not outcome.dropped:
            held.came_back(header.sender, header.version)
            apply_push(held, gradient, header.weight, header.flags, values, outcome)
            self._stats.applied(delay)
        else:
            self._stats.dropped(delay)
        if self._log is not None:
            # The sum of the bits that it made: a replay that differs finds out where it begins to.
            check = None if outcome.dropped else held.check()
            order, named = self._order[header.key], self._settings.by_group(values)
            place = (self._server, header.key, order, header.round, header.lane, header.sender)
            self._log(Applied(*place, named, outcome, check))
        self._order[header.key] += 1

    # -- what is pulled ----------------------------------------------------------------------------------------------

    def weights_for(self, pull: Header, held: ServerKey) -> Tensor:
        """A copy: a push may update the key while these weights are still being sent."""
        return held.copy() if pull.flags & AS_THEY_ARE else held.seen_by(pull.sender)

    # -- what only rounds that are summed have -----------------------------------------------------------------------

    norm = math.nan  # each lane's gradient is clipped on its worker

    def needs_all_workers(self, round: int) -> bool:
        return False

    def sum_for(self, worker: int, key: int, round: int) -> FinishedSum | None:
        return None

    def hear_norms(self, server: int, round: int, squares: Sequence[float]) -> None: ...

    def norms_to_tell(self) -> Iterator[tuple[int, Tensor]]:
        return iter(())

    # -- how far a key is --------------------------------------------------------------------------------------------

    def advance(self, among: Sequence[int] | None = None) -> Iterator[int]:
        """The keys that are complete up to a later round than before."""
        for key in reversed(self._complete) if among is None else among:
            before = self._complete[key]
            while self._has_all(key, self._complete[key] + 1):
                self._complete[key] += 1
            if self._complete[key] > before:
                self._in[key] = {place for place in self._in[key] if place[0] > self._complete[key]}
                yield key
        if among is not None:
            return
        done = min(self._complete.values(), default=-1)
        for state in self._workers.values():
            state.lanes = {round: lanes for round, lanes in state.lanes.items() if round > done}

    def _has_all(self, key: int, round: int) -> bool:
        return bool(self._workers) and all(
            state.opened >= round
            and (state.closed >= round or all((round, lane) in self._in[key] for lane in state.lanes.get(round, ())))
            for state in self._workers.values()
        )


def apply_push(
    held: ServerKey, gradient: Tensor, weight: float, used: int, values: tuple[float, ...], outcome: Outcome
) -> None:
    """One update as the staleness policy wants it; replay does the same, with the outcome that the log has."""
    if weight != 1.0:
        gradient.mul_(weight)
    corrected = None if outcome.momentum is None else partial(corrected_momentum, delay=outcome.updates)
    held.update(held.as_gradient(gradient), used, values, lr_factor=outcome.lr_factor, momentum=corrected)
