"""Waiting is charged to the worker and the part that caused it, and to none where nothing stands out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.monitor.attribution import AFTER_VOTE, BEFORE_VOTE, Straggler, join, straggler
from paceline.monitor.events import FOLDER, Part, told_of
from paceline.monitor.run_events import read_run
from tests.monitor.simulated import Simulated

SEEDS = range(20)
CAUSES = [Part.DATA, Part.FORWARD, Part.BACKWARD, Part.EXCHANGE, Part.OPTIMIZER, Part.OTHER]


def found_in(folder: Path, simulated: Simulated) -> Straggler | None:
    return straggler(join(read_run(simulated.write(folder))))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_injected_cause_is_named(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    workers, since = int(draw.integers(2, 9)), int(draw.integers(5, 30))
    worker = int(draw.integers(workers))
    for part in CAUSES:
        delays = {(worker, part): 0.02}
        simulated = Simulated(workers, 80, seed, delays=delays, since=since)
        found = found_in(tmp_path / part.name, simulated)
        assert found is not None, part
        assert (found.worker, found.part) == (worker, part), str(found)
        assert abs(found.since - since) <= 3, str(found)
        assert found.until == 80
        assert 0.01 < found.late_s < 0.025


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_backward_is_told_with_the_bucket_from_which_on_it_is_late(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    workers, buckets = int(draw.integers(2, 7)), int(draw.integers(2, 40))
    worker, slow = int(draw.integers(workers)), int(draw.integers(buckets))
    delays, clocks = {(worker, Part.BACKWARD): 0.03}, {one: 100.0 * one for one in range(workers)}
    simulated = Simulated(workers, 80, seed, 0.02, delays, 20, clocks, buckets=buckets, slow_bucket=slow)
    found = found_in(tmp_path, simulated)
    assert found is not None
    assert (found.worker, found.part) == (worker, Part.BACKWARD)
    assert found.bucket is not None
    told = [number for number in told_of(buckets) if number >= slow]  # of more than 17 every second or third is told
    assert found.bucket == (told[0], buckets)
    assert f"backward takes it longer from bucket {told[0]} of {buckets} on than the others" in str(found)


def test_a_late_worker_whose_others_tell_of_other_buckets_is_named_without_one(tmp_path: Path) -> None:
    delays = {(1, Part.BACKWARD): 0.03}
    simulated = Simulated(3, 80, delays=delays, buckets=4).write(tmp_path / "a")
    fewer = Simulated(3, 80, delays=delays, buckets=3).write(tmp_path / "b")
    (fewer / FOLDER / "worker-2.0").rename(simulated / FOLDER / "worker-2.0")
    found = straggler(join(read_run(simulated)))
    assert found is not None
    assert (found.worker, found.part, found.bucket) == (1, Part.BACKWARD, None)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("jitter", [0.02, 0.3])
def test_where_nothing_is_injected_none_stands_out(seed: int, jitter: float, tmp_path: Path) -> None:
    for workers in (2, 3, 8):
        simulated = Simulated(workers, 200, seed, jitter=jitter, meets_after_update=seed % 2 == 0)
        joined = join(read_run(simulated.write(tmp_path / str(workers))))
        for end in range(14, 200, 7):  # as it is watched live
            assert joined.peers is not None
            assert joined.peer_s is not None
            cut = (one[:, :end] for one in (joined.arrived, joined.parts, joined.peers, joined.peer_s))
            assert straggler(type(joined)(joined.workers, joined.steps[:end], *cut)) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_update_is_named_where_all_wait_for_each_other_after_it(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    workers = int(draw.integers(2, 9))
    worker = int(draw.integers(workers))
    delays = {(worker, Part.OPTIMIZER): 0.02}
    found = found_in(tmp_path, Simulated(workers, 80, seed, delays=delays, since=20, meets_after_update=True))
    assert found is not None
    assert (found.worker, found.part, found.by_link) == (worker, Part.OPTIMIZER, False), str(found)
    assert abs(found.since - 20) <= 3, str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_link_is_told_from_a_worker_that_computes_late(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    workers = int(draw.integers(3, 9))
    worker = int(draw.integers(workers))
    for computes, meets in ((False, False), (False, True), (True, False)):  # its messages come late either way
        delays = {(worker, Part.BACKWARD): 0.03} if computes else {}
        link = Simulated(workers, 80, seed, delays=delays, since=20, link=(worker, 0.03), meets_after_update=meets)
        found = found_in(tmp_path / f"{computes} {meets}", link)
        assert found is not None
        part = Part.BACKWARD if computes else Part.EXCHANGE
        assert (found.worker, found.by_link, found.part) == (worker, not computes, part), str(found)
        assert abs(found.since - 20) <= 3, str(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_that_is_late_now_and_then_is_named(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    workers = int(draw.integers(2, 9))
    worker = int(draw.integers(workers))
    for meets in (False, True):
        simulated = Simulated(
            workers, 400, seed, delays={(worker, Part.BACKWARD): 0.2}, every=10, meets_after_update=meets
        )
        found = found_in(tmp_path / str(meets), simulated)
        assert found is not None
        assert (found.worker, found.part) == (worker, Part.BACKWARD), str(found)
        assert found.times is not None
        assert 20 <= found.times <= 60
        assert 0.15 < found.late_s < 0.25


@pytest.mark.parametrize("seed", SEEDS[:5])
def test_long_steps_of_any_worker_are_nobodys(seed: int, tmp_path: Path) -> None:
    """A disk or a switch that makes all of them late now and then, one after another."""
    delays = {(worker, Part.DATA): 0.2 for worker in range(3)}
    simulated = Simulated(3, 400, seed, delays=delays, every=10)
    assert found_in(tmp_path, simulated) is None


@pytest.mark.parametrize("seed", SEEDS[:5])
def test_clocks_of_hosts_are_aligned_by_their_votes_however_late_a_worker_is(seed: int, tmp_path: Path) -> None:
    clocks = {worker: float(np.random.default_rng(seed + worker).uniform(0, 5e5)) for worker in range(4)}
    delays = {(2, Part.BACKWARD): 0.2}
    run = read_run(Simulated(4, 60, seed, delays=delays, clocks=clocks).write(tmp_path))
    voted = np.stack([steps["voted"] for steps in run.workers.values()])
    assert np.ptp(voted, axis=0).max() < 5e-4
    found = straggler(join(run))
    assert found is not None
    assert (found.worker, found.part) == (2, Part.BACKWARD)
    assert abs(found.late_s - 0.2) < 0.06


def test_waiting_is_that_of_the_others_for_the_last(tmp_path: Path) -> None:
    joined = join(read_run(Simulated(3, 40, delays={(1, Part.DATA): 0.05}).write(tmp_path)))
    waiting = joined.waiting
    assert waiting[1].max() == 0
    assert (waiting[[0, 2]] > 0.03).all()
    assert (waiting <= joined.parts[:, :, Part.VOTE]).all()


def test_a_straggler_that_has_recovered_is_none(tmp_path: Path) -> None:
    run = read_run(Simulated(3, 200, delays={(1, Part.DATA): 0.05}).write(tmp_path))
    joined = join(run)
    quiet = join(read_run(Simulated(3, 200).write(tmp_path / "quiet")))
    parts = np.concatenate([joined.parts[:, :100], quiet.parts[:, 100:]], axis=1)
    arrived = np.concatenate([joined.arrived[:, :100], quiet.arrived[:, 100:]], axis=1)
    assert straggler(type(joined)(joined.workers, joined.steps, arrived, parts)) is None


def test_few_steps_and_one_worker_have_none(tmp_path: Path) -> None:
    delays = {(0, Part.DATA): 0.5}
    assert found_in(tmp_path / "few", Simulated(3, 13, delays=delays)) is None
    assert found_in(tmp_path / "alone", Simulated(1, 60, delays=delays)) is None


def test_each_part_is_charged_once() -> None:
    assert sorted([*BEFORE_VOTE, Part.VOTE, *AFTER_VOTE]) == list(Part)


def test_the_words(tmp_path: Path) -> None:
    found = Straggler(worker=1, part=Part.DATA, late_s=0.0333, share=0.464, cost_s=1.53, since=21, until=63)
    assert str(found) == (
        "worker 1 is late: data takes it longer than the others, who wait for it 33.3 ms a step since step 21 "
        "(1.53 s in all, 46% of the time)"
    )
    link = replace(found, part=Part.EXCHANGE, by_link=True)
    assert str(link) == (
        "the link of worker 1 is slow: the others wait 33.3 ms a step longer for its messages than for those of the "
        "rest since step 21 (1.53 s in all, 46% of the time)"
    )
    assert str(replace(found, part=Part.BACKWARD, times=5)) == (
        "worker 1 is late now and then: in 5 of the 43 steps since step 21 backward takes it 33.3 ms longer than the "
        "others, who wait for it (1.53 s in all, 46% of the time)"
    )
