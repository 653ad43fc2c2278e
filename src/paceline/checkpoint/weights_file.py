"""Weights as other people have them: one tensor a name, in one .safetensors file or in several with an index.

    model.safetensors                     all of them, a tied weight once, under its first name

    model-00001-of-00002.safetensors      beyond a size: shards, which several workers write at the same time
    model-00002-of-00002.safetensors
    model.safetensors.index.json          {"metadata": {"total_size": 96}, "weight_map": {"embed.weight": "model-0…"}}

That is what `from_pretrained` reads. Tensors come from the checkpoint as they are written, so memory holds one of them.
Read are our checkpoints, .safetensors, and .pt/.pth/.bin as far as they hold tensors alone (no pickled objects).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.disk import flush_folder, rename, write_file
from paceline.checkpoint.load import Checkpoint, StoredTensor
from paceline.checkpoint.manifest import COMPLETE, MANIFEST
from paceline.checkpoint.retention import newest_in
from paceline.checkpoint.tensor_file import Later, LazyTensor, TensorFile, best_checksum, write_tensors
from paceline.errors import CheckpointError, ConfigError
from paceline.input_file import cause_of, one_line, open_input, read_json

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
LARGEST_SHARD = 50 * 10**9  # what transformers cuts at
WORTH_CUTTING = 1 << 30
"""Several workers write shards of at least so much: smaller models stay the one file that everything expects."""

NOT_ABOUT = (
    "worker-*-of-*", MANIFEST, COMPLETE, "*.safetensors", "*.safetensors.index.json", "*.distcp",
    "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "trainer_state.json",
)  # fmt: skip

_WEIGHTS_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

Weights = Mapping[str, Tensor | LazyTensor]


@dataclass(frozen=True)
class Shard:
    """A file of weights, and whose are in it."""

    file: str
    names: tuple[str, ...]
    bytes: int


def cut(weights: Weights, workers: int = 1, largest: int = LARGEST_SHARD) -> list[Shard]:
    """The files of a model, in the order of its names; each of so many workers has one of about the same size to write.

    A tensor is in one file, so one that is larger than a file may be makes a file that is.
    """
    sizes = {name: _bytes(weights[name]) for name in _once(weights)}
    limit = min(largest, max(WORTH_CUTTING, -(-sum(sizes.values()) // workers)))
    groups: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if groups[-1] and size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    count = len(groups)
    files = [WEIGHTS] if count == 1 else [f"model-{place + 1:05}-of-{count:05}.safetensors" for place in range(count)]
    return [Shard(file, tuple(g), sum(sizes[name] for name in g)) for file, g in zip(files, groups, strict=True)]


def write_shards(folder: Path, weights: Weights, shards: Sequence[Shard]) -> None:
    """Some of the files of a model; with several, `write_index` makes them one."""
    for shard in shards:
        write_weights(folder / shard.file, {name: weights[name] for name in shard.names})


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Where each weight is; one file needs none."""
    if len(shards) > 1:
        table = {name: shard.file for shard in shards for name in shard.names}
        index = {"metadata": {"total_size": sum(shard.bytes for shard in shards)}, "weight_map": table}
        write_file(folder / INDEX, [(json.dumps(index, indent=2, sort_keys=True) + "\n").encode()])


