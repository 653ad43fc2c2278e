"""Sums between processes have the canonical tree's bits: for any N and slot size, in shared memory or out of it."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline import World
from tests.collectives.one_process import lane_values, one_process_sum
from tests.collectives.shared_memory.ranks import bits, group_of, odd_rows, opts, plain_sum, same_numbers, succeeded
from tests.workers import run_workers

pytestmark = pytest.mark.workers

COUNTS = (1, 63, 1000, 8192, 8193, 40_000)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest()


def sums_between_processes(world: World, **options: Any) -> dict[str, str]:
    """A digest of every sum, by how it was made."""
    rank, size = world.rank, world.size
    made = {}
    with group_of(world, **options) as group:
        for count in COUNTS:
            lanes = lane_values(tuple(range(size)), count)
            mine = lanes[rank].clone()
            group.allreduce([mine], opts(ReduceOp.SUM)).wait()
            made[f"all_reduce {count}"] = digest(mine)
            shared = group.allocate(count + 7)[7:]
            shared.copy_(lanes[rank])
            group.allreduce([shared], opts(ReduceOp.SUM)).wait()
            made[f"in shared memory {count}"] = digest(shared)
            mine = lanes[rank].clone()
            group.reduce([mine], opts(ReduceOp.SUM, root=size - 1)).wait()
            if rank == size - 1:
                made[f"reduce {count}"] = digest(mine)
            part = torch.empty(count)
            group._reduce_scatter_base(part, lanes[rank].repeat(size), opts(ReduceOp.SUM)).wait()
            made[f"reduce_scatter {count}"] = digest(part)
    return made


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_every_sum_has_the_bits_of_the_canonical_tree(workers: int) -> None:
    wanted = {count: digest(one_process_sum(lane_values(tuple(range(workers)), count))) for count in COUNTS}
    choices: list[dict[str, Any]] = [{"kernels": "c"}, {"kernels": "torch", "slot_bytes": 4096}]
    if workers == 3:
        choices += [{"kernels": "c", "slot_bytes": 4096}, {"kernels": "torch"}]
    for options in choices:
        for rank, made in enumerate(succeeded(run_workers(sums_between_processes, workers, **options))):
            for how, found in made.items():
                assert found == wanted[int(how.split()[-1])], f"rank {rank}, {options}: {how}"


def sums_of_others(world: World) -> list[bool]:
    """fp64, bf16 and whole numbers have no kernel of their own, but the same tree."""
    right = []
    with group_of(world) as group:
        for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
            rows = [row.to(dtype) for row in odd_rows(world.size, 9000, seed=5)]
            mine = rows[world.rank].clone()
            group.allreduce([mine], opts(ReduceOp.SUM)).wait()
            right.append(same_numbers(mine, plain_sum([row.to(wide) for row in rows]).to(dtype)))
    return right


def test_other_floats_follow_the_same_tree() -> None:
    assert succeeded(run_workers(sums_of_others, 5)) == [[True, True]] * 5
