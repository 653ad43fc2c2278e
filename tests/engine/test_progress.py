"""The progress line: what it shows, how much of it fits, and that it is honest about speed."""

from __future__ import annotations

import math
import re

import pytest
import torch.nn.functional as F

from paceline import Engine, World
from paceline.engine.progress import Bar, Pace
from paceline.world.control import NoSupervisor
from paceline.world.terminal import ProgressLine, SummaryTable, duration
from tests.engine.loops import prepared

FULL = {"epoch": 1.54, "loss": 0.29314, "lr": 3e-4, "samples/s": 8120.0, "eta": "0:42"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (200, "step 512/1,000 · epoch 1.54 · loss 0.2931 · lr 0.0003 · samples/s 8,120 · eta 0:42"),
        (75, "step 512/1,000 · epoch 1.54 · loss 0.2931 · samples/s 8,120 · eta 0:42"),
        (60, "step 512/1,000 · loss 0.2931 · samples/s 8,120 · eta 0:42"),
        (40, "step 512/1,000 · loss 0.2931 · eta 0:42"),
        (30, "step 512/1,000 · loss 0.2931"),
        (10, "step 512/1,000"),
    ],
)
def test_what_can_be_done_without_is_left_out_first(width: int, text: str) -> None:
    assert ProgressLine(512, 1000, FULL).fitted(width) == text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 300])
def test_a_drawn_line_never_wraps(width: int) -> None:
    drawn = ProgressLine(512, 1000, {**FULL, "something long": "x" * 90}).drawn(width)
    assert len(re.sub(r"\x1b\[[0-9;]*m", "", drawn)) < width


def test_a_loss_that_is_not_finite_is_shown() -> None:
    assert ProgressLine(1, None, {"loss": math.nan}).text() == "step 1 · loss nan"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (42, "0:42"), (3723, "1:02:03"), (2 * 86400 + 3 * 3600 + 600, "2d 03:10")]
)
def test_durations_are_short_to_read(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_speed_is_that_of_the_last_half_minute() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin(100)
    for step in range(101, 161):
        clock.now += 10.0  # slow, ten minutes long
        pace.mark(step, 8)
    assert (pace.steps_per_s, pace.samples_per_s) == (0.1, 0.8)
    for step in range(161, 361):
        clock.now += 0.5
        pace.mark(step, 8)
    assert (pace.steps_per_s, pace.samples_per_s) == (2.0, 16.0)


def test_the_time_left_is_counted_from_the_step_it_began_at(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    bar = Bar(step=50, total=100, main=lambda: True, supervisor=NoSupervisor(), clock=clock)
    bar.show(loss=2.5)
    for step in range(51, 61):
        clock.now += 1.0
        bar.step_done(step, 16)
    bar.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 51/100 · loss 2.5 · samples/s 16 · eta 0:49",
        "step 56/100 · loss 2.5 · samples/s 16 · eta 0:44",
        "step 60/100 · loss 2.5 · samples/s 16 · in 0:10",
    ]


def test_a_worker_that_has_joined_goes_on_with_the_line_at_a_speed_of_its_own_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    main = [False]
    bar = Bar(step=0, total=100, main=lambda: main[0], supervisor=NoSupervisor(), clock=clock)
    for step in range(51, 61):
        clock.now += 1.0
        main[0] = step > 55  # the one that showed it is lost
        bar.step_done(step, 16)
    assert capsys.readouterr().out.splitlines() == ["step 56/100 · samples/s 16 · eta 0:44"]


def test_only_the_main_worker_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar(step=0, total=3, main=lambda: False, supervisor=NoSupervisor())
    bar.step_done(1, 4)
    bar.close()
    assert capsys.readouterr().out == ""


def test_a_loop_shows_its_epoch_and_what_the_script_adds(capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(world=World()) as engine:
        model, optimizer, loader = prepared(engine)
        capsys.readouterr()
        for x, y in (bar := engine.progress(loader)):
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
            bar.show(rate="fast", **{"tokens/s": 7})
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "step 8/8 · epoch 1.00 · rate fast · tokens/s 7 · in 0:00"


def test_a_table_is_aligned_lines_off_a_terminal_and_fits_on_one() -> None:
    table = SummaryTable.of("training has ended", [("steps", "700"), ("weights", "sha256:" + "0123456789abcdef" * 4)])
    assert table.plain() == f"training has ended\n  steps    700\n  weights  sha256:{'0123456789abcdef' * 4}\n"
    for width in (40, 80, 120):
        rows = re.sub(r"\x1b\[[0-9;]*m", "", table.drawn(width)).splitlines()
        assert max(map(len, rows)) <= width
        assert "steps" in rows[2]


def test_without_a_launcher_a_table_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(world=World()) as engine:
        engine.show_table("ended", [("steps", "7")])
    assert capsys.readouterr().out == "ended\n  steps  7\n"
