"""`strategy="auto"`: of the strategies that give the bits of ddp, the one that is fastest here.

    several CPU workers of one host     zero2: they share one copy of the weights, and each updates its part of it
    otherwise                           ddp while it fits into memory, then zero2, then fsdp
    what only ddp takes                 ddp: optimizers that need whole parameters, reduction="fast"
    elastic jobs                        ddp: it has nothing that could be lost with a worker

It is not the default, though the bits are the same: under zero2 and fsdp a script can't look at `.grad`, can't write to
weights between steps (as a Trainer that loads its best model at the end does), and has no `optimizer.state_dict()` of
the whole on one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.engine.config import EngineConfig
from paceline.engine.group import Group
from paceline.engine.memory_check import fit_of
from paceline.engine.replicas import parameter_names
from paceline.errors import ConfigError
from paceline.optim.range_optimizer import check_elementwise, check_thread_cuts
from paceline.strategies.registry import choose
from paceline.strategies.zero.sharded_optimizer import check_apart


def settle(config: EngineConfig, group: Group, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Where the strategy was left to us: choose it, on all workers alike."""
    if not config.is_auto:
        return
    mine = _choice(config, group, models, optimizers)
    name, why = max(group.comm.gather_json(mine), key=lambda choice: _ORDER.index(choice[0]))
    config.settle(choose(name), f"auto: {why}")


_ORDER = ("zero2", "fsdp", "ddp")  # where workers differ, the last: it takes what the others refuse


def _choice(
    config: EngineConfig, group: Group, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> tuple[str, str]:
    fit = fit_of(config, group.world, group.comm, group.device, models, optimizers)

    def fits(name: str) -> bool:
        return fit is None or replace(fit, chosen=choose(name)).fits

    if group.comm.size == 1:
        return "ddp", "one worker"
    if group.recovery.is_elastic:
        return "ddp", "elastic, and nothing is lost with a worker"
    if config.reduction != "exact":
        return "ddp", f"reduction={config.reduction!r}"
    shares_memory = group.comm.backend == "paceline"
    if fits("ddp") and not shares_memory:
        return "ddp", "it fits"
    if refused := _why_not_in_parts(models, optimizers, group.device):
        return "ddp", refused
    if shares_memory:
        return "zero2", "workers share the host's memory"
    if fits("zero2") or config.compression is not None:
        return "zero2", "ddp does not fit"
    return "fsdp", "neither ddp nor zero2 fits"


def _why_not_in_parts(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], device: torch.device) -> str | None:
    """What zero2 and fsdp would refuse these optimizers for."""
    names = parameter_names(models)
    trained = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"] if not p.is_meta}
    try:
        check_apart([(names.get(key, "a parameter"), parameter) for key, parameter in trained.items()])
    except ConfigError:
        return "two parameters share their memory"
    for optimizer in optimizers:
        try:
            check_elementwise(optimizer, device)
            check_thread_cuts(optimizer)
        except ConfigError:
            return f"{type(optimizer).__name__} needs whole parameters"
    return None
