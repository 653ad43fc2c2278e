"""Ten planted bugs, each found with its step, tensor and cause; and scripts without one, which pass."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.verify import report
from paceline.verify.comparison import first_difference
from tests.verify.running import PLANTED, verified

pytestmark = pytest.mark.beside


@dataclass(frozen=True)
class Found:
    kind: str
    step: int
    tensor: str
    cause: str
    operator: str | None = None
    strategies: tuple[str, ...] | None = None


BUGS = {
    "seeded_by_rank": Found("random", 1, "0.bias", "seeded by the worker", "aten.bernoulli_"),
    "dropout_outside_the_engine": Found("loss", 1, "0.bias", "random state outside the engine", "aten.bernoulli"),
    "missing_set_epoch": Found("data", 5, "0.bias", "data that depend on the process"),
    "averaged_averages": Found("share", 1, "0.bias", "averages of averages"),
    "unsynchronised_buffer": Found("loss", 1, "0.bias", "state outside the engine", "aten.mul"),
    "rank_dependent_branch": Found("loss", 1, "0.weight", "a rank-dependent branch", "aten.mul"),
    "non_deterministic_scatter": Found("loss", 1, "0.bias", "a non-deterministic operator", "planted.scatter_add"),
    "wrong_bucket_order": Found("gradient", 1, "0.bias", "the order of the sum"),
    "update_by_shard_length": Found(
        "weight", 1, "0.weight", "an update that depends on the length of a shard", strategies=("ddp", "zero2")
    ),
    "weight_written_on_one_worker": Found(
        "written", 4, "0.weight", "a weight written between steps on one worker only"
    ),
    "schedule_by_items": Found("rates", 2, "0.bias", "learning rates"),
}


@pytest.mark.job
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_with_its_step_tensor_and_cause(bug: str, tmp_path: Path) -> None:
    wanted = BUGS[bug]
    plan, outcome = verified(tmp_path, str(PLANTED), bug, strategies=wanted.strategies)
    found, element, cause = outcome.difference, outcome.element, outcome.cause
    assert found is not None
    assert element is not None
    assert cause is not None
    assert (found.kind, found.step, cause.name) == (wanted.kind, wanted.step, wanted.cause)
    assert element.name == wanted.tensor
    assert element.bits[0] != element.bits[1]
    if wanted.operator is not None:
        assert outcome.parted is not None
        name, _, line = outcome.parted.operators[1].partition(" at ")
        assert name == wanted.operator
        assert bug in "\n".join(PLANTED.read_text().splitlines()[: int(line.split(":")[1])][-6:]), line
    assert not outcome.same
    assert json.loads(report.as_json(plan, outcome))["finding"]["cause"]["name"] == wanted.cause


@pytest.mark.job
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("bug", "steps", "tensor", "kind", "unlike", "rest", "cause"),
    [
        (
            "weight_written_on_one_worker", 4, "0.weight", "written", 0, 1,
            "something wrote 0.weight on worker 0 of 2, and not alike on the others",
        ),
        (
            "update_on_one_worker", 1, "0.weight", "weight", 1, 0,
            "0.weight got another update on worker 1 than on others of the same run: __main__.OnOneWorker",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("other", [1, 3])
def test_a_reference_whose_own_workers_drift_apart_is_the_one_that_is_blamed(
    bug: str, steps: int, tensor: str, kind: str, unlike: int, rest: int, cause: str, other: int, tmp_path: Path
) -> None:
    _, outcome = verified(tmp_path, str(PLANTED), bug, workers=(2, other), steps=steps)
    found, element = outcome.difference, outcome.element
    assert found is not None
    assert (found.kind, found.step, found.workers, found.of_reference) == (kind, steps, (unlike,), True)
    assert outcome.other == 0
    assert report.title(*outcome.pair, found) == (
        f"the workers of 2 workers, ddp, the reference, differ from each other in step {steps}"
    )
    assert element is not None
    assert (element.name, element.between) == (tensor, (f"worker {rest}", f"worker {unlike}"))
    assert outcome.cause is not None
    assert cause in outcome.cause.text
    assert outcome.repeats is True


@pytest.mark.job
@pytest.mark.smoke
@pytest.mark.timeout(300)
def test_a_script_without_a_bug_is_the_same_at_every_setting(tmp_path: Path) -> None:
    _, outcome = verified(tmp_path, str(PLANTED), workers=(1, 3), strategies=("ddp", "zero2"))
    assert outcome.states == ["reference", *["same"] * 3]
    assert {run.made for run in outcome.runs} == {6}
    assert len({report.digest(run) for run in outcome.runs}) == 1
    written = {path.name for path in tmp_path.rglob("*look*")}
    assert not written  # where all is well there is no second pass


@pytest.mark.job
@pytest.mark.timeout(300)
def test_a_model_that_the_engine_refuses_is_told_with_its_words(tmp_path: Path) -> None:
    _, outcome = verified(tmp_path, str(PLANTED), "model_seeded_by_rank")
    assert outcome.states == ["reference", "failed"]
    assert outcome.difference is None
    assert "'0.bias' has other values on worker 1 than on worker 0" in str(outcome.runs[1].error)


@pytest.mark.job
@pytest.mark.timeout(300)
def test_an_optimizer_that_shards_refuse_is_told_with_its_words(tmp_path: Path) -> None:
    _, outcome = verified(tmp_path, str(PLANTED), "update_by_norm", workers=(2,), strategies=("ddp", "zero2"))
    assert outcome.states == ["reference", "failed"]
    assert "optimizer ByNorm can't run on ranges of parameters" in str(outcome.runs[1].error)


@pytest.mark.job
@pytest.mark.timeout(300)
def test_a_forward_in_which_weights_are_gathered_is_compared_without_its_operators(tmp_path: Path) -> None:
    _, outcome = verified(tmp_path, str(PLANTED), "rank_dependent_branch", strategies=["fsdp"])
    assert outcome.difference is not None
    assert outcome.cause is not None
    assert outcome.parted is None
    assert (outcome.difference.kind, outcome.cause.name) == ("loss", "a forward that depends on the worker")
    assert outcome.element is not None
    assert outcome.element.kind == "weights"


@pytest.mark.job
@pytest.mark.timeout(300)
def test_sums_in_any_order_are_compared_within_a_tolerance(tmp_path: Path) -> None:
    script = tmp_path / "fast.py"
    script.write_text(PLANTED.read_text().replace("Engine(seed=3)", 'Engine(seed=3, reduction="fast")'))
    _, outcome = verified(tmp_path / "runs", str(script), workers=(1, 2))
    assert outcome.same
    assert len({report.digest(run) for run in outcome.runs}) == 2, "the order of the sum shows in the bits"
    strict = first_difference(*outcome.runs, tolerance=1e-12)
    assert strict is not None
    assert strict.kind in ("weight", "loss")
