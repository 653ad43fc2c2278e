"""The figures are counted right, and grouping by length is at least as good as transformers' in each of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ConfigError
from tests.benchmarks import script

bench = script("lengths")
ORDERS, Grouping, Weight, weigh = bench.ORDERS, bench.Grouping, bench.Weight, bench.weigh
FIGURES = ("padding", "tokens_spread", "padded_spread", "slowest")


def test_a_step_is_weighed_as_in_the_drawing() -> None:
    lengths = np.array([4, 2, 3, 3, 1])
    steps = [[[[0, 1]], [[2, 3]]], [[[4]], []]]
    assert asdict(weigh(steps, lengths)) == pytest.approx(
        asdict(Weight(padding=2 / 15, tokens_spread=0.0, padded_spread=8 / 7 - 1, slowest=9 * 2 / 13, steps=2))
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_order_deals_every_sample(order: str, accumulate: int) -> None:
    grouping = Grouping(samples=500, lanes=3, batch_size=4, accumulate=accumulate)
    lengths = grouping.lengths(0)
    steps = ORDERS[order](grouping, lengths, 0)
    dealt = [sample for step in steps for lane in step for batch in lane for sample in batch]
    assert set(dealt) == set(range(500))
    assert len(dealt) == (501 if order == "transformers, every n-th sample" else 500)  # it repeats to be even
    assert all(len(lane) == accumulate for step in steps[:-1] for lane in step)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("lanes", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_ours_pads_less_and_balances_better_than_transformers(lanes: int, accumulate: int, seed: int) -> None:
    grouping = Grouping(lanes=lanes, accumulate=accumulate)
    lengths = grouping.lengths(seed)
    ours, *theirs = (
        asdict(weigh(order(grouping, lengths, seed), lengths))
        for order in (bench.balanced, bench.every_nth, bench.whole_batches)
    )
    best = {figure: min(weight[figure] for weight in theirs) for figure in FIGURES}
    worse = {figure: (ours[figure], best[figure]) for figure in FIGURES if ours[figure] > best[figure]}
    assert worse == {}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lanes": 0}, "--lanes 0: it must be at least 1"),
        ({"batch_size": 0}, "--batch-size 0: it must be at least 1"),
        ({"sigma": -1.0}, "--sigma -1.0: it can't be negative; 0 makes all lengths equal"),
        ({"samples": 100}, "--samples 100: two steps or more are compared, of 64 samples"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Grouping(**options)


def test_the_script_shows_a_row_per_order_and_writes_every_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lengths.json"
    bench.main(["--samples", "600", "--lanes", "2", "--json", str(file)])
    shown = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert "600 samples of log-normal length, median 200, σ 1 · 2 lanes × 8 samples, accumulate 1" in shown
    for name in ORDERS:
        assert f"{written['orders'][name]['padding']:.2%}" in shown
        assert len(written["by_seed"][name]) == written["seeds"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--lanes", "0"], "--lanes 0: it must be at least 1"),
        (["--json", "/proc/x/y"], "--json /proc/x/y can't be written"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(options)
    assert text in capsys.readouterr().err.splitlines()[-1]
