"""The kernels in C and in torch give the same bits, those of the canonical tree, whatever the numbers are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.collectives.shared_memory import kernels
from paceline.collectives.shared_memory.kernels import (
    STREAM_FROM,
    CKernels,
    Kernels,
    TorchKernels,
    compiled_library,
    merged,
)
from paceline.collectives.shared_memory.operations import rank_merges
from tests.collectives.shared_memory.ranks import odd_rows, plain_sum, same_numbers

needs_c = pytest.mark.skipif(compiled_library() is None, reason="no C compiler")


def c_kernels() -> CKernels:
    library = compiled_library()
    assert library is not None
    return CKernels(library)


def sums_by(adder: Kernels, rows: list[Tensor], outs: int, in_place: bool) -> list[Tensor]:
    """The sum in each out; with `in_place`, the first outs are rows."""
    rows = [row.clone() for row in rows]
    made = [torch.empty_like(rows[0]) for _ in range(outs)]
    if in_place:
        made[: len(rows)] = rows[:outs]
    adder.sum_into(made, rows, rank_merges(len(rows)))
    return made


@needs_c
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 20), st.integers(1, 5000), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 2**20))
def test_c_and_torch_sum_to_the_same_bits(
    count: int, elements: int, outs: int, in_place: bool, nan: bool, seed: int
) -> None:
    rows = odd_rows(count, elements, seed, nan=nan)
    wanted = plain_sum(rows)
    for adder in (TorchKernels(), c_kernels()):
        for total in sums_by(adder, rows, outs, in_place):
            assert same_numbers(total, wanted), adder.name


@needs_c
@pytest.mark.parametrize("count", [2, 3, 8, 130])
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_sums_written_past_the_caches_have_the_same_bits(
    count: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "STREAM_FROM", 1000)
    elements = 30_001 if count < 100 else 300
    rows = [row[offset:] for row in odd_rows(count, elements + offset, seed=1)]
    outs = [torch.zeros(elements + 3)[3:] for _ in range(2)]
    c_kernels().sum_into(outs, rows, rank_merges(count))
    assert all(same_numbers(out, plain_sum(rows)) for out in outs)


@needs_c
@pytest.mark.parametrize("bytes_", [1, 63, STREAM_FROM - 4, STREAM_FROM, STREAM_FROM + 4, STREAM_FROM + 7])
def test_copies_past_the_caches_have_every_byte(bytes_: int) -> None:
    for offset in (0, 1, 4):
        source = torch.randint(0, 256, (bytes_ + offset,), dtype=torch.uint8)[offset:]
        room = torch.zeros(bytes_ + 64, dtype=torch.uint8)
        c_kernels().copy(room[32 : 32 + bytes_], source)
        assert torch.equal(room[32 : 32 + bytes_], source)
        assert not room[:32].any()
        assert not room[32 + bytes_ :].any()


def test_torch_sums_leave_rows_alone_that_are_not_outs() -> None:
    rows = odd_rows(5, 100, seed=3)
    before = [row.clone() for row in rows]
    merged(rows, rank_merges(5), torch.empty(100))
    assert all(torch.equal(row, old) for row, old in zip(rows, before, strict=True))
