"""Will it fit? Weights, gradients and optimizer state by formula, against the memory that there is, before step 1.

    ConfigError: strategy='ddp' does not fit: … take 2.24 GiB on each worker, and the limit is 2.00 GiB (cgroup /job0).
    On 4 workers zero3 takes 0.56 GiB …

What comes on top, activations most of all, nobody knows before it was seen; a job that dies of it is told the same
numbers by the launcher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.manifest import size_text
from paceline.collectives.communicator import Communicator
from paceline.compression import BlockCompressor, Compression, TopK
from paceline.engine.config import EngineConfig, counted
from paceline.engine.replicas import parameter_names
from paceline.errors import ConfigError
from paceline.optim.offload import PARAMETERS, OffloadName
from paceline.planner.model_sizes import frozen_bytes, sizes_of
from paceline.sharding.footprint import Footprint, Model, Residuals
from paceline.strategies.registry import STRATEGIES, Chosen
from paceline.world import out_of_memory
from paceline.world.control import Supervisor
from paceline.world.host_limits import MemoryLimit, memory_limit, oom_kills
from paceline.world.world import World

_GIB = 2**30
FP32 = 4


@dataclass(frozen=True)
class Fit:
    """What strategies hold on one worker, and how much of a limit one worker has."""

    chosen: Chosen
    model: Model
    limit: MemoryLimit
    sharers: int
    workers: int
    lanes: int
    accumulate: int
    per_host: int
    on_host: int
    residuals: Residuals | None = None  # None: gradients are not compressed
    offload: OffloadName | None = None
    host_limit: MemoryLimit | None = None  # for what is offloaded
    host_sharers: int = 1

    @property
    def room(self) -> int:
        return self.limit.bytes // self.sharers

    def parts(self, strategy: Chosen, workers: int | None = None) -> Footprint:
        on_host = self.on_host if workers is None else None  # others may be anywhere
        more = {"accumulate": self.accumulate, "per_host": self.per_host}
        return strategy.footprint(
            self.model, workers=workers or self.workers, lanes=self.lanes, **more, on_host=on_host
        )

    def held(self, strategy: Chosen, workers: int | None = None) -> int:
        kept = 0 if self.residuals is None else self.residuals.on_worker(workers or self.workers, self.lanes)
        parts = self.parts(strategy, workers)
        away = 0 if self.offload is None else parts.optimizer_state
        if self.offload == PARAMETERS:
            away += parts.parameters + parts.gradients  # each gradient leaves as soon as it is there
        return parts.held + kept - away

    @property
    def offloaded(self) -> int:
        """On the host, for one worker: gradients land there, and weights in fp32 have a copy that is updated."""
        if self.offload is None:
            return 0
        parts = self.parts(self.chosen)
        weights = parts.parameters if self.offload == PARAMETERS else 0
        is_low = self.model.weight < FP32  # masters are optimizer state already
        masters = 0 if is_low or self.offload == PARAMETERS else self.model.parameters * FP32 // self.workers
        return parts.optimizer_state + parts.gradients + weights + masters

    @property
    def fits(self) -> bool:
        return self.held(self.chosen) <= self.room

    @property
    def fits_host(self) -> bool:
        return self.host_limit is None or self.offloaded <= self.host_limit.bytes // self.host_sharers

    def told_of_host(self) -> str:
        limit, shared = self.host_limit, counted(self.host_sharers, "worker")
        assert limit is not None
        return (
            f"offload={self.offload!r} does not fit: {self.model.parameters:,} parameters take {_gib(self.offloaded)} "
            f"on the host for each worker, and the limit is {_gib(limit.bytes)} for {shared} ({limit.shared_by}). "
            + (
                "Instead: offload='optimizer', which leaves weights on the device"
                if self.offload == PARAMETERS
                else f"Without offload {self.chosen.name} takes {_gib(self.parts(self.chosen).held)} on the device"
            )
        )

    def told(self) -> str:
        """What is held, of what, and by whom less."""
        shared = "" if self.sharers == 1 else f" for {counted(self.sharers, 'worker')}"
        kept = "gradients" if self.residuals in (None, Residuals()) else "gradients, residuals"
        return (
            f"weights, {kept} and optimizer state of {self.model.parameters:,} parameters"
            f"{f' and {_gib(self.model.frozen)} of weights that are not trained' if self.model.frozen else ''} take "
            f"{_gib(self.held(self.chosen))} on each worker, and the limit is {_gib(self.limit.bytes)}{shared} "
            f"({self.limit.shared_by})"
        )

    def when_out(self, *, recomputes: bool) -> str:
        """Of what was there, what was held by part, and what would take less, after a device had no more."""
        parts = self.parts(self.chosen)
        held = (
            f"{_gib(parts.parameters)} of weights, {_gib(parts.gradients)} of gradients and "
            f"{_gib(parts.optimizer_state)} of optimizer state"
        )
        less = [] if recomputes else ["activation_checkpointing='blocks'"]
        less.append("a smaller batch, with accumulate for the rest of it")
        smaller = {s.name: self.held(s) for s in self._others() if self.held(s) < self.held(self.chosen)}
        if smaller:
            name, least = min(smaller.items(), key=lambda pair: pair[1])
            less.append(f"strategy={name!r}, which holds {_gib(least)} on {counted(self.workers, 'worker')}")
        return (
            f"of {_gib(self.limit.bytes)} ({self.limit.shared_by}) {self.chosen.name} holds {held}; "
            f"{_gib(max(0, self.room - self.held(self.chosen)))} were left for activations and what is under way. "
            f"Less: {'; '.join(less)}"
        )

    def _others(self) -> list[Chosen]:
        others = [Chosen(entry, entry.config()) for _, entry in sorted(STRATEGIES.items())]
        return [s for s in others if s.has_footprint and (s.entry.takes_compression or self.residuals is None)]

    def advice(self) -> str:
        smaller = {s.name: self.held(s) for s in self._others() if self.held(s) < self.held(self.chosen)}
        fitting = [f"strategy={name!r} takes {_gib(held)}" for name, held in smaller.items() if held <= self.room]
        told = [f"on {counted(self.workers, 'worker')} {', '.join(fitting)}"] if fitting else []
        if self.chosen.entry.lanes_apart:  # it holds as much for each lane: more workers have fewer each
            more = range(self.workers + 1, self.lanes + 1)
            enough = next((n for n in more if self.held(self.chosen, n) <= self.room), None)
            told += [] if enough is None else [f"{self.chosen.name} fits on {enough} workers of this size"]
        if told:
            return "; ".join(told)
        if self.residuals is not None and (plain := replace(self, residuals=None)).fits:
            return f"without compression strategy={self.chosen.name!r} takes {_gib(plain.held(self.chosen))}"
        each = self.model.weight + self.model.gradient + self.model.state
        everything = self.model.parameters * each + self.model.frozen
        return f"strategy='zero3' needs at least {counted(math.ceil(everything / self.room), 'worker')} of this size"


def check_memory(
    config: EngineConfig,
    world: World,
    comm: Communicator,
    device: torch.device,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    supervisor: Supervisor,
) -> None:
    """Refuse what can't fit, on all workers alike; what may is told to the launcher, in case it does not."""
    fit = fit_of(config, world, comm, device, models, optimizers)
    refused = None
    if fit is not None and not fit.fits:
        refused = f"strategy={config.strategy.name!r} does not fit: {fit.told()}. Instead: {fit.advice()}"
    elif fit is not None and not fit.fits_host:
        refused = fit.told_of_host()
    everyone = comm.gather_json(refused)
    if text := next((text for text in everyone if text is not None), None):
        raise ConfigError(text)
    recomputes = config.activation_checkpointing is not None
    out_of_memory.told_by(None if fit is None else lambda: fit.when_out(recomputes=recomputes))
    if fit is not None and fit.limit.kills_file is not None:
        file = fit.limit.kills_file
        supervisor.tell("memory", told=f"{fit.told()}; {fit.advice()}", kills_file=str(file), kills=oom_kills(file))


