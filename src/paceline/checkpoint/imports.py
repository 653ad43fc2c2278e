"""Checkpoints made of what other tools have saved: weights to begin a training with, and an optimizer's state.

    Hugging Face's folder  ──►  checkpoint-0:  models[0], step 0
    a folder of dcp        ──►  checkpoint-0:  models[0], step 0, and if it is there the optimizer's state by name

It is written as one worker would, a tensor at a time, and opened by any number of workers. There is no job in it that
could go on: `engine.load_state` takes over weights and optimizer, and the training begins at the start of its data.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.disk import new_folder, write_file
from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import MANIFEST, Manifest, Range, StoredFile, StoredShape
from paceline.checkpoint.save import complete
from paceline.checkpoint.tensor_file import Later, LazyTensor, best_checksum, code_of, write_tensors
from paceline.checkpoint.tree import SMALL, flatten
from paceline.checkpoint.weights_file import copy_about, read_pretrained

FILE = "worker-00000-of-00001.safetensors"


def import_pretrained(source: Path, folder: Path) -> Checkpoint:
    """Of a folder that `from_pretrained` reads the weights, with config and tokenizer beside them."""
    return _written(folder, source, "hf", read_pretrained(source), None, [])


def import_dcp(source: Path, folder: Path, *, optimizer: bool = True) -> Checkpoint:
    from paceline.checkpoint.dcp_folder import read_dcp

    return _written(folder, source, "dcp", *read_dcp(source, optimizer=optimizer))


def _written(
    folder: Path, source: Path, kind: str, model: dict[str, Any], optimizer: dict[str, Any] | None, names: list[str]
) -> Checkpoint:
    tree = {
        "job": {}, "step": 0, "left_out_steps": 0, "loss_scale": None, "schedulers": [], "data": None,
        "models": [model], "optimizers": [] if optimizer is None else [optimizer],
        "parameter_names": [] if optimizer is None else [[f"0/{name}" for name in names]],
        "extra": {"imported": kind},
    }  # fmt: skip
    later: dict[int, Later] = {}
    encoded, found = flatten(_shapes(tree, later))
    leaves = {path: leaf for path, leaf in found.items() if isinstance(leaf, Tensor)}
    with new_folder(folder) as partial:
        checksum = best_checksum()
        tensors: list[tuple[str, Tensor | LazyTensor]] = [
            (f"{path}[0:{leaf.numel()}]", later.get(id(leaf), leaf)) for path, leaf in leaves.items()
        ]
        file = write_tensors(partial / FILE, tensors, checksum)
        stored = {}
        for (path, leaf), (name, _), digest in zip(leaves.items(), tensors, file.tensors, strict=True):
            whole = Range(0, leaf.numel(), FILE, name, digest)
            stored[path] = StoredShape(code_of(leaf.dtype, path), tuple(leaf.shape), (whole,))
        about = {
            "step": 0,
            "saved at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "imported": kind,
            "workers": 1,
            "versions": {"torch": str(torch.__version__)},
        }
        manifest = Manifest(checksum, about, encoded, stored, {FILE: StoredFile(file.bytes, file.checksum)})
        write_file(partial / MANIFEST, [manifest.text().encode()])
        if kind == "hf":
            copy_about(source, partial)
        complete(Checkpoint(partial, manifest), folder)
    return Checkpoint.open(folder)


def _shapes(tree: Any, later: dict[int, Later]) -> Any:
    """The tree with tensors that have no memory for those that are read later, which are noted; tiny ones are read."""
    if isinstance(tree, Later):
        if tree.shape.numel() * tree.dtype.itemsize <= SMALL:
            return tree.full_tensor()
        shape = torch.empty(tree.shape, dtype=tree.dtype, device="meta")
        later[id(shape)] = tree
        return shape
    if isinstance(tree, dict):
        return {key: _shapes(value, later) for key, value in tree.items()}
    return [_shapes(value, later) for value in tree] if isinstance(tree, list) else tree
