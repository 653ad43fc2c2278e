"""The last table of a run: what it says, and that it says nothing it does not know."""

from __future__ import annotations

import math
from pathlib import Path

from paceline.trainer.meters import Meters, PeakFlops, Stretch
from paceline.trainer.reporting import summary_rows


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
    def row(exposed_s: float, workers: int = 4, *, is_ddp: bool = True) -> str | None:
        meters = Meters(workers, whole=Stretch(steps=10, samples=10, seconds=10.0, exposed_s=exposed_s))
        return dict(summary_rows(meters, seconds=10.0, is_ddp=is_ddp)).get("communication")

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
    assert row(4.0, is_ddp=False) == "40% of a step waits for gradients"
