"""Who trains: each contestant has its own copy of the model and optimizer, and does one step when asked.

| contestant       | one step includes                                                                     |
|------------------|---------------------------------------------------------------------------------------|
| paceline-*       | next of the prepared loader, forward, engine.backward, step, zero_grad, all checks    |
| paceline-engine  | the same, gradients clipped and the learning rate scheduled: what a Trainer does      |
| paceline-trainer | trainer.train() from one on_step_end to the next, logging every 10 steps              |
| torch-ddp        | forward, backward, step, zero_grad on batches made beforehand                         |
| torch-ddp-views  | the same with gradient_as_bucket_view=True                                            |
| …-ddp-paceline   | torch's DDP as it is, on our shared-memory backend instead of gloo                    |
| torch-fsdp2      | torch's fully_shard over the model and each of its repeated modules, on gloo          |
| no-communication | the same without DDP: the ceiling, workers that never talk                            |
| one-process      | the same in worker 0 alone, on everyone's batches and threads; the others wait        |

All of them get their tensors ready made; paceline still pays for its loader and the random states it sets. An exact
Engine allows only deterministic algorithms. That and the number of threads are settings of the whole process, so each
contestant runs under its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.bench.race import OURS, THREADS_PER_WORKER, TRAINER, EngineOptions, EngineTiming, Race
from paceline.bench.trainer_contestant import CLIP_AT, TrainerLoop
from paceline.bench.workloads import ReadyBatches, Workload, adamw, linear
from paceline.world.world import World


class Contestant(Protocol):
    deterministic: bool
    threads: int

    def step(self) -> None: ...
    def take_timings(self) -> list[EngineTiming]:
        """Of the steps since the last call; empty for contestants that measure nothing themselves."""
        ...

    def close(self) -> None: ...


def enter(name: str, workload: Workload, race: Race, world: World, most_steps: int) -> Contestant:
    """The contestant of this name; every worker enters the same ones in the same order."""
    mine = [world.rank]
    match name:
        case "torch-ddp":
            return PlainLoop(DistributedDataParallel(workload.build()), workload, mine)
        case "torch-ddp-views":
            views = DistributedDataParallel(workload.build(), gradient_as_bucket_view=True)
            return PlainLoop(views, workload, mine)
        case "torch-ddp-paceline":
            import paceline.backend  # noqa: F401 (it registers the name)

            ours = DistributedDataParallel(workload.build(), process_group=dist.new_group(backend="paceline"))
            return PlainLoop(ours, workload, mine)
        case "torch-fsdp2":
            return PlainLoop(_fully_sharded(workload), workload, mine)
        case "no-communication":
            return PlainLoop(workload.build(), workload, mine)
        case "one-process":
            everyone = range(world.size)
            return PlainLoop(workload.build(), workload, everyone, race.threads(name)) if world.is_main else Spectator()
        case name if name == TRAINER:
            return TrainerLoop(workload, race, world, most_steps)
    return PacelineLoop(OURS[name], workload, race, world, most_steps)


def _fully_sharded(workload: Workload) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = workload.build(), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, workload.repeated):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class PlainLoop:
    """The loop of a torch user, with or without DDP around the model, on the batches of some ranks laid together."""

    deterministic = False

    def __init__(
        self, model: nn.Module, workload: Workload, ranks: Sequence[int], threads: int = THREADS_PER_WORKER
    ) -> None:
        self._model, self._workload, self.threads = model, workload, threads
        self._optimizer = adamw(model)
        self._batches = itertools.cycle([_batch_of(ranks, number, workload) for number in range(4)])

    def step(self) -> None:
        inputs, targets = next(self._batches)
        loss = self._workload.loss(self._model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()

    def take_timings(self) -> list[EngineTiming]:
        return []

    def close(self) -> None:
        pass


def _batch_of(ranks: Sequence[int], number: int, workload: Workload) -> tuple[Tensor, Tensor]:
    drawn = [workload.draw(workload.batch_size, seed=100 * rank + number) for rank in ranks]
    inputs, targets = zip(*drawn, strict=True)
    return torch.cat(inputs), torch.cat(targets)


class Spectator:
    """A worker in whose turn another one trains: it goes on to the next barrier and sleeps there."""

    deterministic = False
    threads = THREADS_PER_WORKER

    def step(self) -> None:
        pass

    def take_timings(self) -> list[EngineTiming]:
        return []

    def close(self) -> None:
        pass


class PacelineLoop:
    """The loop of a paceline user, one item a step because there are as many lanes as workers."""

    threads = THREADS_PER_WORKER

    def __init__(self, options: EngineOptions, workload: Workload, race: Race, world: World, most_steps: int) -> None:
        self._workload = workload
        buckets: dict[str, Any] = {} if race.bucket_mib is None else {"bucket_mib": race.bucket_mib}
        self._engine = paceline.Engine(
            world=world if options.servers else replace(world, servers=0),
            strategy=options.strategy,
            lanes=world.size,
            threads=self.threads,
            device="cpu",
            backend=race.backend,
            reduction=options.reduction,
            overlap=options.overlap,
            **buckets,
        )
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        length = most_steps * world.size * workload.batch_size
        samples = ReadyBatches(workload, length, seed=100 * world.rank)
        model = workload.build()
        self._model, self._optimizer, loader = self._engine.prepare(
            model, adamw(model), samples.loader(workload.batch_size)
        )
        self._scheduler: Any = None
        if options.as_trainer:
            self._scheduler = self._engine.prepare(linear(self._optimizer, most_steps + 1))
        self._batches = iter(loader)
        self._timings: list[EngineTiming] = []

    def step(self) -> None:
        inputs, targets = next(self._batches)
        loss = self._workload.loss(self._model(inputs), targets)
        self._engine.backward(loss)
        if self._scheduler is not None:
            self._engine.clip_grad_norm_(CLIP_AT)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad()
        last = self._engine.timing
        self._timings.append(EngineTiming(last.exposed_s, last.backward_s, last.left_during_backward))

    def take_timings(self) -> list[EngineTiming]:
        taken, self._timings = self._timings, []
        return taken

    def close(self) -> None:
        self._batches.close()  # what a `break` does
        self._engine.close()
