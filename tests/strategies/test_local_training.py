"""local_sgd and diloco: lanes that train apart are so many plain loops of torch, whoever holds them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Engine, World
from paceline.errors import ConfigError, LoopError
from paceline.strategies.local.diloco import DilocoConfig
from paceline.strategies.local.lane_optimizer import fragments_of
from paceline.strategies.local.local_sgd import LocalSgdConfig
from tests.workers import run_workers

Items = list[list[tuple[int, Tensor, Tensor]]]  # by step: lane, x, y


class CountsInItsGroups(torch.optim.SGD):
    """Keeps its count of steps in the settings of its groups, as Prodigy and schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["made"] = group.get("made", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(group["made"])
        return super().step(closure)


class CountsInAnAttribute(torch.optim.SGD):
    made = 0

    def step(self, closure: Any = None) -> Any:
        self.made += 1
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(self.made)
        return super().step(closure)


OPTIMIZERS: Mapping[str, Any] = MappingProxyType(
    {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),  # has a state before its first step
        "counts": lambda p: CountsInItsGroups(p, lr=0.1),
        "counts in an attribute": lambda p: CountsInAnAttribute(p, lr=0.1),
    }
)


def build(buffers: bool = False) -> nn.Module:
    torch.manual_seed(7)
    norm = [nn.BatchNorm1d(12)] if buffers else []
    return nn.Sequential(nn.Linear(8, 12), *norm, nn.Tanh(), nn.Linear(12, 3))


def samples(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 8, generator=drawn), torch.randint(0, 3, (count,), generator=drawn))


