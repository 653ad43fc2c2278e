"""zero3 with weights in shards: the bits of one process, from weights that are whole only while they are used."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.errors import ConfigError
from paceline.strategies.fsdp.fsdp import Fsdp
from paceline.strategies.fsdp.unmaterialised import is_unmaterialised, names_only
from paceline.strategies.fsdp.weights import ShardedWeights
from paceline.strategies.zero.zero3 import Zero3Config
from tests.bits.programs import gpt
from tests.strategies.test_zero import trains
from tests.workers import Result, hashes, run_workers

pytestmark = pytest.mark.workers

SHARDS = Zero3Config(weights="in shards")
JOB: dict[str, Any] = {"samples": 32, "epochs": 1, "bucket_mib": 0.02}


@cache
def hash_of_one(lanes: int, **job: Any) -> frozenset[str]:
    return frozenset(hashes(run_workers(gpt, 1, lanes=lanes, **JOB, **job)))


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize(("workers", "lanes"), [(2, 4), (3, 4), (4, 5), (1, 5)])
def test_any_number_of_workers_gives_the_bits_of_one(workers: int, lanes: int, backend: str) -> None:
    made = run_workers(gpt, workers, lanes=lanes, strategy=SHARDS, backend=backend, accumulate=2, **JOB)
    assert hashes(made) == hash_of_one(lanes, accumulate=2)


# -- which weights are here --------------------------------------------------------------------------------------------


class Watched(nn.Sequential):
    """Writes down how many of its layers have their weights here while each of them runs."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__(*[nn.Linear(64, 64) for _ in range(layers)])
        self.here: list[int] = []
        for layer in self:
            layer.register_forward_hook(lambda *_: self.note())

    def note(self) -> None:
        self.here.append(sum(not is_unmaterialised(layer.weight) for layer in self))


def data(samples: int = 32) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 64, generator=torch.Generator().manual_seed(1)))


def unit_weights(engine: Engine) -> ShardedWeights:
    strategy = engine._training().active
    assert isinstance(strategy, Fsdp)
    return strategy._weights[0]


def counts_what_is_here(world: World) -> tuple[list[int], list[int], int, list[bool]]:
    with Engine(world=world, strategy=SHARDS, bucket_mib=0.02) as engine:
        model = Watched()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data(), batch_size=4))
        assert all(is_unmaterialised(p) for p in model.parameters())
        in_backward: list[int] = []
        for layer in model:
            layer.register_full_backward_hook(
                lambda *_: in_backward.append(sum(not is_unmaterialised(layer.weight) for layer in model))
            )
        shapes = [model[0].weight.shape == (64, 64), model[0].weight.numel() == 4096, model[0].bias.dim() == 1]
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        own = sum(part.numel() for parts in unit_weights(engine)._shards for part in parts)
        engine.barrier()
        return model.here, in_backward, own, [*shapes, all(is_unmaterialised(p) for p in model.parameters())]


def test_few_units_are_whole_at_once_and_none_between_items() -> None:
    for result in run_workers(counts_what_is_here, 2):
        assert result.error is None, result.traceback
        forward, backward, own, facts = result.value
        assert max(forward) <= 2, forward
        assert max(backward) <= 3, backward
        assert own == 6 * (64 * 64 + 64) / 2
        assert all(facts)


def counts_bytes(world: World, *, backend: str) -> tuple[int, int, int]:
    """In the second step, when the order of units is known: weights received, gradients sent, the model's bytes."""
    with Engine(world=world, strategy=SHARDS, bucket_mib=0.1, backend=backend) as engine:
        model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(6)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(
            model, optimizer, DataLoader(TensorDataset(torch.randn(16 * world.size, 128)), batch_size=4)
        )
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        weights = engine.traffic.of("gather of weights")
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        return weights.received_bytes, engine.traffic.of("canonical reduce-scatter").sent_bytes, size


