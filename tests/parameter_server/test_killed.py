"""Killed at any moment: a real process of a real job dies by SIGKILL, at a random time after the first round began.

asynchronous    workers      the others go on; the log has every push of theirs once, and the run can be replayed
synchronous     a worker     one error on all that are left, which names it and its round
any clock       a server     one error on all workers, which names what it held and what to do
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.collectives.communicator import Communicator
from paceline.engine import group as surroundings
from paceline.engine.engine import Engine
from paceline.parameter_server.clock import parse_clock
from paceline.parameter_server.replay import replay_of
from paceline.parameter_server.update_log import RecordedRun, read_log
from paceline.strategies.server import ParameterServer
from paceline.world.world import LaunchSettings, World
from tests.workers import Result, run_workers

pytestmark = pytest.mark.workers

ROUNDS, LANES = 40, 3
TRAINING_S = 0.15  # at least: the naps alone


def die_at_a_random_moment(begun: Path, seed: int) -> None:
    """Any instruction of any thread may be the last one."""

    def wait_and_die() -> None:
        deadline = time.monotonic() + 20
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(random.Random(seed).uniform(0, TRAINING_S))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_die, daemon=True).start()


def train(world: World, *, folder: str, clock: str, victim: str | None, seed: int = 0, backend: str = "gloo") -> str:
    if world.name == victim:
        die_at_a_random_moment(Path(folder) / "begun", seed)
    asynchronous = not parse_clock(clock).deterministic
    settings = ParameterServer(clock=parse_clock(clock), key_mib=0.0005, record=folder if asynchronous else None)
    options: dict[str, Any] = {"device": "cpu", "backend": backend, "timeout_s": 20.0, "lanes": LANES}
    with Engine(world=world, strategy=settings, **options) as engine:
        model: Any = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(2 * LANES * ROUNDS, 8, generator=generator)
        loader: Any = DataLoader(TensorDataset(inputs, torch.arange(len(inputs)) % 4), batch_size=2)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        for x, y in loader:
            if world.size > 1:
                (Path(folder) / "begun").touch()
                time.sleep(TRAINING_S / ROUNDS)
            engine.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return engine.weights_hash()


def die_after_a_message(world: World, *, folder: str, dies_after: Mapping[str, int], **options: Any) -> str:
    """Where a message ends with the sending of its n-th part: a push between its header and its gradient among them."""
    if world.name in dies_after:
        original, sent = Communicator.send, itertools.count(1)

        def send(self: Communicator, *parts: Any, **where: Any) -> Any:
            work = original(self, *parts, **where)
            if next(sent) == dies_after[world.name]:
                os.kill(os.getpid(), signal.SIGKILL)
            return work

        Communicator.send = send  # type: ignore[method-assign]
    store = FileStore(f"{folder}/store")  # one that does not die with worker 0, as the launcher's does not
    surroundings.open_store = lambda *_: store  # type: ignore[attr-defined]
    return train(world, folder=folder, victim=None, **options)


def replayed(_: World, *, folder: str, clock: str) -> tuple[str, str]:
    found = train(World(settings=LaunchSettings(replay=folder)), folder=folder, clock=clock, victim=None)
    return found, replay_of(Path(folder)).verdict()


def pushes_by_key(run: RecordedRun) -> dict[int, Counter[tuple[int, int]]]:
    """How often each (round, lane) was applied."""
    return {
        key: Counter((record.round, -1 if record.lane is None else record.lane) for record in records)
        for key, records in run.applied.items()
    }


@pytest.mark.parametrize(
    ("clock", "seed"), [("s=2,from=0", 1), ("s=2,from=0", 2), ("s=2", 3), ("s=inf", 4), ("s=inf", 5)]
)
def test_a_worker_killed_at_any_moment_loses_no_push_of_the_others_and_doubles_none(
    clock: str, seed: int, tmp_path: Path
) -> None:
    one, victim, other, server = run_workers(
        train, 3, servers=1, folder=str(tmp_path), clock=clock, victim="worker 1", seed=seed
    )
    check_what_is_left([one, victim, other, server], {"worker 1"}, tmp_path, clock)


# Worker n has lane n. The last but one dies in its first round, the last before it has said a word.
MESSAGES = [
    ({"worker 0": 94, "worker 1": 174}, 1, "gloo", "s=1,from=5"), ({"worker 0": 203}, 2, "paceline", "s=1,from=5"),
    ({"worker 2": 299}, 1, "paceline", "s=inf"), ({"worker 1": 67, "worker 2": 261}, 2, "gloo", "s=2,from=0"),
    ({"worker 1": 12}, 2, "gloo", "s=2,own,from=0"), ({"worker 0": 1}, 1, "paceline", "s=2,from=0"),
]  # fmt: skip


@pytest.mark.parametrize(("dies_after", "servers", "backend", "clock"), MESSAGES)
def test_a_push_of_the_dead_is_applied_whole_or_not_at_all(
    dies_after: dict[str, int], servers: int, backend: str, clock: str, tmp_path: Path
) -> None:
    """Replay computes it again, all of it, and finds the bits of what the server made of it."""
    options: dict[str, Any] = {"dies_after": dies_after, "backend": backend, "clock": clock}
    results = run_workers(die_after_a_message, 3, servers=servers, folder=str(tmp_path), **options)
    check_what_is_left(results, set(dies_after), tmp_path, clock)


def check_what_is_left(results: list[Result], dead: set[str], folder: Path, clock: str) -> None:
    for result in results:
        if result.name in dead:
            assert result.exit_code == -signal.SIGKILL, result
        else:
            assert result.error is None, f"{result.name}: {result.error}\n{result.traceback}"
    (found,) = {result.value for result in results if result.name not in dead and "worker" in result.name}
    for key, pushes in pushes_by_key(read_log(folder)).items():
        assert set(pushes.values()) == {1}, f"key {key}: a push was applied twice"
        for worker in range(LANES):
            rounds = [round for round, lane in pushes if lane == worker]
            assert rounds == list(range(len(rounds))), f"key {key}: a push of lane {worker} is missing in between"
            assert f"worker {worker}" in dead or len(rounds) == ROUNDS, f"key {key} lost pushes of lane {worker}"
    (again,) = run_workers(replayed, 1, folder=str(folder), clock=clock)
    assert again.error is None, again.traceback
    assert again.value[0] == found
    assert "equal to the recorded run" in again.value[1]


@pytest.mark.parametrize(
    ("servers", "backend", "seed"), [(1, "gloo", 1), (2, "gloo", 2), (0, "gloo", 3), (0, "gloo", 4), (1, "paceline", 5)]
)
def test_a_synchronous_job_ends_with_one_line_on_all_that_are_left_which_names_the_killed_worker(
    servers: int, backend: str, seed: int, tmp_path: Path
) -> None:
    """Workers may stand in an exchange of their own, where gloo can't tell who it was: the servers can."""
    victims: dict[str, Any] = {"clock": "s=0", "victim": "worker 1", "seed": seed, "backend": backend}
    results = run_workers(train, 3, servers=servers, folder=str(tmp_path), **victims)
    assert results.pop(1).exit_code == -signal.SIGKILL
    for left in results:
        assert re.fullmatch(
            r"PeerLostError: worker 1 was lost( in round \d+, before it had pushed all of it| between two rounds); a "
            "round needs the gradients of all workers, so training stops here: resume from the last saved state",
            text_of(left),
        ), f"{left.name}: {text_of(left)}"


