"""Folders of `torch.distributed.checkpoint`: the model's weights, and its optimizer's state by parameter name.

    {"model": {"embed.weight": …},
     "optim": {"state": {"embed.weight": {"exp_avg": …}}, "param_groups": [{"params": ["embed.weight"], …}]}}

These are the names of torch's `get_model_state_dict` and `get_optimizer_state_dict`, so `dcp.load` fills what they
return. A folder has `.metadata` (which element of which tensor lies where) and files `__0_0.distcp`, `__1_0.distcp` …
of tensors one after another, each as torch.save writes it. Written files have at most a given size, and one is in
memory at a time, as torch's writer keeps what it has written until a file is full. Read is one tensor at a time.

`.metadata` is a pickle. Reading one runs what it names, so here it may name the parts of a metadata and nothing else;
values that are not tensors are read with torch's `weights_only=True`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from paceline.checkpoint.load import Checkpoint, StoredTensor
from paceline.checkpoint.tensor_file import Later
from paceline.checkpoint.weights_file import model_of
from paceline.errors import CheckpointError
from paceline.input_file import LARGEST, cause_of, one_line, open_input, read_input

METADATA = ".metadata"
MODEL_KEYS = ("model", "model_state_dict", "state_dict")
OPTIMIZER_KEYS = ("optim", "optimizer", "optimizer_state_dict")
LARGEST_FILE = 10**9

# -- writing -----------------------------------------------------------------------------------------------------------


def write_dcp(folder: Path, checkpoint: Checkpoint, model: int = 0, largest: int = LARGEST_FILE) -> list[str]:
    """A model of a checkpoint and what its optimizers know about it; the top-level names that were written."""
    state: dict[str, Any] = {"model": model_of(checkpoint, model)}
    try:
        if (optimizers := _by_name(checkpoint, model)) is not None:
            state["optim"] = optimizers
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the optimizers in {checkpoint.folder} can't be understood: {cause_of(error)}"
        ) from error
    stored: dict[int, StoredTensor] = {}
    shapes = _shapes(state, stored)
    planner = _Planner(stored)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is one process that is meant
        try:
            save(shapes, storage_writer=_Writer(folder, largest), planner=planner, no_dist=True)
        except CheckpointException as error:  # of this one rank: what it failed of
            raise next(iter(error.failures.values()))[0] from error
    return list(state)


def _by_name(checkpoint: Checkpoint, model: int) -> dict[str, Any] | None:
    """The states of all optimizers as one, as torch has it; None if the checkpoint does not say whose they are."""
    tree = checkpoint.tree
    states, names = tree.get("optimizers"), tree.get("parameter_names")
    if not isinstance(states, list) or not isinstance(names, list) or len(states) != len(names) or not states:
        return None
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer, known in zip(states, names, strict=True):
        own = {n: name.partition("/")[2] for n, name in enumerate(known) if name.startswith(f"{model}/")}
        merged["state"] |= {own[number]: state for number, state in optimizer["state"].items() if number in own}
        for group in optimizer["param_groups"]:
            if params := [own[number] for number in group["params"] if number in own]:
                merged["param_groups"].append({**group, "params": params})
    return merged if merged["param_groups"] else None


def _shapes(tree: Any, stored: dict[int, StoredTensor]) -> Any:
    """The tree with tensors that have no memory for those on the disk, which are noted."""
    if isinstance(tree, StoredTensor):
        shape = torch.empty(tree.shape, dtype=tree.dtype, device="meta")
        stored[id(shape)] = tree
        return shape
    if isinstance(tree, dict):
        return {key: _shapes(value, stored) for key, value in tree.items()}
    return [_shapes(value, stored) for value in tree] if isinstance(tree, list) else tree


class _Planner(DefaultSavePlanner):
    """Reads a tensor when it is written."""

    def __init__(self, stored: Mapping[int, StoredTensor]) -> None:
        super().__init__()
        self._stored = stored

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        return self._stored[id(found)].full_tensor() if id(found) in self._stored else found


class _Writer(FileSystemWriter):
    """Several files, as if as many ranks had written them; torch's keeps the tensors of a file until it is whole."""

    def __init__(self, folder: Path, largest: int) -> None:
        super().__init__(folder)
        self._largest = largest

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: list[WriteResult] = []
        for number, items in enumerate(self._files(plan.items)):
            place = type(plan.storage_data)(f"__{number}_")
            written += super().write_data(replace(plan, items=items, storage_data=place), planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def _files(self, items: list[WriteItem]) -> Iterator[list[WriteItem]]:
        file: list[WriteItem] = []
        room = self._largest
        for item in items:
            size = item.tensor_storage_size() or 0
            if file and size > room:
                yield file
                file, room = [], self._largest
            file.append(item)
            room -= size
        if file:
            yield file


# -- reading -----------------------------------------------------------------------------------------------------------


def read_dcp(folder: Path, *, optimizer: bool = True) -> tuple[dict[str, Any], dict[str, Any] | None, list[str]]:
    """The model's state by name, its optimizer's by number (None if there is none), and the names of these numbers."""
    tree = _tree(folder, _metadata(folder))
    while len(tree) == 1 and isinstance(inner := next(iter(tree.values())), dict) and not tree.keys() & {*MODEL_KEYS}:
        tree = inner
    key = next((key for key in MODEL_KEYS if isinstance(tree.get(key), dict)), None)
    model = tree if key is None else tree[key]
    if not any(isinstance(value, Later) for value in model.values()):
        held = ", ".join(map(repr, list(tree)[:5])) or "nothing"
        raise CheckpointError(
            f"{folder} holds {one_line(held)}, and no model's weights; save {{'model': …, 'optim': …}}"
        )
    if key is None and any(isinstance(value, dict) for value in model.values()):
        raise CheckpointError(f"{folder} has weights beside other things; save them as {{'model': …, 'optim': …}}")
    wanted = next((tree[name] for name in OPTIMIZER_KEYS if name in tree), None) if optimizer and key else None
    state, names = (None, []) if wanted is None else _by_number(folder, wanted, model)
    return _read_values(model), state, names


def _metadata(folder: Path) -> Metadata:
    try:
        found = _Metadata(io.BytesIO(read_input(folder / METADATA, LARGEST))).load()
    except FileNotFoundError as error:
        why = "there is no such folder" if not folder.exists() else f"it has no {METADATA}"
        raise CheckpointError(f"{folder} is not of torch.distributed.checkpoint: {why}") from error
    except OSError as error:
        raise CheckpointError(f"{folder}/{METADATA} can't be read: {cause_of(error)}") from error
    except Exception as error:  # a damaged pickle raises whatever its opcodes come to
        raise CheckpointError(f"{folder}/{METADATA} can't be understood: {cause_of(error)}") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{folder}/{METADATA} is no metadata of torch.distributed.checkpoint")
    return found


class _Metadata(pickle.Unpickler):
    """Of torch's classes those that describe tensors and their places."""

    def find_class(self, module: str, name: str) -> Any:
        kind = getattr(torch, name, None) if module == "torch" else None
        if name in _ALLOWED.get(module, ()) or isinstance(kind, torch.dtype | torch.layout):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not of a metadata")


_ALLOWED = {
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class _Plain:
    """A value that is no tensor, not read yet."""

    read: Callable[[], Any]


def _tree(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """What was saved, with a `Later` for each value: tensors and others."""
    root: dict[Any, Any] = {}
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for name, about in metadata.state_dict_metadata.items():
        *above, last = paths.get(name, (name,))
        at = root
        for key in above:
            at = at.setdefault(key, {})
        at[last] = _later(folder, metadata, name, about)
    return root


def _later(folder: Path, metadata: Metadata, name: str, about: Any) -> Any:
    if isinstance(about, TensorStorageMetadata):
        return Later(torch.Size(about.size), about.properties.dtype, lambda: _tensor(folder, metadata, name, about))
    if isinstance(about, BytesStorageMetadata):
        return _Plain(lambda: _loaded(folder, metadata, MetadataIndex(name)))
    raise CheckpointError(f"{folder}/{METADATA}: {name!r} is a {type(about).__name__}, which is unknown here")


def _tensor(folder: Path, metadata: Metadata, name: str, about: TensorStorageMetadata) -> Tensor:
    whole: Tensor | None = None
    covered = 0
    for chunk in about.chunks:
        part = _loaded(folder, metadata, MetadataIndex(name, chunk.offsets))
        if not isinstance(part, Tensor) or part.dtype != about.properties.dtype:
            raise CheckpointError(f"{folder}: {name!r} is damaged: it is not what {METADATA} says")
        if part.shape != chunk.sizes:
            raise CheckpointError(
                f"{folder}: {name!r} is {tuple(part.shape)}, and {METADATA} says {tuple(chunk.sizes)}"
            )
        covered += part.numel()
        if part.shape == about.size:
            return part.detach()
        whole = torch.empty(about.size, dtype=part.dtype) if whole is None else whole
        _place(whole, chunk).copy_(part)
    if whole is None or covered != whole.numel():
        raise CheckpointError(f"{folder}: {name!r} has {covered:,} of its {torch.Size(about.size).numel():,} elements")
    return whole


def _place(whole: Tensor, chunk: ChunkStorageMetadata) -> Tensor:
    for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dimension, offset, size)
    return whole


def _loaded(folder: Path, metadata: Metadata, index: MetadataIndex) -> Any:
    """One value, out of the file that has it."""
    where = metadata.storage_data.get(index)
    if where is None:
        raise CheckpointError(f"{folder}/{METADATA} does not say where {index.fqn!r} is")
    name = str(where.relative_path)
    if Path(name).name != name or getattr(where, "transform_descriptors", None):
        raise CheckpointError(f"{folder}: {index.fqn!r} is in {one_line(name)!r} in a way that is not read here")
    try:
        with open_input(folder / name) as file:
            file.seek(where.offset)
            data = file.read(where.length)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{folder}/{name} can't be read: {cause_of(error)}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{folder}/{name}: {index.fqn!r} is damaged, or holds pickled objects: not read"
        ) from error
    except Exception as error:  # a damaged pickle raises whatever its opcodes come to
        raise CheckpointError(f"{folder}/{name}: {index.fqn!r} is damaged: {cause_of(error)}") from error


def _read_values(tree: Any) -> Any:
    """The tree with what is not tensors read."""
    if isinstance(tree, dict):
        values = {key: _read_values(value) for key, value in tree.items()}
        if values and all(isinstance(key, int) for key in values):  # places in a list
            return [values[key] for key in sorted(values)]
        return values
    return tree.read() if isinstance(tree, _Plain) else tree


def _by_number(folder: Path, saved: Any, model: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """As an optimizer's state_dict has it; by name it is as torch's `get_optimizer_state_dict` gives it."""
    saved = _read_values(saved)
    if isinstance(saved, dict) and not saved.keys() & {"state", "param_groups"}:
        saved = _unflattened(saved)
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        raise CheckpointError(f"{folder}: its optimizer's state has no param_groups; {_OR_NONE}")
    names, states = [name for group in groups for name in group["params"]], saved.get("state", {})
    if unknown := [name for name in [*names, *states] if name not in model]:
        raise CheckpointError(f"{folder}: its optimizer knows {unknown[0]!r}, and its model does not; {_OR_NONE}")
    number = {name: place for place, name in enumerate(names)}
    if homeless := [name for name in states if name not in number]:
        raise CheckpointError(f"{folder}: no group of its optimizer has {homeless[0]!r}; {_OR_NONE}")
    return {
        "state": {number[name]: state for name, state in states.items()},
        "param_groups": [{**group, "params": [number[name] for name in group["params"]]} for group in groups],
    }, names


_OR_NONE = "save get_optimizer_state_dict(model, optimizer), or import the weights with --no-optimizer"


def _unflattened(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Of `flatten_optimizer_state_dict=True`: state.embed.weight.exp_avg, param_groups.embed.weight.lr."""
    tables: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in saved.items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        if kind in tables and name:
            tables[kind].setdefault(name, {})[entry] = value
    groups = [{**settings, "params": [name]} for name, settings in tables["param_groups"].items()]
    return {"state": tables["state"], "param_groups": groups}
