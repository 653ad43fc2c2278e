"""A few buffers serve all buckets in turn."""

from __future__ import annotations

import pytest
import torch

from paceline import torch_compat
from paceline.strategies.buckets import BufferPool

FP32 = torch.float32, torch.device("cpu")
FP64 = torch.float64, torch.device("cpu")


def test_a_buffer_that_was_given_back_serves_any_other_bucket_of_its_dtype() -> None:
    pool = BufferPool()
    for expected in (10, 1000):
        pool.expect(expected, *FP32)
    first = pool.take(10, *FP32)
    assert first.shape == (10,)
    pool.give_back(first)
    second = pool.take(1000, *FP32)
    assert second.shape == (1000,)
    assert second.data_ptr() == first.data_ptr()
    assert pool.take(10, *FP64).dtype == torch.float64
    assert pool.bytes == 4000 + 80


def test_buffers_that_are_out_are_not_lent_twice() -> None:
    pool = BufferPool()
    taken = [pool.take(10, *FP32) for _ in range(3)]
    assert len({buffer.data_ptr() for buffer in taken}) == 3
    for buffer in taken:
        pool.give_back(buffer)
    assert pool.bytes == 3 * 40


def test_buffers_too_small_for_rebuilt_buckets_are_let_go() -> None:
    pool = BufferPool()
    pool.give_back(pool.take(10, *FP32))
    pool.give_back(pool.take(20, *FP32))
    assert pool.bytes == 80


def test_an_empty_bucket_takes_no_memory() -> None:
    for pool in (BufferPool(), BufferPool(viewed=True)):
        for _ in range(2):
            pool.give_back(pool.take(0, *FP32))
        assert pool.bytes == 0


def test_memory_that_is_still_viewed_is_not_used_again() -> None:
    pool = BufferPool(viewed=True)
    first = pool.take(100, *FP32)
    address, view = first.data_ptr(), first[3:]
    pool.give_back(first)
    del first
    other = pool.take(100, *FP32)
    assert other.data_ptr() != address
    del view
    assert pool.take(50, *FP32).numel() == 50
    assert pool.take(100, *FP32).data_ptr() == address


def test_where_torch_can_not_count_views_no_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compat, "_CAN_COUNT", False)
    pool = BufferPool(viewed=True)
    first = pool.take(100, *FP32)
    address = first.data_ptr()
    pool.give_back(first)
    assert pool.take(100, *FP32).data_ptr() != address
