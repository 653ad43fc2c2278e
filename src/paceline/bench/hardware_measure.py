"""What each worker runs for `paceline bench hardware`."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
import paceline.backend
from paceline.bench.hardware import HardwareRun
from paceline.bench.measure import borrowed_settings, deterministic, gathered, meeting, threads
from paceline.bench.statistics import machine_facts
from paceline.planner.hardware_here import memory_here, rates_here
from paceline.world.environment import read_world
from paceline.world.world import World

SHAPES = ((8, 2**17), (8, 2**21), (64, 2**15))
"""(layers, elements of each): little, many bytes, many tensors."""
TINY = (8, 256)
WARM_UP = 3
SIZES = (4 * 2**10, 2**20, 16 * 2**20)


class _Gradient(torch.autograd.Function):
    """Computes nothing: backward makes a gradient of the weights' shape, as large ones are made, by writing it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradients[0], torch.full_like(weight, 1e-3)


class Layer(nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Gradient.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return made


class Flat(nn.Sequential):
    def __init__(self, layers: int, elements: int) -> None:
        super().__init__(*(Layer(elements) for _ in range(layers)))


def measure(run: HardwareRun, world: World) -> dict[str, Any]:
    """As one worker of `world`; what rank 0 returns is the result."""
    with borrowed_settings(), meeting(world), threads(run.threads):
        dist.barrier()
        rates = rates_here(workers=world.size, threads=run.threads)
        mine = [*rates.flops.values(), rates.memory_bandwidth, rates.operator_s, *_engine_alone(run)]
        columns = [statistics.fmean(column) for column in gathered(mine)]
        *flops, bandwidth, operator_s, step_s, item_s = columns
        plain = [_plain(*shape, _steps(run, shape)) for shape in (*SHAPES, TINY)]
        update_bandwidth = _touched(SHAPES[1]) / plain[1][1]
        found: dict[str, Any] = {
            "rates": {
                "flops": dict(zip(rates.flops, flops, strict=True)),
                "memory_bandwidth": bandwidth,
                "operator_s": operator_s,
                "update_bandwidth": update_bandwidth,
                "step_s": step_s,
                "item_s": item_s,
            },
            "exchanges": {},
            "collectives": {},
            "link": None,
        }
        for backend in run.backends if world.size > 1 else ():
            found["collectives"][backend] = _all_reduces(backend)
            found["exchanges"][backend] = {name: _exchange(run, world, name, backend, plain) for name in run.strategies}
        if found["collectives"]:
            first = next(iter(found["collectives"].values()))
            found["link"] = {
                "name": f"{next(iter(found['collectives']))}, {world.size} workers",
                "bandwidth": first[-1]["bus_bandwidth"], "latency_s": first[0]["seconds"] / 2,
            }  # fmt: skip
    machine = machine_facts()
    about = {"name": machine["cpu"], "cores": machine["cores"], "torch": machine["torch"]}
    return found | about | {"memory_bytes": memory_here(), "threads": run.threads}


def _steps(run: HardwareRun, shape: tuple[int, int]) -> int:
    """Short steps are disturbed more, and it is from them that the fixed costs are drawn."""
    return run.steps if shape is SHAPES[1] else 8 * run.steps


def _touched(shape: tuple[int, int]) -> float:
    """Bytes of an AdamW update, as the planner counts them."""
    return shape[0] * shape[1] * (4 + 4 + 1.5 * 8)


def _plain(layers: int, elements: int, steps: int) -> tuple[float, float]:
    """Seconds of a step of workers that never talk, and of the update in it; slowest worker's medians."""
    model = Flat(layers, elements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    updates: list[float] = []

    def step() -> None:
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        started = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - started)
        optimizer.zero_grad()

    whole = _timed(step, steps)
    (columns,) = gathered([statistics.median(updates[WARM_UP:])])
    return whole, statistics.fmean(columns)


def _timed(step: Callable[[], None], steps: int) -> float:
    """The median over steps, of the slowest worker."""
    for _ in range(WARM_UP):
        step()
    dist.barrier()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    (column,) = gathered([statistics.median(seconds)])
    return max(column)


def _engine_alone(run: HardwareRun) -> tuple[float, float]:
    """What the Engine adds to a step, and to each of its items: of a worker that has no others, around nothing."""
    steps = _steps(run, TINY)
    whole, update = _plain(*TINY, steps)
    of_one, of_four = (_engine_step(run, World(), "ddp", None, *TINY, items, steps) for items in (1, 4))
    item_s = max(0.0, (of_four - of_one) / 3 - (whole - update))
    return max(0.0, of_one - whole - item_s), item_s


def _exchange(
    run: HardwareRun, world: World, strategy: str, backend: str, plain: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """Beyond a step that talks to no other worker, with the worker's own part of the update."""
    part = 1.0 if strategy in ("ddp", "star") else 1.0 / world.size
    costs = []
    for shape, (whole, update) in zip((*SHAPES, TINY), plain, strict=True):
        step_s = _engine_step(run, world, strategy, backend, *shape, 1, _steps(run, shape))
        costs.append(step_s - (whole - update) - part * update)
    return fitted(costs[:-1]) | {"least_s": max(0.0, costs[-1])}


def fitted(costs: Sequence[float]) -> dict[str, float]:
    """fixed + per byte · bytes + per tensor · tensors, through the costs of SHAPES; no coefficient is negative."""
    (few, small), (_, large), (many, tiny) = SHAPES
    per_byte = max(0.0, (costs[1] - costs[0]) / (4 * few * (large - small)))
    per_tensor = max(0.0, (costs[2] - costs[0] - per_byte * 4 * (many * tiny - few * small)) / (many - few))
    fixed = max(0.0, costs[0] - per_byte * 4 * few * small - per_tensor * few)
    return {"fixed_s": fixed, "per_byte_s": per_byte, "per_tensor_s": per_tensor}


def _engine_step(
    run: HardwareRun,
    world: World,
    strategy: str,
    backend: str | None,
    layers: int,
    elements: int,
    items: int,
    steps: int,
) -> float:
    with deterministic(torch.are_deterministic_algorithms_enabled()):
        engine = paceline.Engine(
            world=world, lanes=world.size, accumulate=items, threads=run.threads, device="cpu", strategy=strategy,
            backend=backend,
        )  # fmt: skip
        model = Flat(layers, elements)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
        data = TensorDataset(torch.zeros((WARM_UP + steps + 2) * items * world.size, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=1))
        batches = iter(loader)

        def step() -> None:
            for _ in range(items):
                (x,) = next(batches)
                engine.backward(model(x.requires_grad_()).sum())
                optimizer.step()
                optimizer.zero_grad()

        try:
            return _timed(step, steps)
        finally:
            batches.close()
            engine.close()
            gc.collect()


def _all_reduces(backend: str) -> list[dict[str, float]]:
    """By size: seconds, and the bus bandwidth of nccl-tests, 2·(N-1)/N · bytes / seconds."""
    group = dist.new_group(backend=backend)
    rows = []
    factor = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        seconds = _timed(lambda tensor=tensor: dist.all_reduce(tensor, group=group), 12)  # type: ignore[misc]
        rows.append({"bytes": size, "seconds": seconds, "bus_bandwidth": factor * size / seconds})
    dist.destroy_process_group(group)
    return rows


def main(run: str, result_file: str) -> None:
    world = read_world()
    result = measure(HardwareRun.from_json(run), world)
    if world.is_main:
        Path(result_file).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
