"""The DataLoaders that TrainingArguments describe; the Engine deals their samples to lanes and workers.

| train_sampling_strategy | order                                                             |
|-------------------------|-------------------------------------------------------------------|
| random                  | a keyed shuffle, from `data_seed` where it is given               |
| sequential              | the dataset's                                                     |
| group_by_length         | similar lengths meet in a step, and its lanes get equal work      |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from paceline.data.global_order import GlobalOrder, Shuffled
from paceline.data.length_grouped import LengthGroupedSampler
from paceline.data.sharded_sampler import BatchPlan
from paceline.errors import ConfigError
from paceline.trainer.argument_fields import Sampling
from paceline.trainer.collating import Collator
from paceline.trainer.training_arguments import TrainingArguments


class SeededShuffle(Sampler[int]):
    """The Engine's own shuffle, under a seed of the data's own."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        return iter(Shuffled(self._samples, self._seed, 0).samples_at(range(self._samples)))

    @property
    def identity(self) -> str:
        return f"of data_seed {self._seed}"

    def order(self, seed: int, epoch: int, cut: BatchPlan) -> GlobalOrder:
        return Shuffled(cut.samples, self._seed, epoch)


def train_loader(
    dataset: Any, arguments: TrainingArguments, collator: Collator, device: torch.device, processing_class: Any = None
) -> DataLoader[Any]:
    options = _options(arguments, collator, device)
    size, drop_last = arguments.per_device_train_batch_size, arguments.dataloader_drop_last
    if _is_stream(dataset):
        if arguments.train_sampling_strategy is Sampling.GROUP_BY_LENGTH:
            raise ConfigError("train_sampling_strategy='group_by_length' needs a dataset with a length, not a stream")
        return DataLoader(dataset, batch_size=size, drop_last=drop_last, **options)
    if len(dataset) == 0:
        raise ConfigError("train_dataset is empty: there is nothing to train on")
    sampler = _sampler(dataset, arguments, processing_class)
    shuffle = sampler is None and arguments.train_sampling_strategy is Sampling.RANDOM
    return DataLoader(dataset, batch_size=size, shuffle=shuffle, sampler=sampler, drop_last=drop_last, **options)


def eval_loader(
    dataset: Any, arguments: TrainingArguments, collator: Collator, device: torch.device, name: str = "eval_dataset"
) -> DataLoader[Any]:
    """Every sample, in the dataset's order."""
    check_not_empty(dataset, name)
    size = arguments.per_device_eval_batch_size
    return DataLoader(dataset, batch_size=size, shuffle=False, **_options(arguments, collator, device))


def check_not_empty(dataset: Any, name: str) -> None:
    if not _is_stream(dataset) and len(dataset) == 0:
        raise ConfigError(f"{name} is empty: there is nothing to evaluate; leave it out and set eval_strategy='no'")


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")


def _sampler(dataset: Any, arguments: TrainingArguments, processing_class: Any) -> Sampler[int] | None:
    match arguments.train_sampling_strategy:
        case Sampling.GROUP_BY_LENGTH:
            column = arguments.length_column_name
            lengths = list(dataset[column]) if column in getattr(dataset, "column_names", ()) else None
            names = getattr(processing_class, "model_input_names", None)
            return LengthGroupedSampler(
                arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps,
                dataset=dataset,
                lengths=lengths,
                model_input_name=names[0] if names else None,
            )
        case Sampling.RANDOM if arguments.data_seed is not None:
            return SeededShuffle(len(dataset), arguments.data_seed)
    return None


def _options(arguments: TrainingArguments, collator: Collator, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {
        "collate_fn": collator,
        "num_workers": arguments.dataloader_num_workers,
        "pin_memory": arguments.dataloader_pin_memory and device.type != "cpu",
    }
    if arguments.dataloader_num_workers:
        options["persistent_workers"] = arguments.dataloader_persistent_workers
        options["prefetch_factor"] = arguments.dataloader_prefetch_factor
        options["multiprocessing_context"] = arguments.dataloader_multiprocessing_context
    return options
