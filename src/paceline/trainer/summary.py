"""The end of a run in a dozen rows: what it did, how fast, how well, and what it left behind.

    ╭─────────────┬──────────────────────────────────────────────────────────────╮
    │ steps       │ 700 · 44,800 samples                                         │
    │ time        │ 1:23, of it in steps 1:10                                    │
    │ speed       │ 640 samples/s · 100 ms a step, 2 % of it waiting for data    │
    │ MFU         │ 38.2 % of 2 × 61.4 GFLOP/s per worker (measured, …)          │
    │ …           │                                                              │

`engine.show_table(title, RunSummary(…).rows())` shows it; a row that nobody knows anything for is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.trainer.meters import Meters
from paceline.world.terminal import duration


@dataclass(frozen=True)
class Best:
    """The best value of a metric, and the step that had it."""

    name: str
    value: float
    step: int


@dataclass(frozen=True)
class RunSummary:
    meters: Meters
    seconds: float | None = None
    """From the first line to the last, evaluations and saving included."""
    best: Best | None = None
    checkpoints: int | None = None
    last_checkpoint: Path | None = None
    weights_hash: str | None = None

    def rows(self) -> list[tuple[str, str]]:
        meters, whole = self.meters, self.meters.whole
        rows = [
            (
                "steps",
                f"{whole.steps:,} · {whole.samples:,} samples" + (f" · {whole.tokens:,} tokens" * (whole.tokens > 0)),
            ),
            ("time", self._time()),
            ("speed", self._speed()),
            ("MFU", self._mfu()),
            ("peak memory", "" if meters.memory is None else f"{_bytes(meters.memory())} on this worker"),
            ("loss", "" if meters.last_loss is None else f"{meters.last_loss:.5g} in the last step"),
            ("best", "" if self.best is None else f"{self.best.name} {self.best.value:.5g} at step {self.best.step:,}"),
            ("checkpoints", self._checkpoints()),
            ("weights", self.weights_hash or ""),
        ]
        return [(name, value) for name, value in rows if value]

    def _time(self) -> str:
        in_steps = self.meters.whole.seconds
        if self.seconds is None or self.seconds - in_steps < 1:
            return duration(in_steps)
        return f"{duration(self.seconds)}, of it in steps {duration(in_steps)}"

    def _speed(self) -> str:
        whole = self.meters.whole
        if not whole.steps or whole.seconds <= 0:
            return ""
        parts = [f"{_rate(whole.samples / whole.seconds)} samples/s"]
        if whole.tokens:
            parts.append(f"{_rate(whole.tokens / whole.seconds)} tokens/s")
        waiting = whole.waited_s / whole.seconds
        parts.append(f"{_time(whole.seconds / whole.steps)} a step, {waiting:.0%} of it waiting for data")
        return " · ".join(parts)

    def _mfu(self) -> str:
        meters = self.meters
        mfu = meters.mfu(meters.whole)
        if mfu is None or meters.peak is None:
            return ""
        return f"{100 * mfu:.3g} % of {meters.workers} × {meters.peak.text}"

    def _checkpoints(self) -> str:
        if not self.checkpoints:
            return ""
        last = "" if self.last_checkpoint is None else f", the last is {self.last_checkpoint}"
        return f"{self.checkpoints:,} kept{last}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
