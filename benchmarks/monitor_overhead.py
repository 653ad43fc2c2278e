"""What it costs to record where the time of each step goes: steps of about 50 ms with events and without, in turns.

    paceline run --workers 2 benchmarks/monitor_overhead.py --rounds 20 --steps 20 --out overhead.json

A round is some steps with events, the marks of the clock and the thread that writes them, then as many without any of
these; which comes first changes from round to round. The ratio of a round is that of its two median steps. On a machine
with other work the wall time says little, so the CPU time of the process is told beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH = 8


class Work(nn.Module):
    """A model whose forward multiplies matrices `times` times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.matrix = torch.randn(256, 256) / 16
        self.times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            product = self.matrix
            for _ in range(self.times):
                product = product @ self.matrix
        return self.layer(x) + 0 * product.mean()


def calibrate(engine: paceline.Engine, model: Work, wanted_s: float) -> None:
    """All workers multiply as often."""
    model.times = 50
    times = []
    for _ in range(5):
        began = time.perf_counter()
        model(torch.zeros(BATCH, 256))
        times.append((time.perf_counter() - began) / model.times)
    model.times = max(1, int(wanted_s / engine.reduce(statistics.median(times), "max")))


def switch(engine: paceline.Engine, folder: Path | None) -> None:
    """Events into that folder; None: not even the marks."""
    timing: Any = engine.timing
    if folder is None:
        engine.record_events(None)
        timing.enter = lambda part: 0.0
    else:
        timing.__dict__.pop("enter", None)
        engine.record_events(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="of each kind in a round")
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    engine = paceline.Engine(seed=1)
    model = Work()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    workers, total = engine.world.size, 2 * asked.rounds * asked.steps
    data = TensorDataset(
        torch.randn(workers * BATCH * (total + 1), 256), torch.randn(workers * BATCH * (total + 1), 256)
    )
    model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    calibrate(engine, model, asked.step_ms / 1e3)
    measured: list[dict[str, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        engine.record_events(Path(folder))
        walls: list[float] = []
        cpu = time.process_time()
        wall = time.perf_counter()
        for x, y in loader:
            engine.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            now = time.perf_counter()
            walls.append(now - wall)
            wall = now
            done = engine.step
            if done % asked.steps or done > total:
                continue
            half = done // asked.steps - 1  # 0 on, 1 off, 2 off, 3 on, 4 on …
            spent = (time.process_time() - cpu) / asked.steps
            name = "on" if (half + 1) // 2 % 2 == 0 else "off"
            if half % 2 == 0:
                measured.append({})
            measured[-1][name] = (statistics.median(walls), spent)
            following = "on" if (half + 2) // 2 % 2 == 0 else "off"
            if following != name:
                switch(engine, Path(folder) if following == "on" else None)
            walls, cpu, wall = [], time.process_time(), time.perf_counter()
        if engine._recorder is None:
            switch(engine, Path(folder))
        report(engine, measured[1:], asked)  # the first warms up
        engine.close()


def report(engine: paceline.Engine, measured: list[dict[str, tuple[float, float]]], asked: argparse.Namespace) -> None:
    def ratios(which: int) -> dict[str, float]:
        all_of_them = [one["on"][which] / one["off"][which] for one in measured]
        low, median, high = statistics.quantiles(all_of_them, n=4)
        return {"median": median, "low_quartile": low, "high_quartile": high}

    found = {
        "workers": engine.world.size,
        "rounds": len(measured),
        "step_s": statistics.median(one["off"][0] for one in measured),
        "wall_ratio": ratios(0),
        "cpu_ratio": ratios(1),
    }
    engine.print(json.dumps(found, indent=2))
    if asked.out is not None and engine.is_main_process:
        asked.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
