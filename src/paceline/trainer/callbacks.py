"""Callbacks: the moments of a run, in the order they come.

    on_init_end
    on_train_begin
      on_epoch_begin
        on_step_begin                   before the step's first item on this worker
          on_substep_end                after an item that other items of the same step follow
        on_pre_optimizer_step           the step's gradient is there, and clipped
        on_optimizer_step               the weights have changed
        on_step_end                     then, where control says so: on_log, on_evaluate, on_save
      on_epoch_end
    on_train_end

Each gets `(args, state, control, model=…, optimizer=…, …)`, as in transformers; objects made for its Trainer run here.
`TrainerState` says where training is, and what a callback sets in `TrainerControl` is what training does next; both
have the fields of transformers' classes. A callback runs on every worker, and what it sets has to follow from what all
workers see alike, as steps and metrics are.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, ConfigError
from paceline.input_file import cause_of, read_json
from paceline.trainer.argument_fields import IntervalStrategy, SaveStrategy
from paceline.trainer.training_arguments import TrainingArguments
from paceline.world import messages

_TAKEN_BACK = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
    "on_log": ("should_log",),
}


@dataclass
class TrainerState:
    """Where training is. A step is one update of the weights."""

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Every how many steps; a number below 1 is a part of all steps."""
        for kind in ("logging", "eval", "save"):
            steps = getattr(args, f"{kind}_steps")
            if steps is not None:
                setattr(self, f"{kind}_steps", math.ceil(max_steps * steps) if steps < 1 else int(steps))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save_to_json(self, json_path: str | Path) -> None:
        Path(json_path).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> TrainerState:
        """Fields that a newer version may have saved are left."""
        known = {item.name for item in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in saved.items() if name in known})

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        try:
            return cls.from_dict(read_json(json_path))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{json_path} can't be read: {cause_of(error)}") from error


@dataclass
class TrainerControl:
    """What shall happen next; a callback sets it, and returns it or not."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def state(self) -> dict[str, Any]:
        return {"args": dataclasses.asdict(self), "attributes": {}}


class TrainerCallback:
    """Does nothing at every moment; override those you care about."""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any: ...


class CallbackHandler:
    """Calls them in the order they were added, with the objects of the run."""

    def __init__(self, callbacks: Iterable[Any], **objects: Any) -> None:
        self.callbacks: list[Any] = []
        self.objects = objects  # model, processing_class, optimizer, lr_scheduler, train_dataloader, eval_dataloader
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        made = callback() if isinstance(callback, type) else callback
        if any(type(made) is type(known) for known in self.callbacks):
            messages.warn(f"there is already a {type(made).__name__} among the callbacks; now there are two")
        self.callbacks.append(made)

    def pop(self, callback: Any) -> Any:
        """Take one out, by itself or by its class; transformers' class of that name stands for ours."""
        for known in self.callbacks:
            if known is callback or (isinstance(callback, type) and _is_one(known, callback)):
                self.callbacks.remove(known)
                return known
        return None

    def __getattr__(self, event: str) -> Any:
        """`handler.on_log(args, state, control, logs=…)`, as in transformers."""
        if event in TrainerCallback.__dict__ and event.startswith("on_"):
            return partial(self.call, event)
        raise AttributeError(f"'CallbackHandler' object has no attribute {event!r}")

    def call(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> TrainerControl:
        """Let all of them know; a wish that the event fulfils is taken back before they are asked for others."""
        for wish in _TAKEN_BACK.get(event, ()):
            setattr(control, wish, False)
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            answer = method(args, state, control, **self.objects, **more)
            control = control if answer is None else answer
        return control

    def listens(self, event: str) -> bool:
        """Whether one of them does something at this moment."""
        methods = (getattr(callback, event, None) for callback in self.callbacks)
        return any(method and not method.__qualname__.startswith("TrainerCallback.") for method in methods)

    # -- what they carry over a resume --------------------------------------------------------------------------------

    def states(self) -> dict[str, list[Any]]:
        """The states of callbacks that have one, by class name."""
        states: dict[str, list[Any]] = {}
        for callback in self.callbacks:
            if _has_state(callback):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        return states

    def restore(self, states: dict[str, list[Any]]) -> None:
        """Give each its state back: arguments as it was made with, then attributes."""
        left = {name: list(saved) for name, saved in states.items()}
        for callback in self.callbacks:
            saved = left.get(type(callback).__name__)
            if _has_state(callback) and saved:
                found = saved.pop(0)
                for name, value in {**found.get("args", {}), **found.get("attributes", {})}.items():
                    setattr(callback, name, value)
        if missing := [name for name, saved in left.items() if saved]:
            messages.warn(f"the checkpoint has a state of {', '.join(missing)}, but there is no such callback now")


def _is_one(known: Any, kind: type) -> bool:
    ours = type(known).__module__ == __name__
    return isinstance(known, kind) or (ours and type(known).__name__ == kind.__name__)


def _has_state(callback: Any) -> bool:
    return callable(getattr(callback, "state", None)) and callable(getattr(type(callback), "from_state", None))


class ExportableState:
    """A callback that carries something over a resume: `state()` gives {"args": …, "attributes": …} of plain values."""

    def state(self) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} needs a state() that returns its args and attributes")

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Any:
        made = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(made, name, value)
        return made


