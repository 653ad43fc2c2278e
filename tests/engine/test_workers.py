"""What several workers do together: agree, notice when they don't, evaluate, stop, save and continue."""

from __future__ import annotations

import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.errors import CheckpointError
from tests.bits.programs import TiedGpt
from tests.engine.loops import prepared
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers

# -- start-up and drift ------------------------------------------------------------------------------------------------


def builds_another_model(world: World, *, how: str) -> None:
    with Engine(world=world) as engine:
        if world.rank == 1 and how == "values":
            torch.manual_seed(99)
        wide = 9 if world.rank == 1 and how == "shape" else 8
        layers: list[nn.Module] = [nn.Linear(wide, 4), nn.Linear(4, 1)]
        if world.rank == 1 and how == "name":
            layers.append(nn.Linear(1, 1))
        model = nn.Sequential(*layers)
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("values", r"'0\.bias' has other values on worker 1 than on worker 0"),
        ("shape", r"'0\.weight' has shape \[4, 9\] on worker 1, \[4, 8\] on worker 0"),
        ("name", r"worker 1 has '2\.bias', worker 0 has not"),
    ],
)
def test_models_that_differ_are_refused_on_every_worker_with_the_first_difference(how: str, text: str) -> None:
    for result in run_workers(builds_another_model, 2, how=how):
        assert result.error is not None
        assert re.search(text, result.error), result.error
        assert result.error.startswith("ReplicaError: the models differ")


def drifts(world: World) -> None:
    with Engine(world=world) as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.step == 2 and world.rank == 2:
                model.weight.data[0, 3] += 1e-7


def test_a_replica_that_drifts_is_named_with_its_tensor() -> None:
    for result in run_workers(drifts, 3):
        assert result.error is not None
        assert result.error.startswith("ReplicaError: before step 3 the weights have drifted apart: 'weight'")
        assert "on worker 2 from the others" in result.error


# -- leaving -----------------------------------------------------------------------------------------------------------


def leaves(world: World, *, how: str) -> int:
    with Engine(world=world, lanes=4, timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine, samples=160)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            if engine.step == 2 and world.rank == 1 and how == "break inside":
                break
            optimizer.step()
            if engine.step == 2 and world.rank == 1 and how == "break after":
                break
            if engine.step == 2 and world.rank == 1 and how == "exit":
                os._exit(0)
        return engine.step


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("break inside", "worker 0 waited for worker 1, but it left its training loop inside step 3"),
        ("break after", "worker 0 waited for worker 1, but it left its training loop after step 2"),
        ("exit", "worker 0 lost its peers"),
    ],
)
def test_a_worker_that_leaves_alone_is_named_by_those_who_wait(how: str, text: str) -> None:
    first, second = run_workers(leaves, 2, how=how, timeout_s=30)
    assert first.error is not None
    assert first.error.startswith("PeerLostError: " + text), first.error
    if how == "exit":
        assert second.error == "Died: exit code 0"


def stops(world: World) -> tuple[int, int]:
    with Engine(world=world, lanes=4) as engine:
        model, optimizer, loader = prepared(engine, samples=160)
        for x, y in loader:
            if engine.step == 2 and world.rank == 1:
                engine.stop()
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        return engine.step, loader.position


def test_stop_by_one_worker_ends_the_loop_of_all_after_the_same_step() -> None:
    assert [result.value for result in run_workers(stops, 3)] == [(3, 48)] * 3


def has_nan(world: World) -> None:
    with Engine(world=world, lanes=4) as engine:
        model, optimizer, loader = prepared(engine, samples=64)
        for x, y in loader:
            bad = engine.step == 1 and bool((x == loader.dataset.tensors[0][28]).all(1).any())  # in lane 3 of step 2
            engine.backward(F.mse_loss(model(x), y) * (math.nan if bad else 1.0))
            optimizer.step()


def test_a_nan_on_one_worker_stops_all_with_its_step_and_lane() -> None:
    for result in run_workers(has_nan, 3):
        assert result.error is not None
        assert result.error.startswith("NonFiniteLossError: the loss of step 2 is nan in lane 3")


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluates(world: World, *, samples: int) -> tuple[list[float], float]:
    with Engine(world=world, lanes=4) as engine:
        prepared(engine)
        ids = torch.arange(samples, dtype=torch.float32)
        loader = engine.prepare(DataLoader(TensorDataset(ids), batch_size=3))
        seen = [engine.gather_for_metrics({"id": batch})["id"] for (batch,) in loader]
        ranks = engine.reduce(torch.tensor([float(world.rank)]), "max")
        return torch.cat(seen).tolist(), ranks.item()


