"""Weights once per host: one buffer for all workers, written by the update alone, gone with the last of them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.errors import ConfigError
from paceline.strategies.zero.zero1 import Zero1Config
from paceline.strategies.zero.zero2 import Zero2Config
from tests.bits.programs import wide
from tests.engine.loops import prepared, vectors
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers

CONFIGS = {"zero1": Zero1Config, "zero2": Zero2Config}


def mapping_of(address: int) -> str:
    """What the kernel says about the memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return line.split(maxsplit=5)[-1]
    return "nothing"


def told_by_memory(world: World, *, config: Any, backend: str) -> tuple[set[str], list[float], list[str]]:
    """Where the parameters lie, what worker 1 finds after worker 0 alone has written, and the named shared memory."""
    with Engine(world=world, strategy=config, backend=backend) as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        engine.weights_hash()
        where = {mapping_of(parameter.data_ptr()) for parameter in model.parameters()}
        if world.rank == 0:
            model.bias.data.fill_(7.0)
        engine.barrier()
        named = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/paceline" in line]
        return where, model.bias.tolist(), named


@pytest.mark.parametrize("strategy", CONFIGS)
def test_workers_of_a_host_have_one_copy_without_a_name(strategy: str) -> None:
    for result in run_workers(told_by_memory, 3, config=CONFIGS[strategy](), backend="paceline"):
        assert result.error is None, result.traceback
        where, bias, named = result.value
        assert len(where) == 1
        assert "memfd:paceline" in where.pop()
        assert bias == [7.0]
        assert named == []


@pytest.mark.parametrize(("weights", "backend"), [("per worker", "paceline"), (None, "gloo")])
def test_without_shared_memory_or_where_it_is_not_wanted_each_has_its_own(weights: Any, backend: str) -> None:
    first, second = run_workers(told_by_memory, 2, config=Zero1Config(weights), backend=backend)
    assert (first.error, second.error) == (None, None), first.traceback or second.traceback
    assert first.value[1] == [7.0]
    assert second.value[1] != [7.0]


def counts_calls(world: World) -> tuple[dict[str, int], int]:
    with Engine(world=world, strategy="zero1") as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        return dict(engine.traffic.native), engine.traffic.sent_bytes


def test_a_step_gathers_no_weights() -> None:
    """The vote, and the barriers before and after the update."""
    for result in run_workers(counts_calls, 2):
        assert result.value == ({"scatter_bucket": 1, "all_gather": 3}, 0), result.traceback


# -- who may write -----------------------------------------------------------------------------------------------------


def writes(world: World, *, strategy: str, how: str) -> None:
    with Engine(world=world, strategy=strategy, lanes=2) as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped and engine.step == 2:
                if how == "clamp":
                    with torch.no_grad():
                        model.weight.clamp_(-0.1, 0.1)
                elif how == "load":
                    model.load_state_dict(model.state_dict())
                else:
                    model.weight.data = model.weight.data.clone()
                if how == "load":
                    engine.weights_hash()


@pytest.mark.parametrize(
    ("strategy", "how", "word"),
    [("zero1", "clamp", "changed"), ("zero2", "load", "changed"), ("zero2", "replace", "replaced")],
)
def test_a_write_outside_the_optimizer_is_refused_with_what_to_do(strategy: str, how: str, word: str) -> None:
    for rank, result in enumerate(run_workers(writes, 2, strategy=strategy, how=how)):
        assert re.match(
            rf"LoopError: worker {rank}: '(weight|bias)' was {word} outside the optimizer\. "
            rf"Under strategy='{strategy}' the workers of a host share one copy.*engine\.load_state\(\).*"
            rf"strategy={strategy.capitalize()}Config\(weights='per worker'\)",
            str(result.error),
        ), result.error


def moves_weights_in_a_step(world: World, *, lanes: int) -> None:
    """As sharpness-aware minimisation does, which puts them back before the update."""
    with Engine(world=world, strategy="zero2", lanes=lanes) as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            with torch.no_grad():
                model.weight.add_(0.1)
            loss = F.mse_loss(model(x), y)
            with torch.no_grad():
                model.weight.sub_(0.1)
            engine.backward(loss)
            optimizer.step()


@pytest.mark.parametrize("lanes", [2, 4])
def test_a_write_that_is_taken_back_within_the_step_is_refused_too(lanes: int) -> None:
    """The other worker may have read what was there in between."""
    for result in run_workers(moves_weights_in_a_step, 2, lanes=lanes):
        assert "'weight' was changed outside the optimizer" in str(result.error), result.error


