"""The first difference of two runs: what comes first in a step is what is told, for random records."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.verify import comparison as c
from paceline.verify.comparison import Difference, differences_in, distance, first_difference
from paceline.verify.record import After, Item, Run, Setting, Step
from paceline.verify.recorder import sketch

NAMES = ["0.bias", "0.weight", "1.weight"]
ORDER = [c.WRITTEN, c.DATA, c.RANDOM, c.LOSS, c.SHARE, c.LANE_GRADIENT, c.RATES, c.GRADIENT, c.BUFFER, c.WEIGHT]


def made_run(draw: random.Random, workers: int, lanes: int, steps: int, *, whole: bool = True) -> Run:
    """What a job writes whose bits don't depend on its workers."""
    about = {"reduction": "exact", "lanes": lanes, "strategy": "ddp", "whole": whole, "facts": {"updates": "x"}}
    run = Run(Setting(workers), about)
    text = lambda *parts: "-".join(map(str, parts))  # noqa: E731
    run.start = {worker: {name: text("start", name) for name in NAMES} for worker in range(workers)}
    for step in range(1, steps + 1):
        items = {
            (lane, micro, 0): Item(
                lane * workers // lanes, 0, (lane, micro),
                {"[0]": text(step, lane, micro)}, {"torch": text(step, lane)},
                step + lane / 7, 4.0, {name: text(step, lane, name) for name in NAMES},
            )
            for lane in range(lanes)
            for micro in range(2)
        }  # fmt: skip
        after = After((0.1,), {name: text("g", step, name) for name in NAMES}, {"mean": text("b", step)},
                      {name: text("w", step, name) for name in NAMES})  # fmt: skip
        run.steps[step] = Step({}, items, dict.fromkeys(range(workers), after))
    return run


def _item(field: str, changed: Callable[[Any], Any]) -> Callable[[Step, random.Random, int], None]:
    def plant(step: Step, draw: random.Random, workers: int) -> None:
        place = draw.choice(sorted(step.items))
        step.items[place] = replace(step.items[place], **{field: changed(getattr(step.items[place], field))})

    return plant


def _after(field: str, changed: Callable[[Any], Any]) -> Callable[[Step, random.Random, int], None]:
    def plant(step: Step, draw: random.Random, workers: int) -> None:
        worker = draw.randrange(workers)
        step.after[worker] = replace(step.after[worker], **{field: changed(getattr(step.after[worker], field))})

    return plant


def _other(values: dict[str, str]) -> dict[str, str]:
    return {**values, next(iter(values)): "other"}


def _write(step: Step, draw: random.Random, workers: int) -> None:
    step.entry[draw.randrange(workers)] = {"0.weight": "other"}


PLANTED: dict[str, Callable[[Step, random.Random, int], None]] = {
    c.WRITTEN: _write,
    c.DATA: _item("data", _other),
    c.RANDOM: _item("random", _other),
    c.LOSS: _item("loss", lambda loss: loss + 2**-40),
    c.SHARE: _item("weight", lambda weight: weight / 3),
    c.LANE_GRADIENT: _item("gradients", _other),
    c.RATES: _after("rates", lambda rates: (rates[0] / 2,)),
    c.GRADIENT: _after("gradients", _other),
    c.BUFFER: _after("buffers", _other),
    c.WEIGHT: _after("weights", _other),
}


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_any_number_of_workers_that_agree_are_alike(seed: int) -> None:
    draw = random.Random(seed)
    lanes, steps = draw.randint(3, 6), draw.randint(1, 5)
    one, many = made_run(draw, 1, lanes, steps), made_run(draw, draw.randint(2, 3), lanes, steps)
    assert first_difference(one, many, 1e-4) is None


