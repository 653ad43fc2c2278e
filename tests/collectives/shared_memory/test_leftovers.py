"""Nothing is left behind, whatever the end was, and who waits leaves the cores to others."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from paceline import World
from tests.collectives.shared_memory.ranks import group_of, opts, succeeded, torch_distributed
from tests.workers import run_workers

pytestmark = pytest.mark.workers

MOST_CPU_S = 0.2  # of a second of waiting


def descriptors() -> dict[str, str]:
    links = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            links[entry] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the one that lists the folder
    return links


def mapped(name: str = "memfd:paceline") -> int:
    return Path("/proc/self/maps").read_text().count(name)


def use_and_leave(world: World) -> list[Any]:
    """Collectives in the caller and in the thread, messages, shared tensors, a sub-group; then the end of it all."""
    before = descriptors()
    with torch_distributed(world):
        store = set(descriptors()) - set(before)
        group = dist.new_group()
        for each in (None, group):
            dist.all_reduce(torch.ones(100_000), group=each)
            dist.all_reduce(torch.ones(100_000), group=each, async_op=True).wait()
        shared = dist.distributed_c10d._get_default_group().allocate(1000)
        dist.all_reduce(shared)
        other = 1 - world.rank
        work = dist.isend(torch.ones(3), other)
        dist.recv(torch.ones(3), other)
        work.wait()
        held = mapped() > 0, mapped("/dev/shm")
        del group, shared, each, work
    gc.collect()
    left = {fd: link for fd, link in descriptors().items() if fd not in before and fd not in store}
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")]
    return [held, mapped(), [link for link in left.values() if "memfd" in link or "pidfd" in link], threads]


def test_after_the_end_no_memory_thread_or_descriptor_is_left() -> None:
    for found in succeeded(run_workers(use_and_leave, 2)):
        assert found == [(True, 0), 0, [], []]


def raising(world: World) -> None:
    with group_of(world) as group:
        group.allreduce([torch.ones(5)], opts(ReduceOp.SUM)).wait()
        raise ValueError("the script's own problem")


def test_an_exception_with_a_group_open_shows_itself_on_every_rank() -> None:
    assert [result.error for result in run_workers(raising, 2)] == ["ValueError: the script's own problem"] * 2


def killed(world: World) -> None:
    with group_of(world) as group:
        group.allreduce([torch.ones(1_000_000)], opts(ReduceOp.SUM)).wait()
        assert mapped() > 0
        assert mapped("/dev/shm") == 0  # no name, nothing to leave behind
        os.kill(os.getpid(), signal.SIGKILL)


def test_killing_all_ranks_leaves_nothing_since_the_memory_never_had_a_name() -> None:
    assert {result.exit_code for result in run_workers(killed, 3)} == {-signal.SIGKILL}


SCRIPT = """
import torch, torch.distributed as dist
import paceline.backend
dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3), async_op=True).wait()
dist.irecv(torch.ones(1), tag=1)
print("done")
"""


def test_a_script_that_forgets_to_destroy_its_group_ends_quietly() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# -- waiting -----------------------------------------------------------------------------------------------------------


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_while_waiting(world: World, kernels: str) -> list[float]:
    """What this process uses while it waits a second for rank 0: in a collective, in the thread, for a message."""
    used = []
    with group_of(world, kernels=kernels) as group:
        group.barrier(opts()).wait()
        for wait in (
            lambda: group.barrier(opts()).wait(),
            lambda: group.barrier().wait(),
            lambda: group.recv([torch.ones(1)], 0).wait(),
        ):
            group.barrier(opts()).wait()
            began = cpu_seconds()
            if world.rank == 0:
                time.sleep(1.0)
                if len(used) == 2:
                    for to in range(1, world.size):
                        group.send([torch.ones(1)], to).wait()
            if world.rank or len(used) < 2:
                wait()
            used.append(cpu_seconds() - began)
        group.barrier(opts()).wait()
    return used


@pytest.mark.parametrize("kernels", ["c", "torch"])
def test_eight_ranks_that_wait_leave_the_cores_to_others(kernels: str) -> None:
    for used in succeeded(run_workers(cpu_while_waiting, 8, kernels=kernels)):
        assert max(used) < MOST_CPU_S, used
