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
| files of the run, reports                | `run_folder.py`, `reporting.py`, `tracking/`            |
| files for from_pretrained, the Hub       | `pretrained_files.py`, `hub.py`                         |
| what a subclass may override             | `overrides.py`                                          |
| a batch size that fits into memory       | `batch_size.py`                                         |

The same script runs alone, under `paceline run --workers N`, torchrun, SLURM or MPI.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from paceline.data.sharded_sampler import WorkItem
from paceline.engine.engine import Engine
from paceline.engine.vote import HostReading
from paceline.errors import ConfigError, LoopError
from paceline.trainer import hub, run_folder
from paceline.trainer.argument_fields import SaveStrategy
from paceline.trainer.argument_parsing import check_names
from paceline.trainer.batch_size import BatchSizeFinder
from paceline.trainer.callbacks import (
    CallbackHandler,
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerControl,
    TrainerState,
)
from paceline.trainer.dataloaders import (
    Collator,
    KnownColumns,
    batch_size_of,
    check_not_empty,
    count_tokens,
    default_collator,
    eval_loader,
    is_stream,
    known_columns,
    told_total,
    train_loader,
    train_sampler,
)
from paceline.trainer.engine_setup import (
    advice_to_compile,
    build_engine,
    check_can_be_replaced,
    share_weights,
    start_seed,
)
from paceline.trainer.evaluation import EvaluationOutput, Evaluator
from paceline.trainer.losses import LossFunction, LossRule, predictions_of, takes
from paceline.trainer.memory_metrics import MemoryMetrics
from paceline.trainer.optimization import (
    Scheduler,
    decaying_names,
    get_scheduler,
    make_optimizer,
    optimizer_class,
)
from paceline.trainer.overrides import TrainerAccelerator, check_overrides, overrides, refusing_plain_backward
from paceline.trainer.pretrained_files import PretrainedFiles
from paceline.trainer.reporting import ReportCallback
from paceline.trainer.training_arguments import TrainingArguments
from paceline.trainer.training_loop import TrainingLoop, TrainOutput, metric_for_best
from paceline.world import messages
from paceline.world.determinism import seed_everything
from paceline.world.world import World