@pytest.mark.parametrize(("clock", "seed"), [("s=0", 1), ("s=0", 2), ("d=1", 3), ("s=2,from=0", 4), ("s=inf", 5)])
def test_a_killed_server_is_named_with_what_it_held_and_what_to_do(clock: str, seed: int, tmp_path: Path) -> None:
    results = run_workers(train, 2, servers=2, folder=str(tmp_path), clock=clock, victim="server 1", seed=seed)
    assert results[3].exit_code == -signal.SIGKILL
    for result in results[:3]:
        assert re.fullmatch(
            r"PeerLostError: server 1, which held keys? [\d–, ]+ \([\w.]+( … [\w.]+)?\), was lost \(its process has "
            r"ended\); what it had learned is gone: resume from the last saved state",
            text_of(result),
        ), text_of(result)


@pytest.mark.parametrize("clock", ["s=2,from=0", "s=inf"])
def test_a_killed_worker_that_was_the_server_is_named_as_that(clock: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dies_after": {"worker 0": 150}, "backend": "gloo", "clock": clock}
    killed, *left = run_workers(die_after_a_message, 3, folder=str(tmp_path), **options)
    assert killed.exit_code == -signal.SIGKILL
    for result in left:
        assert re.fullmatch(
            r"PeerLostError: server 0, which held keys? [\d–, ]+ \([\w.]+( … [\w.]+)?\), was lost \(its process has "
            r"ended\); what it had learned is gone: resume from the last saved state",
            text_of(result),
        ), text_of(result)


def text_of(result: Result) -> str:
    assert result.error is not None, f"{result.name} ended well"
    return result.error
