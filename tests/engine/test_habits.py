"""Habits of plain PyTorch loops: one hash on any number of workers, or one line that names the habit."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_module_registration_hooks as module_hooks
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
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


def test_a_model_that_torch_spreads_over_the_gpus_of_one_process_is_refused() -> None:
    """On a host with several each worker would; where there is none it changes nothing but the weights' names."""
    model = nn.DataParallel(net())
    with Engine() as engine:
        told = r"^engine.prepare\(\) got a model in a DataParallel of torch: each worker would run it on all GPUs;"
        with pytest.raises(ConfigError, match=told):
            engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))


# -- weights inside a step ---------------------------------------------------------------------------------------------


def shrinks(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.999)


def shrinks_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.999)  # which no version counter sees


def replaces_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = 0.999 * parameter.data


def clamps(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def edits(engine: Engine, edit: Callable[[nn.Module], None], *, stepped: bool = False, start: int = 0) -> str:
    model = net()
    clamps(model)
    model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=2))
    for _ in range(8):
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if engine.step >= start and (engine.stepped or not stepped):
                edit(model)
    return engine.weights_hash()


@pytest.mark.parametrize("edit", [shrinks, shrinks_data, replaces_data])
def test_weights_that_are_edited_in_every_item_are_refused(edit: Callable[[nn.Module], None]) -> None:
    with pytest.raises(LoopError, match=r"'0.weight' changed inside step 1: .* where engine.stepped is true"):
        alone(partial(edits, edit=edit))


def test_a_lazy_module_that_has_not_run_is_no_copy_of_the_model() -> None:
    lazy = nn.Sequential(nn.LazyLinear(16), nn.Dropout(0.1), nn.Linear(16, 1))
    assert alone(partial(edits, edit=clamps)).startswith("sha256:")
    assert type(lazy) is type(net())


def test_an_edit_in_every_item_that_begins_later_is_found_too() -> None:
    with pytest.raises(LoopError, match=r"changed inside step \d+: "):
        alone(partial(edits, edit=shrinks, start=5))


@pytest.mark.workers
def test_weights_edited_in_every_item_are_refused_where_a_worker_has_several() -> None:
    for workers in (2, 3):
        errors = refusals(partial(edits, edit=shrinks), workers, "ddp")
        assert errors
        assert all("'0.weight' changed inside step 1" in error for error in errors), errors


@pytest.mark.workers
@pytest.mark.parametrize("workers", [2, 3])
def test_a_clamp_in_every_item_and_an_edit_of_each_step_give_one_hash(workers: int) -> None:
    for habit in (partial(edits, edit=clamps), partial(edits, edit=shrinks, stepped=True)):
        assert hashes(run_workers(in_job, workers, habit=habit)) == {alone(habit)}


