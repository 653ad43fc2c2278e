"""Samples of similar length meet in a step, its lanes get nearly equal work, and every sample comes once."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline.data.global_order import Shuffled
from paceline.data.length_grouped import (
    DistributedLengthGroupedSampler,
    LengthGrouped,
    LengthGroupedSampler,
    Lengths,
    assign_pieces,
)
from paceline.data.sharded_sampler import BatchPlan
from paceline.errors import ConfigError
from paceline.world.lanes import neighbouring_lanes
from tests.data.logged_runs import assigned

Case = tuple[Lengths, BatchPlan, int]  # with the window


@st.composite
def cases(draw: st.DrawFn, drop_last: bool | None = None) -> Case:
    batch_size, lanes, accumulate = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    drop = draw(st.booleans()) if drop_last is None else drop_last
    least = batch_size * lanes * accumulate if drop else 1
    samples = draw(st.integers(least, least + 300))
    longest = draw(st.sampled_from([1, 3, 1000]))
    lengths = np.random.default_rng(draw(st.integers(0, 99))).integers(0, longest + 1, samples)
    return lengths, BatchPlan(samples, batch_size, lanes, accumulate, drop), draw(st.sampled_from([1, 2, 5, 128]))


def log_normal(samples: int, seed: int = 0) -> Lengths:
    return np.maximum(1, np.random.default_rng(seed).lognormal(5, 1, samples)).astype(np.int64)


def whole(order: LengthGrouped, cut: BatchPlan) -> list[int]:
    return order.samples_at(range(cut.samples))


def steps_of(order: LengthGrouped, cut: BatchPlan) -> list[list[int]]:
    return [order.samples_at(range(*cut.step_range(step))) for step in range(cut.steps)]


# -- the order ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 2**40), st.integers(0, 9))
def test_every_sample_stands_at_one_position(case: Case, seed: int, epoch: int) -> None:
    lengths, cut, window = case
    assert sorted(whole(LengthGrouped(lengths, seed, epoch, cut, window), cut)) == list(range(cut.samples))


def test_every_size_up_to_a_hundred_is_a_bijection() -> None:
    cuts = [BatchPlan(n, 2, 3, 2, drop) for n in range(1, 101) for drop in (False, True) if n >= 12 or not drop]
    broken = [
        c for c in cuts if sorted(whole(LengthGrouped(log_normal(c.samples), 1, 0, c, 3), c)) != [*range(c.samples)]
    ]
    assert broken == []


@settings(max_examples=60, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_random_access_gives_what_iteration_gives(case: Case, chance: random.Random) -> None:
    lengths, cut, window = case
    iterated = whole(LengthGrouped(lengths, 3, 1, cut, window), cut)
    asked = LengthGrouped(lengths, 3, 1, cut, window)
    for _ in range(10):
        start = chance.randrange(cut.samples)
        positions = range(start, chance.randint(start, cut.samples), chance.randint(1, 7))
        assert asked.samples_at(positions) == [iterated[place] for place in positions]
        assert asked.sample_at(start) == iterated[start]


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 6))
def test_a_lane_has_the_same_samples_whichever_worker_has_it(case: Case, workers: int) -> None:
    lengths, cut, window = case

    def dealt(workers: int) -> dict[tuple[int, int, int], list[int]]:
        found = {}
        for own_lanes in neighbouring_lanes(cut.lanes, workers):
            order = LengthGrouped(lengths, 5, 2, cut, window)
            for step in range(cut.steps):
                for lane, micro_batch, positions, shadow in assigned(cut, step, own_lanes):
                    if not shadow:
                        found[step, lane, micro_batch] = order.samples_at(positions)
        return found

    assert dealt(workers) == dealt(1)


def test_every_epoch_and_every_seed_groups_anew() -> None:
    cut = BatchPlan(200, 4, 3, 1)
    batches = [
        frozenset(frozenset(step) for step in steps_of(LengthGrouped(log_normal(200), seed, epoch, cut), cut))
        for seed in range(5)
        for epoch in range(5)
    ]
    assert len(set(batches)) == len(batches)


def test_the_order_stays_what_it_was_when_jobs_began() -> None:
    lengths, cut = np.array([5, 3, 9, 1, 7, 3, 8, 2, 6, 4, 9, 5, 2, 7]), BatchPlan(14, 2, 2, 1)
    assert whole(LengthGrouped(lengths, 0, 0, cut), cut) == [10, 11, 4, 13, 9, 3, 1, 7, 8, 12, 0, 5, 2, 6]


def test_an_order_can_be_pickled() -> None:
    cut = BatchPlan(50, 2, 3, 1)
    order = LengthGrouped(log_normal(50), 1, 2, cut)
    assert whole(pickle.loads(pickle.dumps(order)), cut) == whole(order, cut)  # noqa: S301


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_window_holds_what_the_shuffle_put_there_cut_into_steps_of_neighbours() -> None:
    lengths, cut = log_normal(600), BatchPlan(600, 5, 2, 2)
    steps = steps_of(LengthGrouped(lengths, 7, 1, cut, window=10), cut)
    for first in (0, 10, 20):
        window = steps[first : first + 10]
        shuffled = Shuffled(600, 7, 1).samples_at(range(20 * first, 20 * (first + 10)))
        assert sorted(shuffled) == sorted(sample for step in window for sample in step)
        ranges = sorted((min(lengths[step]), max(lengths[step])) for step in window)
        assert all(lower[1] <= higher[0] for lower, higher in pairwise(ranges))


def test_the_steps_of_a_window_come_in_a_shuffled_order() -> None:
    lengths, cut = log_normal(640), BatchPlan(640, 4, 2, 1)
    firsts = [
        int(np.argmax([lengths[step].max() for step in steps_of(LengthGrouped(lengths, 1, epoch, cut), cut)[:40]]))
        for epoch in range(100)
    ]
    assert max(Counter(firsts).values()) < 12
    assert len(set(firsts)) > 30


@settings(max_examples=60, deadline=None)
@given(cases(drop_last=False))
def test_a_short_last_step_has_neighbours_too(case: Case) -> None:
    lengths, cut, _ = case
    steps = steps_of(LengthGrouped(lengths, 2, 0, cut), cut)
    second_half = steps[cut.steps // 2 :] if cut.steps >= 4 else steps
    window, short = (sorted(lengths[list(chain(*part))].tolist()) for part in (second_half, steps[-1:]))
    assert any(window[slot : slot + len(short)] == short for slot in range(len(window)))


def test_the_short_last_step_is_not_always_of_the_same_lengths() -> None:
    lengths, cut = log_normal(330), BatchPlan(330, 4, 2, 1)
    lasts = [lengths[steps_of(LengthGrouped(lengths, 0, epoch, cut), cut)[-1]].mean() for epoch in range(40)]
    assert min(lasts) < np.quantile(lengths, 0.2)
    assert max(lasts) > np.quantile(lengths, 0.8)


def test_what_drop_last_drops_is_what_the_shuffle_put_last() -> None:
    cut = BatchPlan(100, 4, 3, 1, drop_last=True)
    dropped = whole(LengthGrouped(log_normal(100), 4, 0, cut), cut)[96:]
    assert dropped == Shuffled(100, 4, 0).samples_at(range(96, 100))


# -- pieces ----------------------------------------------------------------------------------------------------------


def lanes_of(lengths: Lengths, batch_size: int, lanes: int) -> list[list[list[int]]]:
    """Per lane, the lengths of its micro-batches in one step of these lengths."""
    lengths = np.sort(lengths)[::-1]
    dealt = lengths[assign_pieces(lengths[None], batch_size, lanes)[0]]
    cut = BatchPlan(len(lengths), batch_size, lanes, -(-len(lengths) // batch_size // lanes))
    return [[dealt[list(places)].tolist() for places in ranges] for ranges in cut.micro_batches(0).values()]


def test_a_step_looks_like_the_drawing() -> None:
    assert lanes_of(np.arange(1, 25), batch_size=8, lanes=3) == [
        [[24, 23, 14, 13, 12, 11, 2, 1]],
        [[22, 21, 16, 15, 10, 9, 4, 3]],
        [[20, 19, 18, 17, 8, 7, 6, 5]],
    ]


def test_one_very_long_sample_gets_the_shortest_company() -> None:
    lanes = lanes_of(np.array([1000, 50, 49, 48, 47, 46, 45, 44]), batch_size=4, lanes=2)
    assert lanes == [[[1000, 48, 46, 44]], [[50, 49, 47, 45]]]


def test_what_one_micro_batch_leaves_uneven_the_next_makes_good() -> None:
    assert lanes_of(np.arange(1, 17), batch_size=4, lanes=2) == [
        [[16, 15, 10, 9], [6, 5, 4, 3]],
        [[14, 13, 12, 11], [8, 7, 2, 1]],
    ]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 90), st.integers(1, 7), st.integers(1, 6), st.integers(0, 99))
def test_a_deal_hands_out_every_sample_once_in_every_step(
    steps: int, samples: int, batch_size: int, lanes: int, seed: int
) -> None:
    lengths = -np.sort(-np.random.default_rng(seed).integers(0, 50, (steps, samples)))
    assert np.sort(assign_pieces(lengths, batch_size, lanes)).tolist() == [list(range(samples))] * steps


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 99), st.floats(0, 2))
def test_the_tokens_of_lanes_differ_by_less_than_a_piece(batch_size: int, lanes: int, seed: int, sigma: float) -> None:
    lengths = np.random.default_rng(seed).lognormal(5, sigma, lanes * batch_size).astype(np.int64)
    sums = [sum(micro_batch) for (micro_batch,) in lanes_of(lengths, batch_size, lanes)]
    assert max(sums) - min(sums) <= -(-batch_size // 4) * (lengths.max() - lengths.min())


# -- transformers' samplers --------------------------------------------------------------------------------------------

LENGTHS = [5, 3, 9, 1, 7, 3, 8, 2, 6, 4, 9, 5, 2, 7, 1, 8, 4, 6, 3, 5]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_indices_are_those_that_transformers_gives() -> None:
    assert list(LengthGroupedSampler(2, lengths=LENGTHS, generator=generator(3))) == [
        2, 12, 7, 3, 8, 9, 1, 5, 6, 17, 11, 14, 10, 13, 4, 19, 15, 0, 16, 18,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("drop_last", "epoch", "shards"),
    [
        (False, 0, [[2, 5, 18, 0, 10, 3, 8], [13, 19, 1, 7, 15, 6, 12], [11, 9, 4, 14, 16, 17, 2]]),
        (False, 1, [[10, 1, 12, 6, 2, 18, 5], [19, 8, 14, 16, 13, 11, 3], [0, 4, 15, 7, 17, 9, 10]]),
        (True, 0, [[2, 5, 18, 0, 10, 3], [13, 19, 1, 7, 15, 6], [11, 9, 4, 14, 16, 17]]),
    ],
)
def test_the_shards_are_those_that_transformers_gives(drop_last: bool, epoch: int, shards: list[list[int]]) -> None:
    samplers = [
        DistributedLengthGroupedSampler(2, None, 3, rank, seed=1, drop_last=drop_last, lengths=LENGTHS)
        for rank in range(3)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    assert [list(sampler) for sampler in samplers] == shards
    assert [len(sampler) for sampler in samplers] == [len(shard) for shard in shards]


@pytest.mark.parametrize(("samples", "batch_size", "mega_batch"), [(1000, 3, 150), (100, 5, 25), (7, 5, 5)])
def test_mega_batches_are_sorted_and_the_longest_sample_comes_first(
    samples: int, batch_size: int, mega_batch: int
) -> None:
    lengths = log_normal(samples)
    found = list(LengthGroupedSampler(batch_size, lengths=lengths, generator=generator(0)))
    shuffled = torch.randperm(samples, generator=generator(0)).tolist()
    assert lengths[found[0]] == lengths.max()
    assert sorted(found) == list(range(samples))
    for start in range(0, samples, mega_batch):
        group = found[start : start + mega_batch]
        assert lengths[group[1:]].tolist() == sorted(lengths[group[1:]], reverse=True)
        assert len(set(group) - set(shuffled[start : start + mega_batch])) <= 1  # the one that changed places


def test_without_a_generator_the_order_comes_from_torch_s_own() -> None:
    sampler = LengthGroupedSampler(2, lengths=LENGTHS)
    torch.manual_seed(3)
    assert list(sampler) == list(LengthGroupedSampler(2, lengths=LENGTHS, generator=generator(3)))
    assert list(sampler) != list(sampler)


def test_a_prepared_loader_is_given_the_balanced_order() -> None:
    cut = BatchPlan(20, 2, 3, 1)
    order = LengthGroupedSampler(2, lengths=LENGTHS).order(4, 5, cut)
    assert order.samples_at(range(20)) == whole(LengthGrouped(np.array(LENGTHS), 4, 5, cut), cut)


def test_an_epoch_begun_before_the_dataset_grew_is_finished_as_it_was() -> None:
    cut = BatchPlan(15, 2, 3, 1)
    grown, before = LengthGroupedSampler(2, lengths=LENGTHS), LengthGroupedSampler(2, lengths=LENGTHS[:15])
    assert grown.order(4, 5, cut).samples_at(range(15)) == before.order(4, 5, cut).samples_at(range(15))


def test_every_iteration_has_the_epoch_after_the_last() -> None:
    sampler = DistributedLengthGroupedSampler(2, None, 3, 1, lengths=LENGTHS)
    found = [list(sampler) for _ in range(3)]
    for epoch, indices in enumerate(found):
        sampler.set_epoch(epoch)
        assert list(sampler) == indices


def test_an_iteration_that_was_left_early_has_had_its_epoch_and_one_never_begun_has_not() -> None:
    sampler = DistributedLengthGroupedSampler(2, None, 3, 1, lengths=LENGTHS)
    iter(sampler)
    list(islice(sampler, 3))
    assert sampler.epoch == 0
    second = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) == second


def test_an_epoch_set_during_an_iteration_is_the_next_one() -> None:
    sampler = DistributedLengthGroupedSampler(2, None, 3, 1, lengths=LENGTHS)
    for _ in sampler:
        sampler.set_epoch(7)
    seventh = list(sampler)
    sampler.set_epoch(7)
    assert list(sampler) == seventh


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_data_loader_moves_the_epoch_on(drop_last: bool) -> None:
    sampler = DistributedLengthGroupedSampler(2, None, 3, 1, lengths=LENGTHS)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(20)), 2, sampler=sampler, drop_last=drop_last)
    for epoch in range(3):
        list(loader)
        assert sampler.epoch == epoch


def test_few_samples_are_repeated_until_every_replica_has_one() -> None:
    shards = [list(DistributedLengthGroupedSampler(2, None, 8, rank, lengths=[4, 2, 3])) for rank in range(8)]
    assert sorted(Counter(sample for (sample,) in shards).values()) == [2, 3, 3]


def test_replicas_and_rank_are_what_the_launcher_said(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": 2, "WORLD_SIZE": 4, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4}
    for name, value in (torchrun | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}).items():
        monkeypatch.setenv(name, str(value))
    sampler = DistributedLengthGroupedSampler(2, lengths=LENGTHS)
    assert (sampler.num_replicas, sampler.rank, len(sampler)) == (4, 2, 5)


# -- where lengths come from -------------------------------------------------------------------------------------------


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, **columns: list[Any]) -> None:
        self.rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


TEXTS = Rows(input_ids=[[1, 2], [3], torch.zeros(5)], words=[["a"], ["b", "c"], []], label=[0, 1, 0])


@pytest.mark.parametrize("kind", [LengthGroupedSampler, DistributedLengthGroupedSampler])
@pytest.mark.parametrize(("name", "lengths"), [(None, [2, 1, 5]), ("words", [1, 2, 0])])
def test_lengths_are_taken_from_the_dataset(kind: Any, name: str | None, lengths: list[int]) -> None:
    assert kind(2, TEXTS, model_input_name=name).lengths.tolist() == lengths


@pytest.mark.parametrize("given_as", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint16)])
def test_lengths_may_be_a_list_an_array_or_a_tensor(given_as: Any) -> None:
    known = LengthGroupedSampler(2, lengths=given_as(LENGTHS)).lengths
    assert (known.tolist(), known.dtype) == (LENGTHS, np.int64)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, r"grouping by length needs lengths=, or a dataset= to take them from"),
        (
            {"dataset": TEXTS, "model_input_name": "tokens"},
            r"can't be taken from the column 'tokens': sample 0 has 'input_ids', 'words', 'label'; say which one with "
            r"model_input_name=, or pass lengths=\[…\]",
        ),
        (
            {"dataset": TensorDataset(torch.zeros(3, 2))},
            r"column 'input_ids': sample 0 is of type tuple and has no columns; pass lengths=\[…\], one number per",
        ),
        (
            {"dataset": TEXTS, "model_input_name": "label"},
            "sample 0: the column 'label' is of type int and has no length",
        ),
        ({"dataset": TEXTS, "lengths": [1, 2]}, "there are 2 lengths, but the dataset has 3 samples; give one length"),
        ({"lengths": [4, 2, -1, 3]}, "sample 2 has the length -1; a length is never negative"),
        ({"lengths": []}, "there are no lengths: the dataset is empty"),
        ({"dataset": Rows(input_ids=[])}, "there are no lengths: the dataset is empty"),
        ({"lengths": [1.5, 2.0]}, "lengths are float64; expected whole numbers"),
        ({"lengths": torch.ones(2, 2, dtype=torch.int64)}, r"lengths have the shape \(2, 2\); expected one number per"),
        ({"lengths": [1], "batch_size": 0}, "batch_size=0: a batch has at least one sample"),
    ],
)
@pytest.mark.parametrize("kind", [LengthGroupedSampler, DistributedLengthGroupedSampler])
def test_what_cannot_be_grouped_is_refused_with_what_to_do(kind: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        kind(**{"batch_size": 2} | options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 3}, "there is no rank 3 among num_replicas=3; ranks count from 0 to num_replicas - 1"),
        ({"rank": 0, "drop_last": True}, "2 samples can't be shared by 3 replicas with drop_last: each would get none"),
    ],
)
def test_replicas_that_would_get_nothing_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DistributedLengthGroupedSampler(2, num_replicas=3, lengths=[1, 2], **options)


def test_lengths_of_another_dataset_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are 20 lengths for 21 samples; give one length per sample"):
        LengthGroupedSampler(2, lengths=LENGTHS).order(0, 0, BatchPlan(21, 2, 2, 1))


def test_an_epoch_is_not_cut_anew_in_its_middle() -> None:
    cut = replace(BatchPlan(20, 2, 2, 1), start=8)
    text = "epoch 3 was grouped by length for the batch size, lanes and accumulate it began with, so it can't be cut"
    with pytest.raises(ConfigError, match=text):
        LengthGroupedSampler(2, lengths=LENGTHS).order(0, 3, cut)


def test_a_window_without_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="window=0: a window has at least one step"):
        LengthGrouped(np.array(LENGTHS), 0, 0, BatchPlan(20, 2, 2, 1), window=0)


def test_lengths_given_as_a_tensor_are_copied() -> None:
    given: Tensor = torch.tensor(LENGTHS)
    sampler = LengthGroupedSampler(2, lengths=given)
    given.zero_()
    assert sampler.lengths.tolist() == LENGTHS
