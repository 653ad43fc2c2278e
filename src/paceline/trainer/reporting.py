"""What people see of a run: a progress line, its values wherever `report_to` says, and a summary at the end.

    on_train_begin     reporters start; the line appears
    on_step_end        the line moves
    on_log             values go to the reporters
    on_train_end       the line stands still; a summary is shown
    on_log after it    values go to metrics.jsonl alone

It gets every event before the callbacks do. Reporters and the line belong to the main worker; the others are silent.
Where an elastic job loses that one, the next main worker takes over: the line continues, and so do the reports
(tracking/run.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.retention import all_checkpoints
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.tracking import choose, json_lines
from paceline.tracking.reporter import RunInfo
from paceline.tracking.run import RunReports
from paceline.trainer.callbacks import TrainerCallback, full_metric_name
from paceline.trainer.meters import Meters
from paceline.trainer.training_arguments import TrainingArguments
from paceline.world import messages
from paceline.world.less_traffic import Way, waiting_told, ways_out
from paceline.world.terminal import duration

SHOWN = {"learning_rate": "lr", "eval_loss": "eval loss"}


class ReportCallback(TrainerCallback):
    """Passes a run's events on to what reports it: nothing, then the reports of a training, then its file alone."""

    def __init__(self, arguments: TrainingArguments) -> None:
        choose(arguments.report_to)  # a wrong name is an error now, not when training starts
        self.shows_progress = not arguments.disable_tqdm
        self._reports = NoReports()
        self._begin: Callable[..., NoReports] = lambda args, state, shows: NoReports()

    def attach(self, engine: Engine, meters: Meters) -> None:
        """The training that begins next."""
        self._begin = partial(TrainingReports, engine, meters)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._reports = self._begin(args, state, shows=self.shows_progress)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._reports.step(args, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        values = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        self._reports.log(args, state, values)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        reports = self._reports
        rows = reports.summary(args, state)
        self.close(ok=True)
        reports.show(f"{args.run_name} has ended", rows)

    def close(self, *, ok: bool) -> None:
        """However training ends."""
        self._reports = self._reports.close(ok=ok)


class NoReports:
    """Before a training."""

    def step(self, args: Any, state: Any) -> None: ...

    def log(self, args: Any, state: Any, values: dict[str, float]) -> None: ...

    def summary(self, args: Any, state: Any) -> list[tuple[str, str]]:
        return []

    def show(self, title: str, rows: list[tuple[str, str]]) -> None: ...

    def close(self, *, ok: bool) -> NoReports:
        return self


class TrainingReports(NoReports):
    def __init__(self, engine: Engine, meters: Meters, args: Any, state: Any, *, shows: bool) -> None:
        self._engine, self._meters, self._shows = engine, meters, shows
        self._folder = Path(args.output_dir)
        run = RunInfo(
            name=str(args.run_name),
            folder=self._folder,
            config=args.to_dict(),
            world=engine.resolved(),
            resumed_at=state.global_step or None,
        )
        self._reports = RunReports(
            args.report_to,
            run,
            is_main=lambda: engine._writes_reports,
            world=engine.resolved,
            say=partial(engine._note, area="trainer"),
            at_end=engine.store_residuals,
        )
        engine.record_events(run.folder)
        self._bar = engine.bar(state.max_steps) if shows else NoBar()
        self._began = time.monotonic()

    def step(self, args: Any, state: Any) -> None:
        self._reports.take_over(state.log_history)
        loss = self._meters.last_loss
        shown = {} if loss is None else {"loss": loss}
        self._bar.show(**shown, epoch=f"{state.epoch:.2f}")  # always as wide: a line that jumps is hard to read
        self._bar.step_done(state.global_step, self._engine.step_samples)

    def log(self, args: Any, state: Any, values: dict[str, float]) -> None:
        self._reports.log(state.global_step, values, state.log_history)
        shown = {label: values[name] for name, label in SHOWN.items() if name in values}
        best = full_metric_name(args.metric_for_best_model or "loss")
        if best in values and best not in SHOWN:  # what the run is judged by, in the place of the loss
            shown.pop("eval loss", None)
            shown[best.replace("_", " ")] = values[best]
        self._bar.show(**shown)

    def summary(self, args: Any, state: Any) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        if self._shows:
            best = None
            if state.best_metric is not None:
                best = (args.metric_for_best_model, state.best_metric, state.best_global_step or 0)
            rows = summary_rows(
                self._meters,
                seconds=time.monotonic() - self._began,
                best=best,
                checkpoints=all_checkpoints(Path(args.output_dir)),
                ways=ways_of(self._engine.config),
                lanes=-(-self._engine.config.summed_lanes // self._engine.world.size),
                weights_hash=self._engine.weights_hash(),  # a collective: a worker that is lost by then is known to be
            )
        self._reports.take_over(state.log_history)
        return rows

    def show(self, title: str, rows: list[tuple[str, str]]) -> None:
        if rows:
            self._engine.show_table(title, rows)

    def close(self, *, ok: bool) -> NoReports:
        self._bar.close()
        self._engine.record_events(None)
        has_file = not self._reports.is_reporting or json_lines.JsonLines.name in self._reports.names
        self._reports.close(ok=ok)
        return FileAlone(self._engine, self._folder) if has_file else NoReports()


class FileAlone(NoReports):
    """After a training: what is measured then is a line of metrics.jsonl too."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._folder, self._is_writable = engine, folder, True

    def log(self, args: Any, state: Any, values: dict[str, float]) -> None:
        if not self._engine.is_main_process or not self._is_writable:
            return
        try:
            json_lines.append(self._folder, state.global_step, values)
        except OSError as error:
            self._is_writable = False
            path, why = self._folder / json_lines.FILE_NAME, error.strerror or error
            messages.warn(f"{path} can't be written any more: {why}")


class NoBar:
    """Where disable_tqdm is set, or the ProgressCallback was removed."""

    def show(self, **fields: float | str | int) -> None: ...

    def step_done(self, step: int, samples: int) -> None: ...

    def close(self) -> None: ...


def summary_rows(
    meters: Meters,
    *,
    seconds: float,
    best: tuple[str, float, int] | None = None,
    checkpoints: Sequence[Path] = (),
    weights_hash: str = "",
    ways: Sequence[Way] = (),
    lanes: int = 1,
) -> list[tuple[str, str]]:
    """The end of a run in a dozen rows: what it did, how fast, how well, and what it left behind.

        │ steps       │ 700 · 44,800 samples                                         │
        │ time        │ 1:23, of it in steps 1:10                                    │
        │ speed       │ 640 samples/s · 100 ms a step, 2 % of it waiting for data    │
        │ MFU         │ 38.2 % of 2 × 61.4 GFLOP/s per worker (measured, …)          │
        │ …           │                                                              │

    `seconds` go from the first line to the last, with evaluations and saving. `best` is a metric's name, its value and
    the step that had it. `ways` could be gone to wait less, with so many lanes on a worker. A row without a value is
    left out.
    """
    whole = meters.whole
    tokens = f" · {whole.tokens:,} tokens" if whole.tokens else ""
    in_steps = duration(whole.seconds)
    mfu, peak = meters.mfu(whole), meters.peak
    rows = [
        ("steps", f"{whole.steps:,} · {whole.samples:,} samples{tokens}"),
        ("time", in_steps if seconds - whole.seconds < 1 else f"{duration(seconds)}, of it in steps {in_steps}"),
        ("speed", _speed(meters)),
        ("communication", _communication(meters, ways, lanes)),
        ("MFU", "" if mfu is None or peak is None else f"{100 * mfu:.3g} % of {meters.workers} × {peak.text}"),
        ("peak memory", "" if meters.memory is None else f"{_bytes(meters.memory())} on this worker"),
        ("loss", "" if meters.last_loss is None else f"{meters.last_loss:.5g} in the last step"),
        ("best", "" if best is None else f"{best[0]} {best[1]:.5g} at step {best[2]:,}"),
        ("checkpoints", f"{len(checkpoints):,} kept, the last is {checkpoints[0]}" if checkpoints else ""),
        ("weights", weights_hash),
    ]
    return [(name, value) for name, value in rows if value]


def _communication(meters: Meters, ways: Sequence[Way], lanes: int) -> str:
    whole = meters.whole
    if meters.workers == 1 or whole.seconds <= 0:
        return ""
    return waiting_told(whole.exposed_s / whole.seconds, ways, lanes=lanes)


def ways_of(config: EngineConfig) -> tuple[Way, ...]:
    """None, unless gradients travel in every step and as they are: otherwise there is less to gain."""
    if config.strategy.entry.name != "ddp" or config.compression is not None:
        return ()
    return ways_out(shares_memory=config.backend == "paceline")


def _speed(meters: Meters) -> str:
    whole = meters.whole
    if not whole.steps or whole.seconds <= 0:
        return ""
    rates = {"samples": whole.samples / whole.seconds, "tokens": whole.tokens / whole.seconds}
    parts = [f"{rate:,.0f} {name}/s" if rate >= 100 else f"{rate:.3g} {name}/s" for name, rate in rates.items() if rate]
    step_s = whole.seconds / whole.steps
    step = f"{step_s:.3g} s" if step_s >= 1 else f"{1000 * step_s:.3g} ms"
    return " · ".join([*parts, f"{step} a step, {whole.waited_s / whole.seconds:.0%} of it waiting for data"])


def _bytes(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
