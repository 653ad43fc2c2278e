"""A saved state: one folder with `state.json` and `tensors.safetensors`, published by a rename.

The folder either exists whole or not at all: it is written under another name, flushed to disk and renamed, or
exchanged with an older one of its name in a single step. The JSON carries the sha256 of the tensor file and of itself,
so a truncated or flipped file is refused instead of loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint.tree import flatten, unflatten
from paceline.errors import CheckpointError

FORMAT = 1
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_state(folder: Path, tree: dict[str, Any]) -> None:
    """Publish `tree` as `folder`, replacing an older state of that name only once the new one is whole."""
    encoded, tensors = flatten(tree)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file({name: _own_memory(tensor) for name, tensor in tensors.items()}, partial / "tensors.safetensors")
        manifest = {
            "format": FORMAT,
            "tensors_sha256": _sha256(partial / "tensors.safetensors"),
            "tree_sha256": _tree_sha256(encoded),
            "tree": encoded,
        }
        (partial / "state.json").write_text(json.dumps(manifest, indent=1))
        for name in ("tensors.safetensors", "state.json", "."):
            _flush(partial / name)
        if folder.exists():
            _exchange(partial, folder)
        else:
            partial.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"the state could not be saved to {folder}: {reason}") from error


def read_state(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "state.json").read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {manifest['format']}; this version reads format {FORMAT}")
        if _sha256(folder / "tensors.safetensors") != manifest["tensors_sha256"]:
            raise CheckpointError(f"{folder}/tensors.safetensors is damaged: its sha256 is not the one recorded")
        if _tree_sha256(manifest["tree"]) != manifest["tree_sha256"]:
            raise CheckpointError(f"{folder}/state.json is damaged: its sha256 is not the one recorded")
        tree: dict[str, Any] = unflatten(manifest["tree"], load_file(folder / "tensors.safetensors"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"there is no saved state in {folder} ({Path(error.filename).name} is missing)"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"the state in {folder} can't be read: {type(error).__name__}: {error}") from error
    return tree


def _own_memory(tensor: Tensor) -> Tensor:
    """safetensors refuses tensors that share storage, as tied weights do."""
    return tensor.detach().cpu().contiguous().clone()


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step, so that at no moment there is none of the name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, f"renameat2: {os.strerror(number)}", str(old))


def _tree_sha256(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
