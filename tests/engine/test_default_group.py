"""torch.distributed inside a job: its default group has the job's workers, before and after they change."""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.collectives.shared_memory.group import SharedMemoryGroup
from paceline.engine.default_group import COLLECTIVES
from paceline.errors import ConfigError, LoopError
from paceline.torch_compat import HashStore
from paceline.world.world import World
from tests.faults.elastic_jobs import check_unharmed, run_elastic
from tests.faults.jobs import run_job
from tests.workers import Result, free_port, run_workers


def values(results: list[Result]) -> list[Any]:
    for result in results:
        assert result.error is None, result.traceback
    return [result.value for result in results]


@pytest.mark.unit
def test_whatever_the_shared_memory_backend_moves_the_jobs_group_passes_on() -> None:
    theirs = {name for name, member in vars(SharedMemoryGroup).items() if hasattr(member, "__wrapped__")}
    assert theirs >= {"allreduce", "alltoall", "recv"}
    assert theirs <= set(COLLECTIVES)


def ask_torch(world: World, *, backend: str) -> dict[str, Any]:
    with paceline.Engine(world=world, backend=backend) as engine:
        rank, size = dist.get_rank(), dist.get_world_size()
        found: dict[str, Any] = {"place": (rank, size), "backend": str(dist.get_backend())}
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        found["sum"] = total.item()
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        found["objects"] = [one["rank"] for one in objects]
        last = torch.tensor([rank])
        dist.broadcast(last, size - 1)
        found["broadcast"] = last.item()
        parts = [torch.zeros(2, dtype=torch.float64) for _ in range(size)]
        dist.all_gather(parts, torch.full((2,), rank, dtype=torch.float64))
        found["gathered"] = torch.cat(parts).tolist()
        few = dist.new_group(list(range(max(size - 1, 1))))
        if rank < max(size - 1, 1):
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=few)
        # A collective of the engine's own between two of the script's: neither gets into the other's order.
        work = dist.all_reduce(torch.ones(3), async_op=True)
        found["engine"] = engine.reduce(torch.tensor([1.0]), "sum").item()
        work.wait()
        dist.barrier()
    found["after"] = dist.is_initialized()
    return found


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "backend"), [(1, "gloo"), (1, "paceline"), (2, "gloo"), (3, "paceline")])
def test_the_default_group_has_all_workers(workers: int, backend: str) -> None:
    for rank, found in enumerate(values(run_workers(ask_torch, workers, backend=backend))):
        assert found == {
            "place": (rank, workers),
            "backend": backend,
            "sum": workers * (workers + 1) / 2,
            "objects": list(range(workers)),
            "broadcast": workers - 1,
            "gathered": [rank for rank in range(workers) for _ in range(2)],
            "engine": workers,
            "after": False,
        }


def use_tools_of_torch(world: World, *, backend: str, folder: str) -> dict[str, Any]:
    import torch.distributed._functional_collectives as functional
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    found: dict[str, Any] = {}
    with paceline.Engine(world=world, backend=backend):
        state: dict[str, Any] = {"weights": torch.arange(4.0), "step": 3}
        dcp.async_save(state, checkpoint_id=folder).result()
        read: dict[str, Any] = {"weights": torch.zeros(4), "step": 0}
        dcp.load(read, checkpoint_id=folder)
        found["checkpoint"] = (read["weights"].tolist(), read["step"])
        rows = distribute_tensor(torch.arange(8.0).view(4, 2), init_device_mesh("cpu", (world.size,)), [Shard(0)])
        found["dtensor"] = (rows @ rows.T).full_tensor().sum().item()
        group, mine = dist.group.WORLD, torch.full((2,), world.rank + 1.0)
        found["functional"] = [
            functional.all_reduce(mine, "sum", group).tolist(),
            functional.all_gather_single(mine, 0, group).tolist(),
            functional.reduce_scatter_single(mine, "sum", 0, group).tolist(),
            functional.all_to_all_single(mine, None, None, group).tolist(),
        ]
        out = torch.empty(2 * world.size)
        dist.all_gather_into_tensor(out, mine)
        part = torch.empty(1)
        dist.reduce_scatter_tensor(part, mine)
        found["into"] = [out.tolist(), part.tolist()]
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=30), group)
    return found


@pytest.mark.workers
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_what_torch_builds_on_its_default_group_works_on_the_jobs(backend: str, tmp_path: Path) -> None:
    expected = {
        "checkpoint": ([0.0, 1.0, 2.0, 3.0], 3),
        "dtensor": 400.0,
        "functional": [[3.0, 3.0], [1.0, 1.0, 2.0, 2.0], [3.0], [1.0, 2.0]],
        "into": [[1.0, 1.0, 2.0, 2.0], [3.0]],
    }
    found = values(run_workers(use_tools_of_torch, 2, backend=backend, folder=str(tmp_path)))
    assert found == [expected] * 2


