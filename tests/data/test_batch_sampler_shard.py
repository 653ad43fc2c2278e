"""accelerate's BatchSamplerShard: its answers as a table of corner cases, as a digest of all small cases, as rules."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain, islice, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from paceline.data.process_shards import BatchSamplerShard
from paceline.errors import ConfigError

TRUTH = (False, True)
Batches = list[list[int]]


class Given:
    """A batch sampler of one's own."""

    def __init__(self, batches: Batches, **attributes: Any) -> None:
        self.batches = batches
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def shards(
    sampler: Any, processes: int, split: bool = False, even: bool = True, kind: Any = BatchSamplerShard
) -> list[Batches]:
    return [list(kind(sampler, processes, index, split, even)) for index in range(processes)]


def cut(samples: int, batch_size: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(range(samples), batch_size, drop_last)


@pytest.mark.parametrize(
    ("sampler", "options", "expected"),
    [
        # the drawing
        (cut(10, 4), {}, [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]),
        (cut(10, 4), {"split": True}, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]),
        # the same, not made even, and dropped
        (cut(10, 4), {"even": False}, [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7]]]),
        (cut(10, 4), {"even": False, "split": True}, [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]),
        (cut(10, 4, True), {}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
        (cut(10, 4, True), {"split": True}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (cut(10, 4, True), {"even": False}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
        # the round is complete but its last batch is short; a full batch is without a partner
        (cut(7, 4), {}, [[[0, 1, 2, 3]], [[4, 5, 6, 0]]]),
        (cut(7, 4), {"even": False}, [[[0, 1, 2, 3]], [[4, 5, 6]]]),
        (cut(12, 4), {}, [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [0, 1, 2, 3]]]),
        (cut(12, 4), {"even": False}, [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7]]]),
        # fewer samples than one round, and than one batch: the start is taken more than once
        (cut(3, 4), {}, [[[0, 1, 2, 0]], [[1, 2, 0, 1]]]),
        (cut(1, 4), {"split": True}, [[[0, 0]], [[0, 0]]]),
        (cut(3, 4), {"even": False, "split": True}, [[[0, 1]], [[2]]]),
        (cut(2, 4), {"even": False, "split": True}, [[[0, 1]], []]),
        (cut(3, 4, True), {}, [[], []]),
        (cut(0, 4), {}, [[], []]),
        # no batch_size: batches of any length, and whole batches are taken again
        (Given([[0], [1, 2], [3, 4, 5]]), {}, [[[0], [3, 4, 5]], [[1, 2], [0]]]),
        (Given([[0, 1]], batch_size=None), {}, [[[0, 1]], [[0, 1]]]),
        (Given([[0], [1, 2], [3]]), {"even": False}, [[[0], [3]], [[1, 2]]]),
        (Given([[0], [1, 2], [3]], drop_last=True), {}, [[[0]], [[1, 2]]]),
    ],
)
def test_two_processes_share_as_with_accelerate(
    sampler: Any, options: dict[str, bool], expected: list[Batches]
) -> None:
    assert shards(sampler, 2, **options) == expected


def all_small_cases(kind: Any) -> str:
    """A digest of every shard and its length, over all small cases."""
    digest = hashlib.sha256()
    for samples, size, processes in product(range(26), range(1, 6), range(1, 5)):
        for drop_last, split, even in product(TRUTH, TRUTH, TRUTH):
            if not split or size % processes == 0:
                sampler = cut(samples, size, drop_last)
                lengths = [len(kind(sampler, processes, index, split, even)) for index in range(processes)]
                digest.update(repr((shards(sampler, processes, split, even, kind), lengths)).encode())
    return digest.hexdigest()


def test_all_small_cases_are_what_accelerate_1_15_answers() -> None:
    assert all_small_cases(BatchSamplerShard) == "8fa39674252c29191ee8668ebe9062e74bd3211fff4c5445158394bc3bda7e78"


def all_small_cases_of_any_length(kind: Any) -> str:
    digest = hashlib.sha256()
    for count, processes, drop_last, even in product(range(10), range(1, 5), TRUTH, TRUTH):
        batches = [[*range(10 * number, 10 * number + number % 4 + 1)] for number in range(count)]
        digest.update(repr(shards(Given(batches, drop_last=drop_last), processes, False, even, kind)).encode())
    return digest.hexdigest()


def test_batches_of_any_length_are_dealt_as_accelerate_1_15_deals_them() -> None:
    assert (
        all_small_cases_of_any_length(BatchSamplerShard)
        == "689184ecd9f79a67233e08941c3586eb01958420b66460db38bfb6c6a43addab"
    )


@st.composite
def setups(draw: st.DrawFn) -> tuple[int, int, int, bool, bool]:
    processes, split = draw(st.integers(1, 6)), draw(st.booleans())
    size = draw(st.integers(1, 5)) * (processes if split else 1)
    return draw(st.integers(0, 120)), size, processes, split, draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(setups())
