"""What a run knows about itself, for `paceline plan --residuals`: its setting, and at its end what it measured."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from paceline.data.step_source import MadeBatches
from paceline.engine.activation_checkpointing import ActivationCheckpointing
from paceline.engine.compilation import Compile
from paceline.engine.config import EngineConfig
from paceline.engine.loop import PreparedLoader
from paceline.engine.step import TrainStep
from paceline.planner.residuals import write_residuals
from paceline.world.world import World

SENDS_NOTHING = ("ddp", "zero1", "zero2")
"""In shared memory: workers read each other's gradients, and weights, where they lie."""


def setting_of(config: EngineConfig, world: World, loader: PreparedLoader | None) -> dict[str, Any]:
    """With the names of a plan's rows. What no plan knows of is `unplanned`: none predicts such a run."""
    checkpointing = config.activation_checkpointing
    made = loader is not None and isinstance(loader.dataset, MadeBatches)  # by a function, in a size of its own
    unplanned = {
        "compression": config.compression is not None,
        "compile": config.compile not in (None, Compile()),
        "offload": config.offload is not None,
        "reduction": config.reduction != "exact",
        "mesh": config.mesh.splits_model,
        "activation_checkpointing": checkpointing not in (None, ActivationCheckpointing()),
    }
    told = ", ".join(name for name, is_so in unplanned.items() if is_so)
    return {
        "strategy": str(config.strategy),
        "workers": world.size,
        "lanes": config.lanes,
        "accumulate": config.accumulate,
        "micro_batch": None if loader is None or made else loader.batch_size,
        "precision": str(config.precision),
        "activation_checkpointing": checkpointing is not None,
        "compile": config.compile is not None,
        **({"unplanned": told} if told else {}),
    }


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
    loader: PreparedLoader | None,
) -> None:
    about = {
        **setting_of(config, world, loader),
        "backend": config.backend,
        "parameters": sum(p.numel() for p in step.strategies.parameters),
    }
    measured: dict[str, Any] = {"sent_bytes": step.traffic.sent_bytes}
    if device.type == "cuda":
        measured["peak"] = torch.cuda.max_memory_allocated(device)
    else:
        # Not what a plan calls the peak, which is of tensors: this has Python, torch, the data and shared pages too.
        measured["resident_peak"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if (seconds := step_seconds(times)) is not None:
        measured["step_s"] = seconds
    # Other formulas (sharding/footprint.py) are of the busiest worker and of sizes alone: bytes of this one differ from
    # them by the padding of its buckets under ddp, and by half where parameters are cut unevenly.
    in_memory = config.backend == "paceline" and str(config.strategy) in SENDS_NOTHING and "unplanned" not in about
    write_residuals(folder, about, measured, {"sent_bytes": 0} if world.size == 1 or in_memory else {})
