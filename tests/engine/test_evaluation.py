"""Evaluations that lose workers: whoever is left gathers every sample once, in the dataset's order.

Workers without processes: they take a round's batches one after another, and a gather looks at all of them.
"""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.engine.evaluation import EvaluationLoader, no_rows, place_of
from paceline.world.world import ControlSocket, World

Row = tuple[float, float]


def one_of(rank: int, size: int) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size, rendezvous=ControlSocket("nowhere"))


class Noisy(Dataset[Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(()) / 2


class Numbers(IterableDataset[Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.tensor, iter(range(self.samples)))


@dataclass(frozen=True)
class Loss:
    """Workers are lost in a call of a round's gather, which some of the others have already got."""

    round: int
    call: int
    lost: frozenset[int]
    got: frozenset[int] = frozenset()


class Worker:
    def __init__(self, source: DataLoader[Any], rank: int, size: int, calls: int, on_end: Callable[[], None]) -> None:
        self.loader = EvaluationLoader(
            source, one_of(rank, size), torch.device("cpu"), seed=3, timeout_s=20,
            on_start=lambda: None, on_end=on_end,
        )  # fmt: skip
        self.gathered: list[list[Row]] = [[] for _ in range(calls)]
        self.rounds = 0
        self.batch: list[Row] | None = []
        self.ahead = False
        self.again()

    def again(self) -> None:
        self._batches = iter(self.loader)

    def advance(self) -> None:
        """Its next round's rows, with a number that the loop's body draws."""
        if self.ahead:
            self.ahead = False
            return
        batch = next(self._batches, None)
        self.batch = None if batch is None else [(value, torch.rand(()).item()) for value in batch.tolist()]
        if batch is not None and not isinstance(self.loader.dataset, IterableDataset):
            self.rounds += 1
            self.length = len(self.loader)


class Audience:
    """All workers, and what befalls them."""

    def __init__(self, source: Callable[[], DataLoader[Any]], workers: int, calls: int = 1) -> None:
        self.calls = calls
        audience = weakref.ref(self)  # loader processes end with the last reference

        def meet() -> None:
            if (all_of_them := audience()) is not None:
                all_of_them._at_end()

        self.workers = [Worker(source(), rank, workers, calls, meet) for rank in range(workers)]
        self._now: Loss | None = None

    def evaluate(self, *losses: Loss) -> list[list[list[Row]]]:
        """By worker that is left and call: what it has gathered."""
        round = 0
        while True:
            for worker in self.workers:
                worker.advance()
            held = [worker.batch for worker in self.workers]
            if held[0] is None:
                assert held == [None] * len(held), "the workers run different numbers of rounds"
                return [worker.gathered for worker in self.workers]
            for call in range(self.calls):
                self._now = next((loss for loss in losses if (loss.round, loss.call) == (round, call)), None)
                if self._now is not None:
                    self._lose(self._now, call, held)
                    break
                for worker in self.workers:
                    self._gather(worker, call, held)
            round += 1

    def _gather(self, worker: Worker, call: int, held: list[Any]) -> None:
        rows = worker.loader.real_rows
        assert rows is not None
        worker.gathered[call] += [row for rank in rows for row in held[rank]]
        worker.loader.confirmed()

    def _lose(self, loss: Loss, call: int, held: list[Any]) -> None:
        got = [worker for rank, worker in enumerate(self.workers) if rank in loss.got]
        for worker in got:
            self._gather(worker, call, held)
        self.workers = [w for rank, w in enumerate(self.workers) if rank not in loss.lost] or self.workers[:1]
        for worker in self.workers:
            if worker in got and call + 1 == self.calls and self._now is not None:
                worker.advance()  # and learns of it in the next round, or when it wants to leave
        self._regroup()
        for worker in self.workers:
            worker.ahead = not worker.loader.void
            if not worker.ahead:
                assert worker.loader.real_rows == []
                worker.loader.confirmed()  # has no effect in a round that begins again

    def _at_end(self) -> None:
        """All meet here: who comes first learns of what has befallen the others."""
        self._regroup()

    def _regroup(self) -> None:
        if self._now is not None:
            self._now = None
            places = [worker.loader.place() for worker in self.workers]
            for rank, worker in enumerate(self.workers):
                worker.loader.deal_to(one_of(rank, len(self.workers)), places)


def dataset(samples: int, batch_size: int = 2, **options: Any) -> Callable[[], DataLoader[Any]]:
    return partial(DataLoader, Noisy(samples), batch_size=batch_size, **options)


def stream(samples: int, batch_size: int = 2, **options: Any) -> Callable[[], DataLoader[Any]]:
    return partial(DataLoader, Numbers(samples), batch_size=batch_size, **options)


def test_without_losses_every_call_gathers_every_sample_once_in_order() -> None:
    for gathered in Audience(dataset(11), workers=3, calls=2).evaluate():
        assert [[int(value) for value, _ in rows] for rows in gathered] == [list(range(11))] * 2


@settings(max_examples=200, deadline=None)
@given(
    make=st.sampled_from([dataset, stream]),
    samples=st.integers(1, 30),
    workers=st.integers(1, 5),
    calls=st.integers(1, 3),
    losses=st.lists(
        st.builds(
            Loss,
            round=st.integers(0, 8),
            call=st.integers(0, 2),
            lost=st.frozensets(st.integers(0, 4), max_size=3),
            got=st.frozensets(st.integers(0, 4), max_size=3),
        ),
        max_size=4,
    ),
)
def test_whoever_is_left_gathers_what_one_undisturbed_worker_does(
    make: Any, samples: int, workers: int, calls: int, losses: list[Loss]
) -> None:
    alone = Audience(make(samples), workers=1, calls=calls).evaluate()[0]
    audience = Audience(make(samples), workers, calls)
    for gathered in audience.evaluate(*losses):
        assert gathered == alone
    for worker in audience.workers:
        assert worker.rounds == getattr(worker, "length", 0)


@pytest.mark.slow
@pytest.mark.parametrize("make", [dataset, stream])
@pytest.mark.parametrize(
    "options", [{"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}], ids=["a process", "that stay"]
)
def test_loader_processes_give_the_same_after_a_loss_and_in_the_next_evaluation(
    make: Any, options: dict[str, Any]
) -> None:
    alone = Audience(make(14), workers=1).evaluate()[0]
    audience = Audience(make(14, **options), workers=3)
    assert audience.evaluate(Loss(1, 0, lost=frozenset({1}), got=frozenset({0}))) == [alone] * 2
    for worker in audience.workers:
        worker.gathered = [[]]
        worker.again()
    assert audience.evaluate() == [alone] * 2
    del audience, worker
    assert not multiprocessing.active_children()


def test_a_round_that_begins_again_has_no_rows_and_nothing_to_communicate() -> None:
    worker = Audience(dataset(8), workers=2).workers[0]
    assert (worker.loader.real_rows, worker.loader.void) == (None, False)
    worker.advance()
    assert (worker.loader.real_rows, worker.loader.void) == ([0, 1], False)
    worker.loader.deal_to(World())
    assert (worker.loader.real_rows, worker.loader.void) == ([], True)
    worker.advance()
    assert (worker.loader.real_rows, worker.loader.void) == ([0], False)


def test_a_loop_that_never_gathers_begins_again_from_its_first_batch() -> None:
    worker = Audience(dataset(8), workers=2).workers[0]
    seen = []
    for round in range(6):
        worker.advance()
        assert worker.batch is not None
        seen.append([int(value) for value, _ in worker.batch])
        if round == 1:
            worker.loader.deal_to(World())
    assert seen == [[0, 1], [4, 5], [0, 1], [2, 3], [4, 5], [6, 7]]
    worker.advance()
    assert worker.batch is None


def test_who_has_to_gather_a_round_again_that_another_has_left_the_loop_after_has_all_of_it() -> None:
    first, second = Audience(dataset(4), workers=2).workers
    for worker in (first, second):
        worker.advance()
        worker.loader.confirmed()
    first.advance()
    assert first.batch is None
    second.loader.deal_to(one_of(1, 2), [first.loader.place(), second.loader.place()])
    second.advance()
    assert second.batch is None


def test_no_rows_are_values_of_the_same_kinds() -> None:
    nothing = no_rows({"matrix": torch.ones(3, 2), "more": (torch.tensor(1.0), [4.0])})
    assert nothing["matrix"].shape == (0, 2)
    assert nothing["more"][0].shape == nothing["more"][1][0].shape == (0,)


def test_a_worker_that_has_joined_since_is_found_in_the_same_evaluation_as_the_others() -> None:
    """It lacks loaders that the others have made evaluations with, and counts on from where they were."""
    told = (7, [[7, 3]])
    assert place_of(7, told) == [7, 3]
    assert place_of(6, told) == (7, 0)  # behind it
    assert place_of(8, told) == (8, 0)  # before it
