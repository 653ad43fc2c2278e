"""`engine.prepare` takes things in any order, finds the loader that trains, and refuses what can't be together."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from paceline import Engine, World
from paceline.engine.evaluation import EvaluationLoader
from paceline.engine.loop import PreparedLoader
from paceline.errors import ConfigError
from tests.engine.loops import vectors
from tests.workers import run_workers


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return itertools.cycle(vectors(4))


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::7], ids=str)
def test_five_things_in_any_order_come_back_in_that_order(order: tuple[int, ...]) -> None:
    with Engine() as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        data, held_out = vectors(16), vectors(8)
        train, evaluation = DataLoader(data, batch_size=4, shuffle=True), DataLoader(held_out, batch_size=4)
        given = [model, optimizer, train, evaluation, scheduler]
        back = dict(zip(order, engine.prepare(*(given[place] for place in order)), strict=True))
        assert [back[0], back[1], back[4]] == [model, optimizer, scheduler]
        assert isinstance(back[2], PreparedLoader)
        assert isinstance(back[3], EvaluationLoader)
        assert (back[2].dataset, back[3].dataset) == (data, held_out)


@pytest.mark.parametrize(
    ("strategy", "reduction", "told"),
    [
        ("ddp", "exact", "ddp, exact ·"), ("ddp", "fast", "ddp, fast ·"), ("star", "fast", "star, fast ·"),
        ("zero1", "fast", "zero1, exact ·"), ("zero2", "fast", "zero2, exact ·"), ("fsdp", "fast", "fsdp, exact ·"),
    ],
)  # fmt: skip
def test_the_first_line_says_how_gradients_are_really_added(
    strategy: str, reduction: Any, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(strategy=strategy, reduction=reduction) as engine:
        model = nn.Linear(8, 1)
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(vectors(16), batch_size=4))
    assert told in capsys.readouterr().out


def shuffled() -> DataLoader[Any]:
    return DataLoader(vectors(), batch_size=4, shuffle=True)


def plain() -> DataLoader[Any]:
    return DataLoader(vectors(), batch_size=4)


def drawn() -> DataLoader[Any]:
    return DataLoader(vectors(), batch_size=4, sampler=RandomSampler(range(32), replacement=True))


def stream() -> DataLoader[Any]:
    return DataLoader(Endless(), batch_size=4)


@pytest.mark.parametrize(
    ("loaders", "trains"),
    [
        ((plain, plain), 0), ((shuffled, shuffled), 0), ((plain, shuffled), 1), ((plain, drawn, plain), 1),
        ((stream, shuffled), 0), ((plain, stream), 1), ((vectors, vectors), 0), ((plain, vectors), 1),
    ],
)  # fmt: skip
def test_of_several_loaders_the_first_that_is_not_in_plain_order_trains(
    loaders: Any, trains: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(global_batch_size=4) as engine:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, *back = engine.prepare(model, optimizer, *(make() for make in loaders))
    assert [isinstance(loader, PreparedLoader) for loader in back] == [at == trains for at in range(len(loaders))]
    assert f"(trains on loader {trains + 1} of {len(loaders)})" in capsys.readouterr().out


def test_an_optimizer_of_another_model_is_refused() -> None:
    with Engine() as engine:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters())
        with pytest.raises(ConfigError, match="got a AdamW none of whose 2 parameters belongs to a model given to it"):
            engine.prepare(model, optimizer)


def test_an_optimizer_with_a_parameter_of_no_prepared_model_is_refused() -> None:
    with Engine() as engine:
        model, temperature = nn.Linear(4, 1), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
        told = r"got a SGD of whose 3 parameters 1 belong to no model given to it, the first of shape \(3,\)"
        with pytest.raises(ConfigError, match=told):
            engine.prepare(model, optimizer)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    with Engine() as engine:
        model = nn.Linear(4, 1)
        optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
        with pytest.raises(ConfigError, match="got a StepLR of an optimizer that was not given to it"):
            engine.prepare(model, optimizer, scheduler)


def test_what_belongs_together_may_come_in_several_models_and_schedulers() -> None:
    with Engine() as engine:
        first, second = nn.Linear(4, 2), nn.Linear(2, 1)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 3)]
        chained = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[2])
        engine.prepare(first, second, optimizer)
        engine.prepare(chained)


# -- schedules over len(loader) ----------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "OneCycleLR": lambda optimizer, steps: schedules.OneCycleLR(optimizer, 0.1, total_steps=steps),
    "CosineAnnealingLR": schedules.CosineAnnealingLR,
    "LinearLR": lambda optimizer, steps: schedules.LinearLR(optimizer, 1.0, 0.0, steps),
    "PolynomialLR": schedules.PolynomialLR,
    "LambdaLR": lambda optimizer, steps: transformers.get_linear_schedule_with_warmup(optimizer, 10, steps),
    "SequentialLR": lambda optimizer, steps: schedules.SequentialLR(
        optimizer, [schedules.ConstantLR(optimizer), schedules.CosineAnnealingLR(optimizer, steps - 10)], [10]
    ),
}


def prepares(kind: str, engine: Engine, steps: Callable[[Any], int], *, batches: int = 60, after: bool = False) -> None:
    """A schedule over `steps(loader)`, made before the loader is prepared, or after."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(vectors(4 * batches), batch_size=4)
    if after:
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        engine.prepare(SCHEDULES[kind](optimizer, steps(loader)))
    else:
        engine.prepare(model, optimizer, loader, SCHEDULES[kind](optimizer, steps(loader)))


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("after", [False, True])
def test_a_schedule_over_len_of_the_loader_is_refused_where_that_is_not_the_steps(kind: str, after: bool) -> None:
    with Engine(lanes=2, accumulate=2) as engine:
        told = rf"the {kind} is made for 180 steps, 3 × len\(loader\), but .* an epoch has 15 steps.*steps_per_epoch"
        with pytest.raises(ConfigError, match=told):
            prepares(kind, engine, lambda loader: 3 * len(loader), after=after)
    told = r"is made for 90 steps, 3 × len\(loader\) / 2, but"
    with Engine(lanes=2, accumulate=2) as engine, pytest.raises(ConfigError, match=told):
        prepares(kind, engine, lambda loader: 3 * len(loader) // 2, after=after)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("after", [False, True])
def test_a_schedule_over_the_steps_is_taken_before_and_after_prepare(kind: str, after: bool) -> None:
    for job in ({"lanes": 4}, {"lanes": 2, "accumulate": 2}, {"lanes": 1}):
        with Engine(**job) as engine:  # 12 epochs of 15 steps are 3 of 60 batches
            prepares(kind, engine, lambda loader: 12 * engine.steps_per_epoch(loader), after=after)
        with Engine(**job) as engine:
            prepares(kind, engine, lambda loader: 123, after=after)
    with Engine(lanes=1, accumulate=2) as engine:
        prepares(kind, engine, lambda loader: 3 * len(loader) // 2)


def test_a_number_of_steps_that_may_be_chosen_is_only_spoken_of(capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(lanes=2) as engine:
        prepares("OneCycleLR", engine, lambda loader: 20, batches=10)
    assert "the OneCycleLR is made for 20 steps, 2 × len(loader), but" in capsys.readouterr().err
    with Engine(lanes=2) as engine:
        prepares("OneCycleLR", engine, lambda loader: 300, after=True)  # by a loop that never asked for len(loader)
    assert "OneCycleLR" not in capsys.readouterr().out


def test_who_asks_for_the_steps_and_counts_batches_all_the_same_is_told() -> None:
    def in_batches(loader: Any) -> int:
        assert engine.steps_per_epoch(loader) == 16
        return 3 * len(loader)

    with Engine(lanes=4) as engine, pytest.raises(ConfigError, match=r"183 steps, 3 × len\(loader\), but"):
        prepares("CosineAnnealingLR", engine, in_batches, batches=61)


def test_where_it_may_be_as_many_epochs_the_epochs_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def asked(loader: Any) -> int:
        return 12 * engine.steps_per_epoch(loader)  # as many as 3 × len(loader)

    with Engine(lanes=4) as engine:
        prepares("CosineAnnealingLR", engine, asked)
    told = "the CosineAnnealingLR is made for 180 steps, 12 epochs of 15. That is also 3 × len(loader), which counts"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer, batches: schedules.StepLR(optimizer, batches),
        lambda optimizer, batches: schedules.MultiStepLR(optimizer, [7, 2 * batches]),
        lambda optimizer, batches: schedules.CosineAnnealingWarmRestarts(optimizer, batches),
    ],
)
def test_a_schedule_that_changes_after_so_many_batches_is_refused(make: Callable[[Any, int], Any]) -> None:
    with Engine(lanes=2) as engine, pytest.raises(ConfigError, match=r"60 steps|120 steps, 2 × len\(loader\)"):
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(vectors(240), batch_size=4)
        engine.prepare(model, optimizer, loader, make(optimizer, len(loader)))


def divided(world: World) -> tuple[int, int, str]:
    """Steps of an epoch before and after `prepare`, and what is said of a schedule over the sampler's own batches."""
    with Engine(world=world, lanes=4, threads=1) as engine:
        model, data = nn.Linear(8, 1), vectors(800)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = DistributedSampler(data, num_replicas=world.size, rank=world.rank)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        batches, before = len(loader), engine.steps_per_epoch(loader)
        model, optimizer, prepared = engine.prepare(model, optimizer, loader)
        after = engine.steps_per_epoch(prepared)
    with Engine(world=world, lanes=4, threads=1) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            engine.prepare(model, optimizer, loader, schedules.CosineAnnealingLR(optimizer, 5 * batches))
        except ConfigError as error:
            return before, after, str(error)
    return before, after, ""


@pytest.mark.workers
@pytest.mark.parametrize("workers", [2, 3])
def test_a_distributed_sampler_changes_no_steps_and_hides_no_schedule(workers: int) -> None:
    for result in run_workers(divided, workers):
        assert result.error is None, result.traceback
        before, after, told = result.value
        assert (before, after) == (50, 50)
        assert "5 × len(loader), but" in told


def test_the_steps_of_what_has_none_are_refused() -> None:
    with Engine() as engine:
        with pytest.raises(ConfigError, match="takes the loader that trains, prepared or not, not list"):
            engine.steps_per_epoch([1])
        with pytest.raises(ConfigError, match="a stream that has no length"):
            engine.steps_per_epoch(DataLoader(Endless(), batch_size=4))


SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: schedules.StepLR(optimizer, 2, 0.5),
    lambda optimizer: schedules.LambdaLR(optimizer, [float]),
    lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=1),
    lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer), schedules.CosineAnnealingLR(optimizer, 9)], [3]
    ),
    lambda optimizer: transformers.get_cosine_schedule_with_warmup(optimizer, 2, 9),
]


