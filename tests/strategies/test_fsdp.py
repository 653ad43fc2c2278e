"""fsdp: ddp's bits from shards of weights, whatever is in the optimizer or the model; states that ddp can load."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.sharding.local_shard import LocalShard
from paceline.strategies.fsdp.fsdp import FsdpConfig
from paceline.strategies.zero.weights import WeightsPerHost
from paceline.strategies.zero.zero2 import Zero2
from tests.bits.programs import TiedGpt, clipped, convnet, gpt, wide
from tests.engine.loops import prepared
from tests.engine.test_data import trains as trains_on
from tests.strategies.test_zero import (
    OPTIMIZERS,
    elements_of_state,
    hash_of_ddp,
    saves_twice,
)
from tests.workers import hashes, run_workers

pytestmark = pytest.mark.workers


def errors_of(program: Callable[..., Any], workers: int, **options: Any) -> set[str]:
    return {str(result.error) for result in run_workers(program, workers, **options)}


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_elementwise_optimizer_gives_the_bits_of_ddp(optimizer: str) -> None:
    made, settings = OPTIMIZERS[optimizer]
    job = {"lanes": 4, "clip": 0.1, "optimizer": made, "settings": dict(settings)}
    assert hashes(run_workers(wide, 3, strategy="fsdp", **job)) == {hash_of_ddp(optimizer)}


@cache
def clipped_alone(lanes: int) -> frozenset[str]:
    return frozenset(hashes(run_workers(clipped, 1, lanes=lanes, accumulate=2)))


@pytest.mark.parametrize(("workers", "lanes"), [(1, 4), (2, 5), (3, 4), (3, 5), (4, 5)])
def test_any_number_of_workers_and_lanes_gives_one_hash(workers: int, lanes: int) -> None:
    """Accumulated, clipped, with a short last step, a parameter used in some lanes and one that nobody uses."""
    assert hashes(run_workers(clipped, workers, lanes=lanes, accumulate=2, strategy="fsdp")) == clipped_alone(lanes)


@pytest.mark.parametrize("units", ["_Block", (nn.LayerNorm, nn.Embedding, "Sequential"), nn.Linear, "TiedGpt"])
def test_units_change_no_bit(units: Any) -> None:
    """Embedding and head of this model are one weight: as units of their own they share it."""
    assert hashes(run_workers(clipped, 2, lanes=4, accumulate=2, strategy=FsdpConfig(units))) == clipped_alone(4)


def test_batch_statistics_come_from_the_lowest_lane() -> None:
    job: dict[str, Any] = {"lanes": 4, "samples": 37, "epochs": 1}
    assert hashes(run_workers(convnet, 3, strategy="fsdp", **job)) == hashes(run_workers(convnet, 1, **job))


@pytest.mark.parametrize("kind", ["stream", "whole stream", "batch sampler"])
def test_streams_whose_lanes_run_dry_at_different_times_give_one_hash(kind: str) -> None:
    alone = hashes(run_workers(trains_on, 1, kind=kind))
    assert hashes(run_workers(trains_on, 3, kind=kind, strategy="fsdp")) == alone


@pytest.mark.parametrize("job", [{"activation_checkpointing": "blocks"}, {"threads": 2}, {"overlap": False}])
def test_checkpointing_threads_and_overlap_change_no_bit(job: dict[str, Any]) -> None:
    job = {"lanes": 4, "samples": 33, "epochs": 1} | job
    assert hashes(run_workers(gpt, 2, strategy="fsdp", **job)) == hashes(run_workers(gpt, 1, **job))


class Twice(nn.Module):
    """One block that runs twice, of which a part runs only the second time; and two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.again = nn.ModuleList([_Again(), _Again()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        for late in (False, True):
            for block in self.again:
                x = block(x, late)
        return x.mean(), x.square().mean()


class _Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.late = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        x = torch.tanh(self.always(x))
        return torch.tanh(self.late(x)) if late else x


def runs_twice(world: World, **job: Any) -> str:
    with Engine(world=world, lanes=4, **job) as engine:
        model = Twice()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(0)))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for (x,) in loader:
            one, two = model(x)
            engine.backward(one + two)
            optimizer.step()
        return engine.weights_hash()


def test_a_unit_that_runs_several_times_gives_the_bits_of_ddp() -> None:
    assert hashes(run_workers(runs_twice, 2, strategy="fsdp")) == hashes(run_workers(runs_twice, 1))


# -- saving ------------------------------------------------------------------------------------------------------------


def test_a_state_saved_and_loaded_in_the_same_run_repeats_the_run(tmp_path: Path) -> None:
    alone = run_workers(saves_twice, 1, folder=str(tmp_path / "alone"), strategy="ddp")
    for result in run_workers(saves_twice, 2, folder=str(tmp_path / "state"), strategy="fsdp"):
        assert result.error is None, result.traceback
        assert result.value == alone[0].value


