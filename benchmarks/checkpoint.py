"""How long a checkpoint keeps the training waiting, and how fast it is written and read, beside torch's own.

    python benchmarks/checkpoint.py /var/tmp/checkpoints --rounds 21        # about 3 minutes, 4 GB of disk

One process with 100 M parameters and AdamW: 1.2 GB. Every round saves and loads with `engine.save_state` and
`torch.distributed.checkpoint` (both flush to the disk; torch's takes no checksums), and saves once in the background.
Rounds turn the order of the three. The first is not counted: it allocates the snapshot's memory, and is printed alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World

WIDTH, LAYERS = 1000, 100
Row = dict[str, float]


def trained(engine: Engine) -> tuple[Any, Any]:
    """A model after one step, so that the optimizer has its state."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    data = TensorDataset(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=8))
    for x, y in loader:
        engine.backward(F.mse_loss(model(x), y))
        optimizer.step()
    return model, optimizer


def timed(row: Row, name: str, work: Callable[[], object]) -> None:
    start = time.perf_counter()
    work()
    row[name] = time.perf_counter() - start


def one_round(engine: Engine, model: Any, optimizer: Any, folder: Path, turn: int) -> Row:
    row: Row = {}
    ours, theirs, run = folder / "ours", folder / "torch", folder / "run"
    for path in (ours, theirs, run):
        shutil.rmtree(path, ignore_errors=True)
    os.sync()

    def by_torch_load() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=theirs, no_dist=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def paceline() -> None:
        timed(row, "save", lambda: engine.save_state(ours))
        timed(row, "load", lambda: engine.load_state(ours))

    def by_torch() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        timed(row, "torch save", lambda: dcp.save(state, checkpoint_id=theirs, no_dist=True))
        timed(row, "torch load", by_torch_load)

    def in_the_background() -> None:
        checkpoints = engine.checkpoints(run)
        timed(row, "stall", checkpoints.save)
        checkpoints.wait()

    contestants = (paceline, by_torch, in_the_background)
    for place in range(3):
        contestants[(turn + place) % 3]()
        os.sync()
    return row


def told(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} (quartiles {low:.3f}–{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    with Engine(world=World(), threads=2) as engine:
        model, optimizer = trained(engine)
        first, *rows = [one_round(engine, model, optimizer, args.folder, turn) for turn in range(args.rounds)]
    print("first round: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in first.items()))
    for name in first:
        print(f"{name:12} {told([row[name] for row in rows])} s")
    for name, above, below in (
        ("stall / save", "stall", "save"),
        ("speed of save, ours / torch's", "torch save", "save"),
        ("speed of load, ours / torch's", "torch load", "load"),
    ):
        print(f"{name}: {told([row[above] / row[below] for row in rows])}")
    shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
