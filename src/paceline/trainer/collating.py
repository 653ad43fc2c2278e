"""Samples into a batch: what a model's forward takes, and nothing else.

    [{"input_ids": …, "label": 3, "text": "…"}, …]  ──►  {"input_ids": Tensor, "labels": Tensor}

Mappings become a mapping of stacked values, under transformers' names for labels; other samples are collated by torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from paceline.errors import ConfigError, DataError

Collator = Callable[[list[Any]], Any]

_LABELS = ("label", "label_ids")


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


def known_columns(model: nn.Module, label_names: Sequence[str]) -> list[str]:
    """What a sample may have: the arguments of forward, and labels."""
    names = list(inspect.signature(model.forward).parameters)
    return list(dict.fromkeys([*names, *_LABELS, *label_names]))


def _stacked(values: list[Any]) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)


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
