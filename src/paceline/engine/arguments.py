"""What `Engine(…)` was given and what the launcher's flags say, made one config.

Each may say what the other leaves open; where both speak they must agree (`one_of`). What neither says has a default.
Only that of lanes depends on the number of workers, at the start of the job, and is for life.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.engine import activation_checkpointing as recomputing
from paceline.engine.config import EngineConfig, check_lanes, check_seed, check_threads, one_of
from paceline.engine.surroundings import check_backend, default_backend
from paceline.optim.loss_scale import LossScale, loss_scale_of
from paceline.optim.offload import OffloadName, check_offload
from paceline.optim.precision import Precision, precision_of
from paceline.strategies.registry import STRATEGIES, choose
from paceline.world.checked_values import one_word
from paceline.world.determinism import default_threads
from paceline.world.known_names import BACKENDS
from paceline.world.world import World

DEFAULT_SEED = 0


def _or(given: Any, otherwise: Any) -> Any:
    """Not what Python's `or` does: 0 and an empty text are values, which somebody has to refuse."""
    return otherwise if given is None else given


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
    for check, given in ((check_lanes, lanes), (check_threads, threads), (check_seed, seed)):
        if given is not None:
            check(given)
    strategy = _or(one_of("strategy", strategy, told.strategy), "ddp")
    precision = precision_of(_or(one_of("precision", precision, told.precision), "fp32"))
    offload = one_of("offload", offload, told.offload)  # type: ignore[arg-type]
    flag: recomputing.Wanted = told.activation_checkpointing
    again = one_of("activation_checkpointing", activation_checkpointing, flag)
    lanes = one_of("lanes", lanes, told.lanes) or seat.size
    backend = _or(_or(backend, told.backend), default_backend(seat, device))
    check_backend(seat, one_word("backend", backend, BACKENDS))
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