@pytest.mark.parametrize("seed", range(60))
def test_the_first_of_several_differences_is_told(seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.randint(2, 4)
    lanes, steps = draw.randint(workers, 6), draw.randint(2, 5)
    one, many = made_run(draw, 1, lanes, steps), copy.deepcopy(made_run(draw, workers, lanes, steps))
    step, kinds = draw.randint(1, steps), draw.sample(ORDER, draw.randint(1, 4))
    for kind in kinds:
        PLANTED[kind](many.steps[step], draw, workers)
    for later in range(step + 1, steps + 1):
        PLANTED[draw.choice(ORDER)](many.steps[later], draw, workers)
    found = first_difference(one, many, 1e-4)
    assert found is not None
    assert (found.step, found.kind) == (step, min(kinds, key=ORDER.index))
    told = list(dict.fromkeys(one.kind for one in differences_in(step, one, many, 1e-4)))
    assert told == sorted(kinds, key=ORDER.index)


INSIDE = (c.WRITTEN, c.RATES, c.GRADIENT, c.BUFFER, c.WEIGHT)  # an item is of one worker: it has nobody to differ from


@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.parametrize("seed", range(8))
def test_a_reference_whose_workers_are_unlike_is_told_with_its_own_worker(kind: str, seed: int) -> None:
    """Worker 0 too: what it has is no measure of the others."""
    draw = random.Random(seed)
    workers = draw.randint(2, 4)
    reference, other = (copy.deepcopy(made_run(draw, n, 4, 3)) for n in (workers, draw.randint(1, 3)))
    before = copy.deepcopy(reference.steps[2])
    PLANTED[kind](reference.steps[2], draw, workers)
    changed = [
        worker
        for worker in range(workers)
        if (reference.steps[2].after[worker], reference.steps[2].entry.get(worker))
        != (before.after[worker], before.entry.get(worker))
    ]
    found = first_difference(reference, other, 1e-4)
    assert found is not None
    assert (found.kind, found.step, found.inside, found.of_reference) == (kind, 2, True, True)
    assert list(found.workers) == changed
    beside = first_difference(reference, other, 1e-4, within_reference=False)
    assert beside is None or changed == [0] or kind == c.WRITTEN


def test_what_differs_before_the_reference_drifts_apart_is_told_first() -> None:
    reference, other = (copy.deepcopy(made_run(random.Random(0), n, 4, 3)) for n in (2, 3))
    PLANTED[c.WEIGHT](reference.steps[3], random.Random(0), 2)
    PLANTED[c.LOSS](other.steps[3], random.Random(0), 3)
    found = first_difference(reference, other, 1e-4)
    assert found is not None
    assert (found.kind, found.of_reference) == (c.LOSS, False)


def test_first_weights_that_the_reference_s_workers_have_apart_are_its_own() -> None:
    reference, other = (made_run(random.Random(0), n, 4, 2) for n in (3, 1))
    reference.start[2] = {**reference.start[2], "1.weight": "other"}
    assert first_difference(reference, other, 1e-4) == Difference(
        c.START, 0, "1.weight", workers=(2,), inside=True, of_reference=True
    )


def test_a_reference_that_drifts_within_the_tolerance_is_left_alone_and_beyond_it_is_not() -> None:
    tensor = torch.randn(64, 8)
    for factor, told in ((1 + 1e-7, False), (1.01, True)):
        runs = [copy.deepcopy(made_run(random.Random(0), workers, 3, 2)) for workers in (3, 1)]
        for run in runs:
            run.about = {**run.about, "reduction": "fast"}
            for worker, after in run.steps[2].after.items():
                value = tensor * factor if run is runs[0] and worker == 1 else tensor
                weights = {**after.weights, "0.weight": str(float(value.sum()))}
                sketches = {"0.weight": tuple(sketch("0.weight", value))}
                run.steps[2].after[worker] = replace(after, weights=weights, sketches=sketches)
        found = first_difference(runs[0], runs[1], 1e-4)
        assert (found == Difference(c.WEIGHT, 2, "0.weight", workers=(1,), inside=True, of_reference=True)) is told


def test_a_weight_that_all_workers_write_alike_is_no_difference() -> None:
    one, two = (made_run(random.Random(0), workers, 3, 2) for workers in (1, 2))
    for run in (one, two):
        run.steps[2].entry = {worker: {"0.weight": "new"} for worker in range(run.workers)}
    assert first_difference(one, two, 1e-4) is None


def test_a_weight_that_one_worker_writes_is_told_with_the_worker() -> None:
    one, two = (made_run(random.Random(0), workers, 3, 3) for workers in (1, 2))
    one.steps[2].entry[0] = two.steps[2].entry[0] = {"0.weight": "new"}
    found = first_difference(one, two, 1e-4)
    assert found == Difference(c.WRITTEN, 2, "0.weight", workers=(0,), inside=True)


def test_shards_of_which_one_was_written_are_compared_with_what_the_reference_wrote() -> None:
    one, two = made_run(random.Random(0), 1, 3, 2), made_run(random.Random(0), 2, 3, 2, whole=False)
    one.steps[2].entry[0] = {"0.weight": "new"}
    two.steps[2].entry[1] = {"0.weight": "a part of it"}
    assert first_difference(one, two, 1e-4) is None
    one.steps[2].entry.clear()
    assert first_difference(one, two, 1e-4) == Difference(c.WRITTEN, 2, "0.weight", workers=(1,))


def test_steps_lanes_and_first_weights_are_compared() -> None:
    run = made_run(random.Random(0), 1, 3, 4)
    shorter = made_run(random.Random(0), 2, 3, 2)
    assert first_difference(run, shorter, 1e-4) == Difference(c.STEPS, 3, values=(4, 2))
    shorter.error = "it failed"  # which says it
    assert first_difference(run, shorter, 1e-4) is None
    other = made_run(random.Random(0), 2, 4, 4)
    assert first_difference(run, other, 1e-4) == Difference(c.LANES, 0, values=(3, 4))
    other = made_run(random.Random(0), 2, 3, 4)
    other.start[1] = {**other.start[1], "1.weight": "other"}
    assert first_difference(run, other, 1e-4) == Difference(c.START, 0, "1.weight", workers=(1,))


def test_an_item_of_one_run_alone_is_told() -> None:
    run, other = (made_run(random.Random(0), workers, 3, 2) for workers in (1, 2))
    del other.steps[1].items[2, 1, 0]
    assert first_difference(run, other, 1e-4) == Difference(c.ITEMS, 1, place=(2, 1, 0), values=(True, False))


def test_a_loss_that_is_not_a_number_is_like_itself() -> None:
    run, other = (made_run(random.Random(0), workers, 3, 1) for workers in (1, 2))
    for one in (run, other):
        one.steps[1].items[0, 0, 0] = replace(one.steps[1].items[0, 0, 0], loss=float("nan"))
    assert first_difference(run, other, 1e-4) is None


# -- values within a tolerance -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_sketches_are_about_as_far_apart_as_tensors_are(seed: int) -> None:
    torch.manual_seed(seed)
    tensor = torch.randn(200, 37)
    for scale in (1e-6, 1e-3, 1e-1):
        other = tensor + scale * torch.randn_like(tensor)
        true = float((other - tensor).norm() / tensor.norm())
        found = distance(tuple(sketch("0.weight", tensor)), tuple(sketch("0.weight", other)))
        assert 0.4 * true < found < 1.8 * true, (true, found)
    assert distance(tuple(sketch("x", tensor)), tuple(sketch("x", tensor.clone()))) == 0


def test_small_differences_are_left_to_a_run_whose_order_of_sums_is_not_promised() -> None:
    tensor = torch.randn(64, 8)
    runs = [made_run(random.Random(0), workers, 3, 2) for workers in (1, 2)]

    def give(run: Run, value: torch.Tensor, fingerprint: str) -> None:
        run.about = {**run.about, "reduction": "fast"}
        for worker, after in run.steps[2].after.items():
            new = {"weights": {**after.weights, "0.weight": fingerprint}, "gradients": {"0.weight": fingerprint}}
            run.steps[2].after[worker] = replace(after, sketches={"0.weight": tuple(sketch("0.weight", value))}, **new)

    give(runs[0], tensor, "one")
    give(runs[1], tensor * (1 + 1e-7), "another")
    assert first_difference(runs[0], runs[1], 1e-4) is None
    give(runs[1], tensor * 1.01, "a third")
    found = first_difference(runs[0], runs[1], 1e-4)
    assert found is not None
    assert (found.kind, found.step, found.name) == (c.WEIGHT, 2, "0.weight")
    give(runs[1], tensor * float("nan"), "a fourth")
    assert first_difference(runs[0], runs[1], 1e-4) is not None
