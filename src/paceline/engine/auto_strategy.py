"""`strategy="auto"`: of the strategies that give the bits of ddp, the one that is fastest here.

    several CPU workers of one host     zero2: they share one copy of the weights, and each updates its part of it
    otherwise                           ddp while it fits into memory, then zero2, then fsdp
    what only ddp takes                 ddp: optimizers that need whole parameters, reduction="fast"
    elastic jobs                        ddp: it has nothing that could be lost with a worker
    PACELINE_HARDWARE=FILE              where ddp is not the only one: what the planner takes for fastest, by what
                                        `paceline bench hardware` measured of so many workers over this backend

The planner knows parameters and optimizer here, and no pass: no batch was seen. It ranks by what strategies differ in,
the update and the exchange, and only where both were measured. On a GPU backward hides a part of the exchange, which
nobody knows without a pass.

It is not the default, though the bits are the same: under zero2 and fsdp a script can't look at `.grad`, can't write to
weights between steps (as a Trainer that loads its best model at the end does), and has no `optimizer.state_dict()` of
the whole on one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.engine.config import EngineConfig
from paceline.engine.group import Group
from paceline.engine.memory_check import fit_of
from paceline.engine.replicas import parameter_names
from paceline.errors import ConfigError
from paceline.optim.range_optimizer import check_elementwise, check_thread_cuts
from paceline.planner.model_sizes import sizes_of
from paceline.strategies.registry import choose
from paceline.strategies.zero.sharded_optimizer import check_apart
from paceline.world.environment import hardware_profile


def settle(config: EngineConfig, group: Group, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Where the strategy was left to us: choose it, on all workers alike."""
    if not config.is_auto:
        return
    file = group.comm.gather_json(str(hardware_profile() or ""))[0]  # rank 0's: other hosts may have other files
    mine = _choice(config, group, models, optimizers, plans=bool(file))
    planned = _Planned()
    if mine.possible and group.world.rank == 0:
        planned = _planned(Path(file), config, group, models, optimizers)
    everyone = group.comm.gather_json(asdict(mine) | {"planned": asdict(planned)})
    told = _Planned(**everyone[0]["planned"])
    if told.error:
        raise ConfigError(told.error)
    rule = max((_Choice(one["name"], one["why"]) for one in everyone), key=lambda one: _ORDER.index(one.name))
    ranked = [name for name in told.ranked if all(name in one["possible"] for one in everyone)]
    if ranked:
        config.settle(choose(ranked[0]), f"auto: {told.why(ranked)}")
    else:
        config.settle(choose(rule.name), f"auto: {rule.why}{told.note}")


_ORDER = ("zero2", "fsdp", "ddp")  # where workers differ, the last: it takes what the others refuse
_PLANNED = ("ddp", "zero1", "zero2", "zero3", "fsdp")


@dataclass(frozen=True)
class _Choice:
    """By the rules; `possible`: what the planner may choose of instead, if there is a choice."""

    name: str
    why: str
    possible: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Planned:
    """`ranked`: milliseconds a step beyond forward and backward, the fastest first."""

    file: str = ""
    ranked: dict[str, float] = field(default_factory=dict)
    note: str = ""  # why the rules decide, though there is a file
    error: str = ""

    def why(self, names: Sequence[str]) -> str:
        rest = f"; next best {names[1]}, {self.ranked[names[1]]:.3g} ms" if len(names) > 1 else ""
        return f"by the planner from {self.file}, update and exchange take {self.ranked[names[0]]:.3g} ms a step{rest}"


def _choice(
    config: EngineConfig, group: Group, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], *, plans: bool
) -> _Choice:
    fit = fit_of(config, group.world, group.comm, group.device, models, optimizers)

    def fits(name: str) -> bool:
        return fit is None or replace(fit, chosen=choose(name)).fits

    if group.comm.size == 1:
        return _Choice("ddp", "one worker")
    if group.recovery.is_elastic:
        return _Choice("ddp", "elastic, and nothing is lost with a worker")
    if config.reduction != "exact":
        return _Choice("ddp", f"reduction={config.reduction!r}")
    shares_memory = group.comm.backend == "paceline"
    if fits("ddp") and not shares_memory and not plans:
        return _Choice("ddp", "it fits")
    refused = _why_not_in_parts(models, optimizers, group.device)
    possible = () if refused or not plans else tuple(name for name in _PLANNED if fits(name))
    if fits("ddp") and not shares_memory:
        return _Choice("ddp", "it fits", possible)
    if refused:
        return _Choice("ddp", refused)
    if shares_memory:
        return _Choice("zero2", "workers share the host's memory", possible)
    if fits("zero2") or config.compression is not None:
        return _Choice("zero2", "ddp does not fit", possible)
    return _Choice("fsdp", "neither ddp nor zero2 fits", possible)


def _planned(
    file: Path, config: EngineConfig, group: Group, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> _Planned:
    # Few jobs have a profile, and every job imports this file.
    from paceline.planner.hardware import read_hardware
    from paceline.planner.model_source import describe
    from paceline.planner.step_time_model import exchange_s, update_s
    from paceline.planner.traffic import Sizes

    try:
        hardware = read_hardware(file)
    except ConfigError as error:
        return _Planned(error=f"PACELINE_HARDWARE: {error}")
    workers, backend, sizes = group.world.size, group.comm.backend, sizes_of(optimizers)
    measured = hardware.exchanges.get(backend, {}).get(workers, {})
    if group.world.local_size < workers or not measured:
        return _Planned(note=f" ({file.name} has no measurement of {workers} workers over {backend} on one host)")
    is_other = config.compression is not None or group.comm.size != workers or config.mesh.cp > 1
    if sizes is None or is_other or group.device.type != "cpu":  # a GPU may talk over gloo too
        return _Planned(note=f" ({file.name} has no measurement of a job like this)")
    bucket_bytes = int(config.bucket_mib * 2**20)
    model = replace(describe("model", models, bucket_bytes=bucket_bytes), state_bytes=sizes.state)
    job = Sizes(workers, config.summed_lanes, config.accumulate, backend, bucket_bytes)
    rates, low = hardware.rates_for(workers), config.precision.is_low
    seconds = {
        name: update_s(name, model, job, rates, low) + exchange_s(name, model, job, cost)
        for name, cost in measured.items()
        if name in _PLANNED
    }
    ranked = sorted(seconds, key=lambda name: (seconds[name], _PLANNED.index(name)))
    return _Planned(file.name, {name: 1e3 * seconds[name] for name in ranked})


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
