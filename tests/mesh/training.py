"""What the workers of these tests run: a few steps of a small Llama, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import paceline
from paceline import Mesh
from paceline.world.world import World
from tests.mesh.small_llama import PLAN, SmallLlama, loss_of, tokens


@dataclass
class Trained:
    hash: str
    weights: dict[str, np.ndarray[Any, Any]]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def trained(
    world: World, mesh: Mesh | None = None, strategy: Any = "ddp", lanes: int = 4, steps: int = 3, dropout: float = 0.0
) -> Trained:
    engine = paceline.Engine(world=world, mesh=mesh, strategy=strategy, lanes=lanes, threads=1, seed=3, timeout_s=30)
    model = SmallLlama(dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(tokens(), batch_size=2, shuffle=True)
    plan = PLAN if mesh is not None and mesh.tp > 1 else None
    model, optimizer, loader = engine.prepare(model, optimizer, loader, plan=plan)
    losses, norms = [], []
    for batch, targets in loader:
        loss = loss_of(model(batch), targets)
        engine.mean("loss", loss)
        engine.backward(loss)
        norm = engine.clip_grad_norm_(0.5)
        optimizer.step()
        if engine.stepped:
            losses.append(engine.means["loss"])
            norms.append(norm)
        if engine.step == steps:
            break
    weights = {name: value.numpy() for name, value in engine.state_dict().items()}
    found = Trained(engine.weights_hash(), weights, losses, norms)
    engine.close()
    return found