class Momentum(nn.Module):
    """As MoCo has it: forward moves weights that no optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = net(), net().requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.mul_(0.9).add_(0.1 * query)
        return self.query(x) - self.key(x)


@pytest.mark.parametrize("lanes", [1, 4])
def test_weights_that_forward_moves_are_refused_where_there_are_lanes(lanes: int) -> None:
    with Engine(world=World(), lanes=lanes, accumulate=2, threads=1) as engine:
        model = Momentum()
        optimizer = torch.optim.AdamW(model.query.parameters(), lr=0.02)
        objects = engine.prepare(model, optimizer, DataLoader(vectors(), batch_size=4))
        if lanes == 1:  # then it is as in a loop of one process, that accumulates
            run(engine, *objects)
        else:
            with pytest.raises(LoopError, match=r"'key.0.weight' changed .* what forward itself changes must be a buf"):
                run(engine, *objects)


def averages_weights(engine: Engine, kind: str, *, stepped: bool = False) -> Any:
    model = net()
    copy = deepcopy(model)  # before prepare, as most do
    model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if kind == "AveragedModel" else copy
    for _ in range(2):
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if engine.stepped or not stepped:
                if isinstance(average, AveragedModel):
                    average.update_parameters(model)
                else:
                    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                        mine.data.lerp_(theirs.data, 0.1)
    return [parameter.tolist() for parameter in average.parameters()]


@pytest.mark.workers
@pytest.mark.parametrize("kind", ["AveragedModel", "a copy"])
def test_an_average_that_is_updated_in_every_item_is_refused(kind: str) -> None:
    told = r"of a copy of the model changed inside step 2: .* averages have as many updates as this worker has items"
    with pytest.raises(LoopError, match=told):
        alone(partial(averages_weights, kind=kind))
    for strategy in ("zero2", "fsdp"):
        errors = refusals(partial(averages_weights, kind="AveragedModel"), 2, strategy)
        assert errors
        assert all("of a copy of the model changed inside step 2" in error for error in errors), errors


def averages_late(engine: Engine) -> None:
    """The average is made when it begins, after some epochs."""
    model = net()
    model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
    run(engine, model, optimizer, loader, epochs=5)
    average = AveragedModel(model)
    for _ in range(15):
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)


def test_an_average_that_begins_late_is_found_at_the_next_look() -> None:
    with pytest.raises(LoopError, match=r"of a copy of the model changed inside step 16:"):  # made after step 10
        alone(averages_late)


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "strategy"), JOBS)
def test_an_average_of_each_step_is_the_same_everywhere(workers: int, strategy: str) -> None:
    habit = partial(averages_weights, kind="AveragedModel", stepped=True)
    results = run_workers(in_job, workers, habit=habit, strategy=strategy)
    assert [result.value for result in results] == [alone(habit)] * workers, [result.error for result in results]


# -- torch's own wrappers ----------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.mark.parametrize("around", [lambda model: model, WithLoss])
def test_a_model_put_into_torchs_ddp_after_prepare_is_refused(around: Callable[[nn.Module], nn.Module]) -> None:
    with Engine(world=World()) as engine:
        model = net()
        model, _, _ = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        with pytest.raises(ConfigError, match=r"is put into a DistributedDataParallel of torch: .* Leave that out"):
            nn.parallel.DistributedDataParallel(around(model))
        nn.parallel.DistributedDataParallel(net())  # of a model of the script's own


def test_no_hook_on_modules_is_left_behind() -> None:
    before = dict(module_hooks)
    engine = Engine(world=World())
    assert len(module_hooks) == len(before) + 1
    engine.close()
    assert module_hooks == before


def scales(engine: Engine, *, enabled: bool) -> str:
    model = net()
    model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    for x, y in loader:
        engine.backward(scaler.scale(F.mse_loss(model(x), y)))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return engine.weights_hash()


def test_a_grad_scaler_is_refused_and_one_that_is_off_does_nothing() -> None:
    with pytest.raises(LoopError, match=r"a GradScaler of torch finds no gradient .* Engine\(precision='fp16'\)"):
        alone(partial(scales, enabled=True))
    assert alone(partial(scales, enabled=False)) == alone(
        lambda engine: run(engine, *engine.prepare(model := net(), adam(model), DataLoader(vectors(), batch_size=4)), 1)
    )


# -- what forward keeps ------------------------------------------------------------------------------------------------


class Keeps(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = net(), how
        self.mean, self.past, self.hidden, self.calls = torch.zeros(8), deque[Tensor](maxlen=3), None, 0
        self.state = {"mean": torch.zeros(8)}

    def forward(self, x: Tensor) -> Any:
        return self.net(x - getattr(self, self.how)(x.detach().mean(0)))

    def replaced(self, mean: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * mean
        return self.mean

    def in_place(self, mean: Tensor) -> Tensor:
        self.mean *= 0.9
        self.mean += 0.1 * mean
        return self.mean

    def in_data(self, mean: Tensor) -> Tensor:
        self.mean.data.lerp_(mean, 0.1)
        return self.mean

    def in_a_dict(self, mean: Tensor) -> Tensor:
        self.state["mean"] = self.state["mean"].lerp(mean, 0.1)
        return self.state["mean"]

    def in_a_deque(self, mean: Tensor) -> Tensor:
        self.past.append(mean)
        return torch.stack(list(self.past)).mean(0)

    def carried_on(self, mean: Tensor) -> Tensor:
        before = torch.zeros(8) if self.hidden is None else self.hidden[0]
        self.hidden: Any = (torch.tanh(before + mean), mean)
        return before

    def counted(self, mean: Tensor) -> Tensor:
        self.calls += 1
        return mean / self.calls


KEPT = {
    "replaced": "mean", "in_place": "mean", "in_data": "mean", "in_a_dict": "state", "in_a_deque": "past",
    "carried_on": "hidden",
}  # fmt: skip


@pytest.mark.parametrize("how", KEPT)
def test_a_tensor_that_forward_carries_on_and_is_no_buffer_is_refused(how: str) -> None:
    with Engine(world=World(), lanes=2, threads=1) as engine:
        model = Keeps(how)
        objects = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        with pytest.raises(LoopError, match=rf"reads and changes '{KEPT[how]}', which is no buffer: .*register_buffer"):
            run(engine, *objects)
        assert type(model.mean) is Tensor


def test_with_one_lane_forward_keeps_what_it_likes() -> None:
    with Engine(world=World(), lanes=1, threads=1) as engine:
        model = Keeps("replaced")
        run(engine, *engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4)))


def test_a_number_that_forward_counts_is_told() -> None:
    with Engine(world=World(), lanes=2, threads=1) as engine:
        model = Keeps("counted")
        objects = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        with pytest.warns(UserWarning, match=r"forward of Keeps changes the number 'calls': .* this worker's items"):
            run(engine, *objects)


@pytest.mark.parametrize("way", ["every second batch", "in every item", "by sync_gradients"])
def test_a_loop_that_accumulates_by_hand_is_told(way: str) -> None:
    with Engine(world=World(), lanes=4, threads=1) as engine:
        plain = net()
        model, optimizer, loader = engine.prepare(plain, adam(plain), DataLoader(vectors(), batch_size=4))
        told = r"step\(\) was not called after every engine.backward\(\) of step 1\. .*Engine\(accumulate=k\)"
        with pytest.warns(UserWarning, match=told) if way == "every second batch" else nullcontext():
            for number, (x, y) in enumerate(loader):
                engine.backward(F.mse_loss(model(x), y) / 2)
                every = engine.sync_gradients if way == "by sync_gradients" else way != "every second batch"
                if every or number % 2:
                    optimizer.step()
                    optimizer.zero_grad()


@pytest.mark.parametrize("changed", ["in every item", "in every step"])
def test_a_number_of_a_module_that_the_body_changes_is_told_unless_it_does_so_between_steps(changed: str) -> None:
    with Engine(world=World(), lanes=2, threads=1) as engine:
        plain = nn.Sequential(net(), nn.Dropout(0.5))
        model, optimizer, loader = engine.prepare(plain, adam(plain), DataLoader(vectors(), batch_size=4))
        told = "number '1.p' of Dropout is changed in the loop's body inside a step"
        with pytest.warns(UserWarning, match=told) if changed == "in every item" else nullcontext():
            for x, y in loader:
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if engine.stepped or changed == "in every item":
                    model[1].p *= 0.9


class LeavesThings(nn.Module):
    """For others to look at, or made anew when they don't fit: nothing goes from one item to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.attention, self.penalty, self.scratch = torch.zeros(4, 8), torch.tensor(0.0), torch.zeros(4, 8)
        self.scale, self.table = torch.ones(8, dtype=torch.float64), torch.ones(1)
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        self.attention = torch.softmax(x, -1).detach()
        self.penalty = x.square().mean()
        self.scratch.copy_(x)
        self.scale = self.scale.to(x.dtype)
        if len(self.table) < len(x):
            self.table = torch.ones(len(x))
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.ones(len(x), 1)
        return self.net(self.scratch * self.scale * self.masks[len(x)] * self.table[:, None] + 0.1 * self.attention)


