"""The all-reduce that is one call into C: the bits of the other way, whenever it has to stop and go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from paceline import World
from paceline.collectives.shared_memory import barrier
from paceline.collectives.shared_memory import group as group_module
from paceline.collectives.shared_memory.group import SharedMemoryGroup
from paceline.collectives.shared_memory.kernels import Merges, compiled_library
from paceline.collectives.shared_memory.operations import AllReduceInC
from paceline.errors import CollectiveError
from tests.collectives.shared_memory.ranks import group_of, odd_rows, opts, plain_sum, same_numbers, succeeded
from tests.workers import run_workers

pytestmark = [pytest.mark.workers, pytest.mark.skipif(compiled_library() is None, reason="no C compiler")]

COUNTS = (1, 64, 1023, 8193, 131_073, 140_000, 600_001)
LARGE = 3_000_000  # floats: an all-reduce of a dozen barriers


def wrong_sums(world: World, look_every_s: float | None = None, slow_reads: int = 0, **options: Any) -> list[int]:
    """The counts whose sum is not the canonical one, for tensors that begin anywhere, in shared memory or not."""
    if look_every_s is not None:
        barrier.LOOK_EVERY_S = look_every_s
    wrong = []
    with group_of(world, **options) as group:
        group._barrier.state.slow_reads = slow_reads
        for count in COUNTS:
            rows = odd_rows(world.size, count, seed=count)
            room = torch.zeros(count + 7)
            mine = room[3 : 3 + count]
            mine.copy_(rows[world.rank])
            group.allreduce([mine], opts(ReduceOp.SUM)).wait()
            shared = group.allocate(count + 7)
            shared[3 : 3 + count] = rows[world.rank]
            group.allreduce([shared[3 : 3 + count]], opts(ReduceOp.SUM)).wait()
            for made in (room, shared):
                around = torch.cat([made[:3], made[3 + count :]])
                right = same_numbers(made[3 : 3 + count], plain_sum(rows)) and not around.any()
                wrong += [] if right else [count]
    return wrong


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_it_has_the_bits_of_the_canonical_tree_for_slots_of_any_size(workers: int) -> None:
    for slot_bytes in (None, 4096, 64 * 2**10):
        found = succeeded(run_workers(wrong_sums, workers, kernels="c", slot_bytes=slot_bytes))
        assert found == [[]] * workers, f"slots of {slot_bytes} bytes"


@pytest.mark.parametrize("workers", [2, 3])
def test_it_goes_on_where_it_was_if_no_barrier_ends_at_once(workers: int) -> None:
    options = {"kernels": "c", "slot_bytes": 64 * 2**10, "look_every_s": 0.0}
    assert succeeded(run_workers(wrong_sums, workers, **options)) == [[]] * workers


@pytest.mark.parametrize("workers", [2, 3])
def test_it_has_the_same_bits_where_reads_are_slow_and_all_write_past_the_caches(workers: int) -> None:
    found = succeeded(run_workers(wrong_sums, workers, kernels="c", slot_bytes=256 * 2**10, slow_reads=2))
    assert found == [[]] * workers


def in_c_or_not(world: World) -> list[str]:
    """What runs in C, told by a spy."""
    run: list[str] = []

    class Spy(AllReduceInC):
        def run(self, flat: torch.Tensor, call: bytes, timeout_s: float) -> None:
            run.append(f"{flat.numel()} {flat.dtype}")
            super().run(flat, call, timeout_s)

        def run_in_place(self, rows: Sequence[torch.Tensor], merges: Merges, call: bytes, timeout_s: float) -> None:
            run.append(f"{rows[0].numel()} in place")
            super().run_in_place(rows, merges, call, timeout_s)

    group_module.AllReduceInC = Spy  # type: ignore[attr-defined]
    for kernels in ("c", "torch"):
        with group_of(world, kernels=kernels) as group:
            for count, dtype, op in (
                (5, torch.float32, ReduceOp.SUM),
                (300_000, torch.float32, ReduceOp.SUM),
                (0, torch.float32, ReduceOp.SUM),
                (5, torch.float32, ReduceOp.MAX),
                (5, torch.float64, ReduceOp.SUM),
            ):
                group.allreduce([torch.ones(count, dtype=dtype)], opts(op)).wait()
            group.allreduce([group.allocate(5)], opts(ReduceOp.SUM)).wait()
        run.append(kernels)
    return run


def test_only_fp32_sums_with_c_take_this_way() -> None:
    (told,) = succeeded(run_workers(in_c_or_not, 1))
    assert told == ["5 torch.float32", "300000 torch.float32", "5 in place", "c", "torch"]


# -- in the middle of it -----------------------------------------------------------------------------------------------


def all_reduces(group: SharedMemoryGroup, seconds: float) -> set[float]:
    """One after the other for some time, as often on every rank; what came out."""
    found = set()
    end = time.monotonic() + seconds
    more = torch.ones(1)
    while more.item():
        tensor = torch.ones(LARGE)
        group.allreduce([tensor], opts(ReduceOp.SUM)).wait()
        found |= {tensor.min().item(), tensor.max().item()}
        more = torch.tensor([float(time.monotonic() < end)])
        group.broadcast([more], opts(root=0)).wait()
    return found


def stopped_now_and_then(world: World) -> set[float]:
    """Rank 1 stands still for longer than anybody waits without looking, wherever it is."""
    with group_of(world, timeout_s=20.0, kernels="c") as group:
        group._store.set(f"pid/{world.rank}", str(os.getpid()))
        pid = int(group._store.get("pid/1"))

        def stop_and_go() -> None:
            for _ in range(3):
                time.sleep(0.05)
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.15)
                os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=stop_and_go)
        if world.rank == 0:
            thread.start()
        found = all_reduces(group, 0.7)
        if world.rank == 0:
            thread.join()
        return found


def test_a_rank_that_stands_still_for_a_while_in_the_middle_changes_no_sum() -> None:
    assert succeeded(run_workers(stopped_now_and_then, 3)) == [{3.0}] * 3


def killed_in_the_middle(world: World) -> str:
    with group_of(world, timeout_s=20.0, kernels="c") as group:
        group._store.set(f"pid/{world.rank}", str(os.getpid()))
        pid = int(group._store.get("pid/2"))
        group.barrier().wait()
        if world.rank == 2:
            timer = threading.Timer(0.1, lambda: os.kill(pid, signal.SIGKILL))
            timer.daemon = True
            timer.start()
        tensor = torch.zeros(LARGE)
        with pytest.raises(CollectiveError) as info:
            while True:
                group.allreduce([tensor], opts(ReduceOp.SUM)).wait()
        return str(info.value).replace(str(pid), "PID")


def test_a_rank_killed_in_the_middle_is_named_by_all_others() -> None:
    results = run_workers(killed_in_the_middle, 3)
    assert results[2].exit_code == -signal.SIGKILL
    for rank, text in enumerate(succeeded(results[:2])):
        told_by_the_other = "it gave up: rank 2 (pid PID) has died" in text
        assert text == f"rank {rank} waits for rank 2 (pid PID), which has died" or told_by_the_other