class DefaultFlowCallback(TrainerCallback):
    """When to log, evaluate, save and end, as the arguments say."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        step, last = state.global_step, state.global_step >= state.max_steps

        def due(strategy: str, every: int) -> bool:
            return strategy == IntervalStrategy.STEPS and every > 0 and step % every == 0

        if due(args.logging_strategy, state.logging_steps) or (step == 1 and args.logging_first_step):
            control.should_log = True
        by_steps = args.eval_strategy == IntervalStrategy.STEPS
        if (due(args.eval_strategy, state.eval_steps) or (last and by_steps)) and args.eval_delay <= step:
            control.should_evaluate = True
        if due(args.save_strategy, state.save_steps) or (last and args.save_strategy == SaveStrategy.STEPS):
            control.should_save = True
        if last:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if args.logging_strategy == IntervalStrategy.EPOCH:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = True


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Ends training when the metric has not become better by more than a threshold, so many evaluations in a row."""

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if args.metric_for_best_model is None or args.eval_strategy == IntervalStrategy.NO:
            raise ConfigError("EarlyStoppingCallback looks at a metric: set eval_strategy and metric_for_best_model")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> Any:
        value = (metrics or {}).get(full_metric_name(args.metric_for_best_model))
        if value is None:
            return
        best = state.best_metric
        better = best is None or (value > best if args.greater_is_better else value < best)
        if best is None or (better and abs(value - best) > self.early_stopping_threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            if state.is_world_process_zero and not control.should_training_stop:
                name, count = args.metric_for_best_model, self.early_stopping_patience_counter
                why = f"{name} has not become better than {best:g} in the last {count} evaluations"
                text = f"paceline: training ends early after step {state.global_step:,}: {why}"
                messages.logger("trainer").info(text)
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        names = ("early_stopping_patience", "early_stopping_threshold")
        counter = "early_stopping_patience_counter"
        return {"args": {name: getattr(self, name) for name in names}, "attributes": {counter: getattr(self, counter)}}


class ProgressCallback(TrainerCallback):
    """Stands for the progress line and the table at the end; a Trainer that it is removed from shows neither."""


class PrinterCallback(TrainerCallback):
    """Prints each log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        if state.is_world_process_zero and logs is not None:
            print({name: f"{v:.4g}" if isinstance(v, float) else v for name, v in logs.items()}, flush=True)


def full_metric_name(name: str) -> str:
    return name if name.startswith("eval_") else f"eval_{name}"
