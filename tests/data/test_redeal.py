"""Workers come and go in the middle of a step: what is committed is what one undisturbed worker is handed.

A job's data without its training: members take their items of a step, and all commit it. A *change* comes when each
has been handed some items of a step: some members are lost, others join, and the step begins again.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SubsetRandomSampler

from paceline.data import item_fetching
from paceline.data.loader import ShardedLoader
from paceline.data.sharded_sampler import WorkItem
from paceline.data.work_source import Deal
from paceline.world.lanes import neighbouring_lanes, strided_lanes

Handed = dict[tuple[int, int, int], tuple[WorkItem, Any]]  # (step, lane, micro-batch) -> item, batch
Pairs = Iterator[tuple[WorkItem, Any]]


class Noisy(Dataset[Tensor]):
    """Augments with all three generators that people use, and says which process did."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor([index, *noise], dtype=torch.float64)


@dataclass(frozen=True)
class Change:
    step: int  # in which it comes
    handed: int  # items of that step that each member has been handed
    lost: frozenset[int] = frozenset()  # members, by their number; one stays in any case
    joining: int = 0


@dataclass
class Crew:
    """The members of a job. Batches that were handed out are spoilt, as a loop's body may do."""

    samples: int
    lanes: int = 4
    accumulate: int = 1
    batch_size: int = 3
    strided: bool = False
    in_rounds: bool = False
    loader: dict[str, Any] = field(default_factory=lambda: {"shuffle": True})

    def run(self, workers: int, changes: tuple[Change, ...] = (), epochs: int = 1) -> list[Handed]:
        """What was committed, by epoch."""
        self.members = [self._member(ride) for ride in self._rides(workers)]
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
        for step in itertools.count():
            for change in changes:
                if change.step == step:
                    if self.members[0].epoch != epoch:  # its last step is committed: nobody joins any more
                        change = replace(change, handed=0, joining=0)
                    for loop in loops:
                        list(of_a_step(loop, most=change.handed))
                    self._change(change)
                    loops = [member.items() for member in self.members]
            taken = [list(of_a_step(loop)) for loop in loops]
            if not any(taken):
                return committed
            if self.in_rounds:
                assert len({len(items) for items in taken}) == 1
            self._commit(committed, taken)
        raise AssertionError

    def _commit(self, committed: Handed, taken: list[list[tuple[WorkItem, Any]]]) -> None:
        for member, items in zip(self.members, taken, strict=True):
            assert items[0][0].first_of_step
            for item, batch in items:
                if not item.shadow:
                    place = (item.step, item.lane, item.micro_batch)
                    assert place not in committed
                    committed[place] = as_a_fact(item), batch
            member.commit(items[-1][0])
        places = [member.committed_place() for member in self.members]
        assert all(place == places[0] for place in places), "the members disagree on where the job is"

    def _change(self, change: Change) -> None:
        members = [member for number, member in enumerate(self.members) if number not in change.lost]
        members = members or self.members[:1]
        for member in self.members:
            if member not in members:
                member.close()
        place = members[0].committed_place()
        for _ in range(change.joining):
            members.append(self._member(()))
            members[-1].restore(place)
        self._deal_to(members)

    def _deal_to(self, members: list[ShardedLoader]) -> None:
        self.members, rides = members, self._rides(len(members))
        for member, ride in zip(members, rides, strict=True):
            member.redeal(ride, rides if self.in_rounds else None)

    def _rides(self, workers: int) -> tuple[tuple[int, ...], ...]:
        return (strided_lanes if self.strided else neighbouring_lanes)(self.lanes, workers)

    def _member(self, ride: tuple[int, ...]) -> ShardedLoader:
        source = DataLoader(Noisy(self.samples), **{"batch_size": self.batch_size} | self.loader)
        return ShardedLoader(source, Deal(self.lanes, self.accumulate, ride, seed=3))