def test_an_even_epoch_is_everything_once_and_then_its_start_again(setup: tuple[int, int, int, bool, bool]) -> None:
    samples, size, processes, split, drop_last = setup
    found = shards(cut(samples, size, drop_last), processes, split)
    assert {len(batch) for shard in found for batch in shard} <= {size // processes if split else size}
    # strict: all processes get the same number of batches
    dealt = list(chain.from_iterable(batch for turn in zip(*found, strict=True) for batch in turn))
    if drop_last:
        whole = size if split else size * processes
        assert dealt == list(range(samples // whole * whole))
    else:
        assert dealt == [place % samples for place in range(len(dealt))]
        assert samples <= len(dealt) < samples + (size if split else size * processes)


@settings(max_examples=150, deadline=None)
@given(setups())
def test_an_uneven_epoch_is_everything_once(setup: tuple[int, int, int, bool, bool]) -> None:
    samples, size, processes, split, _ = setup
    found = shards(cut(samples, size), processes, split, even=False)
    assert sorted(chain(*chain(*found))) == list(range(samples))
    counts = [len(shard) for shard in found]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1


@settings(max_examples=150, deadline=None)
@given(setups(), st.booleans())
def test_the_length_is_the_number_of_batches(setup: tuple[int, int, int, bool, bool], even: bool) -> None:
    samples, size, processes, split, drop_last = setup
    sampler = cut(samples, size, drop_last)
    for index in range(processes):
        shard = BatchSamplerShard(sampler, processes, index, split, even)
        # accelerate's exception, kept: a short last batch that is split counts for processes it has nothing for
        missing = split and not even and not drop_last and 0 < samples % size <= index * size // processes
        assert len(list(shard)) == len(shard) - missing
        assert shard.total_length == len(sampler)


def test_any_length_goes_with_even_batches_false_and_nothing_is_lost() -> None:
    vary = Given([[0, 1], [2], [3, 4], [5]], batch_size=2)
    assert shards(vary, 2, even=False) == [[[0, 1], [3, 4]], [[2], [5]]]


@pytest.mark.parametrize(
    ("batches", "split", "wrong"),
    [
        ([[0, 1], [2], [3, 4]], False, "a batch of 1 before the last"),
        ([[0], [2, 3], [3, 4]], False, "a batch of 1 before the last"),
        ([[0, 1], [2], [3, 4]], True, "a batch of 1 before the last"),
        ([[0, 1], [2, 3, 4]], False, "a batch of 3"),
    ],
)
def test_a_batch_that_accelerate_would_leave_out_is_named(batches: Batches, split: bool, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"process 1: Given says batch_size=2 and gave {wrong}; where batches vary"):
        list(BatchSamplerShard(Given(batches, batch_size=2), 2, 1, split))


def test_the_samplers_own_batches_are_left_as_they_were() -> None:
    batches = [[0, 1], [2, 3], [4]]
    for split in TRUTH:
        shards(Given(batches, batch_size=2), 2, split)
    assert batches == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("size", "nearest"), [(6, "4 or 8"), (3, "4")])
def test_a_batch_that_cannot_be_split_equally_is_refused(size: int, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=f"batch_size={size} is no round multiple of num_processes=4; nearest that is: {nearest}$"
    ):
        BatchSamplerShard(cut(10, size), 4, 0, split_batches=True)


def test_splitting_without_a_batch_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="the batch sampler has no batch_size; give it one or give out whole batches"):
        BatchSamplerShard(Given([[0, 1]]), 2, 0, split_batches=True)


@pytest.mark.parametrize(("processes", "index"), [(2, 2), (2, -1), (0, 0)])
def test_a_process_that_does_not_exist_is_refused(processes: int, index: int) -> None:
    with pytest.raises(ConfigError, match=f"no process_index={index} among num_processes={processes}; processes count"):
        BatchSamplerShard(cut(10, 2), processes, index)


def test_a_data_loader_with_loader_processes_takes_it_as_its_batch_sampler() -> None:
    shard = BatchSamplerShard(cut(10, 4), 2, 1)
    loader: DataLoader[Any] = DataLoader(torch.arange(10), batch_sampler=shard, num_workers=2)  # type: ignore[arg-type]
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [2, 3, 4, 5]]
    assert (len(loader), isinstance(shard, BatchSampler)) == (2, True)


def test_an_endless_sampler_is_dealt_as_it_comes() -> None:
    class Endless(Given):
        def __iter__(self) -> Iterator[list[int]]:
            start = 0
            while True:
                yield [start, start + 1]
                start += 2

    assert list(islice(BatchSamplerShard(Endless([], batch_size=2), 3, 1), 2)) == [[2, 3], [8, 9]]