@pytest.mark.parametrize(("workers", "samples"), [(1, 10), (2, 10), (3, 10), (3, 2), (4, 13)])
def test_evaluation_sees_every_sample_once_in_order(workers: int, samples: int) -> None:
    for result in run_workers(evaluates, workers, samples=samples):
        assert result.error is None, result.traceback
        assert result.value == ([float(i) for i in range(samples)], workers - 1)


def sums_by_hand(world: World, *, samples: int, strategy: str, how: str) -> float:
    """As scripts for DDP do: add up over my batches, then reduce."""
    with Engine(world=world, lanes=4, strategy=strategy) as engine:
        model, _, _ = prepared(engine)
        numbers = torch.arange(1.0, samples + 1).view(-1, 1).expand(-1, 8).contiguous()
        loader = engine.prepare(DataLoader(TensorDataset(numbers), batch_size=3))
        total, several = torch.zeros(()), []
        for (batch,) in loader:
            with torch.no_grad():
                model(batch)
            if "shadow" in how and loader.shadow and how == "asks for shadows":
                continue
            if how == "reduces in the loop":
                total += engine.reduce(batch[:, 0].sum())
            else:
                total += batch[:, 0].sum()
            several.append(batch[:, 0])
        if how == "gathers behind it":
            rows = torch.cat(several) if several else torch.zeros(0)
            return float(engine.gather_for_metrics(rows).sum())
        return float(total if how == "reduces in the loop" else engine.reduce(total))


@pytest.mark.parametrize(
    "how",
    ["reduces behind it", "gathers behind it", "reduces in the loop", "asks for shadows", "looks at loader.shadow"],
)
@pytest.mark.parametrize(("workers", "samples"), [(1, 10), (2, 10), (3, 10), (3, 19), (2, 18)])
def test_sums_by_hand_count_every_sample_once(workers: int, samples: int, how: str) -> None:
    for result in run_workers(sums_by_hand, workers, samples=samples, strategy="ddp", how=how):
        assert result.error is None, result.traceback
        assert result.value == samples * (samples + 1) / 2


@pytest.mark.parametrize(("strategy", "samples"), [("fsdp", 10), ("ddp", 3)], ids=["fsdp", "one round"])
def test_sums_by_hand_over_batches_that_had_to_be_repeated_are_refused_by_all(strategy: str, samples: int) -> None:
    for result in run_workers(sums_by_hand, 3, samples=samples, strategy=strategy, how="reduces behind it"):
        assert result.error is not None
        assert result.error.startswith("LoopError: the last round of the evaluation has 1 batch for 3 workers")
        assert result.error.endswith("or leave out batches for which loader.shadow is true")
    for how in ("reduces in the loop", "asks for shadows"):
        for result in run_workers(sums_by_hand, 3, samples=samples, strategy=strategy, how=how):
            assert result.error is None, result.traceback
            assert result.value == samples * (samples + 1) / 2


# -- saving ------------------------------------------------------------------------------------------------------------


def trains(world: World, *, until: int, folder: str | None, resume: bool, **job: Any) -> str:
    with Engine(world=world, **{"lanes": 4, "accumulate": 2} | job) as engine:
        model = TiedGpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
        text = torch.randint(0, 32, (75, 17), generator=torch.Generator().manual_seed(2))
        loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=4, shuffle=True)
        model, optimizer, loader, schedule = engine.prepare(model, optimizer, loader, schedule)
        if resume:
            assert folder is not None
            engine.load_state(folder)
        while engine.step < until:
            for x, y in loader:
                engine.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
                optimizer.step()
                schedule.step()
                if engine.stepped and engine.step == until:
                    break
        if folder is not None and not resume:
            engine.save_state(folder)
        return engine.weights_hash()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_a_run_stopped_and_continued_on_other_workers_ends_with_the_same_bits(
    before: int, after: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "state")
    straight = hashes(run_workers(trains, 1, until=8, folder=None, resume=False))
    hashes(run_workers(trains, before, until=4, folder=folder, resume=False))
    assert hashes(run_workers(trains, after, until=8, folder=folder, resume=True)) == straight