def clamps(world: World, *, config: Any) -> str:
    """As a Wasserstein critic: weights are clamped after every step."""
    with Engine(world=world, strategy=config, lanes=2) as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped:
                with torch.no_grad():
                    model.weight.clamp_(-0.1, 0.1)
        return engine.weights_hash()


def test_with_weights_of_its_own_every_worker_may_write() -> None:
    ddp = hashes(run_workers(clamps, 1, config="ddp"))
    assert hashes(run_workers(clamps, 2, config=Zero2Config(weights="per worker"))) == ddp


def loads(world: World, *, folder: str, strategy: str) -> list[str]:
    """Back to a saved state in the middle, evaluation and hashes on the way."""
    with Engine(world=world, strategy=strategy, lanes=2) as engine:
        model, optimizer, loader = prepared(engine, samples=48)
        held_out = engine.prepare(DataLoader(vectors(10), batch_size=4))
        found = []
        for turn in range(2):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                if engine.stepped and engine.step == 3 and turn == 0:
                    engine.save_state(folder)
            with torch.no_grad():
                errors = [engine.gather_for_metrics((model(x) - y).square()) for x, y in held_out]
            found += [engine.weights_hash(), f"{float(torch.cat(errors).mean()):.9f}"]
            engine.load_state(folder)
        return found


@pytest.mark.parametrize("strategy", CONFIGS)
def test_the_engine_may_load_a_state_and_evaluation_sees_the_weights(strategy: str, tmp_path: Path) -> None:
    (alone,) = run_workers(loads, 1, folder=str(tmp_path / "alone"), strategy="ddp")
    for result in run_workers(loads, 2, folder=str(tmp_path / "state"), strategy=strategy):
        assert result.error is None, result.traceback
        assert result.value == alone.value
        assert result.value[:2] == result.value[2:]


def dies(world: World, *, strategy: str, where: str) -> None:
    with Engine(world=world, strategy=strategy, timeout_s=20) as engine:
        model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))
        optimizer = torch.optim.Adam(model.parameters())
        data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            if engine.step == 2 and world.rank == 1 and where == "before the update":
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            if engine.step == 2 and world.rank == 1 and where == "after the update":
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("strategy", "where"), [("zero1", "before the update"), ("zero2", "after the update")])
def test_a_killed_worker_is_told_by_those_who_wait_for_it(strategy: str, where: str) -> None:
    first, killed = run_workers(dies, 2, strategy=strategy, where=where, timeout_s=30)
    assert killed.exit_code == -signal.SIGKILL
    assert re.match(r"PeerLostError: worker 0 lost its peers.*rank 1 \(pid \d+\), which has died", str(first.error))


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_sideways_and_spread_out_parameters_keep_their_strides_and_bits() -> None:
    job: dict[str, Any] = {"lanes": 4, "bucket_mib": 0.02, "clip": 0.2}
    assert hashes(run_workers(wide, 3, strategy="zero2", **job)) == hashes(run_workers(wide, 1, **job))


def has_gaps(world: World, *, strategy: str) -> tuple[str, list[tuple[int, ...]]]:
    """A parameter with gaps in memory, an empty one, and one of a single element."""
    with Engine(world=world, strategy=strategy, lanes=2) as engine:
        model = nn.Linear(8, 1)
        model.weight = nn.Parameter(torch.randn(1, 30, generator=torch.Generator().manual_seed(0))[:, 2:26:3])
        model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(vectors(), batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y) + model.nothing.sum())
            optimizer.step()
        return engine.weights_hash(), [parameter.stride() for parameter in model.parameters()]


def test_parameters_with_gaps_and_empty_ones_are_trained_as_they_lie() -> None:
    (alone,) = run_workers(has_gaps, 1, strategy="ddp")
    for result in run_workers(has_gaps, 2, strategy="zero1"):
        assert result.value == alone.value, result.traceback


@pytest.mark.parametrize("strategy", CONFIGS)
def test_one_copy_where_no_memory_is_shared_is_refused(strategy: str) -> None:
    with (
        pytest.raises(ConfigError, match=rf"strategy='{strategy}' with weights='per host' needs workers that share"),
        Engine(world=World(), strategy=CONFIGS[strategy](weights="per host")) as engine,
    ):
        prepared(engine)
    with (
        pytest.raises(ConfigError, match=r"weights='everywhere' is not known; choose 'per host' or 'per worker'"),
        Engine(world=World(), strategy=CONFIGS[strategy](weights="everywhere")) as engine,
    ):
        prepared(engine)
