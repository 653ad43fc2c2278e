"""An abandoned group: every wait in it ends at once, on every backend, and the workers that are left build another."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from paceline.collectives.communicator import Communicator
from paceline.errors import GenerationEnded
from paceline.world.world import Elasticity, World
from tests.workers import run_workers

BACKENDS = ["paceline", "gloo"]
CPU = torch.device("cpu")


def connected(world: World, backend: str, folder: str) -> tuple[Store, Communicator]:
    store = FileStore(f"{folder}/store")  # like the launcher's, it has no TCP connection that could be taken for gloo's
    elastic = replace(world, elastic=Elasticity())
    place = PrefixStore("first", store)
    return store, Communicator.connect(elastic, place, backend=backend, device=CPU, timeout_s=30.0)


def survive(world: World, backend: str, operation: str, how: str, folder: str) -> list[float]:
    store, comm = connected(world, backend, folder)
    child = Communicator.connect(
        comm.world,
        PrefixStore("child", store),
        backend=backend,
        device=CPU,
        timeout_s=30.0,
    )
    child.counts_with(comm)
    comm.barrier()
    if world.rank == 2:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5)  # as if it were stopped
        os._exit(1)
    threading.Timer(0.3, comm.abandon, ["worker 2 is gone"]).start()
    began = time.monotonic()
    tensor = torch.ones(300_000)
    with pytest.raises(GenerationEnded):
        if operation == "all_reduce":
            comm.all_reduce(tensor).wait()
        elif operation == "receive":
            comm.receive(tensor, source=2, tag=1).wait()
        else:
            child.barrier()
    waited = time.monotonic() - began
    assert comm.is_over
    with pytest.raises(GenerationEnded):
        comm.barrier()
    child.close()
    comm.close()
    left = replace(world, size=2, local_size=2, elastic=Elasticity())
    again = Communicator.connect(
        left,
        PrefixStore("second", store),
        backend=backend,
        device=CPU,
        timeout_s=30.0,
    )
    ones = torch.ones(10)
    again.all_reduce(ones).wait()
    again.close()
    return [waited, float(ones.sum())]


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("operation", ["all_reduce", "receive", "in a child"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_waits_in_an_abandoned_group_end_and_the_others_go_on(
    backend: str, operation: str, how: str, tmp_path: Path
) -> None:
    results = run_workers(survive, 3, backend=backend, operation=operation, how=how, folder=str(tmp_path))
    for result in results[:2]:
        assert result.error is None, result.traceback
        assert result.value[1] == 20.0
        assert result.value[0] < 1.2, "it waited for the one that was stopped"