def cost_of_lanes(config: EngineConfig, world: World, optimizers: Sequence[Optimizer]) -> str | None:
    """What a strategy whose lanes are apart holds for them, where a worker has several; for one line at the start."""
    model, most = sizes_of(optimizers), -(-config.summed_lanes // world.size)
    if not config.strategy.entry.lanes_apart or model is None or most == 1:
        return None
    sizes = world.size, config.summed_lanes
    here, alone = (
        size_text(config.strategy.footprint(model, workers=n, lanes=config.summed_lanes).held) for n in sizes
    )
    return (
        f"paceline: {config.strategy.name} keeps weights, a gradient and optimizer state for each lane: "
        f"{here} for {most} lanes on a worker, {alone} if {config.summed_lanes} workers had one each"
    )


def fit_of(
    config: EngineConfig,
    world: World,
    comm: Communicator,
    device: torch.device,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
) -> Fit | None:
    """Of the chosen strategy, on this worker; all workers call it. None: nobody knows."""
    limit = _limit_of(device)
    whom = None if limit is None else f"{world.host_rank} {limit.shared_by}"  # host names need not be unique
    sharers = comm.gather_json(whom).count(whom)  # all workers take part, whatever they find
    host = memory_limit()
    beside = None if host is None else f"{world.host_rank} {host.shared_by}"
    host_sharers = 1 if config.offload is None else comm.gather_json(beside).count(beside)
    model = sizes_of(optimizers)
    if limit is None or model is None or not config.strategy.has_footprint:
        return None
    if device.type != "cpu":
        sharers = 1
    shares_memory = comm.backend == "paceline"
    per_host = world.size if shares_memory else 1
    on_host = world.size if world.size % world.local_size else world.local_size  # hosts that are not even: nobody's
    model = replace(model, frozen=frozen_bytes(models, optimizers, low_precision=config.precision.is_low))
    if config.precision.is_low:  # rounded weights, and masters beside the optimizer's own state
        model = replace(model, weight=min(model.weight, FP32 // 2), state=model.state + FP32)
    residuals = residuals_of(config.compression, models, optimizers)
    sizes = (world.size, config.summed_lanes, config.accumulate, per_host, on_host)
    fit = Fit(config.strategy, model, limit, sharers, *sizes, residuals)
    if config.offload is None or host is None:
        return fit
    return replace(fit, offload=config.offload, host_limit=host, host_sharers=host_sharers)


def residuals_of(
    compression: Compression | None, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> Residuals | None:
    """Of the trained parameters that a rule compresses; powersgd's factors are thin, and not counted."""
    if compression is None:
        return None
    names, lane, sums = parameter_names(models), 0, 0
    trained = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
    for key, parameter in trained.items():
        compressor = compression.compressor(names.get(key, ""), tuple(parameter.shape))
        if compressor is None or parameter.dtype == torch.float64:  # which travels as it is
            continue
        before_and_after = 2 * FP32 * parameter.numel()
        if compression.feedback:
            lane += before_and_after
            sums += before_and_after if isinstance(compressor, BlockCompressor) else 0
        if isinstance(compressor, TopK) and compressor.momentum:
            lane += before_and_after
    return Residuals(lane, sums)


def _limit_of(device: torch.device) -> MemoryLimit | None:
    if device.type == "cuda":
        return MemoryLimit(torch.cuda.get_device_properties(device).total_memory, f"{device}")
    return memory_limit()


def _gib(number: int) -> str:
    return f"{number / _GIB:.2f} GiB"