def write_weights(path: Path, weights: Weights) -> int:
    """One .safetensors file, there when it is whole; its bytes. Of stored tensors memory holds one at a time."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = write_tensors(partial, [(name, weights[name]) for name in _once(weights)], best_checksum())
        rename(partial, path)
        flush_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {cause_of(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return file.bytes


def _once(weights: Weights) -> list[str]:
    """Of names for the same tensor the first, as transformers does."""
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        first.setdefault(id(tensor), name)
    return list(first.values())


def _bytes(tensor: Tensor | LazyTensor) -> int:
    return tensor.shape.numel() * tensor.dtype.itemsize


def write_pretrained(folder: Path, checkpoint: Checkpoint, model: int = 0, largest: int = LARGEST_SHARD) -> list[Shard]:
    """What `from_pretrained` reads: the weights, and beside them what the checkpoint has of config and tokenizer."""
    weights = stored_weights(checkpoint, model)
    shards = cut(weights, largest=largest)
    write_shards(folder, weights, shards)
    write_index(folder, shards)
    copy_about(checkpoint.folder, folder)
    say_dtype(folder, [weight.dtype for weight in weights.values()])
    return shards


def move_model(source: Path, folder: Path) -> None:
    """The files of a model into a folder that may hold those of an earlier one, whose weights go."""
    files = sorted((path for path in source.rglob("*") if path.is_file()), key=lambda path: path.name == INDEX)
    names = [path.relative_to(source) for path in files]  # the index last: what it names is there by then
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).replace(folder / name)
    remove_weights(folder, but=[name.name for name in names])
    flush_folder(folder)
    shutil.rmtree(source)


def remove_weights(folder: Path, but: Sequence[str]) -> None:
    """Those of an earlier model: an index of shards would be read before the one file that follows it."""
    for path in folder.glob("model*.safetensors*"):
        if _WEIGHTS_NAME.fullmatch(path.name) and path.name not in but:
            path.unlink()


def copy_about(source: Path, folder: Path) -> None:
    """The files about a model (config, tokenizer, chat template, code); neither weights nor states of a training."""
    for path in sorted(source.rglob("*")):
        inside = path.relative_to(source)
        hidden = any(part.startswith(".") for part in inside.parts)
        if path.is_file() and not hidden and not any(inside.match(pattern) for pattern in NOT_ABOUT):
            (folder / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / inside)


def say_dtype(folder: Path, saved: Sequence[torch.dtype]) -> None:
    """The config names the precision of the weights in the file: master weights are wider than what computed."""
    path = folder / "config.json"
    kind = next((dtype for dtype in saved if dtype.is_floating_point), None)
    if kind is None or not path.exists():
        return
    config = read_json(path)
    if config.get("dtype") not in (None, name := str(kind).removeprefix("torch.")):
        path.write_text(json.dumps(config | {"dtype": name}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def model_of(checkpoint: Checkpoint, model: int = 0) -> dict[str, Any]:
    """The state of one of its models, not read yet but for tiny tensors; tied ones are one object."""
    models = checkpoint.tree.get("models")
    if not isinstance(models, list) or not all(isinstance(one, dict) for one in models):
        raise CheckpointError(f"{checkpoint.folder} holds no models")
    if not 0 <= model < len(models):
        raise CheckpointError(f"{checkpoint.folder} holds {len(models)} models; there is no model {model}")
    return dict(models[model])


def stored_weights(checkpoint: Checkpoint, model: int = 0) -> dict[str, Tensor | StoredTensor]:
    """Of that the weights and buffers."""
    state = model_of(checkpoint, model)
    return {name: stored for name, stored in state.items() if isinstance(stored, Tensor | StoredTensor)}


def weights_of(checkpoint: Checkpoint, model: int = 0) -> dict[str, Tensor]:
    """The same, read."""
    stored = stored_weights(checkpoint, model)
    read = {id(one): one if isinstance(one, Tensor) else one.full_tensor() for one in stored.values()}
    return {name: read[id(one)] for name, one in stored.items()}


def read_pretrained(folder: Path) -> dict[str, Later]:
    """The weights in a folder that `from_pretrained` reads, not read yet."""
    if (folder / INDEX).exists():
        table = _weight_map(folder / INDEX)
    else:
        _check_pretrained(folder)
        table = dict.fromkeys(TensorFile.open(folder / WEIGHTS).names(), WEIGHTS)
    opened = {name: TensorFile.open(folder / name) for name in sorted(set(table.values()))}
    if lost := [name for name, file in table.items() if name not in opened[file].table]:
        raise CheckpointError(f"{folder / table[lost[0]]} has no {lost[0]!r}, which {INDEX} says it has")
    in_order = [(name, file) for file in opened.values() for name in file.names() if table.get(name) == file.path.name]
    return {name: file.later(name) for name, file in in_order}


def is_pretrained(folder: Path) -> bool:
    return (folder / WEIGHTS).exists() or (folder / INDEX).exists()


def _weight_map(index: Path) -> dict[str, str]:
    try:
        table = read_json(index).get("weight_map")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} can't be read: {cause_of(error)}") from error
    files = list(table.values()) if isinstance(table, dict) else [None]
    if not isinstance(table, dict) or not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise CheckpointError(f"{index} has no weight_map of names and files beside it")
    return table


def _check_pretrained(folder: Path) -> None:
    if (folder / WEIGHTS).exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    for found, meaning in (
        (COMPLETE, "it is a checkpoint of paceline already"),
        (".metadata", "it is of torch.distributed.checkpoint: import it with --dcp"),
        ("adapter_model.safetensors", "it is an adapter alone: merge it into its model, and save that"),
        ("pytorch_model.bin*", "it has pickled weights: open it where it comes from, and save_pretrained again"),
        ("*.safetensors", f"its weights have another name: name them {WEIGHTS}"),
    ):
        if any(folder.glob(found)):
            raise CheckpointError(f"{folder} has no {WEIGHTS}; {meaning}")
    raise CheckpointError(f"{folder} has no {WEIGHTS} and no {INDEX}")


def parse_size(text: str) -> int:
    """5GB, 200MB, 1GiB: bytes, as transformers counts them."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", text, re.IGNORECASE)
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1)) if match else 0
    if size < 1:
        raise ConfigError(f"{one_line(text)!r} is no size of a file; write 5GB, 200MB or 1GiB")
    return size


def read_weights(path: Path, model: int = 0) -> dict[str, Tensor]:
    """Tensors by name, from whatever holds them."""
    if is_pretrained(path) and not (path / COMPLETE).exists():
        return {name: later.full_tensor() for name, later in read_pretrained(path).items()}
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


# -- for a model that was built on the meta device ---------------------------------------------------------------------


@dataclass(frozen=True)
class PretrainedWeights:
    """Opened: names and shapes are known, and a tensor is read when it is needed.

    Nothing but headers is read before a tensor is asked for, and no file is held in memory. Every weight and persistent
    buffer of the model must be there and nothing else. What counts as the same name is what `from_pretrained` takes for
    it: of tied weights any name will do, files of a bare model (`h.0.…`) fit one with a head (`transformer.h.0.…`) and
    the other way round, and names that a model of transformers says to ignore are ignored.
    """

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
