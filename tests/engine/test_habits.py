"""Habits of plain PyTorch loops: one hash on any number of workers, or one line that names the habit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset, get_worker_info

from paceline import Engine, World
from paceline.errors import ConfigError, DataError, LoopError
from tests.engine.loops import vectors
from tests.workers import hashes, run_workers

JOBS = [(2, "ddp"), (3, "ddp"), (2, "zero2"), (2, "fsdp")]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def run(engine: Engine, model: Any, optimizer: torch.optim.Optimizer, loader: Any, epochs: int = 2) -> str:
    for _ in range(epochs):
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return engine.weights_hash()


def in_job(world: World, habit: Callable[[Engine], Any], strategy: str = "ddp") -> Any:
    with Engine(world=world, strategy=strategy, lanes=4, threads=1) as engine:
        return habit(engine)


def alone(habit: Callable[[Engine], Any]) -> Any:
    return in_job(World(), habit)


def refusals(habit: Callable[[Engine], Any], workers: int, strategy: str) -> list[str]:
    """Of the workers that found it; the others lose these."""
    results = run_workers(in_job, workers, habit=habit, strategy=strategy)
    errors = [str(result.error) for result in results]
    return [error for error in errors if not error.startswith("PeerLostError")]


# -- buffers -----------------------------------------------------------------------------------------------------------


class Averaging(nn.Module):
    """Its buffers are other tensors after each forward, as in many a VQ-VAE; one of them grows with what it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("square", torch.ones(8), persistent=False)
        self.register_buffer("cache", torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        if len(self.cache) < len(x):
            self.cache = torch.ones(len(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.square.mul_(0.9).add_(0.1 * x.detach().square().mean(0))
        return self.net((x - self.mean) * self.square.rsqrt() * self.cache[: len(x), None])


def averages(engine: Engine) -> Any:
    model = Averaging()
    prepared, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4, shuffle=True))
    return run(engine, prepared, optimizer, loader), model.mean.tolist(), model.square.tolist()


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "strategy"), JOBS)
def test_buffers_that_forward_replaces_are_those_of_the_lowest_lane(workers: int, strategy: str) -> None:
    results = run_workers(in_job, workers, habit=averages, strategy=strategy)
    assert [result.error for result in results] == [None] * workers
    assert [result.value for result in results] == [alone(averages)] * workers


def test_a_buffer_that_forward_replaces_stays_the_same_tensor_between_steps() -> None:
    with Engine(world=World(), lanes=2) as engine:
        model = Averaging()
        before = model.mean
        run(engine, *engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4)))
        assert model.mean is before
        assert before.abs().sum() > 0


# -- data --------------------------------------------------------------------------------------------------------------


