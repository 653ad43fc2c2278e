"""What goes wrong is named, on every rank, and no wait is infinite."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from paceline import World
from paceline.collectives.shared_memory import segment
from paceline.collectives.shared_memory.group import SharedMemoryGroup
from paceline.errors import CollectiveError, ConfigError
from tests.collectives.shared_memory.ranks import group_of, opts, succeeded, torch_distributed
from tests.workers import run_workers

pytestmark = pytest.mark.workers

LARGE = 3_000_000  # floats: an all-reduce of several barriers


def all_reduce(group: SharedMemoryGroup, count: int = 5) -> float:
    tensor = torch.ones(count)
    group.allreduce([tensor], opts(ReduceOp.SUM)).wait()
    return tensor[-1].item()


def error_of(group: SharedMemoryGroup, count: int = 5) -> str:
    with pytest.raises(CollectiveError) as info:
        all_reduce(group, count)
    return str(info.value)


def pid_of(group: SharedMemoryGroup, rank: int) -> int:
    group._store.set(f"pid/{group.rank()}", str(os.getpid()))
    return int(group._store.get(f"pid/{rank}"))


# -- a peer that dies, stops or leaves ---------------------------------------------------------------------------------


def peer_dies(world: World, kernels: str, count: int) -> Any:
    """Rank 2 is killed; what the others are told, and how long after."""
    with group_of(world, timeout_s=30.0, kernels=kernels) as group:
        all_reduce(group)
        pid = pid_of(group, 2)
        if world.rank == 2:
            group._store.set("death", str(time.monotonic() + 0.2))
        death = float(group._store.get("death"))
        all_reduce(group)  # nobody needs the store after this
        if world.rank == 2:
            time.sleep(max(0.0, death - time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        text = error_of(group, count)
        seconds = time.monotonic() - death
        again = error_of(group)
        return text.replace(str(pid), "PID"), seconds, again.replace(str(pid), "PID")


@pytest.mark.parametrize(("kernels", "count"), [("c", 5), ("torch", 5), ("c", LARGE)])
def test_a_killed_rank_is_named_by_all_others_within_a_second(kernels: str, count: int) -> None:
    quickest = 60.0
    for _ in range(3):  # other programs on this machine may make it wait
        results = run_workers(peer_dies, 4, kernels=kernels, count=count)
        assert results[2].exit_code == -signal.SIGKILL
        survivors = succeeded([results[0], results[1], results[3]])
        for rank, (text, _, again) in zip((0, 1, 3), survivors, strict=True):
            assert text == f"rank {rank} waits for rank 2 (pid PID), which has died"
            assert again == f"the group is broken since an earlier operation failed: {text}"
        quickest = min(quickest, max(seconds for _, seconds, _ in survivors))
        if quickest < 1.0:
            return
    raise AssertionError(f"it took {quickest:.1f} s")


def receiving_from_the_dead(world: World) -> list[str]:
    with torch_distributed(world, timeout_s=30.0):
        dist.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        texts = []
        for call in (lambda: dist.recv(torch.ones(1), 1), lambda: dist.recv(torch.ones(1))):
            with pytest.raises(CollectiveError) as info:
                call()
            texts.append(str(info.value))
        return texts


def test_who_waits_for_a_message_of_a_killed_rank_is_told() -> None:
    texts = succeeded(run_workers(receiving_from_the_dead, 2)[:1])[0]
    assert all(text.startswith("rank 0 waits for rank 1 (pid ") and text.endswith("which has died") for text in texts)


def ddp_loses_a_peer(world: World) -> str:
    with torch_distributed(world, timeout_s=30.0):
        ddp = DistributedDataParallel(nn.Linear(50, 50))
        ddp(torch.ones(2, 50)).sum().backward()
        loss = ddp(torch.ones(2, 50)).sum()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError) as info:
            loss.backward()
        return str(info.value)


def test_torchs_ddp_passes_on_who_died() -> None:
    text = succeeded(run_workers(ddp_loses_a_peer, 2)[:1])[0]
    assert "rank 0 waits for rank 1 (pid " in text
    assert "which has died" in text


def peer_stops(world: World) -> Any:
    """Rank 1 is stopped for longer than the timeout, and comes back when the others have given up."""
    with group_of(world, timeout_s=0.7) as group:
        all_reduce(group)
        pid = pid_of(group, 1)
        if world.rank == 1:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        text = error_of(group)
        waited = time.monotonic() - began
        if world.rank == 2:
            group._store.set("told", "")
        if world.rank == 0:
            group._store.get("told")
            os.kill(pid, signal.SIGCONT)
        return text.replace(str(pid), "PID"), waited, error_of(group)


def test_a_stopped_rank_is_named_when_the_timeout_ends_and_learns_of_it_when_it_comes() -> None:
    (first, waited, _), (late, _, late_again), (third, _, _) = succeeded(run_workers(peer_stops, 3))
    assert first == "rank 0: the timeout of 0.7 s ended in all_reduce of 5 float32 (sum); " + (
        "rank 1 (pid PID) is alive but has not come"
    )
    assert "rank 1 (pid PID) is alive but has not come" in third
    assert waited >= 0.7
    assert late.endswith("calls nothing any more (it gave up: rank 1 (pid PID) has not come)")
    assert late_again.startswith("the group is broken since an earlier operation failed: ")


def peer_leaves(world: World) -> str:
    with group_of(world, timeout_s=30.0) as group:
        store = group._store
        all_reduce(group)
        pid = pid_of(group, 0)
        if world.rank:
            text = error_of(group).replace(str(pid), "PID")
            store.set(f"told/{world.rank}", "")
            return text
    store.wait(["told/1", "told/2"])  # rank 0 has left the group, but holds the store
    return ""


def test_a_rank_that_left_is_named() -> None:
    texts = succeeded(run_workers(peer_leaves, 3))
    assert texts[1:] == [f"rank {rank} waits for rank 0 (pid PID), which has left the group" for rank in (1, 2)]


def interrupted(world: World) -> str:
    """Ctrl-C on rank 1 while it waits: rank 0 is not left waiting."""
    with group_of(world, timeout_s=30.0) as group:
        all_reduce(group)
        if world.rank == 1:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                all_reduce(group)
            group._store.set("interrupted", "")
            return error_of(group)
        group._store.get("interrupted")
        return error_of(group)


def test_an_interrupt_breaks_the_group_and_the_others_are_told() -> None:
    other, mine = succeeded(run_workers(interrupted, 2))
    assert mine == "the group is broken since an earlier operation failed: KeyboardInterrupt in all_reduce: "
    assert other.endswith("rank 1 calls nothing any more (it gave up: KeyboardInterrupt in all_reduce)")


# -- ranks that don't agree --------------------------------------------------------------------------------------------


def disagreeing(world: World, kernels: str) -> list[tuple[str, float]]:
    """Rank 1 calls something else than the others; then all call the same."""
    odd = world.rank == 1
    with group_of(world, timeout_s=10.0, kernels=kernels) as group:
        calls: list[Any] = [
            lambda: group.barrier(opts()) if odd else group.allreduce([torch.ones(5)], opts(ReduceOp.SUM)),
            lambda: group.allreduce([torch.ones(6 if odd else 5)], opts(ReduceOp.SUM)),
            lambda: group.allreduce([torch.ones(LARGE + odd)], opts(ReduceOp.SUM)),
            lambda: group.allreduce([torch.ones(5, dtype=torch.int32 if odd else torch.float32)], opts(ReduceOp.SUM)),
            lambda: group.allreduce([torch.ones(5)], opts(ReduceOp.MAX if odd else ReduceOp.SUM)),
            lambda: group.broadcast([torch.ones(5)], opts(root=int(odd))),
            lambda: group.alltoall([torch.ones(1)] * 3, [torch.ones(1 + odd)] * 3, opts()),
            lambda: group.allreduce([group.allocate(5) if odd else group.allocate(5).clone()], opts(ReduceOp.SUM)),
            lambda: group.allreduce([torch.ones(0 if odd else 5)], opts(ReduceOp.SUM)),
        ]
        found = []
        for call in calls:
            with pytest.raises(CollectiveError) as info:
                call().wait()
            found.append((str(info.value), all_reduce(group)))
        return found


@pytest.mark.parametrize("kernels", ["c", "torch"])
def test_ranks_that_call_different_things_all_say_both_and_the_group_goes_on(kernels: str) -> None:
    pairs = [
        ("all_reduce of 5 float32 (sum)", "barrier"),
        ("all_reduce of 5 float32 (sum)", "all_reduce of 6 float32 (sum)"),
        ("all_reduce of 3,000,000 float32 (sum)", "all_reduce of 3,000,001 float32 (sum)"),
        ("all_reduce of 5 float32 (sum)", "all_reduce of 5 int32 (sum)"),
        ("all_reduce of 5 float32 (sum)", "all_reduce of 5 float32 (max)"),
        ("broadcast of 5 float32 (from rank 0)", "broadcast of 5 float32 (from rank 1)"),
        ("", ""),
        ("all_reduce of 5 float32 (sum)", "all_reduce of 5 float32 (sum, shared memory 0:0)"),
        ("all_reduce of 5 float32 (sum)", "all_reduce of 0 float32 (sum)"),
    ]
    for rank, found in enumerate(succeeded(run_workers(disagreeing, 3, kernels=kernels))):
        for (text, total), (theirs, odd) in zip(found, pairs, strict=True):
            mine, other, whose = (odd, theirs, 0) if rank == 1 else (theirs, odd, 1)
            expected = f"the ranks call different things: rank {rank} calls {mine}, rank {whose} calls {other}"
            if not odd:
                expected = "all_to_all: rank 1 sends 2 elements to rank 0, which expects 1"
            assert text == expected
            assert total == 3.0


# -- groups that can't be made -----------------------------------------------------------------------------------------


def made(world: World, **options: Any) -> None:
    with group_of(world, **options):
        pass


def on_two_hosts(world: World) -> None:
    if world.rank == 1:
        segment.host_identity = lambda: "elsewhere 1234 pid:[5]"
    made(world)


def test_ranks_on_two_hosts_are_told_in_one_line() -> None:
    for result in run_workers(on_two_hosts, 3):
        assert result.error is not None
        assert result.error.startswith("ConfigError: rank 0 is on host ")
        assert result.error.endswith(
            " and rank 1 on elsewhere: the paceline backend joins the processes of one host; use gloo between hosts"
        )


def with_little_memory(world: World) -> None:
    segment.free_bytes = lambda: 1_000_000
    made(world, slot_bytes=2**20)


def test_too_little_memory_is_told_with_what_is_needed_and_what_is_there() -> None:
    for result in run_workers(with_little_memory, 2):
        assert result.error is not None
        start = "CollectiveError: the shared memory of the group needs 4,"
        assert result.error.startswith(start)
        assert " bytes but 1,000,000 are free; use fewer workers on this host, or give the container" in result.error


def test_a_timeout_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^a timeout of 0 s: a wait of no time always fails; give it some$"):
        made(World(), timeout_s=0.0)


def test_more_than_64_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="the paceline backend joins up to 64 processes, not 65"):
        SharedMemoryGroup(dist.HashStore(), 0, 65, timedelta(seconds=1))


def unknown_backend(world: World) -> None:
    with torch_distributed(world, backend="pacelime"):
        pass


def test_an_unknown_backend_is_torchs_own_error() -> None:
    (result,) = run_workers(unknown_backend, 1)
    assert result.error is not None
    assert "pacelime" in result.error


# -- the end while something is under way ------------------------------------------------------------------------------


def ended_early(world: World, how: str) -> list[str]:
    """Rank 1 waits in vain for a barrier, a message and somebody to take one, and ends the group."""
    with group_of(world, timeout_s=30.0) as group:
        store = group._store
        texts = []
        if world.rank == 1:
            works = [group.barrier(), group.recv([torch.ones(1)], 0), group.send([torch.ones(LARGE)], 0)]
            getattr(group, how)()
            for work in works:
                with pytest.raises(CollectiveError) as info:
                    work.wait()
                texts.append(str(info.value))
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("paceline")]
            with pytest.raises(CollectiveError, match=r"^the group has been shut down$"):
                group.barrier()
            store.set("ended", "")
        else:
            store.get("ended")
            texts.append(error_of(group))
        return texts


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_the_end_of_a_group_ends_what_is_under_way_and_the_others_are_told(how: str) -> None:
    others, mine = succeeded(run_workers(ended_early, 2, how=how))
    assert mine == [
        "rank 1: the group was shut down in barrier",
        "the group was shut down before rank 0 came to send a message",
        "the group was shut down before rank 0 came to take a message",
    ]
    assert others[0].endswith("rank 1 calls nothing any more (it gave up: the group was shut down in barrier)")


def finished_at_the_end(world: World) -> float:
    """Nobody waits for the all-reduce, but it is under way everywhere when the groups end."""
    tensor = torch.ones(LARGE)
    with group_of(world) as group:
        group.allreduce([tensor])
    return tensor.mean().item()


def test_what_all_ranks_have_begun_is_finished_at_the_end() -> None:
    assert succeeded(run_workers(finished_at_the_end, 3)) == [3.0] * 3


def asked_for_less_time(world: World) -> str:
    with group_of(world, timeout_s=30.0) as group:
        store = group._store
        if world.rank == 0:
            store.get("told")
            return ""
        options = opts()
        options.timeout = timedelta(seconds=0.2)
        with pytest.raises(CollectiveError) as info:
            group.barrier(options).wait()
        store.set("told", "")
        return str(info.value)


def test_a_call_may_have_a_timeout_of_its_own() -> None:
    text = succeeded(run_workers(asked_for_less_time, 2))[1]
    assert text.startswith("rank 1: the timeout of 0.2 s ended in barrier; ")