def keep_own_group(world: World, *, port: int) -> list[Any]:
    store = dist.TCPStore("127.0.0.1", port, world.size, world.is_main, timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    own = dist.group.WORLD
    with paceline.Engine(world=world, backend="paceline"):
        seen = [dist.group.WORLD is own, str(dist.get_backend())]
    seen.append(dist.group.WORLD is own)
    dist.destroy_process_group()
    return seen


@pytest.mark.workers
def test_a_group_that_the_script_made_stays() -> None:
    assert values(run_workers(keep_own_group, 2, port=free_port())) == [[True, "gloo", True]] * 2


@pytest.mark.unit
def test_no_connection_is_made_for_a_script_that_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any, **__: Any) -> Any:
        raise AssertionError("connected")

    monkeypatch.setattr("paceline.collectives.communicator.Communicator.connect", connect)
    with paceline.Engine(world=World()):
        assert dist.is_initialized()
        assert "distributed" not in sys.excepthook.__qualname__  # torch's puts the rank before every line
        with pytest.raises(AssertionError, match="connected"):
            dist.barrier()
    assert not dist.is_initialized()


@pytest.mark.unit
def test_an_engine_inside_another_ones_life_leaves_the_group_alone() -> None:
    with paceline.Engine(world=World()):
        group = dist.group.WORLD
        with paceline.Engine(world=World()):
            assert dist.group.WORLD is group
        assert dist.group.WORLD is group
    assert not dist.is_initialized()


@pytest.mark.unit
def test_a_group_of_the_script_that_takes_the_place_of_ours_is_not_destroyed() -> None:
    with paceline.Engine(world=World()):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        own = dist.group.WORLD
    assert dist.group.WORLD is own
    dist.destroy_process_group()


@pytest.mark.unit
def test_a_group_that_is_over_says_so() -> None:
    with paceline.Engine(world=World()):
        group = dist.group.WORLD
    with pytest.raises(paceline.errors.WorldError, match=r"the engine was closed.*engine\.reduce"):
        dist.all_reduce(torch.ones(1), group=group)


def sum_of_samples(world: World, *, lanes: int, each: bool) -> float:
    """What a hand-written metric does: sums over this worker's batches, then over the workers."""
    with paceline.Engine(world=world, lanes=lanes, seed=1) as engine:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        data = TensorDataset(torch.arange(64.0).view(64, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=2))
        total = torch.zeros(1)
        for (rows,) in loader:
            part = rows.sum().view(1)
            if each:
                dist.all_reduce(part)
            total += part
            engine.backward(model(rows).sum())
            optimizer.step()
        if not each:
            dist.all_reduce(total)
        return total.item()


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "lanes", "each"), [(1, 4, True), (2, 4, False), (2, 4, True), (3, 4, False)])
def test_a_sum_over_workers_counts_every_sample_once(workers: int, lanes: int, each: bool) -> None:
    assert values(run_workers(sum_of_samples, workers, lanes=lanes, each=each)) == [2016.0] * workers


def asks_in_the_body(world: World, *, how: str, reduction: Any) -> list[str]:
    with (
        warnings.catch_warnings(record=True) as caught,
        paceline.Engine(world=world, lanes=4, reduction=reduction) as engine,
    ):
        warnings.simplefilter("always")
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.arange(64.0).view(16, 4))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=2))
        for (x,) in loader:
            out = model(x)
            loss = out.square().mean()
            parts = [torch.zeros_like(out) for _ in range(world.size)]
            count = torch.tensor(float(len(x)))
            if how == "gathered":
                dist.all_gather(parts, out.detach())
                loss = (out @ torch.cat(parts).T).mean()
            elif how == "with a gradient":
                loss = (out @ torch.cat(all_gather(out)).T).mean()
            elif how == "summed":
                dist.all_reduce(count)
                loss = out.square().sum() / count
            elif how == "printed":
                told = loss.detach().clone()
                dist.all_reduce(told)
            elif how == "given away":
                dist.all_gather([torch.zeros(()) for _ in range(world.size)], loss)
            elif how == "reduced in place":
                dist.all_reduce(loss)
            engine.backward(loss)
            dist.all_reduce(count)
            optimizer.step()
    return [str(one.message) for one in caught if "a collective of torch.distributed" in str(one.message)]


