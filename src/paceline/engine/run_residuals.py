"""What a run knows about itself when it ends, for `paceline plan --residuals`: its setting, and what it measured."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from paceline.engine.config import EngineConfig
from paceline.engine.step import TrainStep
from paceline.planner.residuals import write_residuals
from paceline.world.world import World


def step_seconds(times: Sequence[tuple[int, float]]) -> float | None:
    """The median over what was logged: (step, at which second)."""
    found = [
        (later - sooner) / (after - before) for (before, sooner), (after, later) in pairwise(times) if after > before
    ]
    return statistics.median(found) if found else None


def store(
    folder: Path,
    times: Sequence[tuple[int, float]],
    config: EngineConfig,
    world: World,
    device: torch.device,
    step: TrainStep,
) -> None:
    about = {
        "strategy": config.strategy.name,
        "workers": world.size,
        "lanes": config.lanes,
        "accumulate": config.accumulate,
        "precision": config.precision.parameters,
        "backend": config.backend,
        "parameters": sum(p.numel() for p in step.strategies.parameters),
    }
    measured: dict[str, Any] = {"sent_bytes": step.traffic.sent_bytes}
    if device.type == "cuda":
        measured["peak"] = torch.cuda.max_memory_allocated(device)
    else:
        measured["resident_peak"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if (seconds := step_seconds(times)) is not None:
        measured["step_s"] = seconds
    write_residuals(folder, about, measured, {"sent_bytes": 0} if world.size == 1 else {})
