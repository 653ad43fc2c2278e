"""What people see of a run: a progress line, its values wherever `report_to` says, and a summary at the end.

    on_train_begin     reporters start; the line appears
    on_step_end        the line moves
    on_log             values go to the reporters
    on_train_end       the line stands still; a summary is shown
    on_log after it    values go to metrics.jsonl alone

It is the first callback of a Trainer. Reporters and the line belong to the main worker; the others are silent. Where an
elastic job loses that one, the next main worker takes over: the line goes on, and so do the reports, with what the lost
one had not written yet (`integrations/taking_over.py`).
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.retention import all_checkpoints
from paceline.engine.engine import Engine
from paceline.engine.progress import Bar
from paceline.trainer.callbacks import TrainerCallback, full_metric_name
from paceline.trainer.integrations import json_lines
from paceline.trainer.integrations.choice import Reporters, choose
from paceline.trainer.integrations.reporter import RunInfo
from paceline.trainer.integrations.taking_over import Written
from paceline.trainer.meters import Meters, PeakMemory
from paceline.trainer.peak_flops import ModelFlops, model_flops, peak_flops
from paceline.trainer.summary import Best, RunSummary
from paceline.trainer.training_arguments import TrainingArguments

SHOWN = {"loss": "loss", "learning_rate": "lr", "eval_loss": "eval loss"}
WORTH_MEASURING = 100  # steps; a shorter run is not kept waiting for the speed of its processor


class ReportCallback(TrainerCallback):
    def __init__(self, arguments: TrainingArguments) -> None:
        choose(arguments.report_to)  # a name that is wrong is said now, not when training starts
        self._engine: Engine | None = None
        self._meters: Meters | None = None
        self._reporters: Reporters | None = None
        self._run = RunInfo("", Path(arguments.output_dir))
        self._is_reporting = False
        self._written: Written | None = None  # by the worker that this one has taken over from
        self._ended: Path | None = None  # the folder of a run that was reported, and has ended
        self._bar: Bar | None = None
        self._began = 0.0

    def attach(self, engine: Engine, meters: Meters) -> None:
        """The training that begins now."""
        self._engine, self._meters = engine, meters

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        engine = self._engine
        assert engine is not None
        self._is_reporting, self._written = engine.is_main_process, None
        self._reporters = choose(args.report_to, main=self._is_reporting)
        self._run = RunInfo(
            name=str(args.run_name),
            folder=Path(args.output_dir),
            config=args.to_dict(),
            world=_world_of(engine),
            resumed_at=state.global_step or None,
        )
        self._reporters.start(self._run)
        self._bar = None if args.disable_tqdm else engine.bar(state.max_steps)
        self._began = time.monotonic()

    def _take_over(self, args: Any, state: Any) -> bool:
        """Whether this worker has just become the main one of a run under way; its history is written by then."""
        engine = self._engine
        if self._reporters is None or self._is_reporting or engine is None or not engine.is_main_process:
            return False
        written = Written(self._run.folder, state.log_history)
        self._is_reporting, self._written = True, written
        self._reporters = choose(args.report_to)
        lines, at = written.last_lines, written.last_step
        self._reporters.start(replace(self._run, world=_world_of(engine), resumed_at=at, taken_over=lines))
        for step, values in written.missing:
            self._reporters.log(step, values)
        engine.print(f"paceline: reports go on from here: {', '.join(self._reporters.names)}")
        return True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._take_over(args, state)
        if self._bar is not None and self._meters is not None and self._engine is not None:
            loss = self._meters.last_loss
            shown = {} if loss is None else {"loss": loss}
            self._bar.show(**shown, epoch=f"{state.epoch:.2f}")  # always as wide: a line that jumps is hard to read
            self._bar.step_done(state.global_step, self._engine.step_samples)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        values = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        if self._reporters is not None:
            known = self._take_over(args, state) or (self._written and self._written.has(state.global_step, values))
            if not known:
                self._reporters.log(state.global_step, values)
        elif self._ended is not None and self._engine is not None and self._engine.is_main_process:
            self._add_line(self._ended, state.global_step, values)
        if self._bar is not None:
            told = {SHOWN[name]: value for name, value in values.items() if name in SHOWN and name != "loss"}
            best = full_metric_name(args.metric_for_best_model or "loss")
            if best in values and best not in SHOWN:  # what the run is judged by, in the place of the loss
                told.pop("eval loss", None)
                told[best.replace("_", " ")] = values[best]
            self._bar.show(**told)

    def _add_line(self, folder: Path, step: int, values: dict[str, float]) -> None:
        try:
            json_lines.append(folder, step, values)
        except OSError as error:
            self._ended = None
            warnings.warn(
                f"{folder / json_lines.FILE_NAME} gets no more lines: {error.strerror or error}", stacklevel=6
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        shows = self._engine is not None and self._meters is not None and not args.disable_tqdm
        summary = self._summary(args, state) if shows else None  # all meet for it: who is lost by then is known
        self._take_over(args, state)
        self.close(ok=True)
        if self._engine is not None and summary is not None:
            self._engine.show_table(f"{args.run_name} has ended", summary.rows())

    def close(self, *, ok: bool) -> None:
        """However training ends."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._reporters is not None:
            writes = not self._is_reporting or json_lines.JsonLines.name in self._reporters.names
            self._ended = self._run.folder if writes else None
            self._reporters.close(ok=ok)
            self._reporters = None

    def _summary(self, args: Any, state: Any) -> RunSummary:
        assert self._engine is not None
        assert self._meters is not None
        kept = all_checkpoints(Path(args.output_dir))
        best = None
        if state.best_metric is not None:
            best = Best(args.metric_for_best_model, state.best_metric, state.best_global_step or 0)
        return RunSummary(
            self._meters,
            seconds=time.monotonic() - self._began,
            best=best,
            checkpoints=len(kept),
            last_checkpoint=kept[0] if kept else None,
            weights_hash=self._engine.weights_hash(),
        )


def costs_of(model: Any) -> dict[bool, ModelFlops]:
    """What a token costs (True), and a sample: which of them counts is known after the first batch.

    Asked before `prepare`, while the model has all its parameters.
    """
    return {counts_tokens: model_flops(model, counts_tokens=counts_tokens) for counts_tokens in (True, False)}


def make_meters(engine: Engine, steps: int) -> Meters:
    """All workers call it, since they share a host's cores: a processor's peak is measured."""
    device, peak = engine.device, None
    if device.type != "cpu" or steps >= WORTH_MEASURING:
        peak = peak_flops(device, dtype=engine.config.precision.dtype)
    return Meters(workers=engine.world.size, peak=peak, memory=PeakMemory(device))


def _world_of(engine: Engine) -> dict[str, Any]:
    config = engine.config
    return {
        "workers": engine.world.size,
        "lanes": config.lanes,
        "threads": config.threads,
        "strategy": str(config.strategy),
        "device": engine.device.type,
        "precision": str(config.precision),
        "torch": torch.__version__,
    }
