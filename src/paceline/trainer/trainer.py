"""The Trainer: the loop, ready made, with the names people know from transformers.

    trainer = Trainer(model, TrainingArguments("runs/digits", eval_strategy="epoch"), train_dataset=…, eval_dataset=…)
    trainer.train(resume_from_checkpoint=True)
    trainer.evaluate()
    trainer.save_model()

| what                                     | where                                                   |
|------------------------------------------|---------------------------------------------------------|
| the Engine that the arguments describe   | `engine_setup.py`                                       |
| the loop: items, steps, epochs, saving   | `training_loop.py`; callbacks at each moment            |
| a loss of what the model returns         | `losses.py`, through `compute_loss`                     |
| evaluation and prediction                | `evaluation.py`, through `prediction_step`              |
| loaders, optimizer, schedule             | `dataloaders.py`, `optimization.py`                     |
| files of the run, reports                | `run_folder.py`, `reporting.py`, `integrations/`        |

The same script runs alone, under `paceline run --workers N`, torchrun, SLURM or MPI.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.trainer import run_folder
from paceline.trainer.argument_parsing import check_names
from paceline.trainer.callbacks import (
    CallbackHandler,
    DefaultFlowCallback,
    PrinterCallback,
    TrainerControl,
    TrainerState,
)
from paceline.trainer.dataloaders import (
    Collator,
    KnownColumns,
    check_not_empty,
    count_tokens,
    default_collator,
    eval_loader,
    known_columns,
    train_loader,
)
from paceline.trainer.engine_setup import build_engine, check_can_be_replaced, share_weights, start_seed
from paceline.trainer.evaluation import Evaluator
from paceline.trainer.losses import LossFunction, LossRule, predictions_of
from paceline.trainer.optimization import Scheduler, get_scheduler, make_optimizer
from paceline.trainer.reporting import ReportCallback
from paceline.trainer.training_arguments import TrainingArguments
from paceline.trainer.training_loop import TrainingLoop, TrainOutput
from paceline.world.determinism import seed_everything
from paceline.world.world import World


class PredictionOutput(NamedTuple):
    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class Trainer:
    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Collator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: LossFunction | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        world: World | None = None,
        **old: Any,
    ) -> None:
        if "tokenizer" in old:
            warnings.warn("tokenizer= is called processing_class= now; it is taken as that", stacklevel=2)
            processing_class = old.pop("tokenizer")
        check_names(old, list(Trainer.__init__.__annotations__), "Trainer")
        if (model is None) == (model_init is None):
            raise ConfigError("the Trainer needs a model or a model_init that makes one: give one of them")
        self.args = args if args is not None else TrainingArguments()
        if not isinstance(self.args, TrainingArguments):
            raise ConfigError(
                f"args is a {type(self.args).__module__}.{type(self.args).__name__}; import TrainingArguments from "
                "paceline too: it takes the same arguments"
            )
        if world is not None:
            self.args._world = world
        self._engine: Engine | None = None
        self.model_init = model_init
        self.model: nn.Module = model if model is not None else self.call_model_init()
        self.loss_rule = LossRule(
            self.model,
            loss_function=compute_loss_func,
            label_names=self.args.label_names,
            smoothing=self.args.label_smoothing_factor,
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.data_collator: Collator = data_collator or default_collator(processing_class)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self._optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.optimizer: Any
        self.optimizer, self.lr_scheduler = optimizers
        self._made_by_us = optimizers == (None, None)
        self._check_given()
        self._evaluator = Evaluator(self)
        self.is_in_train = self.has_trained = False
        self.state = self.new_state()
        self.control = TrainerControl()
        self.reports = ReportCallback(self.args)
        printer = [PrinterCallback()] if self.args.disable_tqdm else []
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback(), self.reports, *printer, *(callbacks or ())],
            model=self.model,
            processing_class=self.processing_class,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            train_dataloader=None,
            eval_dataloader=None,
        )
        if getattr(self.model, "config", None) is not None and hasattr(self.model.config, "use_cache"):
            self.model.config.use_cache = self.args.use_cache
        self.call_event("on_init_end")

    def _check_given(self) -> None:
        """Before anything is trained, what could only fail later."""
        if self.optimizer is not None and (self._optimizer_cls_and_kwargs or self.model_init is not None):
            raise ConfigError(
                "optimizers= holds an optimizer of one model; use it without model_init and optimizer_cls_and_kwargs"
            )
        wanted = self.args.eval_strategy != "no" or self.args.eval_on_start
        if wanted and self.eval_dataset is None:
            raise ConfigError(
                f"eval_strategy={self.args.eval_strategy.value!r}, but there is no eval_dataset to evaluate"
            )
        for name, dataset in _named(self.eval_dataset).items():
            check_not_empty(dataset, f"eval_dataset{name and f'[{name!r}]'}")

    # -- training -----------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: bool | str | Path | None = None,
        *,
        ignore_keys_for_eval: list[str] | None = None,
        accept: Sequence[str] = (),
    ) -> TrainOutput:
        """Train to the end; with `resume_from_checkpoint`, from the newest checkpoint in output_dir or the one given.

        `accept` names what may differ from the job that saved it, such as "batch size" (docs/concepts/data.md).
        A signal (SIGTERM, Ctrl-C) ends it after a step that all workers agree on: it saves, and leaves with code 75.
        """
        if self.train_dataset is None:
            raise ConfigError("the Trainer has no train_dataset to train on")
        resume = run_folder.where_to_begin(self.args, resume_from_checkpoint or self.args.resume_from_checkpoint)
        self._make_engine(resume)
        self.is_in_train = self.has_trained = True
        try:
            share_weights(self.engine, self.model)
            loop = TrainingLoop(self, resume, accept, ignore_keys_for_eval)
            self.engine.print(self.args.described())
            run_folder.begin(self.args, self.engine, fresh=not resume)
            if threading.current_thread() is threading.main_thread():  # Python hands signals to that one only
                self.engine.stop_on_signals()
            return loop.run()
        finally:
            self.is_in_train = False
            self.reports.close(ok=self.engine.stop_requested)  # nothing is left to close where training has ended well
            self.engine._stops.close()

    @property
    def engine(self) -> Engine:
        """Made when it is needed: a job that is resumed has the lanes that are on record."""
        if self._engine is None:
            self._engine = build_engine(self.args)
        return self._engine

    def _make_engine(self, resume: bool | Path) -> None:
        """The Engine of this training: an Engine trains once, and its lanes are those of the job for life."""
        lanes = self.args.lanes
        if resume is not False and lanes is None and self.args.world.settings.lanes is None:
            lanes = run_folder.recorded_lanes(Path(self.args.output_dir) if resume is True else resume.parent)
        if self._engine is not None and not self.has_trained and lanes in (None, self._engine.config.lanes):
            return
        if self._engine is not None:
            check_can_be_replaced(self._engine, self._made_by_us or not self.has_trained)
            self._engine.close()
            self._evaluator.forget_loaders()
            if self._made_by_us:
                self.optimizer = self.lr_scheduler = None
            if self.model_init is not None:
                self.model = self.call_model_init()
        self._engine = build_engine(self.args, lanes=lanes)

    def call_model_init(self) -> nn.Module:
        """Makes the model from the job's seed, the same one on every worker."""
        assert self.model_init is not None
        seed_everything(start_seed(self.args))
        return self.model_init()

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: float | None = None
    ) -> Any:
        """The loss of a micro-batch: the mean over its `num_items_in_batch` labels, or samples. Override it at will."""
        loss, outputs = self.loss_rule.of(model, inputs, weight=num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def weight_of(self, batch: Any) -> float | None:
        """How many labels the loss of this batch is the mean of; None: its samples."""
        return self.loss_rule.weight(self.loss_rule.call(batch).labels, batch)

    def count_tokens(self, batch: Any) -> int:
        kind = str(self.args.include_num_input_tokens_seen)
        return count_tokens(batch, self.main_input_name, padding=kind == "all")

    # -- loaders, optimizer, schedule ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        data = self.train_dataset
        return train_loader(data, self.args, self._collator(data), self.engine.device, self.processing_class)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return eval_loader(dataset, self.args, self._collator(dataset), self.engine.device)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return eval_loader(test_dataset, self.args, self._collator(test_dataset), self.engine.device, "test_dataset")

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def create_optimizer(self) -> Optimizer:
        """The optimizer that was given, or that the arguments name. Override it for one of your own."""
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model, self.args, self._optimizer_cls_and_kwargs)
        made: Optimizer = self.optimizer
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Scheduler:
        """The schedule that was given, or that the arguments name, over so many steps."""
        if self.lr_scheduler is None:
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer or self.create_optimizer(),
                self.args.get_warmup_steps(num_training_steps),
                num_training_steps,
                cast("dict[str, Any] | None", self.args.lr_scheduler_kwargs),
            )
        made: Scheduler = self.lr_scheduler
        return made

    def _collator(self, dataset: Any = None) -> Collator:
        if not self.args.remove_unused_columns:
            return self.data_collator
        names = known_columns(self.model, ("labels", *self.loss_rule.names))
        collator = KnownColumns(self.data_collator, names, type(self.model).__name__)
        collator.check(dataset)
        return collator

    # -- evaluation and prediction ------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The loss and metrics over a dataset, or over each of several, by name."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigError("there is no eval_dataset to evaluate; give one to the Trainer or to evaluate()")
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        if isinstance(dataset, dict):
            found: dict[str, float] = {}
            for name, part in dataset.items():
                found |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        loss_only = self.compute_metrics is None or self.args.prediction_loss_only
        make = self.get_eval_dataloader
        output = self._evaluator.measure(dataset, make, metric_key_prefix, ignore_keys, loss_only=loss_only)
        self.log(dict(output.metrics))
        self.call_event("on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for every sample, in the dataset's order; where there are labels, metrics too."""
        make, loss_only = self.get_test_dataloader, self.args.prediction_loss_only
        output = self._evaluator.measure(test_dataset, make, metric_key_prefix, ignore_keys, loss_only=loss_only)
        self.call_event("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, predictions and labels of a batch; a loss only where there are labels, or the model gives one."""
        called = self.loss_rule.call(inputs)
        if called.labels is not None:
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        else:
            loss, outputs = self.loss_rule.of(model, inputs, needed=False)
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            config = getattr(model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        return loss, predictions_of(outputs, ignore_keys), called.labels

    @property
    def main_input_name(self) -> str:
        return str(getattr(self.model, "main_input_name", "input_ids"))

    # -- saving and logging -------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Weights as one safetensors file, with config and tokenizer where there are some; all workers call it."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        state = self.engine.state_dict() if self.has_trained else dict(self.model.state_dict())
        if self.is_world_process_zero():
            run_folder.write_weights(folder, self.model, run_folder.tied(self.model, state), self.processing_class)
        self.engine.barrier()

    def save_state(self) -> None:
        """`trainer_state.json` in output_dir."""
        if self.is_world_process_zero():
            run_folder.write_json(self.args, "trainer_state.json", self.state.to_dict())

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Show what `train`, `evaluate` or `predict` gave, as a table."""
        rows = [(name, f"{value:,.4g}" if isinstance(value, float) else str(value)) for name, value in metrics.items()]
        self.engine.show_table(f"{split} metrics", sorted(rows))

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """`{split}_results.json` in output_dir, and together with those of other splits `all_results.json`."""
        if self.is_world_process_zero():
            run_folder.write_json(self.args, f"{split}_results.json", metrics)
            if combined:
                before = run_folder.read_json(self.args, "all_results.json")
                run_folder.write_json(self.args, "all_results.json", before | metrics)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add the values to the history, and let callbacks and reports know."""
        logs = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in logs.items()}
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call_event("on_log", logs=logs)

    def call_event(self, event: str, **more: Any) -> None:
        self.state.is_world_process_zero = self.is_world_process_zero()  # an elastic job may have lost the one that was
        self.control = self.callback_handler.call(event, self.args, self.state, self.control, **more)

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        return self.callback_handler.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.pop(callback)

    def new_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )

    def is_world_process_zero(self) -> bool:
        return self.args.world.is_main if self._engine is None else self._engine.is_main_process

    def is_local_process_zero(self) -> bool:
        return self.args.world.local_rank == 0


def _named(dataset: Any) -> dict[str, Any]:
    if dataset is None:
        return {}
    return dataset if isinstance(dataset, dict) else {"": dataset}
