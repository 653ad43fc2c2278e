"""The plan of a race, what it refuses, and what its result looks like."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import typer

from paceline.bench import race as race_module
from paceline.bench.race import WARM_UP_ROUNDS, EngineTiming, Race, Round, summarise
from paceline.bench.report import console, show_race
from paceline.cli import bench
from paceline.errors import ConfigError
from paceline.launch.job import Job

RACE = Race("mlp25m", workers=2, ours=("paceline-exact",), against=("torch-ddp", "no-communication"), rounds=2)
WORKLOAD = {"name": "mlp25m", "parameters": 25_179_136, "batch_size": 32, "units_per_sample": 1, "unit": "samples/s"}
MACHINE = {"torch": "2.13.0", "python": "3.11", "cpu": "a cpu", "cpu_capability": "AVX2", "cores": 2}


def measured(ours_s: float, peer_s: float, foreign: float = 0.0) -> Round:
    seconds = {"paceline-exact": ours_s, "torch-ddp": peer_s, "no-communication": 0.25}
    return Round(seconds, {"paceline-exact": EngineTiming(0.01, 0.1, 3.0)}, foreign, steal=0.0)


def result(*rounds: Round) -> dict[str, Any]:
    warm_up = [measured(99.0, 99.0, foreign=1.0)] * WARM_UP_ROUNDS
    return summarise(RACE, WORKLOAD, MACHINE, 4, [*warm_up, *rounds])


def test_every_contestant_comes_first_equally_often_and_runs_once_a_round() -> None:
    orders = [RACE.order(number) for number in range(12)]
    assert all(sorted(order) == sorted(RACE.contestants) for order in orders)
    assert set(Counter(order[0] for order in orders).values()) == {4}


def test_nobody_always_follows_the_same_contestant() -> None:
    followers = {pair for number in range(6) for pair in itertools.pairwise(RACE.order(number))}
    assert {after for before, after in followers if before == "torch-ddp"} == {"no-communication", "paceline-exact"}


def test_a_race_survives_the_trip_to_the_workers() -> None:
    race = replace(RACE, bucket_mib=2.5, steps_per_round=3, keep_memory=True)
    assert Race.from_json(race.to_json()) == race


@pytest.mark.parametrize("keep_memory", [False, True])
def test_freed_memory_is_kept_for_all_or_for_none(keep_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    async def supervise(job: Job) -> int:
        started.append(job)
        return 3

    monkeypatch.setattr(race_module, "supervise", supervise)
    with pytest.raises(typer.Exit):
        bench.step(keep_memory=keep_memory)
    assert [job.keep_memory for job in started] == [keep_memory]


def test_the_table_says_that_freed_memory_was_kept(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for race in (RACE, replace(RACE, keep_memory=True)):
        show_race(summarise(race, WORKLOAD, MACHINE, 4, [measured(0.5, 0.6)] * (WARM_UP_ROUNDS + 1)), console())
        shown.append("memory kept" in capsys.readouterr().out)
    assert shown == [False, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workload": "resnet"}, "workload 'resnet' is not known; choose one of mlp25m, gpt10m, convnet"),
        ({"against": ("horovod",)}, "contestant 'horovod' is not known; choose one of torch-ddp"),
        ({"against": ()}, "nobody to run against"),
        ({"against": ("paceline-exact",)}, "'paceline-exact' can't run against itself"),
        ({"workers": 0}, "--workers 0: a race needs at least one worker"),
        ({"rounds": 0}, "--rounds 0"),
        ({"steps_per_round": 0}, "--steps-per-round 0"),
        ({"backend": "nccl"}, "--backend 'nccl' is not known; choose one of paceline, gloo"),
        ({"bucket_mib": 0.0}, "--bucket-mib 0"),
    ],
)
def test_a_race_that_makes_no_sense_is_one_clear_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(RACE, **change)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_result_pairs_rounds_drops_the_warm_up_and_counts_the_disturbed() -> None:
    summary = result(measured(0.5, 0.6), measured(1.0, 1.0, foreign=0.5))
    against_ddp = summary["ratios"][0]
    assert (against_ddp["ours"], against_ddp["peer"]) == ("paceline-exact", "torch-ddp")
    assert against_ddp["throughput"]["median"] == pytest.approx(1.1)
    assert against_ddp["throughput_in_quiet_rounds"]["median"] == pytest.approx(1.2)
    assert [each["disturbed"] for each in summary["rounds"]] == [False, True]
    assert summary["disturbed_rounds"] == 1
    # 4 steps × 2 workers × 32 samples in 0.5 s and in 1 s
    assert summary["contestants"]["paceline-exact"]["throughput"]["most"] == pytest.approx(512)
    assert summary["contestants"]["paceline-exact"]["throughput"]["least"] == pytest.approx(256)


def test_no_quiet_round_is_said_and_not_invented() -> None:
    assert result(measured(0.5, 0.6, foreign=0.5))["ratios"][0]["throughput_in_quiet_rounds"] is None


def test_the_json_has_the_documented_keys_and_no_date() -> None:
    summary = json.loads(json.dumps(result(measured(0.5, 0.6))))
    assert set(summary) == {
        "workload", "machine", "race", "threads_per_worker", "steps_per_round", "warm_up_rounds", "disturbed_above",
        "disturbed_rounds", "contestants", "ratios", "rounds",
    }  # fmt: skip
    spread = {"median", "lower_quartile", "upper_quartile", "least", "most"}
    counts, spreads = {"processes", "threads", "batch_size"}, {"throughput", "step_s"}
    assert set(summary["contestants"]["torch-ddp"]) == counts | spreads
    ours = summary["contestants"]["paceline-exact"]
    spreads |= {"exposed_s", "backward_s", "left_during_backward"}
    assert set(ours) == counts | spreads
    assert all(set(ours[name]) == spread for name in spreads)
    assert set(summary["rounds"][0]) == {"seconds", "timing", "foreign", "steal", "disturbed"}
    assert set(summary["machine"]) == {"torch", "python", "cpu", "cpu_capability", "cores"}


def test_the_table_shows_both_sides_and_how_many_rounds_were_disturbed(capsys: pytest.CaptureFixture[str]) -> None:
    show_race(result(measured(0.5, 0.6), measured(0.5, 0.6, foreign=0.5)), console())
    shown = capsys.readouterr().out
    assert "paceline-exact / torch-ddp" in shown
    assert "1.200" in shown
    assert "1 of 2 rounds disturbed" in shown


def test_one_process_has_the_threads_and_the_batch_of_all_workers_and_is_compared_like_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    race = Race("mlp25m", workers=3, ours=("paceline-exact", "one-process"), against=("torch-ddp",), rounds=1)
    rounds = [Round({"paceline-exact": 1.0, "one-process": 0.5, "torch-ddp": 0.6}, {}, foreign=0.0, steal=0.0)]
    summary = summarise(race, WORKLOAD, MACHINE, 4, rounds * (WARM_UP_ROUNDS + 1))
    counts = {
        name: [facts[count] for count in ("processes", "threads", "batch_size")]
        for name, facts in summary["contestants"].items()
    }
    assert counts == {"paceline-exact": [3, 1, 32], "one-process": [1, 3, 96], "torch-ddp": [3, 1, 32]}
    assert summary["contestants"]["one-process"]["throughput"]["median"] == pytest.approx(4 * 96 / 0.5)
    assert summary["ratios"][1]["throughput"]["median"] == pytest.approx(1.2)
    show_race(summary, console())
    shown = capsys.readouterr().out
    assert "one-process: 1 process × 3 threads, batch 96, while the other workers wait" in shown
    assert "one-process / torch-ddp" in shown


def test_a_race_has_servers_only_if_a_contestant_uses_them() -> None:
    plain = Race("mlp25m", 2, ours=("paceline-exact",), against=("torch-ddp",))
    served = Race("mlp25m", 2, ours=("paceline-exact", "paceline-parameter-server"), against=("torch-ddp",))
    assert (plain.servers, plain.with_servers) == (0, ())
    assert (served.servers, served.with_servers) == (1, ("paceline-parameter-server",))
