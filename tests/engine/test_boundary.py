"""Operations of all workers between two steps: finished by those that are left, with one result."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore, PrefixStore

from paceline.collectives.communicator import Communicator
from paceline.engine.boundary import Retryable
from paceline.errors import GenerationEnded
from paceline.world.world import Elasticity, World
from tests.workers import run_workers

CPU = torch.device("cpu")


def test_an_operation_in_which_workers_are_lost_is_done_again() -> None:
    together, calls = Retryable(), []

    def operation() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise GenerationEnded("worker 1 died")
        return "result"

    started_over: list[int] = []
    assert together.run(operation, lambda: started_over.append(1)) == "result"
    assert (len(calls), len(started_over)) == (3, 2)


def two_apart(world: World, *, folder: str, result: Any) -> Any:
    """Worker 0 has finished an operation when worker 2 dies, worker 1 has not."""
    store = FileStore(f"{folder}/store")
    elastic = replace(world, elastic=Elasticity())

    def connected(name: str, among: World) -> Communicator:
        return Communicator.connect(among, PrefixStore(name, store), backend="gloo", device=CPU, timeout_s=20.0)

    first = connected("first", elastic)
    first.barrier()
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    first.abandon("worker 2 died")
    second = connected("second", replace(elastic, size=2, local_size=2))
    together, asked = Retryable(), []

    def operation() -> Any:
        asked.append(1)
        if world.rank == 1 and len(asked) == 1:
            raise GenerationEnded("worker 2 died")
        return result if world.rank == 0 else "never used"

    if world.rank == 0:
        together.run(operation, lambda: None)
        together.compare(second, joins=False)
        found = result
    else:
        found = together.run(operation, lambda: together.compare(second, joins=False))
    again = together.run(lambda: second.gather_json(world.rank), lambda: None)
    first.close()
    second.close()
    return (found.tolist() if isinstance(found, torch.Tensor) else found), len(asked), again


@pytest.mark.workers
@pytest.mark.parametrize("result", [["a", 1], None, torch.arange(5)], ids=["plain", "nothing", "tensor"])
def test_who_is_behind_gets_the_result_of_who_is_ahead_and_both_go_on(tmp_path: Path, result: Any) -> None:
    ahead, behind, _ = run_workers(two_apart, 3, folder=str(tmp_path), result=result)
    expected = result.tolist() if isinstance(result, torch.Tensor) else result
    for one in (ahead, behind):
        assert one.error is None, one.traceback
        assert one.value == (expected, 1, [0, 1])
