"""The promise of the data: whatever the sizes and whatever the history of stops, no sample is lost and none repeated.

A job's data without its training: N workers take whole steps, stop, and others go on from the state.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, SubsetRandomSampler, WeightedRandomSampler

from paceline.data.block_shuffle import BlockShuffleSampler
from paceline.data.length_grouped import LengthGroupedSampler
from paceline.data.loader import ShardedLoader
from paceline.data.sharded_sampler import ShardedSampler
from paceline.data.token_budget import TokenBudgetSampler
from paceline.data.work_source import Assignment
from paceline.errors import ConfigError, DataError
from paceline.world.lanes import neighbouring_lanes

Ledger = dict[tuple[int, int, int, int], list[int]]  # (epoch, step, lane, micro-batch) -> sample ids


class Ids(Dataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


@dataclass
class Job:
    """`run` takes steps with some workers; the state goes from one run to the next, and nothing else does."""

    samples: int
    batch_size: int = 4
    lanes: int = 4
    accumulate: int = 1
    seed: int = 0
    loader: dict[str, Any] = field(default_factory=lambda: {"shuffle": True})
    state: dict[str, Any] | None = None
    changed: frozenset[str] = frozenset()

    def run(self, workers: int, steps: int | None = None) -> Ledger:
        """What all workers are handed in so many steps, or in what is left of the epoch."""
        ledger: Ledger = {}
        after = []
        for worker in range(workers):
            loader = self._loader(neighbouring_lanes(self.lanes, workers)[worker])
            if self.state is not None:
                loader.restore(self.state, changed=self.changed)
            done, epoch = 0, loader.epoch
            while done != steps and loader.epoch == epoch:
                for item, batch in loader.items():
                    if not item.shadow:
                        assert batch == list(item.sample_ids)
                        place = (item.epoch, item.step, item.lane, item.micro_batch)
                        assert place not in ledger
                        ledger[place] = batch
                    if item.last_of_step:
                        loader.commit(item)
                        done += 1
                        if done == steps:
                            break
            after.append(loader.state_after(None))
        assert all(state == after[0] for state in after), "the workers disagree on where the job is"
        self.state, self.changed = after[0], frozenset()
        return ledger

    def _loader(self, own_lanes: tuple[int, ...]) -> ShardedLoader:
        options = {"batch_size": self.batch_size, "collate_fn": list} | self.loader
        return ShardedLoader(
            DataLoader(Ids(self.samples), **options), Assignment(self.lanes, self.accumulate, own_lanes, self.seed)
        )


def counted(*ledgers: Ledger) -> dict[int, Counter[int]]:
    """How often each sample was used, by epoch."""
    uses: dict[int, Counter[int]] = {}
    for ledger in ledgers:
        for (epoch, *_), ids in ledger.items():
            uses.setdefault(epoch, Counter()).update(ids)
    return uses


def lost_and_repeated(samples: int, *ledgers: Ledger) -> tuple[int, int]:
    """Over all epochs, taken as finished."""
    uses = counted(*ledgers).values()
    lost = sum(samples - len(epoch) for epoch in uses)
    return lost, sum(count - 1 for epoch in uses for count in epoch.values())


# -- any history -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 120),
    batch_size=st.integers(1, 6),
    lanes=st.integers(1, 6),
    accumulate=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["shuffled", "sequential", "blocks", "lengths", "own sampler", "own batches"]),
    history=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), max_size=5),
)
def test_any_stops_and_numbers_of_workers_give_the_samples_of_one_uninterrupted_worker(
    samples: int, batch_size: int, lanes: int, accumulate: int, seed: int, kind: str, history: list[tuple[int, int]]
) -> None:
    loader: dict[str, Any] = {
        "shuffled": {"shuffle": True},
        "sequential": {},
        "blocks": {"sampler": BlockShuffleSampler(samples, block=3, window=2)},
        "lengths": {"sampler": LengthGroupedSampler(batch_size, lengths=[1 + i * i % 37 for i in range(samples)])},
        "own sampler": {"sampler": range(samples)[::-1]},
        "own batches": {
            "batch_size": 1,
            "batch_sampler": [list(range(low, min(low + 5, samples))) for low in range(0, samples, 5)],
        },
    }[kind]

    def job() -> Job:
        return Job(samples, batch_size, lanes, accumulate, seed, loader)

    stopped = job()
    ledgers = [stopped.run(min(workers, lanes), steps) for workers, steps in history]
    while stopped.state is None or stopped.state["position"]:
        ledgers.append(stopped.run(1))
    epochs = max(epoch for ledger in ledgers for epoch, *_ in ledger) + 1
    straight = job()
    expected = [straight.run(1) for _ in range(epochs)]
    assert {k: v for ledger in ledgers for k, v in ledger.items()} == {k: v for run in expected for k, v in run.items()}
    assert sum(len(ledger) for ledger in ledgers) == sum(len(run) for run in expected)
    assert lost_and_repeated(samples, *ledgers) == (0, 0)


@settings(max_examples=40, deadline=None)
@given(
    samples=st.integers(1, 120),
    first=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 9)),
    second=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 9)),
    steps=st.integers(1, 6),
    by_length=st.booleans(),
)
def test_an_accepted_change_of_batch_lanes_or_seed_finishes_the_epoch_with_every_sample_once(
    samples: int, first: tuple[int, int, int, int], second: tuple[int, int, int, int], steps: int, by_length: bool
) -> None:
    lengths = [1 + i * i % 37 for i in range(samples)]
    loader = {"sampler": LengthGroupedSampler(1, lengths=lengths)} if by_length else {"shuffle": True}
    before = Job(samples, *first, loader=loader)
    ledgers = [before.run(1, steps)]
    after = Job(samples, *second, loader=loader, state=before.state)
    names = ("batch size", "lanes", "accumulate", "seed")
    after.changed = frozenset(name for name, a, b in zip(names, first, second, strict=True) if a != b)
    ledgers.append(after.run(1, 1))
    while after.state is not None and after.state["position"]:
        ledgers.append(after.run(1, 1))
    # The runs may number their steps alike, so they are counted, not merged.
    assert lost_and_repeated(samples, *ledgers) == (0, 0)


def test_a_dataset_that_grew_finishes_its_epoch_as_it_began_and_is_whole_in_the_next() -> None:
    before = Job(30)
    ledgers = [before.run(2, 1)]
    after = Job(50, state=before.state, changed=frozenset({"samples"}))
    ledgers.append(after.run(3))
    assert counted(*ledgers)[0] == Counter(range(30))
    assert counted(after.run(1))[1] == Counter(range(50))


def test_a_dataset_that_shrank_in_the_middle_of_an_epoch_is_refused() -> None:
    before = Job(30)
    before.run(2, 1)
    with pytest.raises(DataError, match=r"has shrunk from 30 to 20 samples in the middle of epoch 0"):
        Job(20, state=before.state, changed=frozenset({"samples"})).run(1)


def test_another_order_in_the_middle_of_an_epoch_is_refused_and_at_its_end_accepted() -> None:
    before = Job(32)
    before.run(2, 1)
    sequential = {"loader": {}, "changed": frozenset({"order"})}
    with pytest.raises(DataError, match=r"another order can't be accepted in the middle of epoch 0"):
        Job(32, state=before.state, **sequential).run(1)
    before.run(1)
    assert counted(Job(32, state=before.state, **sequential).run(1))[1] == Counter(range(32))


def test_a_sampler_with_replacement_goes_on_where_it_was() -> None:
    drawing = {"sampler": WeightedRandomSampler([1.0] * 40, 40)}
    whole, stopped = Job(40, loader=drawing).run(1), Job(40, loader=drawing)
    assert stopped.run(3, 1) | stopped.run(2, 1) | stopped.run(4) == whole


# -- what changes while a job sleeps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"batch_sampler": BatchSampler(range(64), 5, False)}, {"batch_sampler": BatchSampler(range(64), 6, False)}),
        ({"batch_sampler": TokenBudgetSampler([3] * 64, 40)}, {"batch_sampler": TokenBudgetSampler([3] * 64, 60)}),
        ({"sampler": SubsetRandomSampler(range(40))}, {"sampler": SubsetRandomSampler(range(1, 41))}),
    ],
    ids=["batch sampler", "token budget", "sampler"],
)
def test_a_sampler_that_gives_something_else_is_refused_in_the_middle_of_an_epoch(before: Any, after: Any) -> None:
    def with_batches(loader: Any) -> Any:
        return loader | ({"batch_size": 1} if "batch_sampler" in loader else {})

    first = Job(64, loader=with_batches(before))
    first.run(2, 1)
    with pytest.raises(DataError, match=r"gives another order than the one the job is in, in the middle of epoch 0"):
        Job(64, loader=with_batches(after), state=first.state).run(1)


@pytest.mark.parametrize(
    ("sampler", "other"),
    [
        (BlockShuffleSampler(64, block=4, window=2), BlockShuffleSampler(64, block=8, window=2)),
        (LengthGroupedSampler(2, lengths=range(1, 65)), LengthGroupedSampler(2, lengths=range(2, 66))),
    ],
    ids=["blocks", "lengths"],
)
def test_another_block_or_other_lengths_are_another_order(sampler: Any, other: Any) -> None:
    facts = [
        ShardedLoader(DataLoader(Ids(64), batch_size=4, sampler=one), Assignment(4, 1, (0, 1, 2, 3), 0)).facts()[
            "order"
        ]
        for one in (sampler, other)
    ]
    assert facts[0] != facts[1]


@pytest.mark.parametrize("kind", ["sampler", "batch sampler"])
def test_a_sampler_with_a_generator_of_its_own_goes_on_where_it_was(kind: str) -> None:
    def loader() -> dict[str, Any]:
        drawing = SubsetRandomSampler(range(64), generator=torch.Generator().manual_seed(5))
        if kind == "sampler":
            return {"sampler": drawing}
        return {"batch_size": 1, "batch_sampler": BatchSampler(drawing, 5, False)}

    straight = Job(64, loader=loader())
    whole = [straight.run(1) for _ in range(3)]
    stopped = Job(64, loader=loader())
    stopped.run(1)
    stopped.run(2, 2)
    resumed = Job(64, loader=loader(), state=stopped.state)
    rest = resumed.run(3)
    assert all(whole[1][place] == ids for place, ids in rest.items())
    assert resumed.run(1) == whole[2]


def test_an_accepted_drop_last_finishes_an_epoch_grouped_by_length() -> None:
    loader = {"sampler": LengthGroupedSampler(2, lengths=[1 + i * i % 37 for i in range(70)])}
    before = Job(70, loader=loader)
    ledgers = [before.run(1, 1)]
    after = Job(70, loader=loader | {"drop_last": True}, state=before.state, changed=frozenset({"drop_last"}))
    ledgers.append(after.run(2))
    uses = counted(*ledgers)[0]
    assert (max(uses.values()), uses.total()) == (1, 64)  # the last six can't fill a step


def test_an_epoch_that_has_not_begun_begins_with_what_is_there_now() -> None:
    for samples in (80, 40):
        before = Job(64)
        before.run(1)
        after = Job(samples, state=before.state, changed=frozenset({"samples"}))
        assert counted(after.run(1))[1] == Counter(range(samples))


def test_an_inner_sampler_that_wants_to_know_its_epoch_is_told() -> None:
    class Told:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 20

        def __iter__(self) -> Any:
            return iter(range(20)) if self.epoch == 0 else iter(range(19, -1, -1))

    job = Job(20, loader={"batch_size": 1, "batch_sampler": BatchSampler(Told(), 5, False)})  # type: ignore[arg-type]
    first, second = job.run(1), job.run(1)
    assert first[0, 0, 0, 0] == [0, 1, 2, 3, 4]
    assert second[1, 0, 0, 0] == [19, 18, 17, 16, 15]


def test_batches_that_are_empty_or_come_only_once_are_named() -> None:
    with pytest.raises(ConfigError, match="batch 1 of the batch sampler list is empty"):
        Job(4, loader={"batch_size": 1, "batch_sampler": [[0, 1], [], [2, 3]]}).run(1)
    loader = ShardedLoader(DataLoader(Ids(4), batch_sampler=iter([[0, 1], [2, 3]])), Assignment(1, 1, (0,), 0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"gave no batches again: an iterator can be used only once"):
        for _ in range(2):
            for item, _ in loader.items():
                loader.commit(item)


def test_a_place_in_a_stream_is_no_place_in_a_dataset() -> None:
    with pytest.raises(DataError, match="the saved place is one in a stream"):
        Job(4, state={"kind": "stream", "epoch": 0}).run(1)


# -- where the peers lose and repeat (64 samples, or 32; each peer's own numbers of workers) ---------------------------


@pytest.mark.parametrize(
    ("peer", "samples", "before", "after"),
    [
        ("transformers.Trainer repeats 12", 64, 2, 1),
        ("transformers.Trainer never sees 24", 64, 1, 2),
        ("lightning repeats and loses 24", 64, 2, 2),
        ("torch ElasticDistributedSampler repeats 6 and loses 6", 32, 4, 3),
        ("torchdata StatefulDistributedSampler repeats 8", 64, 2, 4),
    ],
)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_where_peers_lose_and_repeat_nothing_is_lost_and_nothing_repeated(
    peer: str, samples: int, before: int, after: int, steps: int
) -> None:
    job = Job(samples, batch_size=2)
    assert lost_and_repeated(samples, job.run(before, steps), job.run(after)) == (0, 0)


# -- without an Engine -------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 80), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 20))
def test_the_sharded_sampler_alone_gives_every_sample_once_from_any_position(
    samples: int, batch_size: int, lanes: int, accumulate: int, stop: int
) -> None:
    def sampler(rank: int, workers: int) -> ShardedSampler:
        return ShardedSampler(samples, batch_size, lanes=lanes, accumulate=accumulate, rank=rank, workers=workers)

    first = sampler(0, 1)
    used: Counter[int] = Counter()
    for batch in first:
        used.update(batch)
        if stop <= first.position == used.total():
            break
    state = first.state_dict()
    for rank in range(lanes if state["epoch"] == 0 else 0):  # the first had not finished the epoch
        rest = sampler(rank, lanes)
        rest.load_state_dict(state)
        expected = len(rest)
        handed = list(rest)
        assert len(handed) == expected
        used.update(index for batch in handed for index in batch)
    assert used == Counter(range(samples))


def test_the_sharded_sampler_moves_on_to_the_next_epoch_by_itself() -> None:
    sampler = ShardedSampler(range(20), 4, lanes=2)
    first, second = list(sampler), list(sampler)
    for epoch in (first, second):
        assert sorted(index for batch in epoch for index in batch) == list(range(20))
    assert first != second
