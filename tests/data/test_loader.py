"""The user's DataLoader, shared out to lanes: the same batches with any number of workers and loader processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from paceline.data.loader import ShardedLoader
from paceline.data.process_shards import BatchSamplerShard
from paceline.data.sharded_sampler import WorkItem
from paceline.data.work_source import Assignment
from paceline.errors import ConfigError
from paceline.world.lanes import neighbouring_lanes

LANES = 4
NUMBERS = TensorDataset(torch.arange(30))


class Noisy(Dataset[Tensor]):
    """Augments with all three generators that people use."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)


def sharded(source: DataLoader[Any], *, worker: int = 0, workers: int = 1, **options: Any) -> ShardedLoader:
    lanes = neighbouring_lanes(LANES, workers)[worker]
    return ShardedLoader(
        source, Assignment(**{"lanes": LANES, "accumulate": 2, "own_lanes": lanes, "seed": 3} | options)
    )


def items_at(loader: ShardedLoader, epoch: int = 0, position: int = 0) -> Iterator[tuple[WorkItem, Any]]:
    """The items from a place on, as after a resume."""
    loader.restore(loader.state_after(None) | {"epoch": epoch, "position": position})
    return loader.items()


def everything(source: DataLoader[Any], *, workers: int = 1, epoch: int = 0) -> dict[tuple[int, int, int], Any]:
    """What all workers together are handed, by (step, lane, micro-batch)."""
    found = {}
    for worker in range(workers):
        for item, batch in items_at(sharded(source, worker=worker, workers=workers), epoch):
            if not item.shadow:
                found[item.step, item.lane, item.micro_batch] = batch.tolist() if isinstance(batch, Tensor) else batch
    return found


def order_of(loader: ShardedLoader, epoch: int = 0) -> list[int]:
    """The epoch's sample ids in the order of their positions: within a step, micro-batch by micro-batch."""
    items = [item for item, _ in items_at(loader, epoch)]
    return [i for item in sorted(items, key=lambda it: (it.step, it.micro_batch, it.lane)) for i in item.sample_ids]


# -- what is handed out ------------------------------------------------------------------------------------------------


def test_a_loader_that_does_not_shuffle_deals_the_dataset_in_order() -> None:
    assert order_of(sharded(DataLoader(NUMBERS, batch_size=3))) == list(range(30))


def test_a_loader_that_shuffles_deals_every_sample_once_in_an_order_of_its_epoch() -> None:
    loader = sharded(DataLoader(NUMBERS, batch_size=3, shuffle=True))
    first, second = order_of(loader, epoch=0), order_of(loader, epoch=1)
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second


def test_a_batch_holds_the_samples_that_its_item_names() -> None:
    for item, (batch,) in sharded(DataLoader(NUMBERS, batch_size=3, shuffle=True)).items():
        assert batch.tolist() == list(item.sample_ids)


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
def test_augmentations_have_the_same_values_with_any_number_of_workers(workers: int) -> None:
    source = DataLoader(Noisy(), batch_size=3, shuffle=True)
    assert everything(source, workers=workers) == everything(source)


def test_augmentations_have_other_values_in_every_micro_batch_and_epoch() -> None:
    source = DataLoader(Noisy(), batch_size=1)
    noise = [row[1:] for epoch in (0, 1) for batch in everything(source, epoch=epoch).values() for row in batch]
    assert len({value for row in noise for value in row}) == 3 * 2 * 30


def test_loader_processes_give_the_batches_that_the_worker_itself_would() -> None:
    alone = everything(DataLoader(Noisy(), batch_size=3, shuffle=True))
    assert everything(DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=2)) == alone


def test_beginning_at_a_step_gives_what_is_left_of_the_epoch() -> None:
    loader = sharded(DataLoader(Noisy(), batch_size=1, shuffle=True))
    tail = [(item, batch.tolist()) for item, batch in loader.items() if item.step >= 2]
    assert [(item, batch.tolist()) for item, batch in items_at(loader, position=16)] == tail


def test_items_know_the_first_and_last_of_their_step_and_lane() -> None:
    items = [item for item, _ in sharded(DataLoader(NUMBERS, batch_size=2), worker=1, workers=2).items()]

    def flags(item: WorkItem) -> tuple[int, int, int, str]:
        names = ("first_of_step", "first_of_lane", "last_of_lane", "last_of_step")
        return item.step, item.lane, item.micro_batch, "".join("x" if getattr(item, name) else "." for name in names)

    assert [flags(item) for item in items] == [
        (0, 2, 0, "xx.."),
        (0, 2, 1, "..x."),
        (0, 3, 0, ".x.."),
        (0, 3, 1, "..xx"),
        (1, 2, 0, "xx.."),  # 14 samples are left: seven micro-batches, of which lane 3 gets only one
        (1, 2, 1, "..x."),
        (1, 3, 0, ".xxx"),
    ]


