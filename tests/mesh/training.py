"""What the workers of these tests run: a few steps of a small Llama, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import paceline
from paceline import Mesh
from paceline.mesh.plans import Plan
from paceline.world.world import World
from tests.mesh.small_llama import PLAN, SmallLlama, loss_of, tokens
from tests.workers import Result, run_workers

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass
class Trained:
    hash: str
    weights: Arrays
    gradients: Arrays = field(default_factory=dict)  # of the first step
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def trained(
    world: World,
    mesh: Mesh | None = None,
    plan: Plan = None,
    model: dict[str, Any] | None = None,
    steps: int = 2,
    folder: Path | None = None,
    resumes: bool = False,
    saves: bool = False,
    looks: bool = False,
    lr: float = 1e-2,
    eps: float = 1e-8,
    **options: Any,
) -> Trained:
    """`looks`: at the gradients of the first step."""
    torch.use_deterministic_algorithms(True)
    given = {"lanes": 4, "threads": 1, "seed": 3, "timeout_s": 30.0, **options}
    engine = paceline.Engine(world=world, mesh=mesh, **given)
    llama = SmallLlama(**{"blocks": 1, **(model or {})})
    optimizer = torch.optim.AdamW(llama.parameters(), lr, eps=eps)
    loader: Any = DataLoader(tokens(), batch_size=2, shuffle=True)
    if mesh is not None and mesh.tp > 1:
        plan = PLAN if plan is None else plan
    llama, optimizer, loader = engine.prepare(llama, optimizer, loader, plan=plan)
    found = Trained("", {})
    if resumes and folder is not None:
        engine.load_state(folder, accept=["tp", "cp"])
        found.hash = engine.weights_hash()
    for batch, targets in loader:
        loss = loss_of(llama(batch, engine.positions(batch)), targets)
        engine.mean("loss", loss)
        engine.backward(loss)
        if looks and engine.sync_gradients and not found.gradients:
            found.gradients = {name: value.numpy() for name, value in engine.full_gradients().items()}
        norm = engine.clip_grad_norm_(0.5)
        optimizer.step()
        if engine.stepped:
            found.losses.append(engine.means["loss"])
            found.norms.append(float(norm))
        if engine.step == steps:
            break
    if saves and folder is not None:
        engine.save_state(folder)
    found.weights = {name: value.numpy() for name, value in engine.state_dict().items()}
    found.hash = found.hash or engine.weights_hash()
    engine.close()
    return found


def runs(workers: int, program: Any = trained, **options: Any) -> list[Trained]:
    """What all workers have, which must have ended well."""
    results = run_workers(program, workers, **options)
    for result in sorted(results, key=lambda r: str(r.error).startswith(("PeerLost", "Collective"))):
        assert result.error is None, f"{result.name}: {result.error}\n{result.traceback}"
    return [result.value for result in results]


def first_error(results: list[Result]) -> str:
    """Of the worker that found it, before those that wait for it in vain."""
    failed = [str(r.error) for r in results if r.error is not None]
    return min(failed, key=lambda text: text.startswith(("PeerLost", "Collective", "Timeout"))) if failed else ""


def worst(mine: Arrays, whole: Arrays) -> float:
    """The largest difference of any tensor, relative to the largest element of it."""
    assert mine.keys() == whole.keys()
    return max(float(np.abs(mine[n] - whole[n]).max() / np.abs(whole[n]).max()) for n in whole)
