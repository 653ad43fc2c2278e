"""Messages between two ranks: order, tags, any source, sizes beyond the ring, and what goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import P2POp

from paceline import World
from paceline.errors import CollectiveError
from tests.collectives.shared_memory.ranks import DTYPES, bits, succeeded, torch_distributed, values
from tests.workers import run_workers

pytestmark = pytest.mark.workers

LARGE = 1_000_003  # floats: many chunks of the ring, the last one not full


def every_pair(world: World) -> list[str]:
    """Everybody sends everybody else every dtype and size, all at once."""
    rank, size, wrong = world.rank, world.size, []
    with torch_distributed(world):
        for dtype in DTYPES:
            for count in (0, 1, 1000, 40_000):
                tensors = values(size, count, dtype)
                sends = [dist.isend(tensors[rank], to) for to in range(size) if to != rank]
                inbox = {source: torch.empty(count, dtype=dtype) for source in range(size) if source != rank}
                for source, into in inbox.items():
                    dist.recv(into, source)
                    if not torch.equal(bits(into), bits(tensors[source])):
                        wrong.append(f"{count} {dtype} from {source}")
                for work in sends:
                    work.wait()
        dist.barrier()
    return wrong


@pytest.mark.parametrize("workers", [2, 5])
def test_every_pair_exchanges_every_dtype_and_size(workers: int) -> None:
    assert succeeded(run_workers(every_pair, workers)) == [[]] * workers


def out_of_order(world: World) -> Any:
    with torch_distributed(world):
        if world.rank == 0:
            works = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in range(6)]
            works += [dist.isend(torch.full((LARGE,), 9.0), 1, tag=9), dist.isend(torch.full((3,), 10.0), 1, tag=1)]
            for work in works:
                work.wait()
            return None
        large = torch.empty(LARGE)
        dist.recv(large, 0, tag=9)
        seen = [large[0].item(), large[-1].item()]
        for tag in (5, 1, 0, 4, 1, 3, 2):
            into = torch.empty(3)
            dist.recv(into, 0, tag=tag)
            seen.append(into[0].item())
        return seen


def test_tags_may_be_asked_for_in_any_order_and_equal_tags_come_in_order() -> None:
    assert succeeded(run_workers(out_of_order, 2))[1] == [9.0, 9.0, 5.0, 1.0, 0.0, 4.0, 10.0, 3.0, 2.0]


def from_anybody(world: World) -> Any:
    with torch_distributed(world):
        if world.rank:
            for number in range(3):
                dist.send(torch.tensor([world.rank, number]), 0, tag=7)
            dist.barrier()
            return None
        seen = []
        for _ in range(3 * (world.size - 1)):
            into = torch.empty(2, dtype=torch.int64)
            source = dist.recv(into, tag=7)
            seen.append((source, *into.tolist()))
        dist.barrier()
        return seen


def test_a_receive_from_anybody_tells_who_sent_and_keeps_each_senders_order() -> None:
    seen = succeeded(run_workers(from_anybody, 4))[0]
    assert all(source == told for source, told, _ in seen)
    for rank in (1, 2, 3):
        assert [number for source, _, number in seen if source == rank] == [0, 1, 2]


def around_the_ring(world: World) -> tuple[float, float]:
    rank, size = world.rank, world.size
    with torch_distributed(world):
        mine, theirs = torch.full((LARGE,), float(rank)), torch.empty(LARGE)
        strided = torch.zeros(4, 6)[:, ::2]
        ops = [
            P2POp(dist.isend, mine, (rank + 1) % size),
            P2POp(dist.irecv, theirs, (rank - 1) % size),
            P2POp(dist.isend, torch.full((3, 4), float(rank)).t(), (rank - 1) % size, tag=1),
            P2POp(dist.irecv, strided, (rank + 1) % size, tag=1),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(theirs, torch.full((LARGE,), theirs[0].item()))
        return theirs[0].item(), strided.mean().item()


def test_batches_of_large_and_strided_messages_go_around_a_ring() -> None:
    assert succeeded(run_workers(around_the_ring, 3)) == [(2.0, 1.0), (0.0, 2.0), (1.0, 0.0)]


def beside_collectives(world: World) -> float:
    """A send whose receiver comes late holds up no collective."""
    with torch_distributed(world):
        mine = torch.full((LARGE,), 5.0)
        work = dist.isend(mine, 1) if world.rank == 0 else None
        total = torch.ones(100_000)
        for _ in range(5):
            dist.all_reduce(total)
        if world.rank == 1:
            dist.recv(mine, 0)
        if work is not None:
            work.wait()
        dist.barrier()
        return total[0].item()


def test_a_message_under_way_does_not_hold_up_collectives() -> None:
    assert succeeded(run_workers(beside_collectives, 2)) == [32.0] * 2


def in_a_sub_group(world: World) -> float:
    with torch_distributed(world):
        group = dist.new_group([1, 2])
        into = torch.zeros(1)
        if world.rank == 1:
            dist.send(torch.tensor([3.0]), 2, group=group)
        if world.rank == 2:
            dist.recv(into, 1, group=group)
        dist.barrier()
        return into.item()


def test_messages_in_a_sub_group_find_their_ranks() -> None:
    assert succeeded(run_workers(in_a_sub_group, 3)) == [0.0, 0.0, 3.0]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def bad_messages(world: World) -> list[str]:
    texts = []
    with torch_distributed(world, timeout_s=0.5):
        if world.rank == 0:
            dist.send(torch.ones(3), 1)
            dist.send(torch.ones(2), 1, tag=3)
        calls: list[Any] = [
            lambda: dist.recv(torch.ones(4), 0),
            lambda: dist.recv(torch.ones(2), 0, tag=4),
            lambda: dist.recv(torch.ones(2), tag=4),
        ]
        if world.rank == 1:
            for call in calls:
                with pytest.raises(CollectiveError) as info:
                    call()
                texts.append(str(info.value))
            into = torch.zeros(2)
            dist.recv(into, 0, tag=3)
            assert into.tolist() == [1.0, 1.0]
        store = dist.distributed_c10d._get_default_store()
        if world.rank == 1:
            store.set("done", "")
        else:
            store.get("done")
    return texts


def test_a_message_of_another_size_or_none_at_all_is_told() -> None:
    assert succeeded(run_workers(bad_messages, 2))[1] == [
        "rank 0 sent 12 bytes to rank 1 (tag 0), which expects 16",
        "rank 1: the timeout of 0.5 s ended while it waited for rank 0 to send a message (tag 4)",
        "rank 1: the timeout of 0.5 s ended while it waited for any rank to send a message (tag 4)",
    ]


def sending_to_oneself(world: World, backend: str) -> str:
    with torch_distributed(world, backend=backend):
        with pytest.raises(ValueError) as info:
            dist.send(torch.ones(1), world.rank)
        dist.barrier()
    return str(info.value)


def test_sending_to_oneself_is_torchs_own_error() -> None:
    assert succeeded(run_workers(sending_to_oneself, 2, backend="paceline")) == succeeded(
        run_workers(sending_to_oneself, 2, backend="gloo")
    )
