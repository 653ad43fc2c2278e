"""The parameter server in an elastic job: whoever is killed, at any moment, the others go on and no bit changes."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore

from paceline.collectives import process_groups
from paceline.errors import GenerationEnded
from paceline.parameter_server.clock import parse_clock
from paceline.strategies.server import ParameterServer
from paceline.world.world import World
from tests.parameter_server.elastic_training import (
    WAIT_S,
    Death,
    Group,
    Members,
    Training,
    built,
    take_part,
    wait_for,
)
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers


@cache
def undisturbed(clock: str) -> str:
    """One process, where worker 0 is its own server and nobody dies."""
    with TemporaryDirectory() as folder:
        strategy = ParameterServer(clock=parse_clock(clock))
        (found,) = hashes(
            run_workers(take_part, 1, folder=folder, generations=[Members([0])], strategy=strategy, backend="gloo")
        )
    return found


def strategy_of(mode: Any, clock: str) -> ParameterServer:
    return ParameterServer(clock=parse_clock(clock), mode=mode, key_mib=0.0005)


def run(folder: Path, generations: Sequence[Members], deaths: Sequence[Death], **job: Any) -> set[str]:
    """The hashes of those that are left."""
    everybody = sorted({rank for members in generations for rank in (*members.workers, *members.servers)})
    workers = 1 + max(rank for members in generations for rank in members.workers)
    options: dict[str, Any] = {"folder": str(folder), "generations": generations, "deaths": deaths, **job}
    results = run_workers(take_part, workers, servers=len(everybody) - workers, **options)
    for death in deaths:
        assert results[death.rank].exit_code == -signal.SIGKILL, results[death.rank]
    dead = {death.rank for death in deaths}
    return hashes([result for rank, result in enumerate(results) if rank not in dead])


# -- nobody dies -------------------------------------------------------------------------------------------------------


def test_without_faults_servers_and_the_memory_checkpoint_change_no_bit(tmp_path: Path) -> None:
    job = {"strategy": strategy_of("update", "s=0"), "backend": "paceline"}
    assert run(tmp_path, [Members([0, 1, 2], [3])], [], **job) == {undisturbed("s=0")}


# -- a worker dies -----------------------------------------------------------------------------------------------------

# victim, phase, servers, mode, clock, backend: every pair of these appears in some row.
WORKERS = [
    (1, "forward", 0, "update", "s=0", "paceline"),
    (0, "exchange", 0, "update", "s=0", "gloo"),
    (0, "apply", 0, "update", "s=0", "paceline"),
    (2, "memory checkpoint", 1, "update", "s=0", "paceline"),
    (0, "ready", 1, "update", "s=0", "gloo"),
    (0, "forward", 2, "aggregate", "s=0", "gloo"),
    (1, "exchange", 1, "aggregate", "s=0", "paceline"),
    (0, "apply", 0, "aggregate", "s=0", "gloo"),
    (2, "memory checkpoint", 0, "aggregate", "d=1", "paceline"),
    (1, "ready", 2, "update", "d=1", "paceline"),
    (0, "apply", 0, "update", "d=2", "gloo"),
    (2, "exchange", 2, "aggregate", "d=2", "paceline"),
]  # fmt: skip


@pytest.mark.parametrize(("victim", "phase", "servers", "mode", "clock", "backend"), WORKERS)
def test_a_worker_killed_in_any_phase_changes_no_bit(
    victim: int, phase: str, servers: int, mode: str, clock: str, backend: str, tmp_path: Path
) -> None:
    """Where worker 0 was the server, the first of those that are left is the next."""
    serving = range(3, 3 + servers)
    generations = [Members([0, 1, 2], serving), Members([rank for rank in range(3) if rank != victim], serving)]
    found = run(
        tmp_path,
        generations,
        [Death(victim, step=5, phase=phase)],
        strategy=strategy_of(mode, clock),
        backend=backend,
    )
    assert found == {undisturbed(clock)}


@pytest.mark.parametrize("seed", range(6))
def test_a_worker_killed_at_any_moment_changes_no_bit(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    victim, servers, backend = chance.randrange(3), chance.randrange(3), chance.choice(["paceline", "gloo"])
    serving, left = range(3, 3 + servers), [rank for rank in range(3) if rank != victim]
    job: dict[str, Any] = {"strategy": strategy_of("update", "s=0"), "backend": backend}
    death = Death(victim, step=3, seed=seed)
    assert run(tmp_path, [Members([0, 1, 2], serving), Members(left, serving)], [death], **job) == {undisturbed("s=0")}


def test_one_after_the_other_until_one_worker_is_left(tmp_path: Path) -> None:
    """Alone with a server it has no group of workers, and hears of the next generation all the same."""
    generations = [Members([0, 1, 2], [3]), Members([1, 2], [3]), Members([2], [3])]
    deaths = [Death(0, step=3, phase="apply"), Death(1, step=6, phase="exchange", generation=2)]
    job: dict[str, Any] = {"strategy": strategy_of("update", "s=0"), "backend": "paceline"}
    assert run(tmp_path, generations, deaths, **job) == {undisturbed("s=0")}


@pytest.mark.parametrize(("servers", "backend"), [(0, "gloo"), (0, "paceline"), (1, "paceline"), (2, "gloo")])
def test_workers_that_join_are_served_too(servers: int, backend: str, tmp_path: Path) -> None:
    """A generation may end without a death: others come in."""
    serving = range(3, 3 + servers)
    generations = [Members([0], serving), Members([0, 1, 2], serving)]
    job: dict[str, Any] = {"strategy": strategy_of("update", "s=0"), "backend": backend, "joins_after": 4}
    assert run(tmp_path, generations, [], **job) == {undisturbed("s=0")}


# -- a server dies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "mode", "clock", "seed"),
    [("paceline", "update", "s=0", 1), ("gloo", "update", "s=0", 2), ("gloo", "aggregate", "s=0", 3),
     ("paceline", "aggregate", "d=1", 4), ("paceline", "update", "d=1", 5)],
)  # fmt: skip
def test_a_killed_server_is_replaced_by_a_fresh_process_that_gets_what_it_held(
    backend: str, mode: str, clock: str, seed: int, tmp_path: Path
) -> None:
    generations = [Members([0, 1], [2, 3]), Members([0, 1], [4, 3])]
    death = Death(2, step=4, seed=seed)
    job: dict[str, Any] = {"strategy": strategy_of(mode, clock), "backend": backend}
    assert run(tmp_path, generations, [death], **job) == {undisturbed(clock)}


# -- what is left behind -----------------------------------------------------------------------------------------------


def what_is_held() -> dict[str, int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        # Less those that wait to be lent again: how many there are depends on how many were lent at the same time.
        "threads": len(os.listdir("/proc/self/task")) - len(process_groups._idle),
        "files": len(os.listdir("/proc/self/fd")),
        "segments": len({line.split()[4] for line in maps if "memfd:paceline" in line}),
    }


def open_and_tear_down(seat: World, *, folder: str, backend: str, times: int) -> list[dict[str, int]]:
    """Each time in the middle of a step."""
    servers = seat.servers
    (model, optimizer), store = built(), FileStore(f"{folder}/store")
    members, seen = Members([0, 1], range(2, 2 + servers)), []
    for number in range(times):
        group = Group(Path(folder) / f"over-{number}")
        watching = group.watch()
        place = PrefixStore(f"elastic/{number}", store)
        job = {"strategy": strategy_of("update", "s=0"), "backend": backend}
        try:
            training = Training(members.world(seat), place, group, model, optimizer, job)
        except GenerationEnded:
            pass  # a server
        else:
            with pytest.raises(GenerationEnded):
                for step in range(1, 1000):
                    training.step(step, lambda phase: None)
                    training.tree()
                    training.strategy.end_step()
                    group.said.touch()
            training.teardown()
            assert all(parameter.grad is None for parameter in model.parameters())
            assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
            del training
        (Path(folder) / f"done-{number}-{seat.rank}").touch()
        for other in range(2 + servers):
            wait_for(Path(folder) / f"done-{number}-{other}")
        watching.join(WAIT_S)
        gc.collect()
        seen.append(what_is_held())
    return seen


@pytest.mark.parametrize(("servers", "backend"), [(0, "paceline"), (1, "paceline"), (0, "gloo"), (1, "gloo")])
def test_opening_again_and_again_leaves_no_thread_file_or_segment(servers: int, backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"servers": servers, "folder": str(tmp_path), "backend": backend, "times": 6}
    for result in run_workers(open_and_tear_down, 2, **options):
        assert result.error is None, f"{result.name}: {result.traceback}"
        first, *_, last = result.value[1:]
        assert last == first, f"{result.name}: {result.value}"
