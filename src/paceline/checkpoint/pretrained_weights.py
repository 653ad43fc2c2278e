"""Weights of a pretrained model, for one that was built on the meta device: a tensor is read when it is needed.

    folder/model.safetensors                                    all weights, or
    folder/model.safetensors.index.json                         {"weight_map": {name: file}}, and
    folder/model-00001-of-00003.safetensors …                   those files
    folder/checkpoint-40                                        a checkpoint of ours

Nothing but headers is read before a tensor is asked for, and no file is held in memory. Every weight and persistent
buffer of the model must be there and nothing else. What counts as the same name is what `from_pretrained` takes for
it: of tied weights any name will do, files of a bare model (`h.0.…`) fit one with a head (`transformer.h.0.…`) and the
other way round, and names that a model of transformers says to ignore are ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import COMPLETE
from paceline.checkpoint.tensor_file import DTYPES, TensorFile
from paceline.checkpoint.weights_file import INDEX, WEIGHTS, stored_weights
from paceline.errors import CheckpointError
from paceline.input_file import cause_of, read_json


@dataclass(frozen=True)
class PretrainedTensor:
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class PretrainedWeights:
    """Opened: names and shapes are known."""

    path: Path
    tensors: Mapping[str, PretrainedTensor]

    @classmethod
    def open(cls, path: Path) -> PretrainedWeights:
        if (path / COMPLETE).exists() and not (path / WEIGHTS).exists() and not (path / INDEX).exists():
            stored = stored_weights(Checkpoint.open(path))
            return cls(path, {name: _of_checkpoint(value) for name, value in stored.items()})
        found: dict[str, PretrainedTensor] = {}
        for file, names in _files_of(path).items():
            opened = TensorFile.open(file)
            for name in opened.names() if names is None else names:
                if name not in opened.table:
                    raise CheckpointError(f"{file} has no {name!r}, which {path / INDEX} says is in it")
                found[name] = _of_file(opened, name)
        return cls(path, found)

    def digest(self) -> str:
        """Of names, shapes and dtypes: whether workers see the same."""
        rows = [(name, tensor.shape, tensor.dtype) for name, tensor in sorted(self.tensors.items())]
        return hashlib.sha256(repr(rows).encode()).hexdigest()

    def values_for(self, model: nn.Module) -> dict[int, Callable[[], Tensor]]:
        """How to read every weight and persistent buffer of the model, by the tensor's id; all of them or none."""
        state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
        own = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
        found: dict[int, Callable[[], Tensor]] = {}
        unknown: list[str] = []
        for name, tensor in self.tensors.items():
            here = next((place for place in _places(name, model) if place in own), None)
            if here is None:
                unknown.append(name)
            elif tuple(own[here].shape) != tensor.shape:
                self._refuse(f"{name!r} is {tensor.shape} there and {tuple(own[here].shape)} in the model")
            else:
                found.setdefault(id(own[here]), tensor.read)
        missing = [name for name, value in own.items() if id(value) not in found]
        unknown = [name for name in unknown if not _is_ignored(name, model)]
        if missing or unknown:
            told = [f"it has no {name!r}" for name in missing[:1]] + [
                f"the model has no {name!r}" for name in unknown[:1]
            ]
            more = len(missing) + len(unknown) - len(told)
            self._refuse(f"{'; '.join(told)}{f' and {more} more names' if more else ''}")
        return found

    def _refuse(self, why: str) -> None:
        raise CheckpointError(
            f"{self.path} holds weights of another model: {why}; build the model from the config that is with them, or "
            "load them on a real device with from_pretrained, which may draw what is missing"
        )


def _files_of(path: Path) -> dict[Path, list[str] | None]:
    """With the names to take from each, or None for all."""
    if path.is_file() and path.suffix == ".safetensors":
        return {path: None}
    if (path / WEIGHTS).is_file():
        return {path / WEIGHTS: None}
    if not (path / INDEX).is_file():
        raise CheckpointError(
            f"{path} holds no weights: no {WEIGHTS}, no {INDEX} and no checkpoint; give the folder that "
            "save_pretrained wrote, or that huggingface_hub.snapshot_download returns"
        )
    try:
        where = read_json(path / INDEX)["weight_map"]
        files: dict[Path, list[str] | None] = {path / Path(file).name: [] for file in where.values()}
        for name, file in where.items():
            files[path / Path(file).name].append(str(name))  # type: ignore[union-attr]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / INDEX} can't be understood: {cause_of(error)}") from error
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{path} has no {file.name}, which {INDEX} names")
    return files


def _of_file(file: TensorFile, name: str) -> PretrainedTensor:
    row = file.table[name]
    if row.get("dtype") not in DTYPES or not isinstance(row.get("shape"), list):
        raise CheckpointError(f"{file.path}: {name!r} is of a type {row.get('dtype')!r:.20} unknown here")
    return PretrainedTensor(tuple(row["shape"]), row["dtype"], partial(file.read, name))


def _of_checkpoint(stored: Any) -> PretrainedTensor:
    read = (lambda: stored) if isinstance(stored, Tensor) else stored.full_tensor
    return PretrainedTensor(tuple(stored.shape), str(stored.dtype), read)


def _places(name: str, model: nn.Module) -> list[str]:
    """What a name in a file may be called in the model, the likeliest first."""
    prefix = getattr(model, "base_model_prefix", None)
    if not isinstance(prefix, str) or not prefix:
        return [name]
    return [name, f"{prefix}.{name}", *([name.removeprefix(f"{prefix}.")] if name.startswith(f"{prefix}.") else [])]


def _is_ignored(name: str, model: nn.Module) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