@pytest.mark.filterwarnings("ignore:Detected call of")  # no step has been made
@pytest.mark.parametrize("make", SCHEDULERS)
def test_the_state_of_a_prepared_scheduler_is_saved_and_loaded_by_hand(
    make: Callable[[torch.optim.Optimizer], Any], tmp_path: Path
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = make(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    with Engine(lanes=1) as engine:
        *_, scheduler = engine.prepare(model, optimizer, DataLoader(vectors(8), batch_size=4), make(optimizer))
        assert (type(scheduler).__name__, isinstance(scheduler, type(own))) == (type(own).__name__, True)
        for one in (scheduler, own):
            one.step(*([1.0] if isinstance(one, schedules.ReduceLROnPlateau) else []))
        state, expected = scheduler.state_dict(), own.state_dict()
        assert state.keys() == expected.keys()
        assert state["_last_lr"] == expected["_last_lr"]
        if not isinstance(own, schedules.LambdaLR | schedules.SequentialLR):  # they keep functions, and schedulers
            torch.save(state, tmp_path / "scheduler.pt")
            own.load_state_dict(torch.load(tmp_path / "scheduler.pt", weights_only=True))
            assert own.state_dict() == state
        assert type(copy.copy(scheduler)) is type(own)
    assert type(scheduler) is type(own)


def scheduled(world: World, *, asks: bool, steps: int) -> str:
    """What worker 0 prints about a schedule, whether the script has asked how many workers there are or not."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), Engine(world=world, lanes=2) as engine:
        if asks:
            steps *= engine.num_processes
        prepares("LambdaLR", engine, lambda loader: steps)
    return printed.getvalue()


@pytest.mark.workers
def test_a_schedule_over_steps_times_processes_is_spoken_of() -> None:
    for asks, steps, told in ((True, 123, True), (False, 246, False)):
        first, *_ = run_workers(scheduled, 2, asks=asks, steps=steps)
        assert first.error is None, first.traceback
        assert ("over 246 steps" in first.value and "if that is 123 × engine.num_processes" in first.value) == told


@pytest.mark.parametrize(("seed", "told"), [(42, True), (7, False), (2**40, False)])
def test_a_seed_that_was_set_before_the_engine_is_spoken_of(
    seed: int, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(seed)
    with Engine(seed=7):
        drawn = torch.randn(3)
    torch.manual_seed(seed + 1)
    with Engine(seed=7):
        assert torch.equal(torch.randn(3), drawn)  # it has no effect
    assert (f"torch's seed {seed}, set before Engine(), gives way to Engine(seed=7)" in capsys.readouterr().out) == told
