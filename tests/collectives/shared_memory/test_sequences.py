"""Long random sequences of collectives and messages, awaited late or at once: every result is the reference's."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline import World
from paceline.collectives.shared_memory.group import SharedMemoryGroup
from tests.collectives.shared_memory.ranks import bits, group_of, is_close, opts, reference, succeeded, values
from tests.workers import run_workers

pytestmark = pytest.mark.workers

MOST_AT_ONCE = 8
Begun = tuple[Any, Callable[[], bool]]  # a handle, and whether its result is right


class Sequence:
    """Every rank draws the same calls from the same seed; each begins one and says what should come out of it."""

    def __init__(self, group: SharedMemoryGroup, seed: int) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.random = random.Random(seed)
        self.kinds = [
            self.all_reduce,
            self.all_reduce,
            self.reduce_scatter,
            self.all_gather,
            self.broadcast,
            self.message,
        ]

    def begin(self, step: int) -> Begun:
        kind, dtype = self.random.choice(self.kinds), self.random.choice([torch.float32, torch.bfloat16, torch.int64])
        count, at_once = self.random.choice([0, 1, 100, 3000, 20_000]), self.random.random() < 0.5
        return kind(values(self.size, count, dtype, seed=step), step, at_once)

    def all_reduce(self, tensors: list[Tensor], step: int, at_once: bool) -> Begun:
        mine, wanted = tensors[self.rank].clone(), reference(tensors, ReduceOp.SUM)
        handle = self.group.allreduce([mine], opts(ReduceOp.SUM) if at_once else None)
        return handle, lambda: is_close(mine, wanted)

    def reduce_scatter(self, tensors: list[Tensor], step: int, at_once: bool) -> Begun:
        out, wanted = torch.empty_like(tensors[0]), reference(tensors, ReduceOp.SUM)
        options = opts(ReduceOp.SUM) if at_once else None
        handle = self.group._reduce_scatter_base(out, tensors[self.rank].repeat(self.size), options)
        return handle, lambda: is_close(out, wanted)

    def all_gather(self, tensors: list[Tensor], step: int, at_once: bool) -> Begun:
        out, wanted = tensors[0].new_empty(self.size * len(tensors[0])), torch.cat(tensors)
        handle = self.group._allgather_base(out, tensors[self.rank], opts() if at_once else None)
        return handle, lambda: torch.equal(bits(out), bits(wanted))

    def broadcast(self, tensors: list[Tensor], step: int, at_once: bool) -> Begun:
        mine, root = tensors[self.rank].clone(), step % self.size
        options = opts(root=root)
        options.asyncOp = not at_once
        return self.group.broadcast([mine], options), lambda: torch.equal(bits(mine), bits(tensors[root]))

    def message(self, tensors: list[Tensor], step: int, at_once: bool) -> Begun:
        source, into = (self.rank - 1) % self.size, torch.empty_like(tensors[0])
        self.group.send([tensors[self.rank]], (self.rank + 1) % self.size, step)
        return self.group.recv([into], source, step), lambda: torch.equal(bits(into), bits(tensors[source]))


def wrong_steps(world: World, steps: int, **options: Any) -> list[int]:
    wrong: list[int] = []
    under_way: deque[tuple[int, Begun]] = deque()
    with group_of(world, **options) as group:
        sequence = Sequence(group, seed=world.size)
        for step in range(steps):
            under_way.append((step, sequence.begin(step)))
            while len(under_way) > (MOST_AT_ONCE if step < steps - 1 else 0):
                number, (handle, is_right) = under_way.popleft()
                handle.wait()
                wrong += [] if is_right() else [number]
    return wrong


@pytest.mark.parametrize(
    ("workers", "options"),
    [(2, {"kernels": "c"}), (3, {"kernels": "torch", "slot_bytes": 4096}), (5, {"kernels": "c", "slot_bytes": 4096})],
)
def test_a_long_random_sequence_gives_every_result(workers: int, options: dict[str, Any]) -> None:
    assert succeeded(run_workers(wrong_steps, workers, steps=300, **options)) == [[]] * workers


def test_sixty_four_ranks_work() -> None:
    assert succeeded(run_workers(wrong_steps, 64, steps=5)) == [[]] * 64
