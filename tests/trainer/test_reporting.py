"""The last table of a run: what it says, and that it says nothing it does not know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline import Engine, World
from paceline.trainer.meters import Meters, PeakFlops, Stretch
from paceline.trainer.reporting import summary_rows, ways_of
from paceline.world.less_traffic import WAYS, Way, ways_out


def test_a_summary_tells_what_how_fast_how_well_and_what_is_left() -> None:
    meters = Meters(
        workers=2,
        flops_per_unit=6e6,
        peak=PeakFlops(64e9, "measured"),
        memory=lambda: 5 * 2**28,
        whole=Stretch(steps=700, samples=44_800, tokens=1_433_600, seconds=70.0, waited_s=1.4),
        last_loss=0.29314159,
    )
    rows = summary_rows(
        meters,
        seconds=83.0,
        best=("eval_accuracy", 0.9733, 600),
        checkpoints=[Path(f"runs/x/checkpoint-{step}") for step in range(700, 0, -100)],
        weights_hash="sha256:00ff",
    )
    assert rows == [
        ("steps", "700 · 44,800 samples · 1,433,600 tokens"),
        ("time", "1:23, of it in steps 1:10"),
        ("speed", "640 samples/s · 20,480 tokens/s · 100 ms a step, 2% of it waiting for data"),
        ("MFU", "96 % of 2 × 64 GFLOP/s per worker (measured)"),
        ("peak memory", "1.25 GiB on this worker"),
        ("loss", "0.29314 in the last step"),
        ("best", "eval_accuracy 0.9733 at step 600"),
        ("checkpoints", "7 kept, the last is runs/x/checkpoint-700"),
        ("weights", "sha256:00ff"),
    ]


def test_a_run_without_a_step_has_no_speed_and_a_loss_of_nan_is_shown() -> None:
    assert summary_rows(Meters(), seconds=0.0) == [("steps", "0 · 0 samples"), ("time", "0:00")]
    rows = dict(summary_rows(Meters(last_loss=math.nan), seconds=0.0))
    assert rows["loss"] == "nan in the last step"


def test_a_summary_says_what_share_waits_for_gradients_and_what_would_cut_it() -> None:
    assert row(0.9) is None
    assert row(5.0, workers=1) is None
    assert row(2.0) == (
        "20% of a step waits for gradients; if that is for bytes, compression=int8 leaves 6%: "
        "1.2 times the steps per second"
    )
    told = row(9.0)
    assert told is not None
    assert told.startswith(
        "90% of a step waits for gradients; if that is for bytes, diloco every=50 outer_gradients=int8 leaves 4%"
    )
    told = row(1.5)
    assert told is not None
    assert "compression=bf16 leaves 8%" in told, "the first that is enough"
    assert row(4.0, ways=()) == "40% of a step waits for gradients"


def test_with_several_lanes_on_a_worker_compression_is_advised_by_what_it_sends_then() -> None:
    """Four lanes on each: int8 sends 2.5 payloads, 0.64 of ddp's bytes, and diloco's int8 is still the least."""
    told = row(2.0, lanes=4)
    assert told is not None
    assert "local_sgd every=8 leaves 3%" in told
    told = row(9.9, lanes=4)
    assert told is not None
    assert "outer_gradients=int8 leaves 56%" in told
    told = row(9.9, lanes=8)
    assert told is not None
    assert "diloco every=50 leaves 66%" in told, "in int8 eight lanes send more than their sum in fp32"


@pytest.mark.parametrize("waiting_s", [1.5, 2.0, 5.0, 9.0, 9.99, 10.0])
def test_where_gradients_lie_in_shared_memory_the_advice_is_to_meet_less_often(waiting_s: float) -> None:
    told = row(waiting_s, ways=ways_out(shares_memory=True))
    assert told is not None
    assert "every=" in told
    assert "int8" not in told


@pytest.mark.parametrize(
    ("backend", "more", "compressed", "others"),
    [
        ("gloo", {}, 3, 2),
        ("paceline", {}, 0, 2),
        ("gloo", {"compression": "int8"}, 0, 0),
        ("gloo", {"strategy": "zero2"}, 0, 0),
    ],
)
def test_an_engines_ways_out_are_those_of_its_backend(
    backend: str, more: dict[str, Any], compressed: int, others: int
) -> None:
    with Engine(world=World(), device="cpu", backend=backend, **more) as engine:
        ways = ways_of(engine.config)
    assert sum(way.is_compressed for way in ways) == compressed
    assert len(ways) == compressed + others


def row(exposed_s: float, workers: int = 4, ways: Sequence[Way] = WAYS[1:], lanes: int = 1) -> str | None:
    """What is told of ten seconds, so many of which waited."""
    meters = Meters(workers, whole=Stretch(steps=10, samples=10, seconds=10.0, exposed_s=exposed_s))
    return dict(summary_rows(meters, seconds=10.0, ways=ways, lanes=lanes)).get("communication")
