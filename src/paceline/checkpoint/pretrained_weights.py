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

from torch import Tensor, nn

from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import COMPLETE
from paceline.checkpoint.tensor_file import LazyTensor, TensorFile
from paceline.checkpoint.weights_file import INDEX, WEIGHTS, read_pretrained, stored_weights
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class PretrainedWeights:
    """Opened: names and shapes are known."""

    path: Path
    tensors: Mapping[str, Tensor | LazyTensor]

    @classmethod
    def open(cls, path: Path) -> PretrainedWeights:
        if path.is_file() and path.suffix == ".safetensors":
            file = TensorFile.open(path)
            return cls(path, {name: file.later(name) for name in file.names()})
        if (path / COMPLETE).exists() and not (path / WEIGHTS).exists() and not (path / INDEX).exists():
            return cls(path, stored_weights(Checkpoint.open(path)))
        return cls(path, read_pretrained(path))

    def digest(self) -> str:
        """Of names, shapes and dtypes: whether workers see the same."""
        rows = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in sorted(self.tensors.items())]
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
            elif own[here].shape != tensor.shape:
                self._refuse(f"{name!r} is {tuple(tensor.shape)} there and {tuple(own[here].shape)} in the model")
            else:
                found.setdefault(id(own[here]), partial(_read, tensor))
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


def _read(tensor: Tensor | LazyTensor) -> Tensor:
    return tensor if isinstance(tensor, Tensor) else tensor.full_tensor()


def _places(name: str, model: nn.Module) -> list[str]:
    """What a name in a file may be called in the model, the likeliest first."""
    prefix = getattr(model, "base_model_prefix", None)
    if not isinstance(prefix, str) or not prefix:
        return [name]
    return [name, f"{prefix}.{name}", *([name.removeprefix(f"{prefix}.")] if name.startswith(f"{prefix}.") else [])]


def _is_ignored(name: str, model: nn.Module) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