def trains(
    world: World,
    *,
    strategy: Any,
    optimizer: str = "momentum",
    count: int = 58,
    epochs: int = 2,
    clip: float | None = None,
    buffers: bool = False,
    schedule: bool = False,
    boundary_every: int = 0,
    until: int | None = None,
    bad: tuple[int, int] | None = None,
    save: str | None = None,
    resume: str | None = None,
    accept: tuple[str, ...] = (),
    **job: Any,
) -> dict[str, Any]:
    """The loop of all tests here: its hash, its weights, and which items it saw."""
    with Engine(world=world, **{"lanes": 4, "device": "cpu", "strategy": strategy} | job) as engine:
        model = build(buffers)
        made = OPTIMIZERS[optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(made, 2, gamma=0.8)
        loader = DataLoader(samples(count), batch_size=3, shuffle=True)
        model, made, loader, scheduler = engine.prepare(model, made, loader, scheduler)
        if resume is not None:
            engine.load_state(resume, accept=accept)
        items: Items = []
        seen: list[str] = []
        while loader.epoch < epochs and (until is None or engine.step < until):
            for x, y in loader:
                assert engine._objects.step is not None
                item = engine._objects.step.now.item
                assert item is not None
                items += [[] for _ in range(engine.step + 1 - len(items))]
                items[engine.step].append((item.lane, x, y))
                loss = F.cross_entropy(model(x), y)
                engine.backward(loss * math.nan if bad == (engine.step, item.lane) else loss)
                if clip is not None:
                    engine.clip_grad_norm_(clip)
                made.step()
                if schedule:
                    scheduler.step()
                if engine.stepped and boundary_every and engine.step % boundary_every == 0:
                    seen.append(engine.weights_hash())
                if engine.stepped and engine.step == until:
                    break
        if save is not None:
            engine.save_state(save)
        weights = {name: value.clone() for name, value in engine.state_dict().items()}
        return {"hash": engine.weights_hash(), "weights": weights, "items": items, "seen": seen}


def trains_to_a_hash(world: World, **options: Any) -> dict[str, Any]:
    """Without tensors, which don't travel between processes here."""
    found = trains(world, **options)
    return {"hash": found["hash"], "seen": found["seen"]}


def run(workers: int, **options: Any) -> list[dict[str, Any]]:
    results = run_workers(trains_to_a_hash, workers, **options)
    for result in results:
        assert result.error is None, f"{result.error}\n{result.traceback}"
    return [result.value for result in results]


def one_hash(workers: int, **options: Any) -> str:
    (found,) = {value["hash"] for value in run(workers, **options)}
    return str(found)


# -- against plain torch -----------------------------------------------------------------------------------------------


def by_hand(
    items: Items, lanes: int, windows: Any, outer: Any, *, optimizer: str, clip: float | None, schedule: bool
) -> nn.Module:
    """So many models in one process: each trains on its lane's micro-batches; then an optimizer on what they moved.

    With fragments it comes in one part of the parameters at a time, between the gradients of a step and its updates.
    """
    model = build()
    outer_optimizer = outer(model.parameters())
    copies = [build() for _ in range(lanes)]
    made = [OPTIMIZERS[optimizer](copy.parameters()) for copy in copies]
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.8) for one in made]
    every, fragments = windows.every, getattr(windows, "fragments", 1)
    weights = [[0.0] * lanes for _ in range(fragments)]
    of = fragments_of(list(model.parameters()), fragments)

    def meet(fragment: int) -> None:
        moving = weights[fragment]
        if not sum(moving):
            return
        named = [one for one, number in zip(model.named_parameters(), of, strict=True) if number == fragment]
        for name, parameter in named:
            there = [copy.get_parameter(name) for copy in copies]
            moved = [weight * (parameter - one) for one, weight in zip(there, moving, strict=True)]
            parameter.grad = torch.stack(moved).sum(0).detach() / sum(moving)
        outer_optimizer.step()
        for name, parameter in named:
            parameter.grad = None
            for copy in copies:
                copy.get_parameter(name).data.copy_(parameter.data)
        weights[fragment] = [0.0] * lanes

    due = {fragment * every // fragments: fragment for fragment in range(fragments)}
    for step, of_step in enumerate(items):
        totals: dict[int, int] = {}
        for lane in sorted({lane for lane, _, _ in of_step}):
            batches = [(x, y) for number, x, y in of_step if number == lane]
            totals[lane] = sum(len(y) for _, y in batches)
            for x, y in batches:
                (F.cross_entropy(copies[lane](x), y) * len(y) / totals[lane]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(copies[lane].parameters(), clip)
        if fragments > 1 and step % every in due:
            meet(due[step % every])
        for lane, total in totals.items():
            made[lane].step()
            made[lane].zero_grad()
            for moving in weights:
                moving[lane] += total
        if schedule:
            for scheduler in schedules:
                scheduler.step()
        if fragments == 1 and (step + 1) % every == 0:
            meet(0)
    for fragment in range(fragments):
        meet(fragment)
    return model


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("seed", range(12))
def test_it_is_a_model_for_each_lane_and_an_optimizer_on_what_they_moved(seed: int) -> None:
    drawn = random.Random(seed)
    every, lanes = drawn.choice([1, 2, 3, 5]), drawn.choice([2, 3, 4])
    how: dict[str, Any] = {"optimizer": list(OPTIMIZERS)[seed % len(OPTIMIZERS)], "clip": drawn.choice([None, 0.1])}
    how["schedule"] = "counts" not in how["optimizer"] and drawn.random() < 0.5
    if seed % 2:
        fragments = drawn.randint(1, every) if seed > 4 else 1
        config: Any = DilocoConfig(every=every, outer_lr=0.6, outer_momentum=0.8, fragments=fragments)
    else:
        config = LocalSgdConfig(every)

    def outer(parameters: Any) -> torch.optim.Optimizer:
        if isinstance(config, LocalSgdConfig):
            return torch.optim.SGD(parameters, lr=1.0)
        return torch.optim.SGD(parameters, lr=0.6, momentum=0.8, nesterov=True)

    job = {"lanes": lanes, "accumulate": drawn.choice([1, 2]), "count": drawn.randint(40, 60)}
    found = trains(World(), strategy=config, **how, **job)
    expected = by_hand(found["items"], lanes, config, outer, **how)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-6)


def test_a_mean_after_every_step_of_plain_sgd_is_ddp_but_for_rounding() -> None:
    """Also where the last step has fewer lanes than there are: they count by their samples."""
    found, ddp = (trains(World(), strategy=s, optimizer="sgd") for s in (LocalSgdConfig(every=1), "ddp"))
    for name, value in ddp["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.workers
@pytest.mark.parametrize("optimizer", ["adamw", "adagrad", "counts", "counts in an attribute"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_first_steps_are_those_of_ddp_to_the_last_bit(optimizer: str, accumulate: int) -> None:
    """Clipped, with buffers, a scheduler and a last step of fewer lanes; then they are other ones."""
    job: dict[str, Any] = {"optimizer": optimizer, "accumulate": accumulate, "buffers": True, "clip": 0.2}
    job |= {"schedule": True, "boundary_every": 1}
    (ddp,) = run(1, strategy="ddp", **job)
    steps = len(ddp["seen"])
    for config in (LocalSgdConfig(every=2, start_after=steps), DilocoConfig(every=2, start_after=steps)):
        for workers in (1, 3, 4):
            assert {(*each["seen"], each["hash"]) for each in run(workers, strategy=config, **job)} == {
                (*ddp["seen"], ddp["hash"])
            }
    (some,) = run(1, strategy=DilocoConfig(every=2, start_after=2), **job)
    same = [mine == theirs for mine, theirs in zip(some["seen"], ddp["seen"], strict=True)]
    assert same[:4] == [True, True, False, False]


# -- any number of workers ---------------------------------------------------------------------------------------------

WAYS = [
    LocalSgdConfig(every=3),
    DilocoConfig(every=4),
    DilocoConfig(every=3, fragments=2, outer_gradients="int8"),
    DilocoConfig(every=2, start_after=2),
    DilocoConfig(every=4, start_after=3, fragments=2),
]
NAMES = ["local_sgd", "diloco", "fragments", "together", "together, then fragments"]


@pytest.mark.workers
@pytest.mark.parametrize("optimizer", ["adagrad", "counts", "counts in an attribute"])
@pytest.mark.parametrize("strategy", WAYS, ids=NAMES)
def test_what_an_optimizer_keeps_anywhere_is_the_lanes(strategy: Any, optimizer: str) -> None:
    job: dict[str, Any] = {"strategy": strategy, "optimizer": optimizer, "schedule": True, "clip": 0.2}
    assert {one_hash(workers, **job) for workers in (1, 2, 3, 4)} == {one_hash(1, **job)}


@pytest.mark.workers
@pytest.mark.parametrize("strategy", WAYS, ids=NAMES)
def test_a_loss_that_is_not_finite_takes_its_lane_out_alone(strategy: Any) -> None:
    """In a step of a window, and in its last one."""
    job: dict[str, Any] = {"strategy": strategy, "on_nonfinite": "skip", "buffers": True}
    clean = one_hash(1, **job)
    for bad in ((1, 2), (2, 0), (3, 1)):
        found = {one_hash(workers, bad=bad, **job) for workers in (1, 3)}
        assert len(found) == 1
        assert found != {clean}


@pytest.mark.workers
@pytest.mark.parametrize("strategy", WAYS, ids=NAMES)
def test_a_boundary_inside_a_window_changes_nothing_and_shows_what_an_outer_step_would_give(strategy: Any) -> None:
    job: dict[str, Any] = {"strategy": strategy, "buffers": True}
    (alone,) = run(1, boundary_every=1, **job)
    for value in run(3, boundary_every=1, **job):
        assert value["seen"] == alone["seen"]
    assert alone["hash"] == one_hash(2, **job), "nothing was looked at on the way"
    for until in (1, 2, 5):  # a run that ends there
        assert one_hash(2, until=until, **job) == alone["seen"][until - 1]


@pytest.mark.workers
@pytest.mark.parametrize("until", [3, 4, 5])
@pytest.mark.parametrize("strategy", WAYS, ids=NAMES)
def test_a_state_saved_anywhere_goes_on_with_other_workers_to_the_same_bits(
    strategy: Any, until: int, tmp_path: Path
) -> None:
    job: dict[str, Any] = {"strategy": strategy, "buffers": True, "optimizer": "counts", "schedule": True}
    state = str(tmp_path / "state")
    run(3, until=until, save=state, **job)
    assert one_hash(2, resume=state, **job) == one_hash(4, **job)


@pytest.mark.workers
def test_ddp_goes_on_from_a_state_of_lanes_and_lanes_from_one_of_ddp_where_that_is_accepted(tmp_path: Path) -> None:
    state, job = str(tmp_path / "state"), {"optimizer": "adamw", "accept": ("updates",)}
    run(2, strategy=DilocoConfig(every=4), until=3, save=state, optimizer="adamw")
    first, second = (run_workers(trains_to_a_hash, 1, strategy=s, resume=state) for s in ("ddp", DilocoConfig(every=5)))
    for result in (*first, *second):
        assert "updates was 'diloco every=4', is '" in str(result.error), result.traceback
    assert {one_hash(workers, strategy="ddp", resume=state, **job) for workers in (1, 2)} == {
        one_hash(3, strategy="ddp", resume=state, **job)
    }
    plain = str(tmp_path / "plain")
    run(2, strategy="ddp", until=3, save=plain, optimizer="adamw")
    assert len({one_hash(n, strategy=DilocoConfig(every=4), resume=plain, **job) for n in (1, 2, 3)}) == 1


# -- bytes -------------------------------------------------------------------------------------------------------------


def sends(world: World, *, strategy: Any, steps: int) -> int:
    with Engine(world=world, lanes=3, strategy=strategy, backend="gloo", device="cpu") as engine:
        model = nn.Linear(256, 256)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(torch.randn(3 * steps, 256)), batch_size=1)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        before = engine._group.comm.traffic
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
        assert engine.step == steps
        return (engine._group.comm.traffic - before).sent_bytes


@pytest.mark.workers
def test_one_outer_step_in_fifty_moves_a_fiftieth_of_what_ddp_moves() -> None:
    ddp, diloco = (
        sum(result.value for result in run_workers(sends, 3, strategy=strategy, steps=50))
        for strategy in ("ddp", DilocoConfig(every=50))
    )
    assert ddp == 50 * 2 * 2 * 4 * (256 * 256 + 256), "2 (N-1)/N · 4 bytes by each of three workers in each step"
    assert ddp == 50 * diloco


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LocalSgdConfig(every=0), r"LocalSgdConfig: every=0: lanes meet every so many steps, so"),
        (lambda: LocalSgdConfig(every=-1), r"LocalSgdConfig: every=-1: "),
        (lambda: DilocoConfig(every=2.5), r"DilocoConfig: every=2.5: expected a whole number of at least 1, got"),  # type: ignore[arg-type]
        (lambda: DilocoConfig(outer_lr=0), r"DilocoConfig: outer_lr=0: it is a number above 0"),
        (lambda: DilocoConfig(outer_momentum=1.0), r"DilocoConfig: outer_momentum=1.0: it is a number of at least 0"),
        (lambda: DilocoConfig(fragments=0), r"DilocoConfig: fragments=0: it is at least 1"),
        (lambda: DilocoConfig(every=3, fragments=4), r"DilocoConfig: fragments=4 with every=3: a step"),
        (lambda: DilocoConfig(outer_gradients="int4"), r"DilocoConfig: outer_gradients='int4' is not known; choose"),  # type: ignore[arg-type]
        (lambda: DilocoConfig(outer_momentum=0), r"DilocoConfig: nesterov=True needs an outer_momentum above 0"),
        (lambda: DilocoConfig(start_after=-1), r"DilocoConfig: start_after=-1: a number of steps"),
        (lambda: LocalSgdConfig(start_after=True), r"LocalSgdConfig: start_after=True: expected a whole number"),
        (lambda: DilocoConfig(nesterov=1), r"DilocoConfig: nesterov=1: expected True or False, got a int"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_windows_that_make_no_sense_are_refused_in_one_line(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        make()


def test_low_precision_compression_and_a_second_opinion_are_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="compression with strategy='diloco', which has none"):
        Engine(world=World(), strategy="diloco", compression="int8")
    with pytest.raises(ConfigError, match="local_sgd"):
        Engine(world=World(), strategy="local_sgd", precision="bf16")
    with (
        Engine(world=World(), lanes=2, strategy="diloco", second_opinion=2) as engine,
        pytest.raises(ConfigError, match=r"Engine\(second_opinion=…\) with strategy='diloco'"),
    ):
        model = build()
        engine.prepare(model, torch.optim.SGD(model.parameters()), DataLoader(samples(12), batch_size=3))


def test_two_optimizers_of_one_parameter_are_refused() -> None:
    with Engine(world=World(), lanes=2, strategy="local_sgd") as engine:
        model = build()
        made = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
        with pytest.raises(ConfigError, match="two optimizers"):
            engine.prepare(model, *made, DataLoader(samples(12), batch_size=3))


def test_weights_may_be_changed_between_windows_and_not_inside_one() -> None:
    with Engine(world=World(), lanes=2, strategy=LocalSgdConfig(every=2)) as engine:
        model = build()
        model, optimizer, loader = engine.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(48), batch_size=3)
        )

        def train(change_after: int) -> None:
            for x, y in loader:
                engine.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                if engine.stepped and engine.step == change_after:
                    with torch.no_grad():
                        model[0].weight.mul_(0.5)

        train(change_after=4)
        with pytest.raises(LoopError, match=r"weights of shape \(12, 8\) were changed between two steps"):
            train(change_after=11)


def test_gradients_and_states_of_lanes_say_where_they_are() -> None:
    with Engine(world=World(), lanes=2, strategy="diloco") as engine:
        model = build()
        model, optimizer, loader = engine.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(6), batch_size=3)
        )
        for x, y in loader:
            engine.backward(F.cross_entropy(model(x), y))
            if model[0].weight.grad is not None:
                with pytest.raises(LoopError, match=r"under strategy='diloco' every lane has a gradient of its own"):
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with pytest.raises(LoopError, match=r"optimizer.state_dict\(\) under strategy='diloco': each lane has a state"):
            optimizer.state_dict()


