"""Handles and futures: operations run in the order in which they were asked for, and callbacks may ask for more."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import World
from paceline.errors import CollectiveError
from tests.collectives.shared_memory.ranks import group_of, opts, succeeded, torch_distributed
from tests.workers import run_workers

pytestmark = pytest.mark.workers


def many_at_once(world: World) -> list[float]:
    """All-reduces and broadcasts, alternately of the same tensor, so that only one order gives the right numbers."""
    with torch_distributed(world):
        mine = torch.full((50_000,), float(world.rank + 1))
        works = []
        for step in range(20):
            works.append(dist.all_reduce(mine, async_op=True))
            works.append(dist.broadcast(mine, src=step % world.size, async_op=True))
        dist.all_reduce(mine)  # waits its turn behind the others
        for work in reversed(works):
            work.wait()
            assert work.is_completed()
            assert work.is_success()
        return [mine.min().item(), mine.max().item()]


def test_operations_run_in_the_order_in_which_they_were_asked_for() -> None:
    wanted = 6.0 * 3.0**20
    for low, high in succeeded(run_workers(many_at_once, 3)):
        assert low == high
        assert high == pytest.approx(wanted, rel=1e-5)


def futures(world: World) -> dict[str, Any]:
    with torch_distributed(world):
        mine = torch.ones(3)
        work = dist.all_reduce(mine, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        found = {"then": doubled.wait().tolist(), "value": work.get_future().value()[0].tolist()}
        after = dist.all_reduce(mine, async_op=True)
        after.wait()
        found["late then"] = after.get_future().then(lambda future: future.value()[0].sum().item()).wait()
        outs = [torch.empty(2) for _ in range(world.size)]
        gathered = dist.all_gather(outs, torch.full((2,), float(world.rank)), async_op=True)
        found["gathered"] = [tensor[0].item() for tensor in gathered.get_future().wait()]
        return found


def test_futures_hold_the_tensors_and_can_be_chained_before_and_after_the_end() -> None:
    wanted = {"then": [4.0] * 3, "value": [2.0] * 3, "late then": 12.0, "gathered": [0.0, 1.0]}
    assert succeeded(run_workers(futures, 2)) == [wanted] * 2


def nested(world: World) -> list[float]:
    """A callback that asks for a second all-reduce and waits for it, as torch's PowerSGD hook does."""
    with torch_distributed(world):
        second = torch.full((4,), 10.0)

        def ask_for_more(future: Any) -> float:
            first = future.value()[0][0].item()
            by_future = dist.all_reduce(second, async_op=True).get_future().wait()[0][0].item()
            by_work = torch.ones(1)
            dist.all_reduce(by_work)
            return first + by_future + by_work.item()

        work = dist.all_reduce(torch.ones(40_000), async_op=True)
        chained = work.get_future().then(ask_for_more)
        return [chained.wait()]


def test_a_callback_may_ask_for_another_collective_and_wait_for_it() -> None:
    assert succeeded(run_workers(nested, 2)) == [[2.0 + 20.0 + 2.0]] * 2


def waiting(world: World) -> list[Any]:
    with group_of(world, timeout_s=20.0) as group:
        seen: list[Any] = []
        if world.rank == 0:
            work = group.barrier()
            seen.append(work.is_completed())
            with pytest.raises(CollectiveError) as info:
                work.wait(timedelta(seconds=0.05))
            seen.append(str(info.value))
            group._store.set("go", "")
            seen.append(work.wait())
        else:
            group._store.get("go")
            group.barrier(opts()).wait()
        return seen


def test_a_wait_with_a_timeout_ends_and_the_operation_goes_on() -> None:
    told = "the timeout of 0.05 s ended before the operation did"
    assert succeeded(run_workers(waiting, 2))[0] == [False, told, True]