def test_a_collate_function_is_kept() -> None:
    source = DataLoader(NUMBERS, batch_size=3, collate_fn=lambda samples: [int(sample[0]) for sample in samples])
    assert everything(source)[0, 1, 0] == [3, 4, 5]


class FetchesMany(Dataset[int]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> int:
        raise AssertionError("a dataset with __getitems__ is asked for whole batches")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * index for index in indices]


def test_a_dataset_that_fetches_many_at_once_is_asked_to() -> None:
    assert everything(DataLoader(FetchesMany(), batch_size=3))[0, 1, 0] == [30, 40, 50]


# -- samplers of the user's own ----------------------------------------------------------------------------------------


def test_the_order_of_a_custom_sampler_is_respected() -> None:
    ids = [5, 29, 5, 0, 7, 7, 11]
    assert order_of(sharded(DataLoader(NUMBERS, batch_size=1, sampler=ids))) == ids


@pytest.mark.parametrize(
    "sampler", [SubsetRandomSampler(range(5, 25)), WeightedRandomSampler([1.0] * 30, 20)], ids=["subset", "weighted"]
)
def test_a_random_sampler_draws_the_same_order_on_every_worker_and_another_in_every_epoch(sampler: Any) -> None:
    source = DataLoader(NUMBERS, batch_size=2, sampler=sampler)
    torch.manual_seed(1)
    first = order_of(sharded(source))
    torch.manual_seed(2)
    assert order_of(sharded(source)) == first
    assert order_of(sharded(source), epoch=1) != first


def test_drawing_a_sampler_s_order_leaves_torch_s_random_numbers_where_they_were() -> None:
    loader = sharded(DataLoader(NUMBERS, batch_size=2, sampler=SubsetRandomSampler(range(30)), num_workers=0))
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert loader.plan.samples == 30
    assert torch.equal(torch.rand(1), expected)


def test_a_sampler_with_a_generator_of_its_own_fetches_what_the_items_name() -> None:
    sampler = SubsetRandomSampler(range(30), generator=torch.Generator().manual_seed(5))
    for item, (batch,) in sharded(DataLoader(NUMBERS, batch_size=2, sampler=sampler)).items():
        assert batch.tolist() == list(item.sample_ids)


class ShufflesWithPython(Sampler[int]):
    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[int]:
        ids = list(range(30))
        random.shuffle(ids)
        return iter(ids)


def test_a_sampler_that_uses_python_s_random_draws_the_same_order_on_every_worker() -> None:
    source = DataLoader(NUMBERS, batch_size=2, sampler=ShufflesWithPython())
    random.seed(1)
    first = order_of(sharded(source))
    random.seed(2)
    assert order_of(sharded(source)) == first


def test_a_random_sampler_of_few_samples_draws_them_from_the_whole_dataset() -> None:
    loader = sharded(DataLoader(NUMBERS, batch_size=1, sampler=RandomSampler(NUMBERS, num_samples=5)))
    assert max(max(order_of(loader, epoch)) for epoch in range(10)) >= 5


def test_a_random_sampler_with_replacement_stays_inside_the_dataset() -> None:
    sampler = RandomSampler(NUMBERS, replacement=True, num_samples=60)
    assert max(order_of(sharded(DataLoader(NUMBERS, batch_size=1, sampler=sampler)))) < 30


# -- what can't be assigned --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            DataLoader(NUMBERS, batch_size=2, sampler=DistributedSampler(NUMBERS, num_replicas=2, rank=0)),
            r"already has a DistributedSampler, so samples would be split twice; pass shuffle=True .* instead",
        ),
        (
            DataLoader(NUMBERS, batch_sampler=BatchSamplerShard(BatchSampler(SequentialSampler(NUMBERS), 2, False), 2)),
            "already has a BatchSamplerShard, so samples would be split twice",
        ),
        (DataLoader(NUMBERS, batch_size=None), "batch_size=None can't be assigned to lanes; give it batch_size="),
        (DataLoader(TensorDataset(torch.zeros(0)), batch_size=2), "the dataset is empty"),
    ],
    ids=["distributed sampler", "batch sampler shard", "no batch size", "empty"],
)
def test_what_cannot_be_assigned_is_refused_with_what_to_do(source: DataLoader[Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        sharded(source)


def test_a_global_batch_size_is_cut_into_lanes_and_micro_batches() -> None:
    assert sharded(DataLoader(NUMBERS, batch_size=5), global_batch_size=24).plan.batch_size == 3


def test_a_global_batch_size_that_cannot_be_cut_is_refused_with_the_nearest_that_can() -> None:
    text = "global_batch_size=20 can't be cut into 4 lanes × 2 micro-batches of equal size; nearest that can: 16 or 24"
    with pytest.raises(ConfigError, match=text):
        sharded(DataLoader(NUMBERS, batch_size=5), global_batch_size=20)
