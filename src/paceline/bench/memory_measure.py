"""What each worker runs for `paceline bench memory`: a few steps, one for the peak, one to count.

python -m paceline.bench.memory_measure RUN FOLDER          under `paceline run`'s supervisor; writes FOLDER/RANK.json
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from paceline.bench.measure import meeting
from paceline.bench.memory import PEERS, ROLES, MemoryRun
from paceline.bench.memory_contestants import MLP50M, Loop, enter, strategies
from paceline.bench.process_memory import Activations, Resident, held_now, peak_pss, reset_peak, shared_pss
from paceline.bench.workloads import Workload, adamw
from paceline.sharding.footprint import FOOTPRINTS, Model, footprint
from paceline.world.environment import read_world
from paceline.world.process import keep_no_free_memory
from paceline.world.world import World

WARM_UP_STEPS = 4
"""Buckets are cut anew after the first; an allocator needs some more to find its places."""


def measure(run: MemoryRun, world: World, workload: Workload = MLP50M) -> dict[str, Any]:
    """This worker's figures, in bytes, and where its tensors are."""
    torch.set_num_threads(1)
    if not run.keep_memory:
        keep_no_free_memory()
    _use_everything_once()
    at_start = Resident.now().pss
    reset_peak()
    with meeting(world) if run.contestant in PEERS else nullcontext():
        loop = enter(run, world, workload)
        try:
            for _ in range(WARM_UP_STEPS):
                _step(loop)
            highest = peak_pss()
            gc.collect()
            reset_peak()
            _step(loop)
            peak = peak_pss()
            figures = _counted(loop, f"worker {world.rank}")
            figures["private_buffers"] += loop.hidden_bytes()
        finally:
            loop.close()
    told = {"parameters": workload.parameters, "formula": formula(run, workload.parameters)}
    return told | figures | {"pss_at_start": at_start, "step_peak": peak, "highest_peak": highest}


def formula(run: MemoryRun, parameters: int) -> int | None:
    """Bytes of parameters, gradients and optimizer state; None where no formula is known."""
    sizes = {"workers": run.workers, "lanes": run.workers}
    if run.contestant not in PEERS:
        chosen = strategies()[run.contestant]
        together = run.workers if run.backend == "paceline" else 1
        return chosen.footprint(Model(parameters), **sizes, per_host=together).held
    like = PEERS[run.contestant]
    return footprint(like, Model(parameters), **sizes).held if like in FOOTPRINTS else None


def _use_everything_once() -> None:
    """What libraries load and allocate at first use is no contestant's memory."""
    layer = torch.nn.Linear(256, 256)
    optimizer = adamw(layer)
    for _ in range(2):
        layer(torch.randn(32, 256)).sum().backward()
        optimizer.step()


def _step(loop: Loop) -> None:
    loop.backward(loop.forward())
    loop.update()


def _counted(loop: Loop, worker: str) -> dict[str, Any]:
    activations = Activations(loop.model, worker)
    with saved_tensors_hooks(activations.pack, lambda tensor: tensor):
        loss = loop.forward()
    kept = activations.bytes
    loop.backward(loss)
    del activations, loss
    before_step, shared = Resident.now().pss, shared_pss()  # looking at all objects writes to pages of theirs
    held = held_now(loop.model, worker, loop.inputs, loop.also())
    loop.update()
    return {
        "spans": {role: getattr(held, role) for role in ROLES},
        "activations": kept,
        "private_buffers": held.buffers,
        "shared_pss": shared,
        "pss_before_step": before_step,
    }


def main(run: str, folder: str) -> None:
    world = read_world()
    figures = measure(MemoryRun.from_json(run), world)
    (Path(folder) / f"{world.rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
