"""Steps and jobs: bytes are the footprint's, nothing slow speeds anything up, and nothing is lost without failures."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.canonical_sum import sum_plan
from paceline.sharding.footprint import footprint
from paceline.simulate import training
from paceline.simulate.exchange import roots_of
from paceline.simulate.job import HOUR_S, Job, simulate_job
from paceline.simulate.result import simulate
from paceline.simulate.scenario import SERVER, STRATEGIES, Scenario
from paceline.simulate.training import Step, Training


def small(**more: Any) -> Scenario:
    given = {"workers": 16, "network": "racks-100g", "parameters": 16 * 4096 * 24, "compute_ms": 5, "steps": 6}
    return Scenario(**{**given, **more})


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {SERVER}))
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_the_busiest_worker_sends_the_bytes_of_the_strategys_footprint(
    strategy: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = small(strategy=strategy, lanes=lanes, bucket_mb=1, every=1 if strategy in training.WINDOWS else None)
    sent = np.zeros(scenario.workers)
    send = training._Now._send

    def counting(self: Any, name: str, collective: Any, ready: Any, *, counted: bool = True) -> None:
        if counted:  # the vote is none of the strategy's
            np.add(sent, collective.link_bytes(0)[0], out=sent)
        send(self, name, collective, ready, counted=counted)

    monkeypatch.setattr(training._Now, "_send", counting)
    Training(scenario).step()
    of = footprint(
        strategy, scenario.model, workers=16, lanes=16 * lanes, shard_over=8 if strategy == "hybrid" else None
    )
    assert sent.max() == pytest.approx(of.sent, rel=1e-9)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("lanes", range(1, 12))
def test_roots_are_those_of_the_plan_of_the_sum(workers: int, lanes: int) -> None:
    plan = sum_plan(workers * lanes, workers, tuple(range(workers * lanes)))
    assert roots_of(lanes, workers) == max(len(plan.roots(worker)) for worker in range(workers))


# -- steps -------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    strategy=st.sampled_from(STRATEGIES),
    factor=st.floats(1, 5),
    slow=st.integers(0, 16),
    jitter=st.floats(0, 0.3),
    seed=st.integers(0, 1000),
)
def test_slow_workers_never_speed_a_step_up(strategy: str, factor: float, slow: int, jitter: float, seed: int) -> None:
    plain = small(strategy=strategy, jitter=jitter, seed=seed, steps=4)
    slowed = replace(plain, slow_workers=slow, slow_factor=factor)
    before, after = Training(plain).run(4), Training(slowed).run(4)
    assert all(b.ends >= a.ends * (1 - 1e-12) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_parts_of_a_step_are_all_of_it(strategy: str) -> None:
    result = simulate(small(strategy=strategy, jitter=0.1, slow_workers=1, slow_factor=2, update_ms=1))
    for step in result.steps:
        assert step.compute + step.straggling + step.exposed == pytest.approx(step.takes)
    assert 0 < result.scaling <= 1
    assert all(step.takes > 0 for step in result.steps)


def test_one_worker_scales_perfectly_and_waits_for_nobody() -> None:
    result = simulate(Scenario(workers=1, steps=3, update_ms=4, other_ms=2))
    assert (result.scaling, result.exposed_s, result.job.goodput) == pytest.approx((1, 0, 1))


def test_communication_hides_behind_backward_as_far_as_it_can() -> None:
    free = simulate(small(compute_ms=500)).exposed_s
    bound = simulate(small(compute_ms=0.1, parameters=10**8))
    assert free < 0.01
    assert bound.exposed_s == pytest.approx(bound.wire_s, rel=0.05)


def test_local_training_is_simulated_in_whole_windows() -> None:
    result = simulate(small(strategy="local_sgd", steps=3))
    assert len(result.steps) == 8
    assert [step.wire > 0 for step in result.steps] == [False] * 7 + [True]


# -- jobs --------------------------------------------------------------------------------------------------------------


def steps_of(rng: np.random.Generator, count: int) -> list[Step]:
    takes = rng.uniform(0.5, 1.5, count)
    return [Step(ends=0, takes=float(t), compute=0.6 * float(t), slowest=float(t), wire=0.4 * float(t)) for t in takes]


@pytest.mark.parametrize("recovery", ["elastic", "restart"])
def test_without_failures_only_checkpoints_and_commits_are_lost(recovery: str) -> None:
    steps = steps_of(np.random.default_rng(1), 7)
    plain = Scenario(recovery=recovery, hours=1, commit_ms=0)
    assert simulate_job(plain, steps).goodput == 1
    job = simulate_job(replace(plain, checkpoint_every=10, checkpoint_s=2.0), steps)
    made = sum(steps[number % 7].takes for number in range(job.steps))
    assert job.failures == 0
    assert job.checkpoints == pytest.approx(2.0 * (job.steps // 10))
    assert job.goodput == pytest.approx(made / (made + job.checkpoints))


@settings(max_examples=60, deadline=None)
@given(
    recovery=st.sampled_from(["elastic", "restart"]),
    mtbf=st.floats(0.2, 20),
    every=st.sampled_from([0, 1, 7, 50]),
    spares=st.integers(0, 2),
    other_ms=st.sampled_from([0, 200]),
    seed=st.integers(0, 1000),
)
def test_all_the_time_of_a_job_is_accounted_for(
    recovery: str, mtbf: float, every: int, spares: int, other_ms: float, seed: int
) -> None:
    scenario = Scenario(
        workers=8, recovery=recovery, mtbf_hours=mtbf, checkpoint_every=every, checkpoint_s=1.5, hours=2, seed=seed,
        spares=spares, replace_s=20, restart_s=15, lanes=2, other_ms=other_ms,
    )  # fmt: skip
    steps = [Step(ends=0, takes=1.0, compute=0.7, slowest=0.8, wire=0.3)]
    job = simulate_job(scenario, steps, lives=1)
    parts = job.recovery + job.redone + job.degraded + job.checkpoints + job.commits
    assert job.seconds == pytest.approx(job.steps * job.step_s + parts)
    assert job.seconds <= 2 * HOUR_S + 100
    assert 0 <= job.goodput <= 1


def by_single_steps(scenario: Scenario, steps: list[Step], failures: list[float]) -> Job:
    """A job that restarts, step by step: the plainest way to say it."""
    now, count, saved, made = 0.0, 0, 0, 0
    job = Job(step_s=float(np.mean([step.takes for step in steps])))
    pending = list(failures)
    while True:
        ends = now + steps[made % len(steps)].takes
        if pending and pending[0] <= min(ends, scenario.hours * HOUR_S):
            died = pending.pop(0)
            now = max(died, now) + scenario.detect_s + scenario.restart_s
            count = saved
            job.failures += 1
            continue
        if ends > scenario.hours * HOUR_S:
            break
        now, count, made = ends, count + 1, made + 1
        if scenario.checkpoint_every and count % scenario.checkpoint_every == 0:
            now, saved = now + scenario.checkpoint_s, count
    job.steps, job.seconds = count, now
    return job


@pytest.mark.parametrize("seed", range(12))
def test_a_restarting_job_equals_one_that_is_followed_step_by_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    steps = steps_of(rng, int(rng.integers(1, 9)))
    failures = sorted(rng.uniform(0, HOUR_S, 6).tolist())
    scenario = Scenario(
        recovery="restart", hours=1, checkpoint_every=int(rng.integers(0, 40)), checkpoint_s=float(rng.uniform(0, 5)),
        restart_s=float(rng.uniform(0, 100)), mtbf_hours=1.0,
    )  # fmt: skip
    wanted = by_single_steps(scenario, steps, failures)
    left = [*failures, math.inf]
    monkeypatch.setattr("paceline.simulate.job._Life._draw", lambda self: left.pop(0))
    found = simulate_job(scenario, steps, lives=1)
    assert (found.steps, found.failures) == (wanted.steps, wanted.failures)
    assert found.seconds == pytest.approx(wanted.seconds)


def test_elastic_recovery_beats_a_restart_and_spares_beat_waiting() -> None:
    told = {"workers": 512, "network": "dgx-a100", "mtbf_hours": 2000, "checkpoint_every": 500, "checkpoint_s": 5.0}
    restart = simulate(Scenario(**told, recovery="restart", steps=5))
    elastic = simulate(Scenario(**told, steps=5))
    spared = simulate(Scenario(**told, spares=4, steps=5))
    assert restart.job.goodput < elastic.job.goodput < spared.job.goodput


@pytest.mark.slow
def test_ten_thousand_workers_and_a_hundred_steps_need_no_loop_over_messages() -> None:
    """Processor time, which other work on the machine leaves alone; the docs tell the time on a clock."""
    before = time.process_time()
    result = simulate(Scenario(workers=10_000, network="dgx-a100", parameters=10**9, jitter=0.05, steps=100))
    took_s = time.process_time() - before
    assert len(result.steps) == 100
    assert took_s < 30
