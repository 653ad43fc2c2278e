"""Who trains: each contestant has its own copy of the model and optimizer, and does one step when asked.

| contestant       | one step includes                                                                     |
|------------------|---------------------------------------------------------------------------------------|
| paceline-*       | next of the prepared loader, forward, engine.backward, step, zero_grad, all checks    |
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
from paceline.bench.race import OURS, THREADS_PER_WORKER, EngineTiming, Race
from paceline.bench.workloads import BATCHES, ReadyBatches, Workload, adamw
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

            on_ours = DistributedDataParallel(workload.build(), process_group=dist.new_group(backend="paceline"))
            return PlainLoop(on_ours, workload, mine)
        case "torch-fsdp2":
            return PlainLoop(fully_sharded(workload), workload, mine)
        case "no-communication":
            return PlainLoop(workload.build(), workload, mine)
        case "one-process":
            everyone = range(world.size)
            return PlainLoop(workload.build(), workload, everyone, race.threads(name)) if world.is_main else Spectator()
    ours = OURS[name]
    return PacelineLoop(
        workload,
        world if ours.servers else replace(world, servers=0),
        most_steps,
        strategy=ours.strategy,
        reduction=ours.reduction,
        overlap=ours.overlap,
        **engine_options(race.backend, race.bucket_mib),
    )


def fully_sharded(workload: Workload) -> nn.Module:
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
        self,
        model: nn.Module,
        workload: Workload,
        ranks: Sequence[int] = (0,),
        threads: int = THREADS_PER_WORKER,
        batches: int = BATCHES,
    ) -> None:
        self.model, self._workload, self.threads = model, workload, threads
        self._optimizer: Any = adamw(model)
        self._batches: Any = itertools.cycle([_batch_of(ranks, number, workload) for number in range(batches)])
        self.inputs: Sequence[Tensor] = ()  # of the last batch

    def step(self) -> None:
        self.backward(self.forward())
        self.update()

    def forward(self) -> Tensor:
        self.inputs = inputs, targets = next(self._batches)
        return self._workload.loss(self.model(inputs), targets)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
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


class Spectator(PlainLoop):
    """A worker in whose turn another one trains: it goes on to the next barrier and sleeps there."""

    threads = THREADS_PER_WORKER

    def __init__(self) -> None:
        """It has no model."""

    def step(self) -> None:
        pass


class PacelineLoop(PlainLoop):
    """The loop of a paceline user, one item a step because there are as many lanes as workers."""

    def __init__(
        self, workload: Workload, world: World, most_steps: int, *, batches: int = BATCHES, **options: Any
    ) -> None:
        """`options` are the Engine's."""
        self._workload, self.threads = workload, THREADS_PER_WORKER
        self._engine = paceline.Engine(world=world, lanes=world.size, threads=self.threads, device="cpu", **options)
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        length = most_steps * world.size * workload.batch_size
        samples = ReadyBatches(workload, length, seed=100 * world.rank, batches=batches)
        model = workload.build()
        self.model, self._optimizer, loader = self._engine.prepare(
            model, adamw(model), samples.loader(workload.batch_size)
        )
        self._batches = iter(loader)
        self.inputs = ()
        self._timings: list[EngineTiming] = []

    def step(self) -> None:
        super().step()
        last = self._engine.timing
        self._timings.append(EngineTiming(last.exposed_s, last.backward_s, last.left_during_backward))

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def take_timings(self) -> list[EngineTiming]:
        taken, self._timings = self._timings, []
        return taken

    def close(self) -> None:
        self._batches.close()  # what a `break` does
        self._engine.close()


def engine_options(backend: str, bucket_mib: float | None) -> dict[str, Any]:
    """What was asked for; the rest is the Engine's default."""
    return {"backend": backend} | ({} if bucket_mib is None else {"bucket_mib": bucket_mib})
