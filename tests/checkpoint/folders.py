"""Checkpoints without an engine: a tree, written as if by so many workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.load import Checkpoint, full_tree
from paceline.checkpoint.save import complete, describe, portion_of, write_model, write_portion
from paceline.checkpoint.tensor_file import best_checksum


def state(value: float, elements: int = 100) -> dict[str, Any]:
    return {"step": 3, "lr": 0.125, "weight": torch.full((elements,), value), "bias": torch.arange(40.0).view(5, 8)}


def write(
    folder: Path, tree: dict[str, Any] | Callable[[int], dict[str, Any]], workers: int = 1, *, weights: bool = False
) -> None:
    """`tree` may depend on the worker."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.0000.partial")
    for worker in range(workers):
        mine = tree(worker) if callable(tree) else tree
        write_portion(partial, portion_of(mine, worker, workers), best_checksum())
    checkpoint = describe(partial, workers, {"step": 3}, best_checksum(), timeout_s=5)
    for worker in reversed(range(workers if weights else 0)):
        write_model(checkpoint, worker, workers, timeout_s=5)
    complete(checkpoint, folder)


def read(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = full_tree(Checkpoint.open(folder).tree)
    return tree


def first_weight(folder: Path) -> float:
    return float(read(folder)["weight"][0])