def loads_weights(world: World, **job: Any) -> str:
    """Weights that the script loads into the prepared model, in the middle of training; one layer is frozen."""
    with Engine(world=world, lanes=2, **job) as engine:
        model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model[1].requires_grad_(False)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
        pretrained = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
        data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), torch.ones(32, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped and engine.step == 2:
                model.load_state_dict(pretrained)
        return engine.weights_hash()


def test_whole_weights_that_the_script_loads_are_cut_into_shards() -> None:
    assert hashes(run_workers(loads_weights, 2, strategy="fsdp")) == hashes(run_workers(loads_weights, 1))


# -- who holds what ----------------------------------------------------------------------------------------------------


def holds(world: World, **job: Any) -> tuple[int, int, int, int]:
    """Elements of the model, and of this worker's weights, optimizer state and gradients between steps."""
    with Engine(world=world, **{"strategy": "fsdp"} | job) as engine:
        model = nn.Sequential(nn.Linear(8, 120), nn.Tanh(), nn.Linear(120, 300), nn.Tanh(), nn.Linear(300, 60))
        elements = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.Adam(model.parameters())
        data = TensorDataset(torch.randn(32, 8))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        strategy = engine._training().active
        assert isinstance(strategy, Zero2)
        kept = [strategy.local_shard(p) for p in model.parameters()]
        weights = sum(part.numel() for one in kept if isinstance(one, LocalShard) for _, part in one.parts)
        if isinstance(strategy._parts.weights, WeightsPerHost):  # once for all workers of the group
            weights = elements // strategy._parts.workers
        gradients = sum(total.numel() for total in strategy._sums)
        return elements, weights, elements_of_state([strategy._parts.optimizers.of(optimizer)._on_pieces]), gradients


BLOCKS_DIFFER = 0.1  # shards are whole blocks


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_keeps_its_share_of_weights_gradients_and_state(workers: int) -> None:
    for result in run_workers(holds, workers):
        assert result.error is None, result.traceback
        elements, weights, state, gradients = result.value
        assert weights == pytest.approx(elements / workers, rel=BLOCKS_DIFFER)
        assert gradients == pytest.approx(weights, rel=BLOCKS_DIFFER)  # of small parameters there is padding
        assert state == 2 * weights


# -- what a loop may do ------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 70), nn.Tanh(), nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 1))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) * self.scale
        return out


def freezes_and_thaws(world: World, *, strategy: str) -> str:
    """A layer that is trained, frozen, and trained again from where its state was; then one more group is added."""
    with Engine(world=world, lanes=4, strategy=strategy) as engine:
        model = Scaled()
        optimizer = torch.optim.Adam(model.layers.parameters(), lr=1e-2)
        data = TensorDataset(*torch.randn(160, 9, generator=torch.Generator().manual_seed(0)).split([8, 1], dim=1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if engine.stepped:
                model.layers[2].requires_grad_(engine.step not in (2, 3, 4))
                if engine.step == 7:
                    optimizer.add_param_group({"params": [model.scale], "lr": 1e-3})
        return engine.weights_hash()


def test_parameters_that_are_frozen_thawed_or_added_keep_their_state() -> None:
    ddp = hashes(run_workers(freezes_and_thaws, 1, strategy="ddp"))
    assert hashes(run_workers(freezes_and_thaws, 3, strategy="fsdp")) == ddp


def loads_by_itself(world: World, *, strategy: str) -> str:
    """A state_dict that the script loads into the prepared optimizer, as it would alone."""
    with Engine(world=world, lanes=2, strategy=strategy) as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = TensorDataset(torch.ones(16, 8), torch.ones(16, 1))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        saved = torch.optim.SGD(nn.Linear(8, 1).parameters(), lr=0.1, momentum=0.9).state_dict()
        saved["state"] = {
            0: {"momentum_buffer": torch.full((1, 8), 3.0)},
            1: {"momentum_buffer": torch.full((1,), 3.0)},
        }
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if engine.stepped and engine.step == 1:
                optimizer.load_state_dict(saved)
        return engine.weights_hash()


def test_a_state_dict_loaded_by_the_script_is_taken_over_by_the_shards() -> None:
    ddp = hashes(run_workers(loads_by_itself, 1, strategy="ddp"))
    assert hashes(run_workers(loads_by_itself, 2, strategy="fsdp")) == ddp


def evaluates(world: World, **job: Any) -> tuple[list[float], str]:
    """Between steps, over an evaluation loader whose batches do not divide over the workers."""
    with Engine(world=world, lanes=3, **job) as engine:
        model = TiedGpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        text = torch.randint(0, 32, (28, 9), generator=torch.Generator().manual_seed(2))
        data = TensorDataset(text[:, :-1], text[:, 1:])
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        held_out = engine.prepare(DataLoader(data, batch_size=4))
        seen: list[float] = []
        for x, y in loader:
            engine.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
            optimizer.step()
            if engine.stepped:
                model.eval()
                with torch.no_grad():
                    for a, b in held_out:
                        losses = F.cross_entropy(model(a).transpose(1, 2), b, reduction="none").mean(1)
                        seen += engine.gather_for_metrics(losses).tolist()
                model.train()
        return seen, engine.weights_hash()


def test_evaluation_between_steps_sees_the_newest_weights() -> None:
    (alone,) = run_workers(evaluates, 1)
    assert alone.error is None, alone.traceback
    for result in run_workers(evaluates, 2, strategy="fsdp"):
        assert result.value == alone.value, result.traceback


def test_clipping_tells_ddps_norm() -> None:
    (alone,) = run_workers(watches_norm, 1, strategy="ddp")
    for result in run_workers(watches_norm, 3, strategy="fsdp"):
        assert result.value == alone.value, result.traceback


def watches_norm(world: World, *, strategy: str) -> list[float]:
    """Rows of 3 × 4001 elements cut blocks of 4096 anywhere; biases of 10 are one block over three workers."""
    with Engine(world=world, lanes=4, strategy=strategy) as engine:
        model = nn.Sequential(nn.Linear(4001, 7), nn.Tanh(), nn.Linear(7, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(32, 4001, generator=torch.Generator().manual_seed(0)))
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data, batch_size=4))
        norms = []
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            norms.append(engine.clip_grad_norm_(0.01))
            optimizer.step()
        return [norm for norm in norms if norm == norm][-1:]


# -- beside what the user has ------------------------------------------------------------------------------------------


def has_a_group(world: World) -> tuple[bool, str]:
    """A default group that the script had before the engine stays its own, under a strategy that makes groups too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    theirs = dist.group.WORLD
    with Engine(world=world, strategy="fsdp") as engine:
        model, optimizer, loader = prepared(engine, samples=16)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        found = engine.weights_hash()
    untouched = dist.group.WORLD is theirs and dist.get_world_size() == 1
    dist.destroy_process_group()
    return untouched, found


def test_a_default_group_of_the_users_is_neither_made_nor_touched() -> None:
    results = run_workers(has_a_group, 2)
    for result in results:
        assert result.error is None, result.traceback
        assert result.value[0]
    assert len({result.value[1] for result in results}) == 1


# -- what it may not do ------------------------------------------------------------------------------------------------


def leaves_an_item_out(world: World, *, strategy: str, how: str) -> str:
    """What the second micro-batch of lane 1 says is not trained on; nobody waits for its forward or backward."""
    with Engine(world=world, lanes=2, strategy=strategy, timeout_s=20) as engine:
        model, optimizer, loader = prepared(engine, samples=16)
        for x, y in loader:
            left_out = engine.step == 1 and engine._training().now.item.lane == 1
            if how == "before forward" and left_out:
                continue
            loss = F.mse_loss(model(x), y)
            if how == "before backward" and left_out:
                continue
            engine.backward(loss, weight=0 if how == "weight" and left_out else None)
            optimizer.step()
        return engine.weights_hash()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["before forward", "before backward", "weight"])
def test_an_item_may_be_left_out(how: str) -> None:
    alone = hashes(run_workers(leaves_an_item_out, 1, strategy="ddp", how=how))
    assert hashes(run_workers(leaves_an_item_out, 2, strategy="fsdp", how=how)) == alone


def clips_with_torch(world: World) -> None:
    with Engine(world=world, lanes=2, strategy="fsdp") as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def test_torchs_clipping_names_the_engines() -> None:
    for error in errors_of(clips_with_torch, 2):
        assert re.match(r"LoopError: the gradient of 'weight' is not here: under strategy='fsdp'", error), error


def moves(world: World) -> None:
    with Engine(world=world, lanes=2, strategy="fsdp") as engine:
        model, optimizer, loader = prepared(engine)
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            model.load_state_dict({n: p.detach().clone() for n, p in model.state_dict().items()}, assign=True)


def test_weights_that_are_replaced_are_named() -> None:
    errors = errors_of(moves, 2)
    text = r"LoopError: another parameter stands where 'weight' was in engine\.prepare\(\)"
    assert any(re.match(text, error) for error in errors), errors


class Skips(nn.Module):
    """Which of two blocks runs depends on the micro-batch, as with experts."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.Linear(w, 1)) for w in widths)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[int(x[0, 0] > 0)](x)
        return out


def runs_other_units(world: World, *, widths: tuple[int, int], **job: Any) -> str:
    with Engine(world=world, lanes=2, timeout_s=20, **job) as engine:
        model = Skips(widths)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        for (x,) in loader:
            engine.backward(model(x).mean())
            optimizer.step()
        return engine.weights_hash()


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize("widths", [(3, 3), (3, 5)])
def test_workers_may_run_different_units(widths: tuple[int, int], backend: str) -> None:
    alone = hashes(run_workers(runs_other_units, 1, widths=widths))
    assert hashes(run_workers(runs_other_units, 2, widths=widths, strategy="fsdp", backend=backend)) == alone


def test_units_of_a_class_that_is_not_there_are_refused() -> None:
    for error in errors_of(gpt, 2, strategy=FsdpConfig("Blok"), lanes=2):
        assert error == "ConfigError: units=Blok: the model has no module of that class; name one that it repeats"