def error_through_a_future(world: World) -> list[str]:
    """C++ (DDP's reducer) sees an error too, not a value that is an exception."""
    with torch_distributed(world):
        texts = []
        count = 3 + world.rank
        work = dist.all_reduce(torch.ones(count), async_op=True)
        for wait in (work.wait, work.get_future().wait, work.get_future().then(lambda future: future.value()).wait):
            with pytest.raises(RuntimeError) as info:
                wait()
            texts.append(str(info.value))
        assert not work.is_success()
        assert isinstance(work.exception(), CollectiveError)
        return texts


def test_an_error_comes_out_of_handles_and_futures_alike() -> None:
    for texts in succeeded(run_workers(error_through_a_future, 2)):
        assert all("calls all_reduce of 3 float32" in text and "of 4 float32" in text for text in texts), texts


def sub_groups(world: World) -> list[float]:
    rank = world.rank
    with torch_distributed(world):
        low, high, everybody = dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group()
        mine = low if rank < 2 else high
        first, second, third = torch.tensor([float(rank)]), torch.tensor([1.0]), torch.tensor([float(rank)])
        works = [
            dist.all_reduce(first, group=mine, async_op=True),
            dist.all_reduce(second, group=everybody, async_op=True),
            dist.broadcast(third, src=3 if rank > 1 else 1, group=mine, async_op=True),
        ]
        for work in works:
            work.wait()
        names = {group.group_name for group in (mine, everybody)}
        assert len(names) == 2
        dist.destroy_process_group(mine)
        dist.all_reduce(second)
        return [first.item(), second.item(), third.item()]


def test_sub_groups_work_side_by_side_and_can_be_destroyed_alone() -> None:
    found = succeeded(run_workers(sub_groups, 4))
    assert found == [[1.0, 16.0, 1.0]] * 2 + [[5.0, 16.0, 3.0]] * 2


def from_threads(world: World) -> list[float]:
    """Each thread has a group of its own, as data loading beside training may."""
    with torch_distributed(world):
        groups = [dist.new_group() for _ in range(4)]
        totals = [torch.full((30_000,), float(number)) for number in range(4)]

        def work(number: int) -> None:
            for _ in range(5):
                dist.all_reduce(totals[number], group=groups[number])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [total[-1].item() for total in totals]


def test_threads_with_groups_of_their_own_do_not_meet() -> None:
    assert succeeded(run_workers(from_threads, 2)) == [[0.0, 32.0, 64.0, 96.0]] * 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step * 10 + rank))


def trained(world: World, **options: Any) -> list[float]:
    """torch's own DDP, unmodified, with several buckets: this rank's losses."""
    with torch_distributed(world):
        ddp = DistributedDataParallel(network(), bucket_cap_mb=0.01, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        losses = []
        for step in range(4):
            loss = ddp(batch(step, world.rank)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


def trained_alone(size: int) -> list[list[float]]:
    """The same in one process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[list[float]] = [[] for _ in range(size)]
    for step in range(4):
        losses = [model(batch(step, rank)).square().mean() for rank in range(size)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        for rank, loss in enumerate(losses):
            found[rank].append(loss.item())
    return found


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_torchs_own_ddp_trains_as_one_process_does(options: dict[str, Any]) -> None:
    for mine, alone in zip(succeeded(run_workers(trained, 2, **options)), trained_alone(2), strict=True):
        assert mine == pytest.approx(alone, rel=1e-5)


def objects(world: World) -> list[Any]:
    with torch_distributed(world):
        everyones: list[Any] = [None] * world.size
        dist.all_gather_object(everyones, {"rank": world.rank, "text": "x" * world.rank})
        given = [["a", "b", "c"][number] for number in range(world.size)] if world.rank == 1 else [None] * world.size
        dist.broadcast_object_list(given, src=1)
        return [len(entry["text"]) for entry in everyones] + given


def test_objects_travel() -> None:
    assert succeeded(run_workers(objects, 3)) == [[0, 1, 2, "a", "b", "c"]] * 3