def of_a_step(loop: Pairs, most: int | None = None) -> Pairs:
    """The items of the step that comes, or the first ones, their batches as lists; what was handed out is spoilt."""
    for item, batch in itertools.islice(loop, most):
        kept = batch.tolist()
        batch.fill_(-1)
        yield item, kept
        if item.last_of_step:
            return


def as_a_fact(item: WorkItem) -> WorkItem:
    """Without what depends on who else rides in this worker."""
    return item._replace(first_of_step=False, last_of_step=False)


changes = st.lists(
    st.builds(
        Change,
        step=st.integers(0, 5),
        handed=st.integers(0, 8),
        lost=st.frozensets(st.integers(0, 4), max_size=4),
        joining=st.integers(0, 3),
    ),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(
    samples=st.integers(1, 60),
    lanes=st.integers(1, 6),
    accumulate=st.integers(1, 3),
    workers=st.integers(1, 5),
    strided=st.booleans(),
    in_rounds=st.booleans(),
    kind=st.sampled_from(["shuffled", "own sampler", "own batches"]),
    history=changes,
)
def test_any_changes_inside_steps_commit_what_one_undisturbed_worker_is_handed(
    samples: int, lanes: int, accumulate: int, workers: int, strided: bool, in_rounds: bool, kind: str,
    history: list[Change],
) -> None:  # fmt: skip
    loader: dict[str, Any] = {
        "shuffled": {"shuffle": True},
        "own sampler": {"sampler": SubsetRandomSampler(range(samples))},
        "own batches": {"batch_size": 1, "batch_sampler": BatchSampler(SubsetRandomSampler(range(samples)), 2, False)},
    }[kind]
    crew = Crew(samples, lanes, accumulate, strided=strided, in_rounds=in_rounds, loader=loader)
    committed = crew.run(workers, tuple(history), epochs=2)
    assert committed == Crew(samples, lanes, accumulate, loader=loader).run(1, epochs=2)
    for epoch in committed:
        assert sorted(i for item, _ in epoch.values() for i in item.sample_ids) == list(range(samples))


PROCESSES = [
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
]


@pytest.mark.parametrize("ahead", [False, True], ids=["", "taken over by a thread"])
@pytest.mark.parametrize("options", PROCESSES, ids=["one process", "processes", "processes that stay"])
def test_loader_processes_hand_out_the_same_after_a_change(
    options: dict[str, Any], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_fetching, "WORTH_A_THREAD_S", 0.0 if ahead else 60.0)
    history = (
        Change(step=1, handed=2, lost=frozenset({1})),
        Change(step=2, handed=0, joining=1),
        Change(step=3, handed=8, lost=frozenset({0})),
        Change(step=5, handed=1, joining=2),  # behind the epoch's last step
    )
    disturbed = Crew(40, accumulate=2, batch_size=1, loader={"shuffle": True, **options}).run(2, history, epochs=2)
    assert disturbed == Crew(40, accumulate=2, batch_size=1).run(1, epochs=2)
    assert not multiprocessing.active_children()


# -- the same lanes once more ------------------------------------------------------------------------------------------


def loader_of(ride: tuple[int, ...] = (0, 1), *, samples: int = 30, **options: Any) -> ShardedLoader:
    source = DataLoader(Noisy(samples), **{"batch_size": 2, "shuffle": True} | options)
    return ShardedLoader(source, Deal(lanes=4, accumulate=2, ride=ride, seed=3))


def committed_steps(loader: ShardedLoader, loop: Pairs, steps: int) -> None:
    for item, _ in loop:
        if item.last_of_step:
            loader.commit(item)
            steps -= 1
            if not steps:
                return


@pytest.mark.parametrize("options", [{}, *PROCESSES])
def test_dealing_the_same_lanes_anew_hands_out_the_same_step_again(options: dict[str, Any]) -> None:
    loader = loader_of(**options)
    loop = loader.items()
    committed_steps(loader, loop, 1)
    lost = list(of_a_step(loop))
    loader.redeal((0, 1), None)
    assert list(of_a_step(loader.items())) == lost
    loader.close()


@pytest.mark.parametrize("end", [lambda loop: None, lambda loop: loop.close()], ids=["let go", "closed"])
def test_what_was_handed_out_before_ends_with_the_new_deal(end: Callable[[Any], None]) -> None:
    loader = loader_of()
    before = loader.items()
    next(before)
    loader.redeal((2,), None)
    assert next(before, None) is None
    after = loader.items()
    end(before)
    assert {item.lane for item, _ in after} == {2}


def test_nothing_is_left_of_a_loop_whose_last_step_is_committed_however_often_it_is_dealt_anew() -> None:
    loader = loader_of()
    committed_steps(loader, loader.items(), loader.steps)
    loop = loader.items()
    committed_steps(loader, loop, loader.steps)
    for _ in range(3):
        loader.redeal((0, 1, 2, 3), None)
        loop = loader.items()
    loader.redeal((0, 1, 2, 3), None)
    assert list(loader.items()) == []
    assert next(loader.items())[0].epoch == 2


def test_between_two_loops_a_new_deal_leaves_the_next_epoch_as_it_is() -> None:
    loader = loader_of()
    loop = loader.items()
    committed_steps(loader, loop, loader.steps)
    assert list(loop) == []
    loader.redeal((0, 3), None)
    assert [(item.epoch, item.lane) for item, _ in itertools.islice(loader.items(), 3)] == [(1, 0), (1, 0), (1, 3)]


# -- loader processes --------------------------------------------------------------------------------------------------


class SaysWho(Dataset[int]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def pids_in(pairs: Pairs) -> set[int]:
    return {int(pid) for _, batch in pairs for pid in batch}


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_stay_over_a_new_deal_and_end_when_they_would(persistent: bool) -> None:
    source = DataLoader(SaysWho(), batch_size=1, num_workers=2, persistent_workers=persistent)
    loader = ShardedLoader(source, Deal(lanes=4, accumulate=2, ride=(0, 1), seed=3))
    loop = loader.items()
    pids = pids_in(itertools.islice(loop, 2))
    for ride in ((0, 1, 2, 3), (0, 1, 2, 3), (2,)):
        loader.redeal(ride, None)
        loop = loader.items()
        assert pids_in(itertools.islice(loop, 5)) == pids
    assert pids_in(loop) == pids
    assert all(psutil.pid_exists(pid) == persistent for pid in pids)
    loader.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_loader_that_is_dealt_anew_and_closed_without_another_loop_leaves_no_process() -> None:
    loader = loader_of(num_workers=2)
    loop = loader.items()
    next(loop)
    loader.redeal((3,), None)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    assert not multiprocessing.active_children()


def test_a_loader_that_is_dealt_anew_leaves_no_descriptor() -> None:
    def dealt_anew() -> None:
        loader = loader_of(num_workers=1)
        loop = loader.items()
        next(loop)
        for ride in ((2,), (0, 1, 2)):
            loader.redeal(ride, None)
            loop = loader.items()
            next(loop)

    dealt_anew()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    dealt_anew()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def seed_in_process(options: dict[str, Any], rides: list[tuple[int, ...]]) -> list[int]:
    """torch's seed in the loader process of each ride's loop."""
    source = DataLoader(Seeds(), batch_size=1, num_workers=1, **options)
    loader = ShardedLoader(source, Deal(lanes=4, accumulate=1, ride=rides[0], seed=3))
    seeds = []
    for ride in rides:
        loader.redeal(ride, None)
        loop = loader.items()
        seeds.append(int(next(loop)[1]))
        loop.close()  # type: ignore[attr-defined]
    loader.close()
    return seeds


class Seeds(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return info.seed


def test_loader_processes_that_start_later_have_the_seed_of_their_lanes_and_no_other_has_it() -> None:
    seeds = seed_in_process({}, [(0, 1), (0, 1), (0,), (2,)])
    assert len(set(seeds)) == 4
    assert seeds == seed_in_process({}, [(0, 1), (0, 1), (0,), (2,)])
    assert seeds[2] == seed_in_process({}, [(0,)])[0]
