"""NCCL, as far as one GPU and one worker show it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from paceline import World
from paceline.collectives.communicator import Communicator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CYCLES = 2_000_000_000  # about a second of the device


def test_an_abandoned_group_is_aborted_under_a_collective_and_another_takes_its_place() -> None:
    device = torch.device("cuda", 0)
    comm = Communicator.connect(World(), HashStore(), backend="nccl", device=device, timeout_s=60.0)
    tensor = torch.ones(1000, device=device)
    comm.all_reduce(tensor).wait()
    torch.cuda.synchronize()

    torch.cuda._sleep(10 * CYCLES)  # what comes after it on this stream can't begin
    comm.all_reduce(tensor)
    began = time.monotonic()
    comm.abandon("worker 1 is gone")
    assert time.monotonic() - began < 1.0
    comm.close()
    comm = Communicator.connect(World(), HashStore(), backend="nccl", device=device, timeout_s=60.0)
    again = torch.ones(1000, device=device)
    comm.all_reduce(again).wait()
    torch.cuda.synchronize()
    assert again.eq(1).all()
    comm.close()
    deadline = time.monotonic() + 30
    while any(thread.name == "paceline-nccl-abort" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "abort has not ended"
        time.sleep(0.05)
