"""Memory that was freed goes back to the system when asked, or at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.bench.memory_measure import Resident
from paceline.world.process import give_back_free_memory, keep_no_free_memory
from tests.workers import run_workers

MIB = 2**20


def resident_with_holes(world: object, *, before: Callable[[], None], after: Callable[[], None]) -> tuple[int, int]:
    """What 64 MiB in every second of 16 places add, once the places between them have been freed."""
    torch.empty(16 * MIB, dtype=torch.uint8)  # the allocator has seen large memory come and go
    before()
    start = Resident.now().rss
    places = [torch.ones(8 * MIB, dtype=torch.uint8) for _ in range(16)]
    full = Resident.now().rss - start
    del places[1::2]
    after()
    return full, Resident.now().rss - start


def nothing() -> None:
    pass


@pytest.mark.workers
def test_asked_for_it_comes_back_at_the_end_or_at_once() -> None:
    for before, after in ((nothing, give_back_free_memory), (keep_no_free_memory, nothing)):
        (result,) = run_workers(resident_with_holes, 1, before=before, after=after)
        assert result.error is None, result.traceback
        full, left = result.value
        assert full > 120 * MIB
        assert left < 70 * MIB