class PredictionOutput(NamedTuple):
    """What `trainer.predict` returns: rows in the dataset's order, every sample once."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class Trainer:
    """The training loop, ready made, with the names of transformers' Trainer; docs/concepts/trainer.md lists them."""

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
            messages.warn("tokenizer= is called processing_class= now; it is taken as that")
            processing_class = old.pop("tokenizer")
        check_names(old, list(Trainer.__init__.__annotations__), "Trainer")
        check_overrides(type(self), Trainer)
        if (model is None) == (model_init is None):
            raise ConfigError("the Trainer needs a model or a model_init that makes one: give one of them")
        self.args = TrainingArguments() if args is None else _checked(args)
        if world is not None:
            self.args._world = world
        if (level := self.args.chosen_log_level) is not None:
            messages.set_level(level)
        self._keep_accelerator_config()
        self._memory = MemoryMetrics(not self.args.skip_memory_metrics, self.args.device)
        self._train_batch_size = self.args.train_batch_size  # auto_find_batch_size may find another
        self._engine: Engine | None = None
        self.model_init = model_init
        with self._memory.stage("init"):
            self.model: nn.Module = model if model is not None else self.call_model_init()
        self.loss_rule = LossRule(
            self.model,
            loss_function=compute_loss_func,
            label_names=self.args.label_names,
            smoothing=self._smoothing(),
            calls_model=not any(overrides(self, name, Trainer) for name in ("compute_loss", "training_step")),
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
        self._loop: TrainingLoop | None = None
        self._takes_count = takes(self.compute_loss, "num_items_in_batch")
        self._owns_step = overrides(self, "training_step", Trainer)
        self._has_run_backward = False  # for the micro-batch that is computed
        counting = ("training_step", "compute_loss", "get_batch_samples", "_get_num_items_in_batch", "weight_of")
        self._shows_count = compute_loss_func is not None or any(overrides(self, name, Trainer) for name in counting)
        self._weight: float | HostReading | None = None  # labels of the micro-batch that is computed
        self.accelerator = TrainerAccelerator(self)
        self._signature_columns: list[str] | None = None
        self.hub_model_id: str | None = None
        self._persistent: list[tuple[Any, DataLoader[Any]]] = []  # eval loaders whose processes are kept
        self._evaluator = Evaluator(self)
        self.is_in_train = self.has_trained = False
        self.state = self.new_state()
        self.control = TrainerControl()
        self.reports = ReportCallback(self.args)
        shown = PrinterCallback() if self.args.disable_tqdm else ProgressCallback()
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback(), shown, *(callbacks or ())],
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

    def _keep_accelerator_config(self) -> None:
        settings, args = self.args.accelerator_settings, self.args
        settings.check_worker(args.process_index, args.world_size)
        args.gradient_accumulation_steps = settings.accumulation(args.gradient_accumulation_steps)

    def lane_batch_size(self, given: int) -> int:
        """Samples of one lane's batch, where the arguments say `given`."""
        return self.args.accelerator_settings.lane_batch_size(given, self.engine.config.lanes)

    @property
    def data_workers(self) -> int:
        """Those with batches of their own: workers that share a model are one."""
        return self.engine.world.size // self.engine.config.mesh.cp

    def _smoothing(self) -> float:
        """Labels of several classes at once are not smoothed, as in transformers; a warning says so."""
        factor, config = self.args.label_smoothing_factor, getattr(self.model, "config", None)
        if factor == 0 or getattr(config, "problem_type", None) != "multi_label_classification":
            return factor
        messages.warn(
            f"Label smoothing is not compatible with multi-label classification: label_smoothing_factor={factor} is "
            "left out, since a label is a number for each class, not one class to spread over the others"
        )
        return 0.0

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
        with self._memory.stage("train"):
            if not self.args.auto_find_batch_size:
                return self._train_once(resume, accept, ignore_keys_for_eval)
            return BatchSizeFinder(self, resume).run(lambda: self._train_once(resume, accept, ignore_keys_for_eval))

    def _train_once(
        self, resume: bool | Path, accept: Sequence[str], ignore_keys_for_eval: list[str] | None
    ) -> TrainOutput:
        self._make_engine(resume)
        self.is_in_train = self.has_trained = True
        try:
            share_weights(self.engine, self.model)
            self._loop = loop = TrainingLoop(self, resume, accept, ignore_keys_for_eval)
            self.engine._note(f"{loop.described()}\n{self.args.described()}", "trainer")
            if advice := advice_to_compile(self.args, self.engine.device.type, self.model):
                self.engine._note(f"paceline: {advice}", "trainer")
            run_folder.begin(self.args, self.engine, fresh=not resume)
            if threading.current_thread() is threading.main_thread():  # Python hands signals to that one only
                self.engine.stop_on_signals()
            with self._loss_in_chunks():
                return loop.run()
        finally:
            self.is_in_train, self._loop = False, None
            self.reports.close(ok=self.engine.stop_requested)  # nothing is left to close where training has ended well
            self.engine._stops.close()

    def _loss_in_chunks(self) -> AbstractContextManager[None]:
        """If asked for; and if nothing is said on a GPU, where memory is scarce, wherever nobody looks at logits."""
        asked, engine = self.args.chunked_loss, self.engine
        looks = self.loss_rule.takes_labels_out or self._owns_step or overrides(self, "compute_loss", Trainer)
        if asked is False or (asked is None and (engine.device.type != "cuda" or looks or engine.config.mesh.tp > 1)):
            return nullcontext()
        fused = self.args.torch_compile or (engine.device.type == "cuda" and find_spec("triton") is not None)
        return self.loss_rule.in_chunks(self.model, compile=fused, needed=asked is True, tell=engine._note)

    @property
    def engine(self) -> Engine:
        """Made when it is needed: a job that is resumed has the lanes that are on record."""
        if self._engine is None:
            self._engine = self._built(None)
        return self._engine

    def _built(self, lanes: int | None) -> Engine:
        engine = build_engine(self.args, self.model, lanes=lanes)
        mesh = engine.config.mesh
        if mesh.cp > 1 and self.loss_rule.takes_labels_out:
            engine.close()
            raise ConfigError(
                f"{mesh} splits sequences, and shifts their labels before that for the model's own loss; "
                "label_smoothing_factor and compute_loss_func would get none of them: leave them or cp out"
            )
        if mesh.tp > 1 and self.args.chunked_loss:
            engine.close()
            raise ConfigError(f"chunked_loss=True with {mesh}: no worker has the whole head; leave one of them out")
        return engine

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
        self._engine = self._built(lanes)

    def call_model_init(self) -> nn.Module:
        """Makes the model from the job's seed, the same one on every worker."""
        assert self.model_init is not None
        seed_everything(start_seed(self.args))
        return self.model_init()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: float | None = None) -> Tensor:
        """Forward and backward of one micro-batch; its loss. Override it, and end in this one or accelerator.backward.

        The loss is the mean of this micro-batch: the Engine divides by accumulation and lanes. What is logged is what
        backward was given.
        """
        inputs = self._prepare_inputs(inputs)
        count: dict[str, Any] = {"num_items_in_batch": num_items_in_batch} if self._takes_count else {}
        with self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(model, inputs, **count)
        self.backward(loss, num_items_in_batch)
        return loss.detach()

    def backward(self, loss: Tensor, num_items_in_batch: float | None = None) -> None:
        """Of this micro-batch's loss, weighted by its labels."""
        if self._has_run_backward:
            raise LoopError(
                "training_step called backward twice for one micro-batch; add the losses up, and call it once with both"
            )
        self._has_run_backward = True
        weight = self._weight if num_items_in_batch is None else float(num_items_in_batch)
        if isinstance(weight, HostReading):
            weight = weight.number()
        self.engine.mean("loss", loss, weight=weight)
        self.engine.backward(loss, weight=weight)

    def run_micro_batch(self, batch: Any, item: WorkItem) -> None:
        """What the loop does with a work item."""
        self._has_run_backward = False
        count: float | None = None
        if self._shows_count:
            batches, count = self.get_batch_samples(iter([batch]), 1, self.engine.device)
            if len(batches) != 1:
                raise LoopError(
                    f"get_batch_samples returned {len(batches)} batches where num_batches is 1; return a list of one"
                )
            batch, self._weight = batches[0], None if count is None else float(count)
        else:
            self._weight = self._labels_of(batch)
        if self._weight is None and self._loop is not None and self._loop.has_ready_batches:
            self._weight = float(batch_size_of(batch))  # for the Engine such a batch is one sample
        self._note_tokens(batch, item)
        if not self._owns_step:
            self.training_step(self.model, batch, count)
        else:
            with refusing_plain_backward(self.model):
                self.training_step(self.model, batch, count)
        self._weight = None
        if not self._has_run_backward:
            raise LoopError(
                "training_step returned without a backward; end it in super().training_step(…) or "
                "self.accelerator.backward(loss)"
            )

    def _note_tokens(self, batch: Any, item: WorkItem) -> None:
        """For each sample, those of the whole item: workers that share its sequences say the same."""
        sequences, padding = self.engine._group.sequences, self.args.include_num_input_tokens_seen == "all"
        tokens = sequences.tokens(item, self.count_tokens(batch), padding=padding)
        self.engine.mean("tokens", tokens / max(1, item.samples), weight=item.samples / sequences.parts)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], float | None]:
        """So many batches, and how many labels they have. It is called for each micro-batch, with `num_batches` 1."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> float | None:
        """How many labels the loss of these batches is the mean of; None: their samples."""
        counts = [self.weight_of(batch) for batch in batch_samples]
        known = [count for count in counts if count is not None]
        return sum(known) if counts and len(known) == len(counts) else None

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch before the model gets it, in training and evaluation; the Engine has put it on its device."""
        return self._prepare_input(inputs)

    def _prepare_input(self, data: Any) -> Any:
        """On the device; what is there already stays the object that it is."""
        if isinstance(data, Tensor):
            return data.to(self.engine.device)
        if isinstance(data, Mapping):
            moved = {name: self._prepare_input(part) for name, part in data.items()}
            same = all(moved[name] is data[name] for name in moved)
            return data if same else type(data)(moved)  # type: ignore[call-arg]
        if type(data) in (list, tuple):
            parts = [self._prepare_input(part) for part in data]
            return data if all(a is b for a, b in zip(parts, data, strict=True)) else type(data)(parts)
        return data

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Entered around compute_loss."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Nothing: parameters are in low precision, not autocast."""
        return nullcontext()

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: float | None = None
    ) -> Any:
        """The loss of a micro-batch: the mean over its `num_items_in_batch` labels, or samples. Override it at will."""
        weight = self._weight if num_items_in_batch is None else num_items_in_batch
        loss, outputs = self.loss_rule.of(model, inputs, weight=weight)
        return (loss, outputs) if return_outputs else loss

    def weight_of(self, batch: Any) -> float | None:
        """How many labels the loss of this batch is the mean of; None: its samples."""
        counted = self._labels_of(batch)
        return counted.number() if isinstance(counted, HostReading) else counted

    def _labels_of(self, batch: Any) -> float | HostReading | None:
        if not self.engine._preparation.trains:  # `paceline plan` runs this: its tensors have no values to count
            return float(batch_size_of(batch))
        return self.loss_rule.counted(batch)

    def count_tokens(self, batch: Any) -> int | Tensor:
        kind = str(self.args.include_num_input_tokens_seen)
        return count_tokens(batch, self.main_input_name, padding=kind == "all")

    # -- loaders, optimizer, schedule ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        if self.train_dataset is None:
            raise ConfigError("the Trainer has no train_dataset to train on")
        data = self._remove_unused_columns(self.train_dataset, "training")
        sampler = None if is_stream(data) else self._get_train_sampler(data)
        collator = self._collator(data, "training")
        size = self.lane_batch_size(self._train_batch_size)
        loader = train_loader(data, self.args, collator, self.engine.device, sampler, size)
        return told_total(loader, size * self.engine.config.lanes)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigError("there is no eval_dataset to evaluate; give one to the Trainer or to evaluate()")
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        if not self.args.dataloader_persistent_workers:
            return self._eval_loader(dataset, "eval_dataset", "evaluation")
        for known, loader in self._persistent:
            if known is dataset:
                return loader
        self._persistent.append((dataset, self._eval_loader(dataset, "eval_dataset", "evaluation")))
        return self._persistent[-1][1]

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return self._eval_loader(test_dataset, "test_dataset", "test")

    def _eval_loader(self, dataset: Any, name: str, description: str) -> DataLoader[Any]:
        dataset = self._remove_unused_columns(dataset, description)
        sampler = None if is_stream(dataset) else self._get_eval_sampler(dataset)
        size = self.lane_batch_size(self.args.eval_batch_size)
        collator = self._collator(dataset, description)
        loader = eval_loader(dataset, self.args, collator, self.engine.device, size, name, sampler)
        return told_total(loader, size * self.data_workers)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """The order of the samples, the same on every worker: the Engine assigns it to lanes."""
        data = self.train_dataset if train_dataset is None else train_dataset
        size = self.lane_batch_size(self._train_batch_size)
        return train_sampler(data, self.args, self.processing_class, size)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """The dataset's order; one of your own is asked once for each loader."""
        return SequentialSampler(eval_dataset)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Called before the first step where a subclass has one of its own; otherwise the two that follow are."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def makes_both(self) -> bool:
        """Whether a subclass makes the optimizer and the schedule together."""
        return overrides(self, "create_optimizer_and_scheduler", Trainer)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The optimizer that was given, or that the arguments name. Override it for one of your own."""
        if self.optimizer is None:
            model = self.model if model is None else model
            kind, options = self._optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = make_optimizer(model, self.args, kind, options, self.get_decay_parameter_names(model))
        made: Optimizer = self.optimizer
        return made

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> tuple[Any, Any]:
        """The class that `optim` names, with its options."""
        return optimizer_class(args)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of parameters that weight decay applies to."""
        return list(decaying_names(model))

    def get_num_trainable_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Of each group of parameters."""
        return [float(group["lr"]) for group in self._existing_optimizer().param_groups]

    def get_optimizer_group(self, param: Tensor | None = None) -> Any:
        """The group of a parameter, or the parameters of all groups."""
        groups = self._existing_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(param is known for known in group["params"])), None)

    def _get_learning_rate(self) -> float:
        """Of the first group, as it is logged."""
        return self.get_learning_rates()[0]

    def _existing_optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise ConfigError("there is no optimizer yet; call create_optimizer() first, or train()")
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

    def _collator(self, dataset: Any = None, description: str = "training") -> Collator:
        collator = self._get_collator_with_removed_columns(self.data_collator, description)
        if isinstance(collator, KnownColumns):
            collator.check(dataset)
        return collator

    def _get_collator_with_removed_columns(self, data_collator: Collator, description: str | None = None) -> Collator:
        """A collator that gives the model the columns it takes."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        if self._signature_columns is None:  # the model takes whatever there is
            return data_collator
        return KnownColumns(data_collator, self._signature_columns, type(self.model).__name__)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The dataset as it is read: its columns are removed by the collator, sample by sample."""
        return dataset

    def _set_signature_columns_if_needed(self) -> None:
        """`_signature_columns`: what forward takes, and labels. Set it yourself for a collator that needs more."""
        if self._signature_columns is None:
            self._signature_columns = known_columns(self.model, ("labels", *self.loss_rule.names))

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
        loss_only = True if self.compute_metrics is None else None
        make = self.get_eval_dataloader
        with self._memory.stage("eval"):
            output = self._evaluator.measure(
                dataset, make, metric_key_prefix, ignore_keys, loss_only=loss_only, description="Evaluation"
            )
            output.metrics.update(self._memory.read("eval"))
        self.log(dict(output.metrics))
        self.call_event("on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions for every sample, in the dataset's order; where there are labels, metrics too."""
        make = self.get_test_dataloader
        with self._memory.stage("test"):
            output = self._evaluator.measure(
                test_dataset, make, metric_key_prefix, ignore_keys, loss_only=None, description="Prediction"
            )
            output.metrics.update(self._memory.read("test"))
        self.call_event("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvaluationOutput:
        """What evaluate and predict do with a loader: every sample once, and the same numbers on every worker."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        keeps_rows = description == "Prediction"
        return self._evaluator.run(
            dataloader, metric_key_prefix, ignore_keys, loss_only=loss_only, keeps_rows=keeps_rows
        )

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, predictions and labels of a batch; a loss only where there are labels, or the model gives one."""
        inputs = self._prepare_inputs(inputs)
        called = self.loss_rule.call(inputs)
        with self.compute_loss_context_manager():
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
    def model_wrapped(self) -> nn.Module:
        """The model itself: nothing is wrapped."""
        return self.model

    @property
    def label_smoother(self) -> LossRule | None:
        """What smooths labels, where something does."""
        return self.loss_rule if self.loss_rule.smoothing > 0 else None

    def _get_output_dir(self, trial: Any = None) -> str:
        return self.args.output_dir

    @property
    def main_input_name(self) -> str:
        return str(getattr(self.model, "main_input_name", "input_ids"))

    # -- saving and logging -------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Weights as safetensors, with config and tokenizer where there are some; all workers call it."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if not self._save_in_parts(folder):
            state = self.engine.state_dict() if self.has_trained else dict(self.model.state_dict())
            if self.is_world_process_zero():
                self._save(str(folder), state_dict=run_folder.tied(self.model, state))
            self.engine.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_in_parts(self, folder: Path) -> bool:
        """Where workers hold parts of the weights each writes some, unless something wants them whole. Whether it did.

        A model of transformers that renames its weights in files does so in its own save_pretrained.
        """
        files = PretrainedFiles(self.model, self.processing_class)
        wanted_whole = files.are_adapters or getattr(self.model, "_weight_conversions", None)
        if not self.has_trained or wanted_whole or overrides(self, "_save", Trainer):
            return False
        beside = files.writer() if self.is_world_process_zero() else None
        return self.engine._save_in_parts(self.model, folder, beside)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """What save_model writes, on the main worker alone."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        state = run_folder.tied(self.model, dict(self.model.state_dict())) if state_dict is None else state_dict
        run_folder.write_weights(folder, self.model, state, self.processing_class)

    def saves_by_itself(self) -> bool:
        """Whether a subclass writes the model its own way; then checkpoints hold what it writes."""
        return overrides(self, "save_model", Trainer) or overrides(self, "_save", Trainer)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """checkpoint-N of the step that has just acted; called on every worker, while training."""
        if self._loop is None:
            raise ConfigError("_save_checkpoint belongs to a training that is under way; save_model() saves weights")
        self._loop.save_checkpoint()

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Whether this evaluation is the best so far; if so the state knows it."""
        args, state = self.args, self.state
        if args.metric_for_best_model is None:
            return False
        value, best = metric_for_best(args, metrics), state.best_metric
        is_best = best is None or (value > best if args.greater_is_better else value < best)
        if is_best and not math.isnan(value):
            state.best_metric = value
            if args.save_strategy is not SaveStrategy.NO:
                state.best_global_step = state.global_step
            return True
        return False

    def state_with_callbacks(self) -> dict[str, Any]:
        """As trainer_state.json has it: with what callbacks and control carry over a resume, as in transformers."""
        each = self.callback_handler.states() | {TrainerControl.__name__: [self.control.state()]}
        states = {name: found[0] if len(found) == 1 else found for name, found in each.items()}
        return self.state.to_dict() | {"stateful_callbacks": states}

    def _load_callback_state(self) -> None:
        """Give callbacks and control what a state that was read from trainer_state.json has of them."""
        saved = {
            name: part if isinstance(part, list) else [part] for name, part in self.state.stateful_callbacks.items()
        }
        for control in saved.pop(TrainerControl.__name__, []):
            self.control = TrainerControl(**control["args"])
        self.callback_handler.restore(saved)

    def _load_best_model(self) -> None:
        """At the end of a training with load_best_model_at_end."""
        if self._loop is not None:
            self._loop.load_best()

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository that push_to_hub uploads to."""
        if self.is_world_process_zero():
            self.hub_model_id = hub.create_repository(self.args, token)

    def create_model_card(
        self, *, model_name: str | None = None, finetuned_from: str | None = None, **facts: Any
    ) -> None:
        """`README.md` in output_dir; `facts` are its metadata: language, license, tags, tasks, dataset …"""
        if not self.is_world_process_zero():
            return
        origin = finetuned_from or getattr(getattr(self.model, "config", None), "_name_or_path", None) or None
        tasks, data = facts.pop("tasks", None), facts.pop("dataset", None)
        known = {"base_model": origin, "pipeline_tag": tasks, "datasets": data, **facts}
        name = model_name or Path(self.args.output_dir).absolute().name
        hub.write_card(self.args, self.state.log_history, name, known)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model and its card, and upload output_dir without checkpoints; all workers call it.

        `kwargs` go to create_model_card. It needs huggingface_hub.
        """
        self.call_event("on_push_begin")
        if self.hub_model_id is None:
            self.init_hf_repo(token)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        assert self.hub_model_id is not None
        return hub.upload(
            self.args, self.hub_model_id, message=commit_message, token=token, revision=revision, wait=blocking
        )

    def hyperparameter_search(self, *positional: Any, **named: Any) -> Any:
        """Refused: trials would share the workers, the folder and the lanes of one job."""
        raise ConfigError(
            "there is no hyperparameter_search here: start one run for each trial, each with an output_dir of its own, "
            "and read eval_loss from its metrics.jsonl"
        )

    def save_state(self) -> None:
        """`trainer_state.json` in output_dir."""
        if self.is_world_process_zero():
            run_folder.write_json(self.args, "trainer_state.json", self.state.to_dict())

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Show what `train`, `evaluate` or `predict` gave, as a table."""
        rows = [(name, str(value)) for name, value in self.metrics_format(metrics).items()]
        self.engine.show_table(f"{split} metrics", sorted(rows))

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, Any]:
        """The values as log_metrics shows them."""
        return {name: f"{value:,.4g}" if isinstance(value, float) else value for name, value in metrics.items()}

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
        getattr(self.reports, event)(self.args, self.state, self.control, **more)
        self.control = self.callback_handler.call(event, self.args, self.state, self.control, **more)

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        found = self.callback_handler.pop(callback)
        if isinstance(found, ProgressCallback):
            self.reports.shows_progress = False
        return found

    def remove_callback(self, callback: Any) -> None:
        self.pop_callback(callback)

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


def _checked(args: Any) -> TrainingArguments:
    if not isinstance(args, TrainingArguments):
        raise ConfigError(
            f"args is a {type(args).__module__}.{type(args).__name__}; import TrainingArguments from paceline too: it "
            "takes the same arguments"
        )
    return args
