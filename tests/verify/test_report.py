"""What is said about runs: a table with a verdict, the first difference in rows, and JSON that is JSON."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.verify import comparison as c
from paceline.verify import report
from paceline.verify.causes import likely_cause
from paceline.verify.comparison import first_difference
from paceline.verify.jobs import Element, Outcome, Plan, settings_of
from tests.verify.test_comparison import PLANTED, made_run

PLAN = Plan(("train.py", "--x"), settings_of((1, 2), None), 4, 3, 1e-4, Path("nowhere"))
ELEMENT = Element("weights", "0.weight", (2, 5), (0.5, float("nan")), ("0x3f000000", "0x7fc00000"), 3, 128)


def outcome(kind: str | None = None, seed: int = 0) -> Outcome:
    draw = random.Random(seed)
    runs = [made_run(draw, workers, 3, 4) for workers in (1, 2)]
    if kind is not None:
        PLANTED[kind](runs[1].steps[3], draw, 2)
    found = first_difference(runs[0], runs[1], 1e-4)
    out = Outcome(runs, ["reference", "same" if found is None else "differs"], [None, 0], found)
    if found is not None:
        out.other, out.element, out.repeats = 1, ELEMENT, True
        out.cause = likely_cause(found, runs[0], runs[1], repeats=True)
    return out


def test_runs_that_agree_get_a_table_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    report.show(PLAN, outcome())
    printed = capsys.readouterr().out
    assert "paceline verify train.py · 2 settings · 3 lanes" in printed
    assert "✓ the same bits in every step" in printed
    assert printed.rstrip().endswith("✓ 2 settings, 4 steps, 4 tensors: every bit is the same.")
    assert json.loads(report.as_json(PLAN, outcome()))["same"] is True


@pytest.mark.parametrize("kind", PLANTED)
def test_a_difference_of_any_kind_is_told_with_step_tensor_values_and_cause(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = outcome(kind)
    report.show(PLAN, out)
    printed = capsys.readouterr().out
    assert "✗ 2 workers, ddp differs from 1 worker, ddp in step 3" in printed
    assert "0.weight[2, 5] · weights after it · 3 of its 128 elements differ" in printed
    assert "0x3f000000" in printed
    assert "0x7fc00000" in printed
    assert out.cause is not None
    assert out.cause.name in printed
    finding = json.loads(report.as_json(PLAN, out), parse_constant=pytest.fail)["finding"]
    assert (finding["kind"], finding["step"], finding["element"]["values"]) == (kind, 3, [0.5, "nan"])


def test_a_reference_whose_own_workers_differ_is_named_and_nothing_is_said_against_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [copy.deepcopy(made_run(random.Random(0), workers, 3, 4)) for workers in (2, 3)]
    PLANTED[c.WEIGHT](runs[0].steps[3], random.Random(0), 2)
    found = first_difference(*runs, 1e-4)
    assert found is not None
    out = Outcome(runs, ["differs", "same"], [None, 0], found, 0, repeats=True)
    out.element = replace(ELEMENT, between=("worker 0", "worker 1"))
    out.cause = likely_cause(found, *out.pair, repeats=True)
    report.show(PLAN, out)
    printed = capsys.readouterr().out
    assert "✗ the workers of 2 workers, ddp, the reference, differ from each other in step 3" in printed
    assert "✗ its own workers differ from step 3 on" in printed
    assert "3 workers, ddp differs" not in printed
    assert "worker 1  " in printed
    finding = json.loads(report.as_json(PLAN, out))["finding"]
    assert (finding["setting"], finding["reference"], finding["workers"]) == (0, 0, [1])
    assert not out.same


def test_a_run_that_fails_is_told_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    out = outcome()
    out.states, out.other, out.runs[1].error = ["reference", "failed"], 1, "worker 1 raised ValueError: bad day"
    report.show(PLAN, out)
    printed = capsys.readouterr().out
    assert "✗ the script fails with 2 workers, ddp, and not with 1 worker, ddp" in printed
    assert "bad day" in printed


def test_digests_are_of_the_weights_after_the_last_step() -> None:
    run, other = made_run(random.Random(0), 1, 3, 4), made_run(random.Random(0), 2, 3, 4)
    assert report.digest(run) == report.digest(other)
    last = other.steps[4].after[0]
    other.steps[4].after[0] = replace(last, weights={**last.weights, "0.bias": "other"})
    assert report.digest(run) != report.digest(other)


def test_updates_of_several_optimizers_are_called_so() -> None:
    out = outcome(c.LOSS)
    out.runs[1].in_updates = True
    assert "in update 3, counting those of all optimizers" in report.title(*out.runs, out.difference)