class Ends(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> Any:
        if number == 21:
            raise StopIteration
        return vectors()[number]


def test_a_stop_iteration_of_a_dataset_does_not_shorten_a_batch() -> None:
    with (
        pytest.raises(DataError, match=r"the dataset failed on sample 21: .*StopIteration"),
        Engine(world=World()) as engine,
    ):
        model = net()
        run(engine, *engine.prepare(model, adam(model), DataLoader(Ends(), batch_size=4)))


class ByRank(IterableDataset[Any]):
    """As for DistributedDataParallel: the parts of loader processes within those of ranks."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(dist.get_rank() * parts + part, 32, parts * dist.get_world_size()):
            yield vectors()[number]


class ToldItsRank(IterableDataset[Any]):
    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(self.rank * parts + part, 32, parts * self.ranks):
            yield vectors()[number]


def test_a_stream_that_splits_itself_by_rank_too_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"ByRank splits itself by get_worker_info\(\) and by get_rank\(\)"),
        Engine(world=World()) as engine,
    ):
        model = net()
        engine.prepare(model, adam(model), DataLoader(ByRank(), batch_size=4))


def streams_by_rank(engine: Engine) -> Any:
    model = net()
    data = ToldItsRank(engine.process_index, engine.num_processes)
    return run(engine, *engine.prepare(model, adam(model), DataLoader(data, batch_size=4)))


@pytest.mark.workers
def test_a_stream_that_was_told_its_rank_is_refused() -> None:
    (error, _) = refusals(streams_by_rank, 2, "ddp")
    assert "worker 1 has in its attributes {'rank': 1, 'ranks': 2}, worker 0 has in its" in error


def pairs(engine: Engine) -> str:
    model = net()
    loader = DataLoader(StackDataset(vectors(), vectors()), batch_size=4, shuffle=True)
    prepared, optimizer, loader = engine.prepare(model, adam(model), loader)
    for (x, y), (u, v) in loader:
        engine.backward(F.mse_loss(prepared(x), y) + F.mse_loss(prepared(u), v))
        optimizer.step()
        optimizer.zero_grad()
    return engine.weights_hash()


def two_loaders(engine: Engine) -> None:
    model = net()
    first, second = (DataLoader(vectors(), batch_size=4, shuffle=True) for _ in range(2))
    prepared, optimizer, first, second = engine.prepare(model, adam(model), first, second)
    for (x, y), (u, v) in zip(first, second, strict=True):
        engine.backward(F.mse_loss(prepared(x), y) + F.mse_loss(prepared(u), v))
        optimizer.step()


def test_a_second_loader_beside_the_one_that_trains_is_refused() -> None:
    with pytest.raises(LoopError, match=r"a loader that is for evaluation beside .*StackDataset\(first, second\)"):
        alone(two_loaders)


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "strategy"), JOBS)
def test_what_to_write_for_two_loaders_gives_one_hash(workers: int, strategy: str) -> None:
    assert hashes(run_workers(in_job, workers, habit=pairs, strategy=strategy)) == {alone(pairs)}


def test_an_evaluation_inside_the_body_is_not_taken_for_a_second_loader() -> None:
    with Engine(world=World()) as engine:
        model = net()
        loaders = DataLoader(vectors(), batch_size=4, shuffle=True), DataLoader(vectors(), batch_size=4)
        model, optimizer, loader, held_out = engine.prepare(model, adam(model), *loaders)
        kept = iter(held_out)
        next(kept)  # a batch to look at, and an iterator that stays
        for x, y in loader:
            with torch.no_grad():
                losses = [F.mse_loss(model(u), v) for u, v in held_out]
            assert len(losses) == 8
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("prepared", ["the one that trains", "one for evaluation"])
def test_update_bn_over_a_prepared_loader_is_refused(prepared: str) -> None:
    with Engine(world=World()) as engine:
        model = net()
        loaders = DataLoader(vectors(), batch_size=4, shuffle=True), DataLoader(vectors(), batch_size=4)
        _, _, trains, evaluates = engine.prepare(model, adam(model), *loaders)
        average = AveragedModel(model)
        with pytest.raises(LoopError, match=r"Give it a DataLoader that is not prepared"):
            update_bn(trains if prepared == "the one that trains" else evaluates, average)
        update_bn(DataLoader(vectors(), batch_size=4), average)


# -- optimizers and models ---------------------------------------------------------------------------------------------


def plateau_of_its_own_loss(engine: Engine) -> str:
    model = net()
    optimizer = adam(model)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    loader = DataLoader(vectors(), batch_size=4)
    model, optimizer, loader, scheduler = engine.prepare(model, optimizer, loader, scheduler)
    for _ in range(3):
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step(0.1 ** (engine.process_index * engine.step))  # of worker 0 it gets no better
    return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "strategy"), JOBS)
def test_learning_rates_that_differ_between_workers_are_told_before_an_update(workers: int, strategy: str) -> None:
    results = run_workers(in_job, workers, habit=plateau_of_its_own_loss, strategy=strategy)
    error = "have different learning rates in step"
    assert all(error in str(result.error) for result in results), [result.error for result in results]


def clips_in_a_hook(engine: Engine) -> str:
    model = net()
    optimizer = adam(model)

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.01, 0.01)

    optimizer.register_step_pre_hook(clip)
    return run(engine, *engine.prepare(model, optimizer, DataLoader(vectors(), batch_size=4)))


@pytest.mark.workers
def test_an_optimizers_hook_that_clips_acts_or_is_refused() -> None:
    assert hashes(run_workers(in_job, 2, habit=clips_in_a_hook)) == {alone(clips_in_a_hook)}
    for strategy in ("zero2", "fsdp"):
        for error in refusals(clips_in_a_hook, 2, strategy):
            assert error.startswith("LoopError: the gradient of '0.weight' is not here")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_models_and_optimizers_that_can_not_be_trained_here_are_told(strategy: str) -> None:
    def refused(model: nn.Module, optimizer: Callable[..., Any], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            engine.prepare(model, optimizer(model.parameters()), DataLoader(vectors(), batch_size=4))

    with Engine(world=World(), strategy=strategy) as engine:
        refused(net(), torch.optim.LBFGS, "prepare.. got a LBFGS, whose step.. needs a closure")
    with Engine(world=World(), strategy=strategy) as engine:
        lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
        refused(lazy, torch.optim.AdamW, "the parameter '0.weight' of a lazy module has no shape yet; run the model")


def wraps(engine: Engine) -> str:
    model = nn.parallel.DistributedDataParallel(net())
    return run(engine, *engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4)))


@pytest.mark.workers
def test_a_model_that_torch_sums_gradients_of_is_refused() -> None:
    errors = refusals(wraps, 2, "ddp")
    assert len(errors) == 2
    assert all(
        "a model in a DistributedDataParallel of torch: its gradients would be summed twice" in e for e in errors
    )