def leaves_things(engine: Engine) -> str:
    model = LeavesThings()
    return run(engine, *engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4, shuffle=True)))


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "strategy"), JOBS)
def test_what_forward_leaves_behind_and_does_not_read_gives_one_hash(workers: int, strategy: str) -> None:
    assert hashes(run_workers(in_job, workers, habit=leaves_things, strategy=strategy)) == {alone(leaves_things)}


class Centered(nn.Module):
    """A loss with a state, as DINO's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1))

    def forward(self, given: Tensor, wanted: Tensor) -> Tensor:
        self.center: Tensor = 0.9 * self.center + 0.1 * given.detach().mean(0)
        return F.mse_loss(given - self.center, wanted)


def centers(engine: Engine, *, prepared: bool) -> str:
    model, loss = net(), Centered()
    model, optimizer, loader, *_ = engine.prepare(
        model, adam(model), DataLoader(vectors(), batch_size=4), *([loss] if prepared else [])
    )
    for x, y in loader:
        engine.backward(loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return engine.weights_hash()


def test_a_loss_with_a_buffer_that_was_not_prepared_is_refused() -> None:
    with pytest.raises(
        LoopError, match=r"a Centered that engine.prepare\(\) was not given changes its buffer 'center'"
    ):
        alone(partial(centers, prepared=False))


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "strategy"), JOBS)
def test_a_loss_with_a_buffer_that_was_prepared_gives_one_hash(workers: int, strategy: str) -> None:
    habit = partial(centers, prepared=True)
    assert hashes(run_workers(in_job, workers, habit=habit, strategy=strategy)) == {alone(habit)}


# -- counting items ----------------------------------------------------------------------------------------------------


def by_break_behind(loader: Any) -> Iterator[Any]:
    for number, batch in enumerate(loader):
        yield batch
        if number == 3:
            break


def by_break_before(loader: Any) -> Iterator[Any]:
    for number, batch in enumerate(loader):
        if number == 4:
            break
        yield batch


def by_next(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    for _ in range(12):
        try:
            yield next(batches)
        except StopIteration:
            batches = iter(loader)
            yield next(batches)


def told_of_items(counts: Callable[[Any], Iterator[Any]], lanes: int, caplog: Any, *, asks: bool = False) -> bool:
    with caplog.at_level("WARNING"), Engine(world=World(), lanes=lanes, threads=1) as engine:
        logging.getLogger("paceline").addHandler(caplog.handler)
        model = net()
        model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        batches = counts(loader)
        for x, y in batches:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            assert not asks or engine.step < 5
        engine.weights_hash()
    logging.getLogger("paceline").removeHandler(caplog.handler)
    return any("the training loop was left early, after step" in record.message for record in caplog.records)


@pytest.mark.parametrize("counts", [by_break_behind, by_break_before, lambda loader: islice(loader, 4), by_next])
@pytest.mark.parametrize(("lanes", "asks", "told"), [(4, False, True), (4, True, False), (1, False, False)])
def test_a_loop_that_ends_by_a_count_of_items_is_told(
    counts: Callable[[Any], Iterator[Any]], lanes: int, asks: bool, told: bool, caplog: Any
) -> None:
    assert told_of_items(counts, lanes, caplog, asks=asks) == told


@pytest.mark.parametrize("what", ["left early", "accumulates"])
def test_clipping_as_accelerate_has_it_is_no_look_at_steps(what: str, caplog: Any) -> None:
    """`clip_grad_norm_(parameters, max_norm)` asks for the step's last item by itself."""
    with caplog.at_level("WARNING"), Engine(world=World(), lanes=4, threads=1) as engine:
        logging.getLogger("paceline").addHandler(caplog.handler)
        model = net()
        model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        told = r"step\(\) was not called after every engine.backward\(\) of step 1\."
        with pytest.warns(UserWarning, match=told) if what == "accumulates" else nullcontext():
            for number, (x, y) in enumerate(loader):
                engine.backward(F.mse_loss(model(x), y))
                engine.clip_grad_norm_(model.parameters(), 1.0)
                if number % 2 or what != "accumulates":
                    optimizer.step()
                    optimizer.zero_grad()
                if number == 3 and what == "left early":
                    break
        engine.weights_hash()
    logging.getLogger("paceline").removeHandler(caplog.handler)
    said = any("the training loop was left early" in record.message for record in caplog.records)
    assert said == (what == "left early")


