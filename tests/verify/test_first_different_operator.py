"""Where two lists of operators part, and the causes that follow from it."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest

from paceline.verify import comparison as c
from paceline.verify import first_different_operator as o
from paceline.verify.causes import likely_cause
from paceline.verify.comparison import Difference
from paceline.verify.first_different_operator import first_different_operator
from paceline.verify.record import Run, Setting
from tests.verify.test_comparison import made_run

RUNS = Run(Setting(1, "ddp")), Run(Setting(2, "ddp"))


def entries(draw: random.Random, count: int) -> list[dict[str, Any]]:
    return [
        {
            "name": draw.choice(["aten.mul", "aten.mm"]),
            "line": f"train.py:{number}",
            "inputs": [[draw.choice(["an operator", "outside", "0.weight"]), draw.randbytes(4).hex()]],
            "others": "",
            "outputs": [draw.randbytes(4).hex()],
            "random": False,
            "generator": False,
        }
        for number in range(count)
    ]


CHANGES: dict[str, Any] = {
    o.ORDER: lambda entry: entry | {"line": "train.py:99"},
    o.NUMBER: lambda entry: entry | {"others": "2.0"},
    o.OUTSIDE: lambda entry: entry | {"inputs": [["outside", "other"]]},
    o.STATE: lambda entry: entry | {"inputs": [["0.weight", "other"]]},
    o.OPERATOR: lambda entry: entry | {"outputs": ["other"]},
    o.RANDOM: lambda entry: entry | {"outputs": ["other"], "random": True},
}
NAMED = {
    o.ORDER: "a rank-dependent branch",
    o.NUMBER: "a value that depends on the worker",
    o.OUTSIDE: "state outside the engine",
    o.STATE: "unsynchronised buffers",
    o.OPERATOR: "an operator that depends on more than its inputs",
    o.RANDOM: "seeded by the worker",
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("seed", range(8))
def test_the_first_entry_that_differs_says_why(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    left = entries(draw, draw.randint(3, 12))
    at = draw.randrange(len(left))
    origin = {o.OUTSIDE: "outside", o.STATE: "0.weight"}.get(kind, "an operator")
    left[at] |= {"inputs": [[origin, "one"]], "random": kind == o.RANDOM}
    right = copy.deepcopy(left)
    right[at] = CHANGES[kind](right[at])
    for later in range(at + 1, len(left)):  # what follows from it
        right[later]["inputs"] = [["an operator", "follows"]]
    found = first_different_operator(left, right)
    assert found is not None
    assert (found.kind, found.at) == (kind, at)
    loss = Difference(c.LOSS, 1, "loss", (1, 0, 0), (1,), values=(1.0, 2.0))
    cause = likely_cause(loss, *RUNS, found, repeats=True)
    assert cause.name == NAMED[kind]
    assert f"train.py:{at if kind != o.ORDER else 99}" in cause.text
    assert "lane 1 (worker 1)" in cause.text


def test_lists_that_are_alike_do_not_part_and_a_longer_one_does_at_its_end() -> None:
    left = entries(random.Random(0), 5)
    assert first_different_operator(left, copy.deepcopy(left)) is None
    found = first_different_operator(left, left[:3])
    assert found is not None
    assert (found.kind, found.at, found.operators[1]) == (o.ORDER, 3, "nothing more")


def test_a_generator_of_its_own_is_told_from_seeding() -> None:
    (entry,) = entries(random.Random(0), 1)
    left = entry | {"random": True, "generator": True}
    loss = Difference(c.LOSS, 1, "loss", (1, 0, 0), (1,), values=(1.0, 2.0))
    cause = likely_cause(loss, *RUNS, first_different_operator([left], [left | {"outputs": ["x"]}]), repeats=True)
    assert cause.name == "random state outside the engine"


def test_runs_that_do_not_repeat_themselves_have_a_non_deterministic_operator() -> None:
    (entry,) = entries(random.Random(0), 1)
    loss = Difference(c.LOSS, 1, "loss", (0, 0, 0), (0,), values=(1.0, 2.0))
    cause = likely_cause(loss, *RUNS, first_different_operator([entry], [entry | {"outputs": ["x"]}]), repeats=False)
    assert cause.name == "a non-deterministic operator"
    assert f"{entry['name']} at train.py:0" in cause.text


CAUSES = {
    Difference(c.START, 0, "0.weight"): "first weights",
    Difference(
        c.WRITTEN, 4, "0.weight", workers=(0,), inside=True
    ): "a weight written between steps on one worker only",
    Difference(c.WRITTEN, 4, "0.weight", workers=(0, 1)): "a weight written between steps",
    Difference(c.ITEMS, 1, place=(2, 0, 0), values=(True, False)): "data order",
    Difference(c.STEPS, 3, values=(4, 2)): "another number of steps",
    Difference(c.LANES, 0, values=(3, 4)): "lanes",
    Difference(c.RANDOM, 1, "numpy", (1, 0, 0), (1,)): "seeded by the worker",
    Difference(c.LOSS, 1, "loss", (1, 0, 0), (1,), values=(1.0, 2.0)): "a forward that depends on the worker",
    Difference(c.SHARE, 1, "weight", (1, 0, 0), (1,), values=(4.0, 2.0)): "averages of averages",
    Difference(c.LANE_GRADIENT, 1, "0.weight", (1, 0, 0), (1,)): "a backward of its own",
    Difference(c.RATES, 1, "learning rate", workers=(1,), values=(0.1, 0.2)): "learning rates",
    Difference(c.GRADIENT, 1, "0.weight", workers=(0,)): "the order of the sum",
    Difference(c.BUFFER, 1, "mean", workers=(0,)): "unsynchronised buffers",
    Difference(c.WEIGHT, 1, "0.weight", workers=(1,), inside=True): "an update of one worker only",
    Difference(c.WEIGHT, 1, "0.weight", workers=(0,)): "the update",
}


def test_what_the_reference_did_wrong_is_told_of_its_own_workers_and_optimizer() -> None:
    reference, other = (made_run(random.Random(0), workers, 3, 4) for workers in (3, 1))
    reference.about = {**reference.about, "optimizers": ["ByRank"]}
    written = Difference(c.WRITTEN, 2, "0.weight", workers=(2,), inside=True, of_reference=True)
    assert "wrote 0.weight on worker 2 of 3, " in likely_cause(written, reference, other).text
    updated = replace(written, kind=c.WEIGHT)
    assert "on worker 2 than on others of the same run: ByRank, " in likely_cause(updated, reference, other).text


@pytest.mark.parametrize(("found", "name"), [*CAUSES.items()], ids=[one.kind for one in CAUSES])
def test_every_difference_has_a_cause_with_advice(found: Difference, name: str) -> None:
    cause = likely_cause(found, *RUNS)
    assert cause.name == name
    assert cause.text
    assert cause.advice


def test_order_and_contents_of_data_are_told_apart() -> None:
    order = Difference(c.DATA, 1, "[0]", (1, 0, 0), (1,), more={"ids": ((1, 2), (2, 1)), "epoch": 0})
    assert likely_cause(order, *RUNS).name == "data order"
    contents = Difference(c.DATA, 5, "[0]", (1, 0, 0), (1,), more={"ids": ((1, 2), (1, 2)), "epoch": 1})
    assert likely_cause(contents, *RUNS).name == "data that depend on the process"
    assert "set_epoch" in likely_cause(contents, *RUNS).text


def test_an_update_under_another_strategy_is_laid_to_the_shards() -> None:
    one, two = Run(Setting(1), {"strategy": "ddp"}), Run(Setting(2), {"strategy": "zero2", "optimizers": ["my.Fused"]})
    cause = likely_cause(Difference(c.WEIGHT, 1, "0.weight", workers=(0,)), one, two)
    assert cause.name == "an update that depends on the length of a shard"
    assert "my.Fused" in cause.text
