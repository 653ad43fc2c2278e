"""Jobs without their training whose workers change in the middle of a step, for tests of what they commit.

members take their items of a step ──► all commit ──► the next …
     └── a *change* when each has been handed some: members are lost, others join, the step begins again
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from paceline.data.sharded_sampler import WorkItem
from paceline.data.work_source import WorkSource
from paceline.errors import GenerationEnded
from paceline.world.lanes import neighbouring_lanes, strided_lanes

Pairs = Iterator[tuple[WorkItem, Any]]
Handed = dict[tuple[int, int, int], tuple[WorkItem, Any]]  # (step, lane, micro-batch) -> item, batch


@dataclass(frozen=True)
class Change:
    step: int  # in which it comes
    handed: int  # items of that step that each member has been handed
    lost: frozenset[int] = frozenset()  # members, by their number; one stays in any case
    joining: int = 0
    interrupted: frozenset[int] = frozenset()  # members that learn of it while they agree on the step


changes = st.lists(
    st.builds(
        Change,
        step=st.integers(0, 5),
        handed=st.integers(0, 8),
        lost=st.frozensets(st.integers(0, 4), max_size=4),
        joining=st.integers(0, 3),
        interrupted=st.frozensets(st.integers(0, 4), max_size=3),
    ),
    max_size=4,
)


@dataclass
class Crew(ABC):
    """The members of a job. Batches that were handed out are spoilt, as a loop's body may do."""

    lanes: int = 4
    accumulate: int = 1
    strided: bool = False
    members: list[WorkSource] = field(default_factory=list)
    interrupted: bool = False

    @abstractmethod
    def member(self, own_lanes: tuple[int, ...]) -> WorkSource: ...

    def run(self, workers: int, changes: tuple[Change, ...] = (), epochs: int = 1) -> list[Handed]:
        """What was committed, by epoch."""
        self.members = [self.member(own_lanes) for own_lanes in self._all_lanes(workers)]
        self._deal_to(self.members)
        try:
            return [self._epoch(changes) for _ in range(epochs)]
        finally:
            for member in self.members:
                member.close()

    def _epoch(self, changes: tuple[Change, ...]) -> Handed:
        committed: Handed = {}
        epoch = self.members[0].epoch
        loops = [member.items() for member in self.members]
        for self.step in itertools.count():
            for change in changes:
                if change.step == self.step:
                    self._change(change if self._steps_left(epoch) else replace(change, joining=0), loops)
                    loops = [member.items() for member in self.members]
            taken = [list(of_a_step(loop)) for loop in loops]
            if not any(taken):
                return committed
            self._commit(committed, taken)
        raise AssertionError

    def _steps_left(self, epoch: int) -> bool:
        """Nobody joins behind the last one."""
        return self.members[0].epoch == epoch

    def _commit(self, committed: Handed, taken: list[list[tuple[WorkItem, Any]]]) -> None:
        for member, items in zip(self.members, taken, strict=True):
            assert items[0][0].first_of_step
            for item, batch in items:
                if not item.shadow:
                    place = (item.step, item.lane, item.micro_batch)
                    assert place not in committed
                    committed[place] = as_a_fact(item), batch
            member.commit(items[-1][0])

    def _change(self, change: Change, loops: list[Pairs]) -> None:
        for number, loop in enumerate(loops):
            self.interrupted = number in change.interrupted
            try:
                list(of_a_step(loop, most=change.handed))
            except GenerationEnded:
                assert self.interrupted
        self.interrupted = False
        members = [member for number, member in enumerate(self.members) if number not in change.lost]
        members = members or self.members[:1]
        places = members[0].merged([member.state_after(None) for member in self.members])
        for member in self.members:
            if member not in members:
                member.close()
        for _ in range(min(change.joining, max(0, self.lanes - len(members)))):  # there is nothing to do for more
            members.append(self.member(()))
            members[-1].restore(places)
        self._deal_to(members, places)

    def _deal_to(self, members: list[WorkSource], places: Mapping[str, Any] | None = None) -> None:
        self.members, all_lanes = members, self._all_lanes(len(members))
        for member, own_lanes in zip(members, all_lanes, strict=True):
            member.reassign(own_lanes, places if member.takes_places else None)

    def _all_lanes(self, workers: int) -> tuple[tuple[int, ...], ...]:
        return (strided_lanes if self.strided else neighbouring_lanes)(self.lanes, workers)


def of_a_step(loop: Pairs, most: int | None = None) -> Pairs:
    """The items of the step that comes, or the first ones, their batches as lists; what was handed out is spoilt."""
    for item, batch in itertools.islice(loop, most):
        kept = batch.tolist()
        batch.fill_(-1)
        yield item, kept
        if item.last_of_step:
            return


def as_a_fact(item: WorkItem) -> WorkItem:
    """Without what depends on who else all_lanes in this worker."""
    return item._replace(first_of_step=False, last_of_step=False)
