"""Shared memory is opened only if it is what rank 0 made: its size, its owner and its token are compared."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from paceline.collectives.shared_memory import segment as segment_module
from paceline.collectives.shared_memory.segment import PAGE, Segment
from paceline.errors import CollectiveError, ConfigError


def changed(told: str, **changes: Any) -> str:
    return json.dumps(json.loads(told) | changes)


def test_what_one_writes_the_other_reads() -> None:
    made, told = Segment.create(3 * PAGE)
    opened = Segment.open(told, rank=1)
    made.memory[PAGE:].fill_(7)
    assert opened.memory.numel() == 4 * PAGE
    assert torch.equal(opened.memory[PAGE:], torch.full((3 * PAGE,), 7, dtype=torch.uint8))
    made.close()
    opened.memory[PAGE] = 8
    assert opened.memory[PAGE] == 8
    opened.close()


def test_only_its_owner_may_look_into_it() -> None:
    made, told = Segment.create(PAGE)
    assert os.stat(f"/proc/self/fd/{json.loads(told)['fd']}").st_mode & 0o777 == 0o600
    made.close()


def test_memory_of_another_job_size_or_user_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    made, told = Segment.create(PAGE)
    path = f"/proc/{os.getpid()}/fd/{json.loads(told)['fd']}"
    with pytest.raises(CollectiveError, match=f"^rank 3: the shared memory in {path} belongs to another job$"):
        Segment.open(changed(told, token="0" * 32), rank=3)
    with pytest.raises(CollectiveError, match=f"^rank 3: {path} is not the shared memory that rank 0 made$"):
        Segment.open(changed(told, bytes=3 * PAGE), rank=3)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(CollectiveError, match=f"^rank 3: {path} is not the shared memory that rank 0 made$"):
        Segment.open(told, rank=3)
    made.close()


def test_memory_that_is_gone_is_told_with_whose_it_was() -> None:
    made, told = Segment.create(PAGE)
    made.close()
    with pytest.raises(CollectiveError) as info:
        Segment.open(told, rank=2)
    assert str(info.value).startswith(
        f"rank 2 can't open the shared memory of rank 0 (pid {os.getpid()}): No such file"
    )


def test_memory_on_another_host_is_not_opened() -> None:
    made, told = Segment.create(PAGE)
    with pytest.raises(
        ConfigError, match=r"^rank 1 is on host \S+ and rank 0 on elsewhere: the paceline backend joins"
    ):
        Segment.open(changed(told, host="elsewhere 123"), rank=1)
    made.close()


def test_too_little_memory_is_told_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "free_bytes", lambda: 5000)
    with pytest.raises(
        CollectiveError, match=r"^the shared memory of the group needs 8,192 bytes but 5,000 are free; "
    ):
        Segment.create(2 * PAGE)


def test_free_memory_is_known_here() -> None:
    free = segment_module.free_bytes()
    assert free is not None
    assert free > 2**20
