"""From a dataset to batches: the DataLoaders that TrainingArguments describe. The Engine assigns samples to lanes.

| train_sampling_strategy | order                                                             |
|-------------------------|-------------------------------------------------------------------|
| random                  | a keyed shuffle, from `data_seed` where it is given               |
| sequential              | the dataset's                                                     |
| group_by_length         | similar lengths meet in a step, and its lanes get equal work      |

A batch holds what the model's forward takes, and nothing else:

    [{"input_ids": …, "label": 3, "text": "…"}, …]  ──►  {"input_ids": Tensor, "labels": Tensor}

Mappings become a mapping of stacked values, under transformers' names for labels; other samples are collated by torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from paceline.data.global_order import GlobalOrder, Shuffled
from paceline.data.length_grouped import LengthGroupedSampler
from paceline.data.sharded_sampler import BatchPlan
from paceline.data.step_source import StepSource
from paceline.errors import ConfigError, DataError
from paceline.trainer.argument_fields import Sampling
from paceline.trainer.losses import forward_of
from paceline.trainer.training_arguments import TrainingArguments
from paceline.world import messages

Collator = Callable[[list[Any]], Any]

_LABELS = ("label", "label_ids")

# -- loaders and samplers ---------------------------------------------------------------------------------------------


def train_loader(
    dataset: Any,
    arguments: TrainingArguments,
    collator: Collator,
    device: torch.device,
    sampler: Sampler[int] | None,
    size: int,
) -> DataLoader[Any]:
    if is_stream(dataset) and arguments.train_sampling_strategy is Sampling.GROUP_BY_LENGTH:
        raise ConfigError("train_sampling_strategy='group_by_length' needs a dataset with a length, not a stream")
    return DataLoader(dataset, batch_size=size, sampler=sampler, **_options(arguments, collator, device))


def eval_loader(
    dataset: Any,
    arguments: TrainingArguments,
    collator: Collator,
    device: torch.device,
    size: int,
    name: str = "eval_dataset",
    sampler: Sampler[int] | None = None,
) -> DataLoader[Any]:
    """Every sample, in the dataset's order unless there is a sampler; dataloader_drop_last leaves a short batch out."""
    check_not_empty(dataset, name)
    if arguments.dataloader_drop_last and not is_stream(dataset) and (left_out := len(dataset) % size):
        if left_out == len(dataset):
            raise ConfigError(f"{name} has {left_out} samples, no batch of {size}, and dataloader_drop_last=True")
        messages.warn(f"dataloader_drop_last leaves the last {left_out} of {len(dataset):,} samples out of {name}")
    return DataLoader(dataset, batch_size=size, sampler=sampler, **_options(arguments, collator, device))


def told_total(loader: DataLoader[Any], samples: int) -> DataLoader[Any]:
    """The loader, with the samples that all get at once under Accelerate's name for them."""
    loader.total_batch_size = samples
    return loader


def check_not_empty(dataset: Any, name: str) -> None:
    if not is_stream(dataset) and len(dataset) == 0:
        raise ConfigError(f"{name} is empty: there is nothing to evaluate; leave it out and set eval_strategy='no'")


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")


def train_sampler(dataset: Any, arguments: TrainingArguments, processing_class: Any, size: int) -> Sampler[int]:
    """The order that the arguments name; a torch RandomSampler stands for the Engine's own shuffle."""
    if len(dataset) == 0:
        raise ConfigError("train_dataset is empty: there is nothing to train on")
    match arguments.train_sampling_strategy:
        case Sampling.GROUP_BY_LENGTH:
            column = arguments.length_column_name
            lengths = list(dataset[column]) if column in getattr(dataset, "column_names", ()) else None
            names = getattr(processing_class, "model_input_names", None)
            return LengthGroupedSampler(
                size * arguments.gradient_accumulation_steps,
                dataset=dataset,
                lengths=lengths,
                model_input_name=names[0] if names else None,
            )
        case Sampling.SEQUENTIAL:
            return SequentialSampler(dataset)
        case _ if arguments.data_seed is not None:
            return SeededShuffle(len(dataset), arguments.data_seed)
    return RandomSampler(dataset)


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


class ReadyBatches(IterableDataset[Any]):
    """What gives batches and is no DataLoader, as a stream: every worker reads all of it, and keeps its lanes' batches.

    So it has to give the same batches on every worker; the stream's own check compares them.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    @property
    def batches(self) -> int | None:
        return len(self._batches) if isinstance(self._batches, Sized) else None


def as_loader(source: Any) -> Any:
    """A loader of one's own as the Engine takes it: with a batch where a stream has a sample."""
    if isinstance(source, DataLoader | Dataset | StepSource) or not isinstance(source, Iterable):
        return source
    return DataLoader(ReadyBatches(source), batch_size=1, collate_fn=_only)


