"""The measured order: both sides in processes of their own, and what can't be measured is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.bench.report import console
from paceline.errors import ConfigError, LaunchError
from tests.benchmarks import script

order = script("order")
BATCH, GIB, OURS, PEER, SIDES = order.BATCH, order.GIB, order.OURS, order.PEER, order.SIDES
does_not_fit, in_a_process, measure_order = order.does_not_fit, order.in_a_process, order.measure_order

FIGURES = {"seconds": 0.002, "grown_mib": 0.25}


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every turn takes 2 ms; the turns asked for."""
    asked: list[tuple[str, int, int]] = []

    def turn(side: str, samples: int, position: int, timeout_s: float) -> Any:
        asked.append((side, samples, position))
        return order.Turn(**FIGURES)

    monkeypatch.setattr(order, "in_a_process", turn)
    return asked


def shown(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    order.show_order(result, console())
    return capsys.readouterr().out


@pytest.mark.parametrize("side", SIDES)
def test_each_side_gives_a_batch_of_different_ids_from_both_places(side: str) -> None:
    take = SIDES[side]()
    for position in (0, 900):
        ids = take(1000, position)
        assert len(set(ids)) == BATCH
        assert all(0 <= sample < 1000 for sample in ids)


@pytest.mark.job
def test_both_sides_are_measured_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "PEER_ROUNDS", 1)
    order.main(["--samples", "1000", "--rounds", "1", "--json", str(tmp_path / "order.json")])
    result = json.loads((tmp_path / "order.json").read_text())
    (size,) = result["sizes"]
    assert set(size["sides"]) == {OURS, PEER}
    for facts in size["sides"].values():
        assert set(facts) == {"first_batch_s", "resume_s", "grown_mib", "turns"}
        assert facts["first_batch_s"]["least"] > 0
        assert [len(turns) for turns in facts["turns"].values()] == [1, 1]
    table = capsys.readouterr().out
    assert OURS in table
    assert PEER in table
    assert "paceline's target at 1,000 samples" in table


def test_smaller_sizes_come_first_and_both_places_are_asked_for_every_time(
    no_processes: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "does_not_fit", lambda samples, free: None)
    result = measure_order(10**9, rounds=20, tell=lambda line: None)
    assert [size["samples"] for size in result["sizes"]] == [10**6, 10**7, 10**9]
    assert no_processes.count((OURS, 10**9, 0)) == no_processes.count((OURS, 10**9, 9 * 10**8)) == 20
    assert no_processes.count((PEER, 10**7, 9 * 10**6)) == 3
    assert no_processes.count((PEER, 10**9, 9 * 10**8)) == 1


def test_a_list_that_does_not_fit_is_not_made(
    no_processes: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 22 * GIB}))
    result = measure_order(10**9, rounds=1, tell=lambda line: None)
    assert (PEER, 10**7, 0) in no_processes
    assert (PEER, 10**9, 0) not in no_processes
    assert "1,000,000,000 samples: needs about 45 GiB, 22 GiB are free: not run" in shown(result, capsys)


def test_what_fits_is_told_by_48_bytes_a_sample() -> None:
    assert does_not_fit(10**9, 44 * GIB) == "needs about 45 GiB, 44 GiB are free: not run"
    assert does_not_fit(10**9, 46 * GIB) is None


@pytest.mark.job
def test_a_side_that_takes_too_long_is_ended_and_said_so() -> None:
    assert in_a_process(OURS, 1000, 0, timeout_s=0.01) == "had no ids after 0.01 s: ended"
    assert order.measure_side(OURS, 1000, rounds=1, timeout_s=0.01) == {"not_run": "had no ids after 0.01 s: ended"}


@pytest.mark.job
def test_a_side_that_fails_is_an_error_with_its_words() -> None:
    with pytest.raises(LaunchError, match=r"paceline, 1,000 samples: the process said:[\s\S]*invalid literal"):
        in_a_process(OURS, 1000, "nowhere", timeout_s=60)


def test_memory_that_grows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIDES, "hungry", lambda: lambda samples, position: list(bytes(samples)))
    # The list is more than malloc ever takes from what was given back to it; the bytes it is made of may be from there.
    assert 16 * 8 - 8 < order.measure_here("hungry", 16 * 2**20, 0).grown_mib < 16 * 9 + 8


@pytest.mark.parametrize(("usual", "verdict"), [(0.002, "reached"), (0.02, "MISSED")])
def test_the_verdict_is_about_the_median_and_the_worst_turn_stands_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], usual: float, verdict: str
) -> None:
    turns = iter([0.5, *[usual] * 99])
    monkeypatch.setattr(order, "in_a_process", lambda *_: order.Turn(next(turns), 0.25))
    text = shown(measure_order(1000, rounds=4, tell=lambda line: None), capsys)
    assert f"first batch: 10 ms {verdict}, median {1e3 * usual:.2f}, worst turn 500.00" in text
    assert "memory: 1 MiB reached, median 0.25, worst turn 0.25" in text


def test_the_table_fits_a_file_with_seconds_on_torchs_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(order, "does_not_fit", lambda samples, free: None)
    monkeypatch.setattr(order, "in_a_process", lambda side, *_: order.Turn(0.0002 if side == OURS else 321.0, 45_678.9))
    text = shown(measure_order(10**9, rounds=2, tell=lambda line: None), capsys)
    assert "321,000 – 321,000" in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("samples", "rounds", "words"),
    [(31, 20, "--samples 31: at least one batch of 32 is measured"), (1000, 0, "--rounds 0: at least one round")],
)
def test_a_measurement_that_makes_no_sense_is_one_clear_line(samples: int, rounds: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measure_order(samples, rounds, tell=lambda line: None)
