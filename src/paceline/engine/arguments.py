"""What `Engine(…)` was given and what the launcher's flags say, made one config.

Each may say what the other leaves open; where both speak they must agree (`one_of`). What neither says has a default.
Only that of lanes depends on the number of workers, at the start of the job, and is for life.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.engine import activation_checkpointing as recomputing
from paceline.engine.config import EngineConfig, one_of
from paceline.engine.surroundings import check_backend, default_backend
from paceline.optim.loss_scale import LossScale, loss_scale_of
from paceline.optim.offload import OffloadName, check_offload
from paceline.optim.precision import Precision, precision_of
from paceline.strategies.registry import STRATEGIES, choose
from paceline.world.determinism import default_threads
from paceline.world.world import World

DEFAULT_SEED = 0


def config_of(
    seat: World,
    device: torch.device,
    *,
    lanes: int | None,
    seed: int | None,
    strategy: str | object | None,
    backend: str | None,
    threads: int | None,
    precision: str | Precision | None,
    loss_scale: LossScale | float | None,
    offload: OffloadName | None,
    activation_checkpointing: recomputing.Wanted,
    **as_given: Any,
) -> EngineConfig:
    """`as_given`: what no flag speaks of."""
    told = seat.settings
    strategy = one_of("strategy", strategy, told.strategy) or "ddp"
    precision = precision_of(one_of("precision", precision, told.precision) or "fp32")
    offload = one_of("offload", offload, told.offload)  # type: ignore[arg-type]
    flag: recomputing.Wanted = told.activation_checkpointing
    again = one_of("activation_checkpointing", activation_checkpointing, flag)
    lanes = one_of("lanes", lanes, told.lanes) or seat.size
    backend = backend or told.backend or default_backend(seat, device)
    check_backend(seat, backend)
    config = EngineConfig(
        lanes=lanes,
        seed=one_of("seed", seed, told.seed) if (seed, told.seed) != (None, None) else DEFAULT_SEED,  # type: ignore[arg-type]
        strategy=choose(strategy),
        backend=backend,
        threads=one_of("threads", threads, told.threads) or default_threads(lanes),
        activation_checkpointing=recomputing.parse(again),
        precision=precision,
        loss_scale=loss_scale_of(loss_scale, precision),
        offload=offload,
        **as_given,
    )
    able = [entry.name for entry in STRATEGIES.values() if entry.takes_offload]
    check_offload(offload, device, config.strategy.name, able)
    return config