@pytest.mark.workers
@pytest.mark.parametrize(
    ("how", "reduction", "tells"),
    [
        ("gathered", "exact", 1),
        ("with a gradient", "exact", 1),
        ("summed", "exact", 1),
        ("summed", "fast", 0),
        ("printed", "exact", 0),
        ("given away", "exact", 0),
        ("reduced in place", "exact", 0),
    ],
)
def test_a_loss_of_what_other_workers_gave_is_told_of(how: str, reduction: str, tells: int) -> None:
    for told in values(run_workers(asks_in_the_body, 2, how=how, reduction=reduction)):
        assert len(told) == tells, told


@pytest.mark.workers
def test_a_collective_in_a_body_that_does_not_run_alike_is_refused() -> None:
    """By the first worker that calls it; one that has not begun its step by then may hear that the other has left."""
    errors = [result.error or "" for result in run_workers(sum_of_samples, 3, lanes=4, each=True)]
    refused = [error for error in errors if error.startswith(LoopError.__name__) and "(1, 1, 2)" in error]
    left = [error for error in errors if "but it left its training loop after step 0" in error]
    assert refused
    assert len(refused) + len(left) == 3, errors


def sum_of_evaluation(world: World, *, samples: int, in_body: bool, asks: bool) -> float:
    with paceline.Engine(world=world, seed=1) as engine:
        data = TensorDataset(torch.arange(float(samples)).view(samples, 1))
        loader = engine.prepare(DataLoader(data, batch_size=2))
        total = torch.zeros(1)
        for (rows,) in loader:
            part = rows.sum().view(1)
            if asks and loader.shadow:
                part.zero_()
            if in_body:
                dist.all_reduce(part)
            total += part
        if not in_body:
            dist.all_reduce(total)
        return total.item()


@pytest.mark.workers
@pytest.mark.parametrize(
    ("workers", "samples", "in_body", "asks"),
    [(2, 20, False, False), (3, 20, False, False), (2, 20, True, False), (3, 20, True, True), (3, 3, False, True)],
)
def test_an_evaluation_that_asks_torch_counts_every_sample_once(
    workers: int, samples: int, in_body: bool, asks: bool
) -> None:
    found = values(run_workers(sum_of_evaluation, workers, samples=samples, in_body=in_body, asks=asks))
    assert found == [float(sum(range(samples)))] * workers


@pytest.mark.workers
def test_a_sum_that_would_count_a_repeated_batch_twice_is_refused() -> None:
    for result in run_workers(sum_of_evaluation, 3, samples=20, in_body=True, asks=False):
        assert result.error is not None
        assert result.error.startswith("LoopError: torch.distributed in the body of an evaluation")


@pytest.mark.unit
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_sync_batch_norm_is_refused_where_bits_would_depend_on_workers(reduction: Any) -> None:
    with paceline.Engine(world=World(), reduction=reduction) as engine:
        model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if reduction == "fast":
            engine.prepare(model, optimizer)
            return
        with pytest.raises(ConfigError, match=r"1 is a SyncBatchNorm.*BatchNorm"):
            engine.prepare(model, optimizer)


BETWEEN_EPOCHS = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import paceline
engine = paceline.Engine()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(640, 4), torch.randn(640, 1)), batch_size=4)
model, optimizer, loader = engine.prepare(model, optimizer, data)
for epoch in range(3):  # a joiner runs the bodies of the epochs that are over, and what stands between them
    for x, y in loader:
        engine.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    count = torch.ones(1)
    dist.all_reduce(count)
    engine.print("epoch", epoch, "workers", int(count))
engine.print("weights", engine.weights_hash())
"""


@pytest.mark.job
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_a_worker_that_joins_is_alone_in_the_group_until_then(tmp_path: Path, backend: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(BETWEEN_EPOCHS)
    found = []
    for name, faults in (("undisturbed", None), ("killed", "kill:rank=1,step=25,phase=backward")):
        (tmp_path / name).mkdir()
        flags = f"--workers 2 --lanes 8 --elastic --backend {backend}"
        job = run_job(tmp_path / name, flags, faults=faults, script=script)
        assert job.code == 0, job.text
        found.append(job.out.split("weights ")[-1].split()[0])
    assert found[0] == found[1]
    assert "worker 1 is back" in job.err, job.text
    assert "WorldError" not in job.err, job.text
    assert "epoch 2 workers 2" in job.out, job.text


@pytest.mark.job
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_the_group_follows_the_workers_of_an_elastic_job(tmp_path: Path, backend: str) -> None:
    orders = ["kill:rank=2,step=2,phase=backward", "kill:rank=0,step=6,phase=exchange"]
    job = run_elastic(tmp_path, f"--backend {backend}", "--count-workers", orders=orders)
    check_unharmed(job, orders)