@pytest.mark.parametrize("workers", [2, 4])
def test_weights_are_gathered_twice_and_gradients_scattered_once(workers: int) -> None:
    """Twice but for the last unit, which backward finds where forward left it, and the first, which it needs not."""
    for result in run_workers(counts_bytes, workers, backend="gloo"):
        assert result.error is None, result.traceback
        weights, gradients, size = result.value
        assert weights == (2 * size - 2 * size // 6) * (workers - 1) // workers
        assert gradients == size * (workers - 1) // workers


class Branches(nn.Module):
    """Which of its layers run depends on the data; one uses the weights of another, one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)  # reads out_proj's weights itself
        self.unused = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.left(x) if x.sum() > 0 else self.right(x)
        x = x + self.attention(x[None], x[None], x[None])[0][0]
        out: Tensor = F.linear(x, self.head.weight) + self.head.bias
        return out


def takes_branches(world: World, **job: Any) -> str:
    with Engine(world=world, lanes=4, bucket_mib=0.005, **job) as engine:
        model = Branches()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data(48), batch_size=3))
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        return engine.weights_hash()


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_may_take_different_branches_and_use_weights_of_other_modules(workers: int) -> None:
    alone = hashes(run_workers(takes_branches, 1))
    assert hashes(run_workers(takes_branches, workers, strategy=SHARDS)) == alone


def looks_at_weights(world: World) -> list[Any]:
    """On one worker alone, while the other waits: an evaluation, a norm, a state_dict, a copy of the model."""
    with Engine(world=world, strategy=SHARDS, bucket_mib=0.02) as engine:
        model = Watched(3)
        before = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.prepare(model, optimizer)
        found: list[Any] = []
        if world.rank == 1:
            with torch.no_grad():
                found.append(bool(torch.equal(model(torch.ones(2, 64)), Watched.forward(model, torch.ones(2, 64)))))
            found.append(float(model[1].weight.norm()) == float(before["1.weight"].norm()))
            found.append(all(torch.equal(value, before[name]) for name, value in model.state_dict().items()))
            twin = copy.deepcopy(model[2])
            found.append(bool(torch.equal(twin.weight.detach(), before["2.weight"])))
        engine.barrier()
        doubled = {name: value * 2 for name, value in before.items()}
        model.load_state_dict(doubled)
        found.append(all(torch.equal(value, doubled[name]) for name, value in model.state_dict().items()))
        engine.barrier()
        return found


def test_one_worker_may_look_at_weights_alone_and_all_may_load_them() -> None:
    results = run_workers(looks_at_weights, 2)
    for result in results:
        assert result.error is None, result.traceback
    assert results[0].value == [True]
    assert results[1].value == [True] * 5


def asks_for_names(world: World) -> list[bool]:
    """One worker alone, between two steps of the others."""
    with Engine(world=world, strategy=SHARDS, bucket_mib=0.02, timeout_s=20) as engine:
        model = Watched(3)
        names = list(model.state_dict())
        model, _ = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        if world.rank == 1:
            with names_only():
                state = model.state_dict()
            found = [list(state) == names, all(x.is_meta for x in state.values())]
            found.append(all(map(is_unmaterialised, model.parameters())))
        engine.barrier()
        found.append(not any(x.is_meta for x in model.state_dict().values()))
        engine.barrier()
        return found


def test_a_thread_that_writes_adapters_may_ask_for_names_without_gathering_weights() -> None:
    results = run_workers(asks_for_names, 2)
    for result in results:
        assert result.error is None, result.traceback
    assert [result.value for result in results] == [[True], [True] * 4]


def causes_in(results: Sequence[Result]) -> list[str]:
    """Of workers that all make one mistake: who comes to it first does not wait for those that need its weights."""
    errors = [str(result.error) for result in results]
    causes = [error for error in errors if not re.match(r"PeerLostError: worker \d waited for worker \d, but", error)]
    assert causes, errors
    return causes


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def writes(world: World, *, when: str) -> None:
    with Engine(world=world, strategy=SHARDS, bucket_mib=0.02, timeout_s=20) as engine:
        model = Watched(3)
        if when == "in forward":
            model[1].register_forward_hook(lambda layer, *_: layer.weight.detach().mul_(0.5).grad)  # None: no output
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data(), batch_size=4))
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
            if when == "between steps":
                with torch.no_grad():
                    model[0].weight.mul_(0.9)


@pytest.mark.parametrize(
    ("when", "told"),
    [
        ("between steps", r"mul_\(\) on a parameter whose weights are in shards on several workers would be lost"),
        ("in forward", r"a parameter of '1' was changed in place while its weights were gathered"),
    ],
)
def test_a_change_that_would_be_lost_is_an_error(when: str, told: str) -> None:
    for cause in causes_in(run_workers(writes, 2, when=when)):
        assert re.search(rf"{told}.*load_state_dict\(\) on every worker", cause)


def uses_after_close(world: World) -> float:
    with Engine(world=world, strategy=SHARDS) as engine:
        model = nn.Linear(64, 64)
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        engine.barrier()
    return float(model.weight.sum())


def test_weights_of_a_closed_engine_are_named() -> None:
    for result in run_workers(uses_after_close, 2):
        assert "its engine is closed; use them before engine.close(), or save them" in str(result.error)


def leaves(world: World) -> None:
    engine = Engine(world=world, strategy=SHARDS, bucket_mib=0.02, timeout_s=20)
    model = Watched(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data(64), batch_size=4))
    for place, (x,) in enumerate(loader):
        if world.rank == 1 and place == 2:
            engine.close()
            return
        engine.backward(model(x).square().mean())
        optimizer.step()


def test_a_worker_that_leaves_is_named_by_those_that_need_its_part() -> None:
    first, second = run_workers(leaves, 2)
    assert second.error is None, second.traceback
    assert re.match(r"PeerLostError: worker 0 .*", str(first.error)), first.traceback


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Zero3Config(weights="per worker"), r"weights='per worker' is not known; choose 'per host' or 'in shards'"),
        (Zero3Config(weights="per host"), r"needs workers that share memory"),
    ],
)
def test_a_place_for_weights_that_is_none_is_refused(config: Zero3Config, told: str) -> None:
    with pytest.raises(ConfigError, match=told), Engine(world=World(), strategy=config) as engine:
        model = nn.Linear(2, 2)
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def names_no_unit(world: World) -> None:
    with Engine(world=world, strategy=Zero3Config(weights="in shards", units="Block")) as engine:
        model = nn.Linear(2, 2)
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_class_that_the_model_does_not_have_is_named() -> None:
    for result in run_workers(names_no_unit, 2):
        assert "units=Block: the model has no module of that class" in str(result.error)


# -- low precision -----------------------------------------------------------------------------------------------------


def test_masters_of_shards_give_the_bits_of_one_process_in_bf16_and_go_on_under_ddp(tmp_path: Path) -> None:
    straight = hashes(run_workers(trains, 1, until=6, precision="bf16"))
    assert hashes(run_workers(trains, 3, until=6, strategy=SHARDS, precision="bf16")) == straight
    for before, after in ((SHARDS, "ddp"), ("ddp", SHARDS)):
        folder = str(tmp_path / str(before))
        hashes(run_workers(trains, 2, until=3, folder=folder, strategy=before, precision="bf16"))
        resumed = run_workers(trains, 3, until=6, folder=folder, resume=True, strategy=after, precision="bf16")
        assert hashes(resumed) == straight


# -- weights wherever they are used ------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """LayerNorms save their weights as they are, and not a view of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(3)])

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def uses_weights(world: World, *, how: str, **job: Any) -> str:
    with Engine(world=world, lanes=4, bucket_mib=0.001, **job) as engine:
        model = Encoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data(), batch_size=4))
        if how == "inference":
            with torch.inference_mode():
                model(torch.ones(2, 64))
        for (x,) in loader:
            if how == "another method":
                loss = model.encode(x).square().mean()
            elif how == "checkpointed by hand":
                x.requires_grad_()
                loss = checkpoint(model.blocks[1], model.blocks[0](x), use_reentrant=True).square().mean()
            elif how == "sparse":
                loss = torch.sparse.mm(torch.eye(len(x)).to_sparse(), model(x)).square().mean()
            else:
                loss = model(x).square().mean()
            if how == "penalty":
                loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
            if how == "second derivative":
                x.requires_grad_()
                y = model(x).square().mean()
                (slope,) = torch.autograd.grad(y, x, create_graph=True)
                loss = y + slope.square().sum()
            engine.backward(loss)
            optimizer.step()
            if how == "a copy":
                assert torch.equal(copy.deepcopy(model)(x), model(x))
        return engine.weights_hash()


