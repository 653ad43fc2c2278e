"""The rules of the peers, and an epoch that moves on by itself, in loader processes too."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Iterator
from itertools import count, islice, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.data.process_shards import IterableDatasetShard
from paceline.errors import ConfigError

TRUTH = (False, True)


class Generated(IterableDataset[int]):
    """Shuffles with a generator, and divides itself among loader processes as torch asks."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        loader = get_worker_info()
        first, stride = (0, 1) if loader is None else (loader.id, loader.num_workers)
        return iter(torch.randperm(16, generator=self.generator).tolist()[first::stride])


class Told(IterableDataset[int]):
    """Says which epoch it was told."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter([self.epochs[-1]] * 4)


def shards(dataset: Any, batch_size: int, processes: int, drop_last: bool = False, split: bool = False) -> Any:
    options = {"split_batches": True} if split else {}
    return [
        list(IterableDatasetShard(dataset, batch_size, drop_last, processes, index, **options))
        for index in range(processes)
    ]


def permutation(seed: int) -> list[int]:
    return torch.randperm(16, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("samples", "options", "expected"),
    [
        (12, {}, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
        (9, {}, [[0, 1, 4, 5, 8, 0], [2, 3, 6, 7, 1, 2]]),  # the drawing
        (9, {"drop_last": True}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (6, {}, [[0, 1, 4, 5], [2, 3, 0, 1]]),
        (3, {}, [[0, 1], [2, 0]]),  # the first real batch is the incomplete one
        (1, {}, [[0, 0], [0, 0]]),
        (3, {"drop_last": True}, [[], []]),
        (0, {}, [[], []]),
        (5, {"split": True}, [[0, 2, 4], [1, 3, 0]]),
        (5, {"split": True, "drop_last": True}, [[0, 2], [1, 3]]),
        (1, {"split": True}, [[0], [0]]),
    ],
)
def test_two_processes_share_as_with_the_peers(samples: int, options: dict[str, bool], expected: Any) -> None:
    assert shards(range(samples), 2, 2, **options) == expected


def all_small_cases(kind: Any) -> str:
    """A digest of every shard, its length and its count, over all small cases."""
    digest = hashlib.sha256()
    for samples, size, processes, drop_last in product(range(30), range(1, 6), range(1, 6), TRUTH):
        for index in range(processes):
            shard = kind(range(samples), size, drop_last, processes, index, 3)
            digest.update(repr((list(shard), len(shard), shard.num_examples)).encode())
    return digest.hexdigest()


def test_all_small_cases_are_what_transformers_5_22_answers() -> None:
    assert all_small_cases(IterableDatasetShard) == "379c76139b065d1ef444b97993995a65eb9e219435f403baffdaed1fcfa54ed1"


def all_small_splits(kind: Any) -> str:
    digest = hashlib.sha256()
    for samples, part, processes, drop_last in product(range(30), range(1, 4), range(1, 6), TRUTH):
        for index in range(processes):
            shard = kind(range(samples), part * processes, drop_last, processes, index, split_batches=True)
            digest.update(repr(list(shard)).encode())
    return digest.hexdigest()


def test_all_small_splits_are_what_accelerate_1_15_answers() -> None:
    assert all_small_splits(IterableDatasetShard) == "9f2fc6c18e5954bf96986ef8b81fa0d71dfa49358e9454b20f4131aea8eb6db3"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 150), st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans())
def test_the_stream_is_shared_once_and_completed_only_from_its_start(
    samples: int, part: int, processes: int, drop_last: bool, split: bool
) -> None:
    batch_size, real = part * processes if split else part, part * processes
    found = shards(range(samples), batch_size, processes, drop_last, split)
    lengths = {len(shard) for shard in found}
    assert lengths == {
        len(IterableDatasetShard(range(samples), batch_size, drop_last, processes, 0, split_batches=split))
    }
    dealt = [
        index for start in range(0, lengths.pop(), part) for shard in found for index in shard[start : start + part]
    ]
    if drop_last:
        assert dealt == list(range(samples // real * real))
    else:
        assert dealt == [place % samples for place in range(len(dealt))]
        assert samples <= len(dealt) < samples + real


def test_a_real_batch_is_read_whole_before_any_of_it_is_given_out() -> None:
    read = count()
    shard = iter(IterableDatasetShard(read, batch_size=2, num_processes=3, process_index=1))
    assert list(islice(shard, 4)) == [2, 3, 8, 9]
    assert next(read) == 12


def test_the_generator_is_seeded_with_seed_and_epoch_and_the_epoch_moves_on() -> None:
    shard = IterableDatasetShard(Generated(), batch_size=16, seed=5)
    found = [(list(shard), shard.epoch) for _ in range(3)]
    assert found == [(permutation(5 + epoch), epoch) for epoch in range(3)]


def test_set_epoch_wins_and_the_count_goes_on_from_there() -> None:
    shard = IterableDatasetShard(Generated(), batch_size=16)
    epochs = []
    for wanted in (None, 0, None, 7, 7, None, 2, None):
        if wanted is not None:
            shard.set_epoch(wanted)
            assert shard.epoch == wanted
        assert list(shard) == permutation(shard.epoch)
        epochs.append(shard.epoch)
    assert epochs == [0, 0, 1, 7, 7, 8, 2, 3]


def test_a_dataset_with_set_epoch_is_told_and_its_generator_left_alone() -> None:
    dataset = Told()
    dataset.generator = torch.Generator().manual_seed(99)
    shard = IterableDatasetShard(dataset, batch_size=2)
    assert [list(shard), list(shard)] == [[0] * 4, [1] * 4]
    shard.set_epoch(5)
    assert dataset.epochs == [0, 1, 5]
    assert list(shard) == [5] * 4
    assert dataset.generator.initial_seed() == 99


def test_only_a_torch_generator_is_seeded() -> None:
    class Plain(Generated):
        def __init__(self) -> None:
            self.generator = iter([3, 4])

        def __iter__(self) -> Iterator[int]:
            return self.generator

    assert list(IterableDatasetShard(Plain())) == [3, 4]


def test_num_examples_counts_what_was_read_in_this_iteration() -> None:
    shard = IterableDatasetShard(range(7), batch_size=2, num_processes=2, process_index=1)
    for _ in range(2):
        list(shard)
        assert shard.num_examples == 7
    next(iter(shard))
    assert shard.num_examples == 4


def test_the_length_of_a_stream_without_one_is_a_type_error_as_torch_expects() -> None:
    shard = IterableDatasetShard(iter([1, 2, 3]))
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(shard)
    assert list(shard) == [1, 2, 3]


@pytest.mark.parametrize("persistent", TRUTH)
def test_the_epoch_moves_on_in_loader_processes_and_set_epoch_reaches_them(persistent: bool) -> None:
    # 16 samples: each of 2 loader processes reads 8 and takes those of process 1, in real batches of 4.
    shard = IterableDatasetShard(Generated(), batch_size=2, num_processes=2, process_index=1, seed=3)
    loader: DataLoader[Any] = DataLoader(shard, batch_size=2, num_workers=2, persistent_workers=persistent)

    def expected(epoch: int) -> list[list[int]]:
        order = permutation(3 + epoch)
        return [order[start : start + 8][slice(loader, None, 2)][2:] for start in (0, 8) for loader in (0, 1)]

    for wanted in (None, None, 0, 9, None):
        if wanted is not None:
            shard.set_epoch(wanted)
        found = [batch.tolist() for batch in loader]
        assert (found, shard.epoch) == (expected(shard.epoch), shard.epoch)
    next(iter(loader))  # an epoch left early counts
    assert (shard.epoch, [batch.tolist() for batch in loader]) == (11, expected(12))


@pytest.mark.slow
def test_loader_processes_of_a_spawned_start_count_too() -> None:
    shard = IterableDatasetShard(Told(), batch_size=2)
    loader: DataLoader[Any] = DataLoader(shard, batch_size=4, num_workers=1, multiprocessing_context="spawn")
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[0] * 4, [1] * 4]


def test_a_copy_goes_on_where_the_original_stands_and_apart_from_it() -> None:
    shard = IterableDatasetShard(Told(), batch_size=2)
    list(shard)
    copies = [copy.deepcopy(shard), pickle.loads(pickle.dumps(shard))]  # noqa: S301
    assert [list(twin) for twin in copies] == [[1] * 4] * 2
    assert shard.epoch == 0
    loader: DataLoader[Any] = DataLoader(copies[0], batch_size=4, num_workers=1)
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[2] * 4, [3] * 4]


def test_iterations_here_and_in_loader_processes_are_counted_together() -> None:
    shard = IterableDatasetShard(Told(), batch_size=2)
    loader: DataLoader[Any] = DataLoader(shard, batch_size=4, num_workers=2)
    found = []
    for source in (shard, loader, loader, shard, shard, loader):
        found.append({int(epoch) for batch in source for epoch in torch.as_tensor(batch).reshape(-1)})
    assert found == [{0}, {1}, {2}, {3}, {4}, {5}]


@pytest.mark.parametrize(("processes", "index"), [(2, 2), (2, -1), (0, 0)])
def test_a_process_that_does_not_exist_is_refused(processes: int, index: int) -> None:
    with pytest.raises(ConfigError, match=f"IterableDatasetShard: there is no process_index={index} among num_proc"):
        IterableDatasetShard(range(4), num_processes=processes, process_index=index)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size=0; a batch has at least one sample"):
        IterableDatasetShard(range(4), batch_size=0)


@pytest.mark.parametrize(("size", "nearest"), [(3, "2 or 4"), (1, "2")])
def test_a_batch_that_cannot_be_split_equally_is_refused(size: int, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=f"batch_size={size} is no round multiple of num_processes=2; nearest that is: {nearest}$"
    ):
        IterableDatasetShard(range(4), batch_size=size, num_processes=2, split_batches=True)