def test_a_state_of_another_job_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    trains(World(), until=1, folder=str(folder), resume=False)
    with pytest.raises(CheckpointError, match=r"another job.*accumulate was 2, is 1; seed was 0, is 7"):
        trains(World(), until=2, folder=str(folder), resume=True, accumulate=1, seed=7)
    tensors = folder / "worker-00000-of-00001.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        trains(World(), until=2, folder=str(folder), resume=True)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        trains(World(), until=2, folder=str(tmp_path / "nowhere"), resume=True)


# -- overlap, and what is left behind ----------------------------------------------------------------------------------


def counts_buckets(world: World, *, overlap: bool) -> int:
    with Engine(world=world, overlap=overlap, bucket_mib=0.001) as engine:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(64, 32), torch.randn(64, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        return engine.timing.left_during_backward


def test_buckets_leave_while_backward_runs_unless_told_otherwise() -> None:
    assert min(result.value for result in run_workers(counts_buckets, 2, overlap=True)) >= 6
    assert [result.value for result in run_workers(counts_buckets, 2, overlap=False)] == [0, 0]


def leaves_nothing(world: World) -> list[str]:
    with Engine(world=world, lanes=4) as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")]


def test_closing_ends_threads_and_removes_hooks() -> None:
    assert [result.value for result in run_workers(leaves_nothing, 3)] == [[], [], []]


def counts_buffers(world: World) -> list[int]:
    with Engine(world=world, lanes=8, device="cpu") as engine:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        held = []
        for _ in range(3):
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
            assert engine._objects.step is not None
            held.append(sum(len(sums._views) for sums in engine._objects.step.strategy()._buckets.sums))
        return held


def test_buffers_do_not_grow_with_the_steps_when_workers_have_several_roots() -> None:
    for result in run_workers(counts_buffers, 3):
        assert result.error is None, result.traceback
        assert result.value[1] == result.value[2], result.value


class Noisy(torch.utils.data.Dataset[Any]):
    """Every sample is drawn anew."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3) + index


def evaluates_noise(world: World, *, processes: int) -> list[float]:
    with Engine(world=world) as engine:
        loader = engine.prepare(DataLoader(Noisy(), batch_size=4, num_workers=processes))
        found: list[float] = []
        for batch in loader:
            values = batch.sum(1) + torch.rand(len(batch))  # as a model that draws
            padded = torch.cat([values, values.new_zeros(4 - len(values))]).view(1, 4)
            found += engine.gather_for_metrics(padded).flatten().tolist()
        return [*found, float(torch.rand(()))]


@pytest.mark.parametrize("processes", [0, 2])
def test_random_numbers_of_an_evaluation_do_not_depend_on_the_number_of_workers(processes: int) -> None:
    alone = run_workers(evaluates_noise, 1, processes=0)[0].value
    for workers in (2,) if processes else (2, 3):
        for result in run_workers(evaluates_noise, workers, processes=processes):
            assert result.value == alone, result.error


# -- what every worker is given ----------------------------------------------------------------------------------------


def is_given_other_data(world: World, *, what: str) -> None:
    first = world.rank == 0
    with Engine(world=world, seed=0 if first or what != "seed" else 1) as engine:
        torch.manual_seed(3)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        points = torch.zeros(64 if first or not what.startswith("samples") else 60, 4)
        data = TensorDataset(points) if first or what != "type" else torch.utils.data.StackDataset(points)
        loader = DataLoader(
            data,
            batch_size=4 if first or what != "batch size" else 2,
            shuffle=first or what != "order",
            drop_last=not first and what == "drop_last",
        )
        if what == "samples to evaluate":
            engine.prepare(model, optimizer)
            engine.prepare(loader)
        else:
            engine.prepare(model, optimizer, loader)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("samples", "worker 1 has samples 60, worker 0 has samples 64"),
        ("samples to evaluate", "worker 1 has samples 60, worker 0 has samples 64"),
        ("batch size", "worker 1 has batch size 2, worker 0 has batch size 4"),
        ("drop_last", "worker 1 has drop_last True, worker 0 has drop_last False"),
        ("order", "worker 1 has a sampler of type SequentialSampler, worker 0 has a sampler of type RandomSampler"),
        ("type", "worker 1 has a dataset of type StackDataset, worker 0 has a dataset of type TensorDataset"),
        ("seed", "worker 1 has seed 1, worker 0 has seed 0"),
    ],
)
def test_data_that_differ_are_refused_before_training(what: str, text: str) -> None:
    for result in run_workers(is_given_other_data, 2, what=what):
        assert result.error is not None
        assert result.error.startswith(f"ReplicaError: the data or settings differ: {text}; "), result.error