def test_a_loop_that_counts_where_sync_gradients_is_true_counts_steps(caplog: Any) -> None:
    """As most scripts for Accelerate end: a line about counting items would be a false one."""
    with caplog.at_level("WARNING"), Engine(world=World(), lanes=4, threads=1) as engine:
        logging.getLogger("paceline").addHandler(caplog.handler)
        model = net()
        model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        steps = 0
        for x, y in loader:
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            steps += engine.sync_gradients
            if steps >= 1:
                break
        engine.weights_hash()
    logging.getLogger("paceline").removeHandler(caplog.handler)
    assert not [record for record in caplog.records if "left early" in record.message]


def test_a_whole_epoch_and_an_exception_are_no_count_of_items(caplog: Any) -> None:
    def fails(loader: Any) -> Iterator[Any]:
        for number, batch in enumerate(loader):
            yield batch
            if number == 3:
                raise KeyError(number)

    assert not told_of_items(iter, 4, caplog)
    with pytest.raises(KeyError):
        told_of_items(fails, 4, caplog)
    assert not [record for record in caplog.records if "left early" in record.message]


# -- settings and random numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "told"), [("lr", "learning rate"), ("weight_decay", "weight decay")])
def test_a_setting_of_the_optimizer_that_changes_in_every_item_is_refused(setting: str, told: str) -> None:
    with Engine(world=World(), lanes=4, threads=1) as engine:
        model = net()
        model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        with pytest.raises(LoopError, match=rf"the {told} changed inside step 1 \(from \[0.1\] to \[0.2\]\)"):
            for number, (x, y) in enumerate(loader):
                optimizer.param_groups[0][setting] = (number + 1) / 10
                engine.backward(F.mse_loss(model(x), y))
                optimizer.step()