def test_a_state_that_the_script_loads_is_that_of_every_lane() -> None:
    """Between two steps; as torch does it, into the optimizer."""

    def final(momentum: float, *, load: bool) -> dict[str, Tensor]:
        with Engine(world=World(), lanes=2, strategy=LocalSgdConfig(every=1)) as engine:
            model = build()
            made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
            empty = made.state_dict()
            model, made, loader = engine.prepare(model, made, DataLoader(samples(24), batch_size=3))
            for x, y in loader:
                engine.backward(F.cross_entropy(model(x), y))
                made.step()
                if engine.stepped and load:
                    made.load_state_dict(empty)
            return dict(engine.state_dict())

    plain, moved, forgotten = final(0.0, load=False), final(0.9, load=False), final(0.9, load=True)
    assert not torch.allclose(moved["0.weight"], plain["0.weight"])
    for name, value in plain.items():
        assert torch.equal(forgotten[name], value), "without its history momentum is the gradient"


# -- int8 --------------------------------------------------------------------------------------------------------------


@pytest.mark.workers
@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_sums_in_int8_have_one_hash_with_any_workers_and_buckets(backend: str) -> None:
    job: dict[str, Any] = {"strategy": DilocoConfig(every=2, outer_gradients="int8"), "optimizer": "adamw"}
    alone = one_hash(1, **job)
    assert {one_hash(workers, backend=backend, bucket_mib=0.0005, **job) for workers in (2, 3, 4)} == {alone}
    assert alone != one_hash(1, strategy=DilocoConfig(every=2), optimizer="adamw")


@pytest.mark.parametrize("seed", range(5))
def test_fragments_are_neighbours_and_each_parameter_is_in_one(seed: int) -> None:
    drawn = random.Random(seed)
    parameters = [nn.Parameter(torch.zeros(drawn.randint(1, 50))) for _ in range(drawn.randint(1, 30))]
    for fragments in (1, 2, 3, 7):
        found = fragments_of(parameters, fragments)
        assert found == sorted(found)
        assert set(found) <= set(range(fragments))
    sizes = [sum(p.numel() for p, number in zip(parameters, fragments_of(parameters, 2), strict=True) if number == one)
             for one in range(2)]  # fmt: skip
    assert abs(sizes[0] - sizes[1]) <= max(p.numel() for p in parameters)


@pytest.mark.workers
def test_in_int8_fifty_steps_move_a_hundred_and_ninety_times_less_than_ddp() -> None:
    ddp, diloco = (
        sum(result.value for result in run_workers(sends, 3, strategy=strategy, steps=50))
        for strategy in ("ddp", DilocoConfig(every=50, outer_gradients="int8"))
    )
    assert ddp > 190 * diloco, (ddp, diloco, ddp / diloco)
