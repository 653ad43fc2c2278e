"""The loader of a replay: work items in the order of the log, one lane of one round at a time.

    loop of the run, 2 workers       (0, 0) (0, 1) (1, 0) (1, 1) …          (round, lane), at the same time
    loop of the replay               (0, 0) (1, 0) (0, 1) (1, 1) …          one after another, as their weights exist

To the loop each (round, lane) is a step of its own. What a script sees of steps stays as it was: in the body
`engine.step` is the item's round, and a step is *done*, with `engine.stepped`, when the last lane of its round is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.data.loader import ShardedLoader
from paceline.data.sharded_sampler import WorkItem
from paceline.data.work_source import WorkSource
from paceline.engine.step import TrainStep
from paceline.errors import ConfigError
from paceline.parameter_server.replay import Replay


class ReplayingSource:
    """A `WorkSource` around the one that the run had."""

    def __init__(self, source: WorkSource, replay: Replay, step: TrainStep) -> None:
        if not isinstance(source, ShardedLoader):
            raise ConfigError(
                "replay needs a dataset with positions: what a stream gave to a lane in some round can't be asked for "
                "again out of its order"
            )
        self._source, self._replay, self._step = source, replay, step
        self.dataset, self.batch_size = source.dataset, source.batch_size
        self._furthest: WorkItem | None = None
        self._last_round: int | None = None  # the script wants to stop after it

    def items(self) -> Iterator[tuple[WorkItem, Any]]:
        source, step = self._source, self._step
        first_round, first_step = step.step, source.steps - source.steps_left
        turns = self._replay.loop(first_round, source.steps_left)
        places = [(turn.item.round - first_round + first_step, turn.item.lane) for turn in turns]
        furthest = first_round
        self._start_loop()
        try:
            for item, batch in source.items_in(places):
                if item.first_of_lane:
                    round = item.step - first_step + first_round
                    if self._last_round is not None and round > self._last_round:
                        break
                    self._replay.hand_out()
                    step.step, furthest = round, max(furthest, round + 1)
                yield item, batch
        finally:
            step.step = furthest
            if self._furthest is not None:
                source.commit(self._furthest)

    def _start_loop(self) -> None:
        self._furthest = self._last_round = None

    def acted(self) -> None:
        """Right after the optimizer did."""
        if not self._replay.ends_round:
            self._step.stepped = False
            self._step.step = self._replay.turn.item.round

    def commit(self, item: WorkItem) -> None:
        """The place in the data moves at the end of the loop, when all lanes have come that far."""
        if self._furthest is None or item.step > self._furthest.step:
            self._furthest = item
        if self._step.stop_wanted:
            # Asked for before the lane's gradient was collected it counts in this round, later in the next. Lanes that
            # are ahead ask later than the one that was the first: the others of that round still follow.
            last = self._replay.turn.item.round + (not self._step.stop_agreed)
            self._last_round = last if self._last_round is None else min(last, self._last_round)
            self._step.stopped()

    # -- as it was -------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._source.epoch

    @property
    def position(self) -> int:
        return self._source.position

    @property
    def steps(self) -> int:
        return self._source.steps

    @property
    def steps_left(self) -> int:
        return self._source.steps_left

    @property
    def own_items(self) -> int:
        return self._source.own_items

    @property
    def digest(self) -> str | None:
        return self._source.digest

    @property
    def fetches_ahead(self) -> bool:
        return False

    @property
    def takes_places(self) -> bool:
        return False

    def reassign(self, lanes: tuple[int, ...], places: Mapping[str, Any] | None = None) -> None:
        raise ConfigError("a replay is one process that follows the log of its run: workers can't join or leave it")

    def state_after(self, item: WorkItem | None) -> dict[str, Any]:
        return self._source.state_after(item)

    def merged(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._source.merged(states)

    def restore(self, state: Mapping[str, Any], *, changed: frozenset[str] = frozenset()) -> None:
        self._source.restore(state, changed=changed)

    def begin_epoch(self, epoch: int) -> None:
        self._source.begin_epoch(epoch)

    def facts(self) -> dict[str, Any]:
        return self._source.facts()

    def log_header(self) -> dict[str, Any]:
        return self._source.log_header()

    def described(self) -> tuple[str, str]:
        return self._source.described()

    def close(self) -> None:
        self._source.close()