@pytest.mark.parametrize(
    "how",
    [
        "penalty", "another method", "checkpointed by hand", "inference", "sparse", "second derivative", "a copy",
    ],
)  # fmt: skip
def test_weights_may_be_used_anywhere(how: str) -> None:
    alone = hashes(run_workers(uses_weights, 1, how=how))
    assert hashes(run_workers(uses_weights, 2, how=how, strategy=SHARDS)) == alone


def clamps(world: World) -> None:
    """As a Wasserstein critic does: past the version counters."""
    with Engine(world=world, strategy=SHARDS, bucket_mib=0.001, timeout_s=20) as engine:
        model = Encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(data(), batch_size=4))
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
            for parameter in model.parameters():
                parameter.data.clamp_(-0.01, 0.01)


def test_a_change_through_data_is_found_too() -> None:
    for cause in causes_in(run_workers(clamps, 2)):
        assert "was changed in place while its weights were gathered" in cause


def saves_late(world: World) -> int:
    with Engine(world=world, strategy=SHARDS, bucket_mib=0.001, timeout_s=20) as engine:
        model = Encoder()
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if world.is_main:
            time.sleep(2.5)
            return len(model.state_dict())
    return 0


def test_a_worker_that_has_ended_answers_until_the_others_have() -> None:
    first, second = run_workers(saves_late, 2)
    assert (first.error, second.error) == (None, None), first.traceback
    assert first.value == 12