def _only(samples: list[Any]) -> Any:
    (batch,) = samples
    return batch


def _options(arguments: TrainingArguments, collator: Collator, device: torch.device) -> dict[str, Any]:
    options: dict[str, Any] = {
        "collate_fn": collator,
        "drop_last": arguments.dataloader_drop_last,
        "num_workers": arguments.dataloader_num_workers,
        "pin_memory": arguments.dataloader_pin_memory and device.type != "cpu",
    }
    if arguments.dataloader_num_workers:
        options["persistent_workers"] = arguments.dataloader_persistent_workers
        options["prefetch_factor"] = arguments.dataloader_prefetch_factor
        options["multiprocessing_context"] = arguments.dataloader_multiprocessing_context
    return options


# -- collators -------------------------------------------------------------------------------------------------------


def default_collator(processing_class: Any) -> Collator:
    """A tokenizer pads to the longest sample of the batch; without one samples have to be equally long."""
    return PaddingCollator(processing_class) if callable(getattr(processing_class, "pad", None)) else collate


def collate(samples: list[Any]) -> Any:
    first = samples[0]
    if not isinstance(first, Mapping):
        return default_collate(samples)
    batch: dict[str, Any] = {}
    for name, value in first.items():
        if value is None or isinstance(value, str):
            continue
        try:
            batch["labels" if name in _LABELS else str(name)] = _stacked([sample[name] for sample in samples])
        except (ValueError, RuntimeError, TypeError) as error:
            raise DataError(
                f"the column {name!r} can't be stacked into a batch: {error}; give a data_collator, or a tokenizer as "
                "processing_class, which pads"
            ) from error
    return batch


class PaddingCollator:
    """Pads with the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, samples: list[Any]) -> Any:
        batch = self._tokenizer.pad([dict(sample) for sample in samples], return_tensors="pt")
        for name in _LABELS:
            if name in batch:
                batch["labels"] = batch.pop(name)
        return batch


class KnownColumns:
    """A collator that sees only the columns that the model takes."""

    def __init__(self, collator: Collator, names: Sequence[str], model_name: str) -> None:
        self._collator, self._names, self._model_name = collator, tuple(names), model_name

    def __call__(self, samples: list[Any]) -> Any:
        if not isinstance(samples[0], Mapping):
            return self._collator(samples)
        return self._collator([{name: sample[name] for name in sample if name in self._names} for sample in samples])

    def check(self, dataset: Any) -> None:
        """Raise before training, by a look at the first sample, if the model would get nothing."""
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset)):
            return
        first = dataset[0]
        if isinstance(first, Mapping) and not any(name in self._names for name in first):
            raise ConfigError(
                f"{self._model_name}.forward takes {', '.join(self._names)}, but the dataset has "
                f"{', '.join(map(str, first))}: none of them; rename columns, or set remove_unused_columns=False"
            )


def known_columns(model: nn.Module, label_names: Sequence[str]) -> list[str] | None:
    """What a sample may have: the arguments of forward, and labels; None: a forward of **kwargs alone takes all."""
    parameters = inspect.signature(forward_of(model)).parameters
    catch_all = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [name for name, parameter in parameters.items() if parameter.kind not in catch_all]
    if not names and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return list(dict.fromkeys([*names, *_LABELS, *label_names]))


def _stacked(values: list[Any]) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)


# -- what is in a batch ----------------------------------------------------------------------------------------------


def batch_size_of(batch: Any) -> int:
    """Samples in a batch: the first length found in it."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for part in batch:
            found = batch_size_of(part) if isinstance(part, Tensor | Mapping | list | tuple) else 0
            if found:
                return found
    return 0


def count_tokens(batch: Any, main_input: str, *, padding: bool) -> int | Tensor:
    """The elements of the main input where they are whole numbers.

    `padding=False` counts where the attention mask is set; a batch without a mask has no padding.
    """
    if isinstance(batch, Mapping):
        mask = batch.get("attention_mask")
        if not padding and isinstance(mask, Tensor):
            return mask.sum(dtype=torch.float64)
        found = batch.get(main_input, next(iter(batch.values()), None))
    else:
        found = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(found, Tensor) or found.dim() < 2 or found.is_floating_point() or found.is_complex():
        return 0
    return int(found.numel())
