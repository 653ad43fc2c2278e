"""The job that faults are tried on: small, and with everything in it whose bits a lost worker could change.

Run by `paceline run` in a folder of its own. Dropout, noise drawn when a sample is fetched, BatchNorm's running
statistics, AdamW's moments, a schedule and a clipped gradient; the last step of an epoch is a short one. Each worker
leaves its final hash in `hashes/SLOT`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.compression import TopK
from paceline.strategies.registry import choose
from paceline.strategies.server import ParameterServer

LANES = 8
ROWS = 4
AWAITED_AT = 4
JOINER_TIMEOUT_S = 30.0
SAMPLES = 3 * LANES * ROWS + 20


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(samples, 16, generator=generator)
        self.labels = torch.randint(0, 10, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index] + 0.1 * torch.randn(16), self.labels[index]


class Moving(torch.optim.AdamW):
    """Counts its steps, as people write it, and goes on from a setting of its groups, as schedule-free ones do."""

    made = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.made += 1
        for group in self.param_groups:
            group["weight_decay"] = (group["weight_decay"] + 0.37 * self.made) % 2


def build(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10),
    )  # fmt: skip


def pretrained(width: int) -> Path:
    """Weights in a file, which every process may write: they are the same."""
    generator, file = torch.Generator().manual_seed(5), Path("pretrained.safetensors")
    state = build(width).state_dict()
    drawn = {n: torch.rand(v.shape, generator=generator) if v.is_floating_point() else v for n, v in state.items()}
    mine = Path(f".pretrained-{os.getpid()}")
    save_file(drawn, mine)
    return mine.replace(file)


def adapted(model: nn.Module, *, joins: bool) -> nn.Module:
    """As if peft had frozen a part of it. A worker that joins has built another base, and is given the others'."""
    model.peft_config = {"default": "an adapter"}  # type: ignore[assignment]
    for parameter in model[4].requires_grad_(False).parameters():  # type: ignore[index]
        if joins:
            parameter.zero_()
    return model


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + JOINER_TIMEOUT_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--width", type=int, default=40)
    parser.add_argument("--log", action="store_true", help="the loss of every step, by engine.log")
    parser.add_argument("--count-workers", action="store_true", help="by torch.distributed, after every epoch")
    parser.add_argument("--loader-processes", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--step-s", type=float, default=0.0, help="how long a step takes at least")
    parser.add_argument("--run-dir", type=Path, default=Path("run"), help="of checkpoints and the sample log")
    parser.add_argument("--sums-on-servers", action="store_true", help="parameter_server whose servers only add")
    parser.add_argument("--windows", help="STRATEGY-STEPS[-FRAGMENTS[-START_AFTER]]")
    parser.add_argument("--second-opinion", type=int, help="steps from one to the next whose lanes are computed twice")
    parser.add_argument("--compression", help="of gradients, by name; topk-momentum is topk that has velocities")
    parser.add_argument("--fp16", action="store_true", help="with a loss scale that changes often")
    parser.add_argument("--moving-settings", action="store_true", help="an optimizer that changes its own settings")
    parser.add_argument("--adapters", action="store_true", help="a layer of the model is the base of adapters")
    parser.add_argument("--pretrained", action="store_true", help="weights from a file, by way of the meta device")
    parser.add_argument("--await-joiner", help="SLOT-INCARNATION: the others don't end before it stands at the loop")
    parser.add_argument("--profile", action="store_true", help="the first steps that this worker makes")
    asked = parser.parse_args()
    slot = int(os.environ["PACELINE_RANK"])  # the engine's rank is another: its place among those that are left

    compression: Any = TopK(momentum=0.5) if asked.compression == "topk-momentum" else asked.compression
    strategy: Any = ParameterServer(mode="aggregate") if asked.sums_on_servers else None
    if asked.windows is not None:
        name, *numbers = asked.windows.split("-")
        settings = dict(zip(("every", "fragments", "start_after"), map(int, numbers), strict=False))
        strategy = replace(choose(name).config, **settings)

    with (
        paceline.Engine(
            device="cpu",
            bucket_mib=0.001,
            record_samples=asked.run_dir,
            strategy=strategy,
            project_dir=asked.run_dir,
            second_opinion=asked.second_opinion,
            compression=compression,
            precision="fp16" if asked.fp16 else None,
            loss_scale=paceline.LossScale(growth_every=1) if asked.fp16 else None,
        ) as engine,
        contextlib.ExitStack() as around,
    ):
        elastic = engine.world.elastic
        if engine.world.is_server and elastic is not None and elastic.joins:
            Path(f"stands-{slot}-{elastic.incarnation}").touch()
        weights = pretrained(asked.width) if asked.pretrained else None
        with torch.device("cpu" if weights is None else "meta"):
            model = build(asked.width)
        if asked.adapters:
            adapted(model, joins=elastic is not None and elastic.joins)
        optimizer = (Moving if asked.moving_settings else torch.optim.AdamW)(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        loader = DataLoader(Noisy(asked.samples), batch_size=ROWS, shuffle=True, num_workers=asked.loader_processes)
        model, optimizer, loader, schedule = engine.prepare(model, optimizer, loader, schedule, weights=weights)
        checkpoints = engine.checkpoints(asked.run_dir, keep=2)
        if asked.log:
            engine.init_trackers("logged", config={"width": asked.width})
        if asked.save_every:
            checkpoints.resume()
        if elastic is not None and elastic.joins:
            Path(f"stands-{slot}-{elastic.incarnation}").touch()
        if asked.profile:
            around.enter_context(engine.profile(wait=0, warmup=0, active=4))
        while loader.epoch < asked.epochs:
            for points, labels in loader:
                loss = F.cross_entropy(model(points), labels)
                engine.mean("loss", loss)
                engine.backward(loss)
                engine.clip_grad_norm_(0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if engine.stepped:
                    if asked.log:
                        engine.log({"loss": engine.means["loss"]})
                    time.sleep(asked.step_s)
                    if asked.await_joiner and engine.step == AWAITED_AT:
                        wait_for(Path(f"stands-{asked.await_joiner}"))
                    if asked.save_every and engine.step % asked.save_every == 0:
                        checkpoints.save()
            if asked.count_workers:
                count = torch.ones(1)
                dist.all_reduce(count)
                assert int(count) == dist.get_world_size() == engine.world.size, (count, engine.world)
        checkpoints.close()
        digest = engine.weights_hash()
        folder = Path("hashes")
        folder.mkdir(exist_ok=True)
        (folder / str(slot)).write_text(digest)
        engine.print(f"weights {digest}")


if __name__ == "__main__":
    main()
