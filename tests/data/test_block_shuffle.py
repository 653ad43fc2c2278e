"""Block shuffle: every sample once, a few blocks at a time, in an order that chance could have made."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from paceline.data.block_shuffle import IDS_AT_ONCE, BlockShuffled, BlockShuffleSampler
from paceline.data.sharded_sampler import BatchPlan
from paceline.errors import ConfigError

PLAN = BatchPlan(samples=50, batch_size=4, lanes=2, accumulate=1)


@st.composite
def block_orders(draw: st.DrawFn, most: int = 600) -> BlockShuffled:
    samples, seed, epoch = draw(st.integers(1, most)), draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 9))
    block = draw(st.one_of(st.integers(1, 12), st.integers(1, samples + 2)))
    return BlockShuffled(samples, seed, epoch, block, window=draw(st.integers(1, 9)))


def whole(order: BlockShuffled) -> list[int]:
    return [order.sample_at(position) for position in range(order.samples)]


def blocks_open_at_once(ids: list[int], block: int) -> int:
    """The most blocks that have begun and not ended, over all positions: what a reader keeps at hand."""
    left = Counter(sample // block for sample in ids)
    begun: set[int] = set()
    most = 0
    for sample in ids:
        begun.add(sample // block)
        most = max(most, len(begun))
        left[sample // block] -= 1
        if left[sample // block] == 0:
            begun.remove(sample // block)
    return most


@settings(max_examples=150, deadline=None)
@given(block_orders())
def test_every_sample_stands_at_one_position_at_any_size(order: BlockShuffled) -> None:
    assert sorted(whole(order)) == list(range(order.samples))


@settings(max_examples=150, deadline=None)
@given(block_orders())
def test_no_more_than_a_window_of_blocks_is_open_at_a_time(order: BlockShuffled) -> None:
    assert blocks_open_at_once(whole(order), order.block) <= order.window


@settings(max_examples=150, deadline=None)
@given(block_orders())
def test_a_window_of_positions_holds_the_whole_of_its_blocks_and_nothing_else(order: BlockShuffled) -> None:
    ids = iter(whole(order))
    slots = list(dict.fromkeys(sample // order.block for sample in whole(replace(order, window=1))))
    for first in range(0, len(slots), order.window):
        starts = [slot * order.block for slot in slots[first : first + order.window]]
        expected = {sample for start in starts for sample in range(start, min(start + order.block, order.samples))}
        assert set(itertools.islice(ids, len(expected))) == expected


@settings(max_examples=150, deadline=None)
@given(block_orders(most=2**63), st.data())
def test_a_batch_at_a_time_gives_the_samples_of_one_at_a_time(order: BlockShuffled, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, order.samples - 1))
    stop = min(order.samples, start + data.draw(st.integers(0, 120)))
    positions = range(start, stop, data.draw(st.sampled_from([1, 1, 1, 3])))
    together = order.samples_at(positions)
    assert together == [order.sample_at(position) for position in positions]
    assert {type(sample) for sample in together} <= {int}


@pytest.mark.parametrize(("samples", "block"), [(2**63, 2**40), (2**63, 3), (2**63 - 1, 2**70), (10**12 + 39, 4096)])
def test_positions_of_a_large_order_never_share_a_sample(samples: int, block: int) -> None:
    order = BlockShuffled(samples, seed=1, epoch=2, block=block, window=64)
    found = order.samples_at(range(1500)) + order.samples_at(range(samples - 1500, samples))
    assert len(set(found)) == len(found)
    assert min(found) >= 0
    assert max(found) < samples


def test_an_order_of_any_size_takes_no_memory() -> None:
    order = BlockShuffled(10**12 + 1, seed=1, epoch=0, block=4096, window=64)
    tracemalloc.start()
    try:
        order.samples_at(range(9 * 10**11, 9 * 10**11 + 32))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_the_order_stays_what_it_was_when_jobs_began() -> None:
    assert whole(BlockShuffled(14, seed=0, epoch=0, block=4, window=2)) == [
        2,
        13,
        0,
        12,
        3,
        1,
        8,
        9,
        7,
        5,
        4,
        11,
        10,
        6,
    ]


def test_blocks_are_shuffled_and_positions_are_shuffled_inside_a_window() -> None:
    first = [BlockShuffled(100, 0, epoch, block=10, window=2).samples_at(range(20)) for epoch in range(40)]
    assert len({frozenset(sample // 10 for sample in ids) for ids in first}) > 20
    assert all(ids != sorted(ids) for ids in first)
    assert all(len({sample // 10 for sample in ids[:10]}) == 2 for ids in first)


def test_every_window_is_shuffled_in_its_own_way() -> None:
    ids = whole(BlockShuffled(20 * 16, seed=0, epoch=0, block=16, window=1))
    assert len({tuple(sample % 16 for sample in ids[start : start + 16]) for start in range(0, 320, 16)}) == 20


@pytest.mark.parametrize("window", [1, 3, 99])
def test_every_sample_comes_first_equally_often(window: int) -> None:
    found = Counter(BlockShuffled(20, 5, epoch, block=4, window=window).sample_at(0) for epoch in range(4000))
    # 200 of each are expected; four standard deviations of a count are 4 · √200.
    assert {sample: count for sample, count in found.items() if abs(count - 200) > 57} == {}


def test_the_short_block_takes_every_slot_equally_often() -> None:
    orders = [whole(BlockShuffled(21, 5, epoch, block=4, window=1)) for epoch in range(1200)]
    found = Counter(order.index(20) // 4 for order in orders)
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert max(abs(count - 200) for count in found.values()) < 57


def test_one_window_over_everything_is_a_shuffle_of_everything() -> None:
    ids = whole(BlockShuffled(1000, seed=1, epoch=0, block=10, window=100))
    steps = [abs(later - earlier) for earlier, later in itertools.pairwise(ids)]
    assert sum(steps) / len(steps) == pytest.approx(1000 / 3, rel=0.1)


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    orders = {tuple(whole(BlockShuffled(64, seed, epoch, 8, 2))) for seed in range(8) for epoch in range(8)}
    assert len(orders) == 64


def test_the_sampler_gives_an_epochs_order_without_iterating() -> None:
    sampler = BlockShuffleSampler(range(50), block=8, window=2)
    assert sampler.order(3, 7, PLAN) == BlockShuffled(50, seed=3, epoch=7, block=8, window=2)
    assert sampler.order(3, 7, PLAN) == BlockShuffleSampler(50, block=8, window=2).order(3, 7, PLAN)


def test_the_sampler_by_itself_gives_every_sample_once_and_another_order_each_epoch() -> None:
    sampler = BlockShuffleSampler(IDS_AT_ONCE + 50, block=64, window=4)
    torch.manual_seed(4)
    epochs = [list(sampler) for _ in range(3)]
    assert all(sorted(ids) == list(range(len(sampler))) for ids in epochs)
    assert all(blocks_open_at_once(ids, 64) <= 4 for ids in epochs)
    assert len({tuple(ids) for ids in epochs}) == 3


def test_the_sampler_by_itself_follows_torchs_global_seed() -> None:
    sampler = BlockShuffleSampler(100, block=8, window=2)
    torch.manual_seed(4)
    once = list(sampler)
    torch.manual_seed(4)
    assert list(sampler) == once


def test_a_dataloader_takes_the_sampler() -> None:
    dataset = TensorDataset(torch.arange(30))
    loader = DataLoader(dataset, batch_size=8, sampler=BlockShuffleSampler(dataset, block=4, window=2))
    batches = [batch.tolist() for (batch,) in loader]
    assert [len(batch) for batch in batches] == [8, 8, 8, 6]
    assert sorted(itertools.chain(*batches)) == list(range(30))


@pytest.mark.parametrize(
    ("samples", "block", "window", "words"),
    [
        (9, 0, 2, "block shuffle with block=0: give the number of samples read in one go, a whole number from 1"),
        (9, 2, -1, "block shuffle with window=-1: give the number of blocks open at once, a whole number from 1"),
        (9, 2.5, 2, "block=2.5"),
        (0, 2, 2, "block shuffle of 0 samples: the dataset is empty, there is nothing to shuffle"),
        ([], 2, 2, "block shuffle of 0 samples"),
        (iter([1]), 2, 2, "block shuffle of a list_iterator, which has no length: give a dataset with __len__"),
    ],
)
def test_what_cannot_be_shuffled_in_blocks_is_one_clear_line(samples: Any, block: Any, window: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        BlockShuffleSampler(samples, block=block, window=window)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_order_checks_itself_too() -> None:
    with pytest.raises(ConfigError, match="block=0"):
        BlockShuffled(9, 0, 0, block=0, window=1)
