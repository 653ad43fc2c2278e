"""torch's DistributedSampler in everything but the order itself and the epoch that moves on."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data.distributed_sampler import DistributedSampler
from paceline.data.global_order import Shuffled
from paceline.data.loader import Assignment, ShardedLoader
from paceline.errors import ConfigError

TRUTH = (False, True)


def shuffled(samples: int, seed: int = 0, epoch: int = 0) -> list[int]:
    order = Shuffled(samples, seed, epoch)
    return [order.sample_at(position) for position in range(samples)]


@pytest.mark.parametrize("shuffle", TRUTH)
def test_it_takes_the_positions_that_torch_takes(shuffle: bool) -> None:
    for samples, replicas, drop_last in product(range(30), range(1, 9), TRUTH):
        order = shuffled(samples) if shuffle else list(range(samples))
        for rank in range(replicas):
            theirs = TorchDistributedSampler(range(samples), replicas, rank, shuffle=False, drop_last=drop_last)
            ours = DistributedSampler(range(samples), replicas, rank, shuffle, drop_last=drop_last)
            case = (samples, replicas, rank, drop_last)
            assert (case, list(ours)) == (case, [order[place] for place in theirs])
            assert (case, len(ours), ours.total_size) == (case, len(theirs), theirs.total_size)


@pytest.mark.parametrize(
    ("samples", "drop_last", "shards"),
    [
        (7, False, [[0, 3, 6], [1, 4, 0], [2, 5, 1]]),
        (7, True, [[0, 3], [1, 4], [2, 5]]),
        (6, False, [[0, 3], [1, 4], [2, 5]]),
        (6, True, [[0, 3], [1, 4], [2, 5]]),
        (2, False, [[0], [1], [0]]),
        (1, False, [[0], [0], [0]]),  # the padding is longer than the dataset
        (2, True, [[], [], []]),
        (0, False, [[], [], []]),
    ],
)
def test_three_replicas_look_like_the_drawing(samples: int, drop_last: bool, shards: list[list[int]]) -> None:
    samplers = [DistributedSampler(range(samples), 3, rank, shuffle=False, drop_last=drop_last) for rank in range(3)]
    assert [list(sampler) for sampler in samplers] == shards


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 12), st.booleans(), st.integers(0, 2**40), st.integers(0, 1000))
def test_replicas_share_an_epoch_and_pad_only_from_its_start(
    samples: int, replicas: int, drop_last: bool, seed: int, epoch: int
) -> None:
    samplers = [DistributedSampler(range(samples), replicas, rank, True, seed, drop_last) for rank in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shards = [list(sampler) for sampler in samplers]
    assert {len(shard) for shard in shards} == {len(samplers[0])}
    dealt = [index for turn in zip(*shards, strict=True) for index in turn]
    order = shuffled(samples, seed, epoch)
    if drop_last:
        assert dealt == order[: samples // replicas * replicas]
    else:
        assert (dealt[:samples], sorted(order)) == (order, list(range(samples)))
        assert dealt[samples:] == list(islice(order * replicas, len(dealt) - samples))
        assert max(Counter(dealt).values()) - min(Counter(dealt).values()) <= 1


def test_the_epoch_moves_on_by_itself() -> None:
    sampler = DistributedSampler(range(20), 1, 0, seed=5)
    found = [(list(sampler), sampler.epoch) for _ in range(3)]
    assert found == [(shuffled(20, 5, epoch), epoch) for epoch in range(3)]


def test_set_epoch_wins_and_the_count_goes_on_from_there() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    epochs = []
    for wanted in (None, 0, None, 7, 7, None, 2, None):
        if wanted is not None:
            sampler.set_epoch(wanted)
        assert list(sampler) == shuffled(20, epoch=sampler.epoch)
        epochs.append(sampler.epoch)
    assert epochs == [0, 0, 1, 7, 7, 8, 2, 3]


def test_an_epoch_left_early_counts_and_one_not_begun_does_not() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    iter(sampler)
    assert next(iter(sampler)) == shuffled(20, epoch=0)[0]
    assert list(sampler) == shuffled(20, epoch=1)


def test_an_iteration_keeps_its_order_when_another_starts() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    early = iter(sampler)
    begun = [next(early)]
    assert list(sampler) == shuffled(20, epoch=1)
    assert begun + list(early) == shuffled(20, epoch=0)


def test_a_trillion_samples_start_at_once() -> None:
    order = Shuffled(10**12, seed=0, epoch=0)
    sampler = DistributedSampler(range(10**12), 1000, 7)
    assert list(islice(sampler, 3)) == [order.sample_at(position) for position in (7, 1007, 2007)]
    assert len(sampler) == 10**9


def test_the_place_is_by_default_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(**given: int) -> tuple[int, int]:
        sampler = DistributedSampler(range(10), **given)
        return sampler.num_replicas, sampler.rank

    for name in ("RANK", "WORLD_SIZE", "PACELINE_RANK", "PACELINE_WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert place() == (1, 0)
    torchrun = {"RANK": 2, "WORLD_SIZE": 4, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 29500}
    for name, value in {**torchrun, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    assert place() == (4, 2)
    assert place(rank=1) == (4, 1)
    assert place(num_replicas=3) == (3, 2)
    with pytest.raises(ConfigError, match="no rank 2 among num_replicas=2"):
        place(num_replicas=2)


def test_a_process_group_that_the_launcher_knows_nothing_of_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {"is_initialized": True, "get_world_size": 4, "get_rank": 3}.items():
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    with pytest.raises(
        ConfigError, match=r"the launcher \(alone\) says rank 0 of 1, the process group says rank 3 of 4; pass num_rep"
    ):
        DistributedSampler(range(10))
    assert len(DistributedSampler(range(10), 4, 3)) == 3


@pytest.mark.parametrize(("replicas", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(replicas: int, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"no rank {rank} among num_replicas={replicas}; ranks count from 0"):
        DistributedSampler(range(10), replicas, rank)


def test_a_dataset_without_a_length_is_sent_to_the_other_class() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

    with pytest.raises(ConfigError, match="Stream has none; shard an iterable dataset with IterableDatasetShard"):
        DistributedSampler(Stream(), 2, 0)


def test_a_dataset_that_grew_is_noticed() -> None:
    dataset = [1, 2, 3]
    sampler = DistributedSampler(dataset, 2, 1)
    dataset.append(4)
    with pytest.raises(ConfigError, match=r"rank 1: the dataset had 3 samples .* has 4 now; make a new sampler"):
        list(sampler)


def test_prepare_refuses_it_as_it_refuses_torchs() -> None:
    dataset = TensorDataset(torch.arange(10))
    source: DataLoader[Any] = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, 2, 0))
    with pytest.raises(ConfigError, match="already has a DistributedSampler"):
        ShardedLoader(source, Assignment(lanes=1, accumulate=1, own_lanes=(0,), seed=0))


def test_a_copy_goes_on_where_the_original_stands() -> None:
    sampler = DistributedSampler(range(20), 1, 0)
    list(sampler)
    assert list(pickle.loads(pickle.dumps(sampler))) == shuffled(20, epoch=1)  # noqa: S301


@pytest.mark.parametrize("batch_size", [5, None])
def test_loader_processes_get_the_epochs_in_turn(batch_size: int | None) -> None:
    sampler = DistributedSampler(range(20), 2, 1)
    loader: DataLoader[Any] = DataLoader(range(20), batch_size, sampler=sampler, num_workers=2)  # type: ignore[arg-type]
    found = [torch.cat([torch.as_tensor(batch).reshape(-1) for batch in loader]).tolist() for _ in range(2)]
    assert found == [shuffled(20, epoch=epoch)[1::2] for epoch in range(2)]
