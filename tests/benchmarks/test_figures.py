"""Figures are drawn from stored numbers, and these are the numbers of the pages' tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from tests.benchmarks import FOLDER, script

figures = script("figures")
DOCS = FOLDER.parent / "docs"
PHOTOGRAPHS = {"monitor.png", "monitor_64_workers.png", "tensorboard.png", "training_in_a_terminal.png"}


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the tables below a heading."""
    text = (DOCS / page).read_text().split(f"{heading}\n", 1)[1].split("\n## ")[0]
    found = re.findall(r"^\| *(.*?) *\|$", text.replace("**", ""), re.MULTILINE)
    return [re.split(r" *\| *", line) for line in found]


def spread(told: dict[str, float], digits: int) -> str:
    low, high = told["lower_quartile"], told["upper_quartile"]
    return f"{told['median']:.{digits}f} ({low:.{digits}f} – {high:.{digits}f})"


def test_the_meshes_are_those_of_the_table() -> None:
    table = {cells[1:][0]: cells[2] for cells in rows_of("concepts/mesh.md", "## What it costs")[1:] if len(cells) == 3}
    for told in figures.numbers("mesh.json")["rows"].values():
        times = f"{told['step_s']:.2f} ({told['least_s']:.2f} to {told['most_s']:.2f})"
        assert table[times] == f"{told['mib']} MiB"


def test_the_clocks_are_those_of_the_tables() -> None:
    cells = figures.staleness.by_cell(figures.numbers("staleness.json")["rows"])
    tables = rows_of("concepts/parameter_server.md", "### Slow workers and random delays")
    for (scenario, clock, until), timed in cells.items():
        if until == "rounds":
            continue
        seen, later = timed["staleness"], cells[scenario, clock, "rounds"]
        expected = [
            clock,
            f"{figures.staleness.speed(timed):.0f}",
            f"{100 * figures.staleness.waiting(timed):.0f} %",
            f"{seen['mean_delay']:.2f}, {seen['most_delay']}",
            f"{timed['loss']:.3f}",
            f"{later['loss']:.3f}",
        ]
        assert expected in [[*row[:2], *row[3:]] for row in tables], (scenario, expected)


def test_the_scaling_is_that_of_the_tables() -> None:
    told = figures.numbers("scaling.json")
    rows = rows_of("benchmarks/scaling.md", "# 2 to 16 workers on 16 cores")
    for name in ("gpt10m", "mlp25m"):
        for point in told[name]:
            ratios = [spread(point["ratios"][peer], 2) for peer in figures.scaling.PEERS]
            assert [str(point["workers"]), *ratios] in [[row[0], *row[-3:]] for row in rows]
    calls = {row[1]: [cell.split(" · ")[-1].replace(" ×", "") for cell in row[2:5]] for row in rows[-4:]}
    for point in told["all_reduce"]:
        assert calls[str(point["workers"])] == [spread(one, 1) for one in point["times_gloo"].values()]


def test_the_slow_network_is_that_of_the_table() -> None:
    told = figures.numbers("shaped_network.json")
    names = {"star": "star", "unsplit-ring": "unsplit ring", "ring": "ring"}
    names |= {"1 server": "parameter server, 1 server", "N servers": "parameter server, N servers"}
    rows = rows_of("benchmarks/slow_network.md", "# The slow network")[2:]
    table = {row[0]: row[2:7] for row in rows if len(row) == 10}
    for name, seconds in told["seconds"].items():
        assert table[names[name]] == [f"{value:.2f}" for value in seconds]


def test_drift_of_ours_is_zero_and_the_table_has_the_others() -> None:
    most = figures.numbers("drift.json")["most"]
    assert set(most["paceline"]) == set(most["torch-ddp"]) == {"1", "2", "3", "4"}
    assert {value for rows in most["paceline"].values() for _, value in rows} == {0.0}
    table = {row[0]: row[1:] for row in rows_of("benchmarks/picture.md", "# The README's picture") if "step" in row[0]}
    assert table
    for label, cells in table.items():
        step = int(label.split()[0])
        drifts = [dict(most["torch-ddp"][workers])[step] for workers in ("2", "3", "4")]
        assert cells == [*(f"{drift:.1e}" for drift in drifts), "0"]


def test_speeds_tell_new_steps_from_those_that_are_done_again() -> None:
    run: dict[str, Any] = {"steps": [[0.0, 1], [0.5, 2], [1.0, 3], [3.0, 2], [3.5, 3], [4.0, 4]]}
    times, new, every = figures.speeds(run, tokens=10)
    assert times == [0, 1, 2, 3, 4, 5]
    assert every == [20, 5, 5, 20, 0, 0]
    assert new == [20, 0, 0, 10, 0, 0]


def same_picture(one: Path, other: Path) -> bool:
    if one.suffix == ".svg":
        return one.read_text() == other.read_text()
    return bool(np.array_equal(imread(one), imread(other)))


@pytest.mark.slow
def test_every_figure_of_the_docs_is_drawn(tmp_path: Path) -> None:
    figures.draw(tmp_path)
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn | PHOTOGRAPHS == {file.name for file in (DOCS / "figures").iterdir()}
    for file in tmp_path.iterdir():
        kept = DOCS / "figures" / file.name
        assert same_picture(file, kept), f"{file.name} is not of these numbers: make figures"
    hashes = re.findall(r"sha256:[0-9a-f]{64}", (tmp_path / "terminal.svg").read_text())
    assert len(hashes) == 2
    assert len(set(hashes)) == 1


def test_the_kills_lost_nothing_of_ours_and_the_table_has_both() -> None:
    runs = figures.numbers("kills.json")["runs"]
    table = {row[0]: row[1:4] for row in rows_of("benchmarks/picture.md", "# The README's picture")}
    for name, run in runs.items():
        reached, end = len({step for _, step in run["steps"]}), run["steps"][-1][0]
        assert table[name] == [str(reached), f"{end:.0f} s", str(len(run["steps"]) - reached)]
        assert len(run["kills_s"]) == 3
    assert table["paceline"][2] == "0"
