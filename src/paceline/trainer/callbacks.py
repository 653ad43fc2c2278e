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
A callback decides on every worker for itself: what it sets in `control` has to follow from what all workers see alike,
as steps and metrics are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from paceline.errors import ConfigError
from paceline.trainer.argument_fields import IntervalStrategy, SaveStrategy
from paceline.trainer.trainer_state import TrainerControl, TrainerState
from paceline.trainer.training_arguments import TrainingArguments

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_save",
    "on_log",
    "on_prediction_step",
)

_TAKEN_BACK = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
    "on_log": ("should_log",),
}


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
            warnings.warn(
                f"there is already a {type(made).__name__} among the callbacks; now there are two", stacklevel=3
            )
        self.callbacks.append(made)

    def pop(self, callback: Any) -> Any:
        """Take one out, by itself or by its class."""
        for known in self.callbacks:
            if known is callback or (isinstance(callback, type) and isinstance(known, callback)):
                self.callbacks.remove(known)
                return known
        return None

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
                told = f"{name} has not become better than {best:g} in the last {count} evaluations"
                print(f"paceline: training ends early after step {state.global_step:,}: {told}", flush=True)
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        names = ("early_stopping_patience", "early_stopping_threshold")
        counter = "early_stopping_patience_counter"
        return {"args": {name: getattr(self, name) for name in names}, "attributes": {counter: getattr(self, counter)}}


class PrinterCallback(TrainerCallback):
    """Prints each log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        if state.is_world_process_zero and logs is not None:
            print({name: f"{v:.4g}" if isinstance(v, float) else v for name, v in logs.items()}, flush=True)


def full_metric_name(name: str) -> str:
    return name if name.startswith("eval_") else f"eval_{name}"