class Noisy(nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.net, self.random = net(), generator

    def forward(self, x: Tensor) -> Any:
        if isinstance(self.random, torch.Generator):
            return self.net(x + torch.randn(x.shape, generator=self.random))
        return self.net(x + self.random.uniform(0, 1))


@pytest.mark.parametrize("kind", [torch.Generator, np.random.default_rng, np.random.RandomState, random.Random])
def test_a_model_that_draws_from_a_generator_of_its_own_is_refused(kind: Callable[[], Any]) -> None:
    with Engine(world=World(), lanes=2, threads=1) as engine:
        model = Noisy(kind())
        objects = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
        with pytest.raises(LoopError, match=r"forward of Noisy draws from a random generator of its own, 'random'"):
            run(engine, *objects)


class NoisySamples(Dataset[Any]):
    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> Any:
        x, y = vectors()[number]
        return x + self.random.normal(), y


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_dataset_with_a_generator_of_its_own_is_told_of(lanes: int, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(world=World(), lanes=lanes) as engine:
        model = net()
        engine.prepare(model, adam(model), DataLoader(NoisySamples(), batch_size=4))
    told = "the NoisySamples has a random generator of its own, 'random'. What samples draw"
    assert (told in capsys.readouterr().err) == (lanes > 1)


def trains_a_head_by_itself(engine: Engine) -> None:
    model, head = net(), nn.Linear(1, 1)
    own = torch.optim.SGD(head.parameters(), lr=0.1)
    model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
    for x, y in loader:
        engine.backward(F.mse_loss(head(model(x)), y))
        optimizer.step()
        own.step()
        own.zero_grad()


def test_a_module_that_is_trained_beside_the_prepared_ones_is_refused() -> None:
    with pytest.raises(LoopError, match=r"a Linear that engine.prepare\(\) was not given is trained in the loop"):
        alone(trains_a_head_by_itself)


def has_a_teacher(engine: Engine) -> str:
    model = net()
    teacher = deepcopy(model).eval()
    model, optimizer, loader = engine.prepare(model, adam(model), DataLoader(vectors(), batch_size=4))
    for x, y in loader:
        with torch.no_grad():
            wanted = teacher(x)
        given = model(x)
        engine.backward(F.mse_loss(given, y) + F.mse_loss(given, wanted))
        optimizer.step()
        optimizer.zero_grad()
        if engine.stepped:
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.data.lerp_(theirs.data, 0.1)
    return engine.weights_hash()


@pytest.mark.workers
@pytest.mark.parametrize(("workers", "strategy"), JOBS)
def test_a_teacher_that_follows_each_step_gives_one_hash(workers: int, strategy: str) -> None:
    assert hashes(run_workers(in_job, workers, habit=has_a_teacher, strategy=strategy)) == {alone(has_a_teacher)}
