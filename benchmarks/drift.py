"""How far weights drift from those of one worker, when only the number of workers changes.

    python benchmarks/drift.py --json benchmarks/results/drift.json      about five minutes on two cores

The same small GPT, bytes, global batch of 12 windows, AdamW and fp32 on 1, 2, 3 and 4 workers: torch's
DistributedDataParallel on gloo, whose ranks take equal parts of the batch, and paceline with 12 lanes, which the
workers share. Nothing is random after the start (no dropout), so what differs is how a batch is cut and in which order
gradients are added. The run on one worker leaves its weights after some steps; the others say how far theirs are then,
at most. Nothing here is a time, so it does not matter what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WORKERS = (1, 2, 3, 4)
WINDOWS, CONTEXT, WIDTH, LAYERS = 12, 64, 96, 3
LEARNING_RATE = 1e-3
LOOKED_AT = (1, 2, 3, 5, 8, 12, 18, 25, 35, 50, 70, 100, 140, 200, 250, 300)
SIDES = ("torch-ddp", "paceline")


class TinyGPT(nn.Module):
    """Bytes in, a guess at each next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        looking_back = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.blocks(self.bytes(x) + self.places.weight, looking_back, is_causal=True))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def windows_of_text(count: int) -> Tensor:
    """Stretches of the source of Python's standard library, each with the byte that follows it."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\0".join(file.read_bytes() for file in files)
    length = CONTEXT + 1
    if len(text) < count * length:
        raise SystemExit(f"drift: the library has {len(text):,} bytes, {count * length:,} are needed")
    return torch.frombuffer(bytearray(text[: count * length]), dtype=torch.uint8).long().view(count, length)


class Comparison:
    """Leaves one worker's weights in the folder, or says how far these are from them."""

    def __init__(self, folder: Path, is_reference: bool) -> None:
        self._folder, self._is_reference = folder, is_reference
        self.rows: list[dict[str, float]] = []

    def look(self, step: int, model: nn.Module) -> None:
        if step not in LOOKED_AT:
            return
        weights, file = nn.utils.parameters_to_vector(model.parameters()).detach(), self._folder / f"{step}.pt"
        if self._is_reference:
            torch.save(weights, file)
        there = torch.load(file)
        self.rows.append({"step": step, "most": float((weights - there).abs().max())})


def train_torch(steps: int, compared: Comparison) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = TinyGPT()
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step, batch in enumerate(windows_of_text(steps * WINDOWS).split(WINDOWS), 1):
        loss_of(replica, batch.chunk(size)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            compared.look(step, model)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train_ours(steps: int, compared: Comparison) -> None:
    import paceline

    with paceline.Engine(lanes=WINDOWS, seed=0, threads=1) as engine:
        loader = torch.utils.data.DataLoader(windows_of_text(steps * WINDOWS))  # type: ignore[arg-type]
        model = TinyGPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        prepared, optimizer, loader = engine.prepare(model, optimizer, loader)
        for windows in loader:
            engine.backward(loss_of(prepared, windows))
            optimizer.step()
            optimizer.zero_grad()
            if engine.stepped and engine.is_main_process:
                compared.look(engine.step, prepared)


def run(side: str, workers: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """One training in processes of its own; what its first worker wrote down."""
    (folder / side).mkdir(exist_ok=True)
    words = [__file__, "--worker", side, "--steps", str(steps), "--folder", str(folder)]
    if side == "torch-ddp":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    else:
        launcher = ["-m", "paceline", "run", "--workers", str(workers), "--lanes", str(WINDOWS)]
    done = subprocess.run(
        [sys.executable, *launcher, *words], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"drift: {side} on {workers} workers failed\n{done.stdout}{done.stderr}"[-3000:])
    rows: list[dict[str, float]] = json.loads((folder / f"{side}-{workers}.json").read_text())
    return rows


def measure(steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-drift-") as folder:
        for side in SIDES:
            for workers in WORKERS:
                rows = run(side, workers, steps, Path(folder))
                found.setdefault(side, {})[str(workers)] = [[row["step"], row["most"]] for row in rows]
                print(f"{side} on {workers}: {rows[-1]['most']:.3g} after {rows[-1]['step']} steps", flush=True)
    return {
        "about": "benchmarks/drift.py: the largest difference of a weight from one worker's, [step, difference]",
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in TinyGPT().parameters()),
        "global_batch": f"{WINDOWS} windows of {CONTEXT} bytes",
        "most": found,
    }


def work(side: str, steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    compared = Comparison(folder / side, is_reference=size == 1)
    {"torch-ddp": train_torch, "paceline": train_ours}[side](steps, compared)
    if rank == 0:
        (folder / f"{side}-{size}.json").write_text(json.dumps(compared.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=max(LOOKED_AT))
    parser.add_argument("--json", type=Path, help="write every number there")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker is not None:
        work(asked.worker, asked.steps, asked.folder)
        return
    result = measure(asked.steps)
    if asked.json is not None:
        asked.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
