"""From a tensor to its first element that differs, and what is read out of the log of a run that failed."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.verify.jobs import error_in, first_element, repeats
from paceline.verify.request import Look, Request
from tests.verify.test_comparison import PLANTED, made_run


@pytest.mark.parametrize("seed", range(20))
def test_the_first_element_that_differs_is_found_by_its_bits(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 3)))
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64])
    left = torch.randn(shape).to(dtype)
    assert first_element("weights", "w", left, left.clone()) is None
    right, elements = left.clone(), left.numel()
    changed = sorted(draw.sample(range(elements), draw.randint(1, min(3, elements))))
    for place in changed:
        right.view(-1)[place] = -right.view(-1)[place] - 1
    found = first_element("weights", "w", left, right)
    assert found is not None
    at = torch.arange(elements).view(shape)[found.index] if shape else torch.tensor(0)
    assert (int(at), found.differing, found.elements) == (changed[0], len(changed), elements)
    assert found.values == (float(left.view(-1)[changed[0]]), float(right.view(-1)[changed[0]]))


def test_bits_count_and_not_values() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    found = first_element("weights", "w", zero, -zero)
    assert found is not None
    assert found.bits == ("0x00000000", "0x80000000")
    assert first_element("weights", "w", nan, nan.clone()) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_repeats_itself_is_told_from_one_that_does_not(seed: int) -> None:
    draw = random.Random(seed)
    run = made_run(draw, 2, 3, 4)
    again = copy.deepcopy(run)
    assert repeats(run, again, 4) is True
    step = draw.randint(1, 4)
    PLANTED[draw.choice(list(PLANTED))](again.steps[step], draw, 2)
    if not again.steps[step].entry:  # one that only the second has, it wrote itself
        assert repeats(run, again, 4) is False
    assert repeats(run, again, step - 1) is True
    run.about = {**run.about, "reduction": "fast"}
    assert repeats(run, again, 4) is None


def test_a_run_that_failed_may_have_less_of_its_last_step() -> None:
    run = made_run(random.Random(0), 2, 3, 4)
    again = copy.deepcopy(run)
    del again.steps[4].after[1]
    again.steps[4].items.popitem()
    assert repeats(run, again, 4) is True
    again.steps[4].after[0] = replace(again.steps[4].after[0], rates=(0.5,))
    assert repeats(run, again, 4) is False


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("paceline: global batch 8\npaceline: worker 1 raised X\npaceline: also stopped: 0", "worker 1 raised X"),
        ("Traceback (most recent call last):\n  File x\nValueError: no such thing\n", "ValueError: no such thing"),
        ("", "it ended with code 7"),
    ],
)  # fmt: skip
def test_the_error_of_a_run_is_one_line(log: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(log)
    assert error_in(tmp_path / "log.txt", 7) == error


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    for look in (None, Look(3), Look(2, (("weights", "0.weight"), ("entry", "b")), (1, 0, 0))):
        request = Request(tmp_path, 20, 3, "zero2", look)
        request.write()
        assert Request.read(tmp_path) == request
