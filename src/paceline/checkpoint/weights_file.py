"""Weights as other people have them: one file, one tensor a name.

written    .safetensors in Hugging Face's layout; a tied weight once, under its first name
read       our checkpoints, .safetensors, and .pt/.pth/.bin as far as they hold tensors alone (no pickled objects)
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from paceline.checkpoint.disk import flush_folder, rename
from paceline.checkpoint.load import Checkpoint, StoredTensor
from paceline.checkpoint.retention import newest_in
from paceline.checkpoint.tensor_file import best_checksum, write_tensors
from paceline.errors import CheckpointError
from paceline.input_file import cause_of, open_input

PICKLED = (".pt", ".pth", ".bin", ".ckpt")


def write_weights(path: Path, weights: Mapping[str, Tensor | StoredTensor]) -> int:
    """One .safetensors file, there when it is whole; its bytes. Of stored tensors memory holds one at a time."""
    once: dict[int, str] = {}
    for name, tensor in weights.items():
        once.setdefault(id(tensor), name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        file = write_tensors(partial, [(name, weights[name]) for name in once.values()], best_checksum())
        rename(partial, path)
        flush_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {cause_of(error)}") from error
    return file.bytes


def stored_weights(checkpoint: Checkpoint, model: int = 0) -> dict[str, Tensor | StoredTensor]:
    """The weights and buffers of one of its models, not read yet but for tiny ones; tied ones are one object."""
    models = checkpoint.tree.get("models")
    if not isinstance(models, list) or not all(isinstance(one, dict) for one in models):
        raise CheckpointError(f"{checkpoint.folder} holds no models")
    if not 0 <= model < len(models):
        raise CheckpointError(f"{checkpoint.folder} holds {len(models)} models; there is no model {model}")
    return {name: stored for name, stored in models[model].items() if isinstance(stored, Tensor | StoredTensor)}


def weights_of(checkpoint: Checkpoint, model: int = 0) -> dict[str, Tensor]:
    """The same, read."""
    stored = stored_weights(checkpoint, model)
    read = {id(one): one if isinstance(one, Tensor) else one.full_tensor() for one in stored.values()}
    return {name: read[id(one)] for name, one in stored.items()}


def read_weights(path: Path, model: int = 0) -> dict[str, Tensor]:
    """Tensors by name, from whatever holds them."""
    if path.is_dir():
        return weights_of(Checkpoint.open(newest_in(path)), model)
    if path.suffix != ".safetensors" and path.suffix not in PICKLED:
        raise CheckpointError(f"{path} is no checkpoint, no .safetensors and no {', '.join(PICKLED)}")
    try:
        open_input(path).close()  # neither library looks whether it would wait for ever
        return _of_safetensors(path) if path.suffix == ".safetensors" else _tensors_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {cause_of(error)}") from error


def _of_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} can't be read: {cause_of(error)}") from error


def _tensors_of(path: Path) -> dict[str, Tensor]:
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds pickled objects besides tensors. Reading them would run code from the file, so it is not "
            "read; save its state_dict() alone where it comes from"
        ) from error
    except Exception as error:  # a damaged pickle raises whatever its opcodes come to
        raise CheckpointError(f"{path} can't be read: {type(error).__name__}: {cause_of(error)}") from error
    for inner in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(inner), dict):
            found = found[inner]
    if not isinstance(found, dict) or not any(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{path} holds no table of tensors, but a {type(found).__name__}")
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
