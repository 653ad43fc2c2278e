"""Workers come and go in the middle of a step: what is committed is what one undisturbed worker is handed."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SubsetRandomSampler

from paceline.data import fetching
from paceline.data.loader import ShardedLoader
from paceline.data.work_source import Assignment
from tests.data.crews import Change, Crew, Pairs, changes, of_a_step


class Noisy(Dataset[Tensor]):
    """Augments with all three generators that people use."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor([index, *noise], dtype=torch.float64)


@dataclass
class DatasetCrew(Crew):
    samples: int = 40
    batch_size: int = 3
    loader: dict[str, Any] = field(default_factory=lambda: {"shuffle": True})

    def member(self, own_lanes: tuple[int, ...]) -> ShardedLoader:
        source = DataLoader(Noisy(self.samples), **{"batch_size": self.batch_size} | self.loader)
        return ShardedLoader(source, Assignment(self.lanes, self.accumulate, own_lanes, seed=3))


@settings(max_examples=150, deadline=None)
@given(
    samples=st.integers(1, 60),
    lanes=st.integers(1, 6),
    accumulate=st.integers(1, 3),
    workers=st.integers(1, 5),
    strided=st.booleans(),
    kind=st.sampled_from(["shuffled", "own sampler", "own batches"]),
    history=changes,
)
def test_any_changes_inside_steps_commit_what_one_undisturbed_worker_is_handed(
    samples: int, lanes: int, accumulate: int, workers: int, strided: bool, kind: str,
    history: list[Change],
) -> None:  # fmt: skip
    loader: dict[str, Any] = {
        "shuffled": {"shuffle": True},
        "own sampler": {"sampler": SubsetRandomSampler(range(samples))},
        "own batches": {"batch_size": 1, "batch_sampler": BatchSampler(SubsetRandomSampler(range(samples)), 2, False)},
    }[kind]
    crew = DatasetCrew(lanes, accumulate, strided, samples=samples, loader=loader)
    committed = crew.run(workers, tuple(history), epochs=2)
    assert committed == DatasetCrew(lanes, accumulate, samples=samples, loader=loader).run(1, epochs=2)
    for epoch in committed:
        assert sorted(i for item, _ in epoch.values() for i in item.sample_ids) == list(range(samples))


PROCESSES = [
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["", "taken over by a thread"])
@pytest.mark.parametrize("options", PROCESSES, ids=["one process", "processes", "processes that stay"])
def test_loader_processes_hand_out_the_same_after_a_change(
    options: dict[str, Any], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "WORTH_A_THREAD_S", 0.0 if ahead else 60.0)
    history = (
        Change(step=1, handed=2, lost=frozenset({1})),
        Change(step=2, handed=0, joining=1),
        Change(step=3, handed=8, lost=frozenset({0})),
        Change(step=5, handed=1, joining=2),  # behind the epoch's last step
    )
    crew = DatasetCrew(accumulate=2, batch_size=1, loader={"shuffle": True, **options})
    assert crew.run(2, history, epochs=2) == DatasetCrew(accumulate=2, batch_size=1).run(1, epochs=2)
    assert not multiprocessing.active_children()


# -- the same lanes once more ------------------------------------------------------------------------------------------


def loader_of(own_lanes: tuple[int, ...] = (0, 1), *, samples: int = 30, **options: Any) -> ShardedLoader:
    source = DataLoader(Noisy(samples), **{"batch_size": 2, "shuffle": True} | options)
    return ShardedLoader(source, Assignment(lanes=4, accumulate=2, own_lanes=own_lanes, seed=3))


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
    loader.reassign((0, 1))
    assert list(of_a_step(loader.items())) == lost
    loader.close()


def test_a_loop_that_has_come_to_its_end_but_was_not_left_does_not_run_on_into_the_next_epoch() -> None:
    loader = loader_of()
    loop = loader.items()
    committed_steps(loader, loop, loader.steps)
    assert next(loop, None) is None
    loader.reassign((0, 3))
    assert list(loader.items()) == []


def test_a_worker_that_joins_goes_on_where_the_others_are_whichever_epoch_that_is() -> None:
    loader = loader_of((0, 1, 2, 3))
    for _ in range(2):
        committed_steps(loader, loader.items(), loader.steps)
    committed_steps(loader, loader.items(), 1)
    joins = loader_of(())
    loop = joins.items()
    joins.restore(loader.state_after(None))
    joins.reassign((1,))
    loop = joins.items()
    assert (next(loop)[0].epoch, joins.position) == (2, 16)


@pytest.mark.parametrize("end", [lambda loop: None, lambda loop: loop.close()], ids=["let go", "closed"])
def test_what_was_handed_out_before_ends_with_the_new_deal(end: Callable[[Any], None]) -> None:
    loader = loader_of()
    before = loader.items()
    next(before)
    loader.reassign((2,))
    assert next(before, None) is None
    after = loader.items()
    end(before)
    assert {item.lane for item, _ in after} == {2}


def test_nothing_is_left_of_a_loop_whose_last_step_is_committed_however_often_it_is_reassigned() -> None:
    loader = loader_of()
    committed_steps(loader, loader.items(), loader.steps)
    loop = loader.items()
    committed_steps(loader, loop, loader.steps)
    for _ in range(3):
        loader.reassign((0, 1, 2, 3))
        loop = loader.items()
    loader.reassign((0, 1, 2, 3))
    assert list(loader.items()) == []
    assert next(loader.items())[0].epoch == 2


def test_between_two_loops_a_new_deal_leaves_the_next_epoch_as_it_is() -> None:
    loader = loader_of()
    loop = loader.items()
    committed_steps(loader, loop, loader.steps)
    assert list(loop) == []
    loop.close()  # type: ignore[attr-defined]
    loader.reassign((0, 3))
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
    loader = ShardedLoader(source, Assignment(lanes=4, accumulate=2, own_lanes=(0, 1), seed=3))
    loop = loader.items()
    pids = pids_in(itertools.islice(loop, 2))
    for own_lanes in ((0, 1, 2, 3), (0, 1, 2, 3), (2,)):
        loader.reassign(own_lanes)
        loop = loader.items()
        assert pids_in(itertools.islice(loop, 5)) == pids
    assert pids_in(loop) == pids
    assert all(psutil.pid_exists(pid) == persistent for pid in pids)
    loader.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_loader_that_is_reassigned_and_closed_without_another_loop_leaves_no_process() -> None:
    loader = loader_of(num_workers=2)
    loop = loader.items()
    next(loop)
    loader.reassign((3,))
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    assert not multiprocessing.active_children()


def test_a_loader_that_is_reassigned_leaves_no_descriptor() -> None:
    def reassigned() -> None:
        loader = loader_of(num_workers=1)
        loop = loader.items()
        next(loop)
        for own_lanes in ((2,), (0, 1, 2)):
            loader.reassign(own_lanes)
            loop = loader.items()
            next(loop)

    reassigned()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    reassigned()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def seed_in_process(options: dict[str, Any], all_lanes: list[tuple[int, ...]]) -> list[int]:
    """torch's seed in the loader process of the loop of each lanes."""
    source = DataLoader(Seeds(), batch_size=1, num_workers=1, **options)
    loader = ShardedLoader(source, Assignment(lanes=4, accumulate=1, own_lanes=all_lanes[0], seed=3))
    seeds = []
    for own_lanes in all_lanes:
        loader.reassign(own_lanes)
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
