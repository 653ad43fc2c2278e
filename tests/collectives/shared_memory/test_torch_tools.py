"""What in torch looks into a process group, or calls it from places of its own, finds what torch's groups have."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel

from paceline import World
from paceline.errors import CollectiveError
from tests.collectives.shared_memory.ranks import succeeded, torch_distributed
from tests.workers import run_workers

pytestmark = pytest.mark.workers


def count_collectives(world: World, backend: str) -> dict[str, int]:
    from torch.distributed.tensor.debug import CommDebugMode

    with torch_distributed(world, backend=backend):
        mode, x, others = CommDebugMode(), torch.ones(2), [torch.empty(2) for _ in range(world.size)]
        with mode:
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
            dist.broadcast(x, 0)
            dist.all_gather(others, x)
            dist.all_gather_into_tensor(torch.empty(2 * world.size), x)
            dist.reduce_scatter(x, others)
            dist.reduce_scatter_tensor(x, torch.cat(others))
            dist.scatter(x, others if world.rank == 0 else None)
            dist.gather(x, others if world.rank == 0 else None)
            dist.reduce(x, 0)
            dist.barrier()
        return {str(operator): count for operator, count in mode.get_comm_counts().items()}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_mode_that_counts_collectives_counts_as_many_as_over_gloo() -> None:
    ours, gloo = (succeeded(run_workers(count_collectives, 2, backend=name)) for name in ("paceline", "gloo"))
    assert ours == gloo
    assert ours[0]["c10d.allreduce_"] == 2


def profile(world: World) -> list[str]:
    with torch_distributed(world):
        x = torch.ones(3)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            dist.all_reduce(x)
            dist.barrier()
        return sorted({event.name for event in profiler.events() if ":" in event.name and "aten" not in event.name})


def test_a_profiler_shows_the_operator_and_the_work() -> None:
    shown = ["c10d::allreduce_", "c10d::barrier", "paceline:all_reduce", "paceline:barrier"]
    assert succeeded(run_workers(profile, 2)) == [shown] * 2


def save_meanwhile(world: World, folder: str) -> list[str]:
    import torch.distributed.checkpoint as dcp

    with torch_distributed(world):
        weights = {"weight": torch.full((3,), float(world.rank))}
        dcp.async_save(weights, checkpoint_id=folder).result()
        group = _get_default_group()
        assert group._get_backend(torch.device("cpu")) is group
        with pytest.raises(CollectiveError, match="no backend is there for cuda"):
            group._get_backend(torch.device("cuda"))
        return [device.type for device in group._device_types]


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_torch_is_saved_in_the_background(tmp_path: Path) -> None:
    assert succeeded(run_workers(save_meanwhile, 2, folder=str(tmp_path))) == [["cpu"]] * 2
    assert (tmp_path / ".metadata").exists()


def train_compiled(world: World, compiled: bool) -> list[float]:
    with torch_distributed(world):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
        run = torch.compile(model, backend="eager") if compiled else model
        for step in range(3):  # DDP's own buffers are made anew between the first two
            run(torch.ones(2, 4) * (step + world.rank)).sum().backward()
        return [float(parameter.grad.sum()) for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore")
def test_ddp_under_torch_compile_trains_on_after_its_first_step() -> None:
    plain, compiled = (succeeded(run_workers(train_compiled, 2, compiled=each)) for each in (False, True))
    assert plain == compiled


def run_built_in_hook(world: World) -> list[float]:
    with torch_distributed(world):
        model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        model(torch.ones(1, 2) * (world.rank + 1)).sum().backward()
        assert model.module.weight.grad is not None
        return list(model.module.weight.grad.flatten().tolist())


def test_the_all_reduce_hook_that_torch_has_in_c_works() -> None:
    assert succeeded(run_workers(run_built_in_hook, 2)) == [[1.5, 1.5]] * 2


def meet(world: World) -> str:
    with torch_distributed(world):
        group = _get_default_group()
        group.monitored_barrier(timedelta(seconds=10))
        if world.rank == 1:
            return ""
        with pytest.raises(CollectiveError) as info:
            group.monitored_barrier(timedelta(seconds=0.2))
        return str(info.value)


def test_a_monitored_barrier_names_who_did_not_come() -> None:
    late, _ = succeeded(run_workers(meet, 2))
    assert "rank 1" in late, late
