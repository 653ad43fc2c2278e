"""Before they share memory, the ranks agree on C or torch, and on whether the cores are too few for them."""

from __future__ import annotations

import json
import os

import pytest
from torch.distributed import HashStore

from paceline.collectives.shared_memory.group import _good_slot_bytes
from paceline.collectives.shared_memory.segment import agree, host_identity

MIB = 2**20


def store_with(*others: list[int], kernels: str = "torch") -> HashStore:
    """Rank 0 has not spoken yet; the others have, and may use these cores."""
    store = HashStore()
    for rank, cores in enumerate(others, start=1):
        store.set(f"hello/{rank}", json.dumps({"host": host_identity(), "kernels": kernels, "cores": cores}))
    return store


@pytest.mark.parametrize(
    ("own", "others", "crowded"),
    [
        ({0, 1}, [[0, 1]], False),
        ({0, 1}, [[0, 1], [0, 1]], True),
        ({0}, [[1], [2]], False),  # each rank bound to a core of its own
        ({0}, [[0], [0]], True),
    ],
)
def test_ranks_are_crowded_if_they_outnumber_the_cores_of_all_of_them(
    own: set[int], others: list[list[int]], crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: own)
    assert agree(store_with(*others), 0, 1 + len(others), "torch").crowded is crowded


def test_one_rank_without_c_is_enough_for_all_to_use_torch() -> None:
    assert not agree(store_with([0], kernels="torch"), 0, 2, None).use_c
    assert not agree(store_with([0], kernels="c"), 0, 2, "torch").use_c


def test_slots_fit_a_shared_cache_unless_ranks_take_turns_on_the_cores() -> None:
    assert [_good_slot_bytes(size, False) // MIB for size in (1, 2, 4, 8, 64)] == [4, 4, 2, 1, 1]
    assert [_good_slot_bytes(size, True) // MIB for size in (2, 8, 16, 32, 64)] == [16, 16, 16, 8, 4]
