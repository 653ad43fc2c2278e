"""Jobs that once ended with other bits than one worker, mostly found by the fuzzer, and that the fuzzer works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bits.fuzz import Case, Outcome, draw, judge, script_of, shrink

FOUND = [json.loads(line) for line in Path(__file__).with_name("found_by_fuzzing.jsonl").read_text().splitlines()]


@pytest.mark.workers
@pytest.mark.parametrize("found", FOUND, ids=[f"{row['why']}-{number}" for number, row in enumerate(FOUND)])
def test_what_was_found_stays_mended(found: dict[str, Any]) -> None:
    case = Case.of(json.dumps(found["case"]))
    outcome = judge(case)
    assert outcome.kind == found["expect"], f"{case}\n{outcome.text}"


def test_a_case_is_its_text() -> None:
    for seed in range(50):
        assert Case.of(draw(seed).text) == draw(seed)
        assert draw(seed, elastic=True).kill is not None


def test_a_failing_case_is_shrunk_to_what_makes_it_fail() -> None:
    """Here: fused AdamW under fsdp."""

    def judged(case: Case) -> Outcome:
        fails = case.settings.get("fused") and any(leg.strategy == "fsdp" for leg in case.legs)
        return Outcome("FAILED", "another hash: 1 instead of 2") if fails else Outcome("same")

    drawn = (draw(seed) for seed in range(10_000))
    case = next(case for case in drawn if len(case.legs) == 2 and judged(case).failed)
    small, outcome = shrink(case, judged(case), judged)
    assert outcome.failed
    assert len(small.legs) == 1
    assert small.layers == ()
    assert small.settings.keys() == {"lr", "fused"}
    leg = small.legs[0]
    assert (leg.recompute, leg.bucket_mib, leg.hosts, small.clip, small.schedule) == (None, 16.0, 1, None, None)


def test_a_failing_case_is_written_as_a_script_that_compiles() -> None:
    case = draw(1)
    text = script_of(case, "Found.", 'an error with """ and \\ in it')
    compile(text, "case.py", "exec")
    assert f"--workers {case.legs[0].workers}" in text
