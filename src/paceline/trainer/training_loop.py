"""The training loop that the Trainer runs: the Engine's loop, with a callback at every moment.

    while there are steps to do:
        for batch in loader:                       work items, as docs/concepts/loop.md tells
            loss ─► backward ─► clip ─► step
            when the step has acted:  log? evaluate? save?
        the epoch has ended:          log? evaluate? save?

What is saved besides the Engine's state goes into the checkpoint's `extra`: TrainerState, the callbacks' states, and
the losses since the last log, so that a resumed run logs what a run that was never stopped would have.

How long a run is (`RunPlan`) follows from the data and the arguments:

    num_train_epochs=3, 40 samples            steps
    batch size 4 throughout                   10 + 10 + 10
    batch size 8 from step 15 on              10 + 5 + 3 + 5         shift: 23 - 3 · 5

A run counted in epochs that is resumed with another batch size has as many steps as its data still gives.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.checkpoint.retention import all_checkpoints, checkpoint_name
from paceline.engine.config import counted
from paceline.errors import CheckpointError, ConfigError
from paceline.input_file import cause_of
from paceline.trainer import run_folder
from paceline.trainer.argument_fields import DebugOption, IntervalStrategy, SaveStrategy
from paceline.trainer.callbacks import TrainerState, full_metric_name
from paceline.trainer.dataloaders import ReadyBatches, as_loader
from paceline.trainer.meters import Meters, PeakMemory, model_flops, peak_flops
from paceline.trainer.module_watch import watched
from paceline.trainer.optimization import is_greedy, looks_at_metrics, reach
from paceline.trainer.pretrained_files import PretrainedFiles, write_state
from paceline.trainer.training_arguments import TrainingArguments

if TYPE_CHECKING:
    from paceline.trainer.trainer import Trainer


WORTH_MEASURING = 100  # steps; a shorter run is not kept waiting for the speed of its processor


class TrainOutput(NamedTuple):
    """What `trainer.train` returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


@dataclass
class Losses:
    """What the next log tells: losses since the last one, and since the start."""

    since_log: float = 0.0
    steps_since_log: int = 0
    in_all: float = 0.0
    steps: int = 0

    def add(self, loss: float) -> None:
        self.since_log += loss
        self.in_all += loss
        self.steps_since_log += 1
        self.steps += 1

    def mean_since_log(self) -> float:
        mean = self.since_log / max(1, self.steps_since_log)
        self.since_log, self.steps_since_log = 0.0, 0
        return mean


@dataclass(frozen=True)
class RunPlan:
    max_steps: int
    epochs: int
    samples_per_step: int
    steps_per_epoch: int | None = None
    shift: int = 0  # steps beyond those of the epochs: steps were made with another batch size

    def saved(self) -> dict[str, int]:
        """What a checkpoint has to say of it."""
        return {"samples_per_step": self.samples_per_step, "shift": self.shift}


def plan_run(
    loader: Any, arguments: TrainingArguments, lanes: int, batch_size: int, batches: int | None = None
) -> RunPlan:
    """`loader` is a prepared one: its length is the same at any number of workers. A stream may know its `batches`."""
    per_epoch = loader.source.steps
    if per_epoch is None and batches is not None:
        per_epoch = math.ceil(batches / (lanes * arguments.gradient_accumulation_steps))
    samples = batch_size * arguments.gradient_accumulation_steps * lanes
    if per_epoch == 0:
        raise ConfigError(
            f"an epoch has no step: the {len(loader.dataset):,} samples don't fill a global batch of {samples}, and "
            "dataloader_drop_last drops what is left; give more samples or smaller batches"
        )
    if arguments.max_steps > 0:
        epochs = sys.maxsize if per_epoch is None else math.ceil(arguments.max_steps / per_epoch)
        return RunPlan(arguments.max_steps, epochs, samples, per_epoch)
    if per_epoch is None:
        raise ConfigError("a stream without a length has no epochs to count; set max_steps")
    epochs = math.ceil(arguments.num_train_epochs)
    return RunPlan(math.ceil(arguments.num_train_epochs * per_epoch), epochs, samples, per_epoch)


def resumed_plan(
    plan: RunPlan, saved: Mapping[str, int], loader: Any, arguments: TrainingArguments, step: int
) -> RunPlan:
    """The plan of a run that is resumed: `loader` stands where the checkpoint says, after `step` steps."""
    if arguments.max_steps > 0 or plan.steps_per_epoch is None:
        return plan
    shift = saved.get("shift", 0)
    if saved.get("samples_per_step", plan.samples_per_step) != plan.samples_per_step:
        whole = math.ceil((arguments.num_train_epochs - loader.epoch) * plan.steps_per_epoch)
        left = max(0, whole - plan.steps_per_epoch + loader.source.steps_left)
        shift = step + left - plan.max_steps
    return replace(plan, max_steps=plan.max_steps + shift, shift=shift)


def metric_for_best(arguments: TrainingArguments, metrics: Mapping[str, Any]) -> float:
    """The value that decides which model is the best."""
    assert arguments.metric_for_best_model is not None
    name = full_metric_name(arguments.metric_for_best_model)
    if name not in metrics:
        raise ConfigError(
            f"metric_for_best_model={arguments.metric_for_best_model!r}: there is no {name!r} among the metrics "
            f"{', '.join(sorted(metrics))}"
        )
    return float(metrics[name])


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """NEFTune: in training, what the input embedding gives gets uniform noise of up to alpha / √(length · width).

    The noise is drawn from torch's generator, as dropout is, so it is the lane's and not the worker's.
    """
    if not alpha:
        yield
        return
    find = getattr(model, "get_input_embeddings", None)
    if not callable(find):
        raise ConfigError(
            f"neftune_noise_alpha needs a model with get_input_embeddings(); {type(model).__name__} has none"
        )

    def add_noise(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        most = alpha / math.sqrt(output.shape[1] * output.shape[2])
        return output + torch.empty_like(output).uniform_(-most, most)

    handle = find().register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()


class TrainingLoop:
    def __init__(
        self,
        trainer: Trainer,
        resume: bool | Path,
        accept: Sequence[str] = (),
        ignore_keys_for_eval: list[str] | None = None,
    ) -> None:
        self.trainer, self.args, self.engine = trainer, trainer.args, trainer.engine
        self._ignore_keys = ignore_keys_for_eval
        self.losses = Losses()
        self._flops = model_flops(trainer.model)
        self.norm: float | Tensor | None = None
        self.rate = 0.0
        self.saved_step = self.evaluated_step = -1
        self._score: float | None = None  # of the checkpoint that is saved next
        self._is_dropped = False
        self.epoch_ends = False  # the step that has just acted is the last of its epoch
        self.checkpoints = self.engine.checkpoints(
            self.args.output_dir, keep=self.args.save_total_limit, asynchronous=self.args.asynchronous_save
        )
        self._files = PretrainedFiles(trainer.model, trainer.processing_class)
        self.loader, self.plan = self._prepared()
        self.began_at_step = 0
        self._resume(resume, accept)
        self.engine.share_with_joiners(self._extra, self._join)
        self._paused = True  # something else than training came before the next step
        self.meters = self._meters(self._flops)
        trainer.reports.attach(self.engine, self.meters)

    # -- before the first step ----------------------------------------------------------------------------------------

    def _prepared(self) -> tuple[Any, RunPlan]:
        trainer, engine = self.trainer, self.engine
        source = as_loader(trainer.get_train_dataloader())
        expected = self._steps_before_prepare(source) if trainer.makes_both() else None
        if expected is not None:
            trainer.create_optimizer_and_scheduler(num_training_steps=expected)
        optimizer = trainer.create_optimizer()
        given = trainer.lr_scheduler is not None
        known = [trainer.lr_scheduler] if given and not is_greedy(trainer.lr_scheduler) else []
        *_, loader = engine.prepare(trainer.model, optimizer, *known, source)
        loader.knows_shadows = True  # nothing is added up by hand here
        size = trainer.lane_batch_size(trainer._train_batch_size)
        self.has_ready_batches = isinstance(getattr(source, "dataset", None), ReadyBatches)
        batches = source.dataset.batches if self.has_ready_batches else None
        plan = plan_run(loader, self.args, engine.config.lanes, size, batches)
        if expected not in (None, plan.max_steps):
            raise ConfigError(
                f"create_optimizer_and_scheduler was called with {expected} steps, but the loader gives "
                f"{plan.max_steps}; override create_optimizer and create_scheduler instead"
            )
        made = None if given else trainer.create_scheduler(plan.max_steps, optimizer)
        if made is not None and not is_greedy(made):
            engine.prepare(made)
        trainer.callback_handler.objects |= {
            "model": trainer.model,
            "optimizer": optimizer,
            "lr_scheduler": trainer.lr_scheduler,
            "train_dataloader": loader,
        }
        return loader, plan

    def _steps_before_prepare(self, source: Any) -> int:
        """How many steps the run will have, for what is made before the Engine has assigned samples."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        try:
            batches = len(source)
        except TypeError:
            raise ConfigError("a stream without a length has no epochs to count; set max_steps") from None
        each = self.args.gradient_accumulation_steps * self.engine.config.lanes
        per_epoch = batches // each if self.args.dataloader_drop_last else math.ceil(batches / each)
        return math.ceil(self.args.num_train_epochs * per_epoch)

    def _resume(self, which: bool | Path, accept: Sequence[str]) -> None:
        state = self.trainer.new_state()
        extra = self.checkpoints.resume(which, accept=accept) if which else None
        if extra is not None and "imported" not in extra:  # of others: a training that begins
            state = self._restored(extra, state)
            self._resume_plan(extra)
        elif which and extra is None and not (self.args.world.elastic is not None and self.args.world.elastic.joins):
            folder = Path(self.args.output_dir)
            if bad := all_checkpoints(folder):
                raise CheckpointError(f"none of the {len(bad)} checkpoints in {folder} can be used; see above why")
            self.engine._note(f"paceline: there is no checkpoint in {folder}; training starts at step 0", "trainer")
        state.max_steps, state.num_train_epochs = self.plan.max_steps, self.plan.epochs
        state.train_batch_size = self.trainer._train_batch_size
        state.compute_steps(self.args, self.plan.max_steps)
        state.global_step = self.began_at_step = self.engine.step
        self.trainer.state = state

    def _resume_plan(self, extra: dict[str, Any]) -> None:
        """To the end that the run was given, which may not be that of one that begins now."""
        self.plan = resumed_plan(self.plan, extra.get("plan", {}), self.loader, self.args, self.engine.step)
        if self.plan.shift:
            reach(self.trainer.lr_scheduler, self.plan.max_steps)

    def _join(self, extra: dict[str, Any]) -> None:
        """This worker joins an elastic job: it continues from the step of the others."""
        state = self._restored(extra, self.trainer.state)
        self._resume_plan(extra)
        state.max_steps, state.num_train_epochs = self.plan.max_steps, self.plan.epochs
        self.trainer.state = state
        self.began_at_step = self.engine.step

    def _restored(self, extra: dict[str, Any], fresh: TrainerState) -> TrainerState:
        if "trainer" not in extra:
            raise CheckpointError(
                "this checkpoint was saved by an Engine's loop, not by a Trainer; use engine.load_state"
            )
        try:
            saved = TrainerState.from_dict(dict(extra["trainer"]))
            self.losses = Losses(**extra["losses"])
            self.epoch_ends, callbacks = bool(extra["epoch_ends"]), extra["callbacks"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the Trainer's part of this checkpoint is damaged: {cause_of(error)}") from error
        if (scheduler := extra.get("scheduler")) is not None:
            self.trainer.lr_scheduler.load_state_dict(scheduler)
        for name in ("is_local_process_zero", "is_world_process_zero"):
            setattr(saved, name, getattr(fresh, name))
        if self.args.restore_callback_states_from_checkpoint:
            self.trainer.callback_handler.restore(callbacks)
        return saved

    def _meters(self, flops: float) -> Meters:
        """The peak of a CPU is measured, by all workers at once: they share a host's cores."""
        device, steps = self.engine.device, self.plan.max_steps - self.began_at_step
        peak = None
        if device.type != "cpu" or steps >= WORTH_MEASURING:
            peak = peak_flops(device, self.engine.config.precision.dtype)
        return Meters(self.engine._group.all_world.size, flops, peak, PeakMemory(device))

    def described(self) -> str:
        """What is about to run, in a line."""
        plan, began = self.plan, self.began_at_step
        epochs = "" if plan.steps_per_epoch is None else f" in {counted(plan.epochs, 'epoch')}"
        resumed = f", from step {began:,} on" if began else ""
        return f"Running training: {counted(plan.max_steps, 'step')}{epochs}{resumed}"

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> TrainOutput:
        model, looks = self.trainer.model, DebugOption.UNDERFLOW_OVERFLOW in self.args.debug
        with noisy_embeddings(model, self.args.neftune_noise_alpha), watched(model, wanted=looks):
            return self._run()

    def _run(self) -> TrainOutput:
        trainer = self.trainer
        began = time.perf_counter()
        trainer.model.train()
        self._event("on_train_begin")
        if self.args.eval_on_start and self.engine.step == 0:
            trainer.evaluate(ignore_keys=self._ignore_keys)  # of an untrained model: neither the best, nor a plateau
        if self.epoch_ends:  # the checkpoint was saved by its last step, before what happens at its end
            self._end_epoch()
        while self._has_steps_left():
            self._event("on_epoch_begin")
            self._paused = True
            before = self.loader.epoch
            for batch in self.loader:
                self._item(batch)
                if self.engine.stepped and self._leaves_here():
                    break
            if self.loader.epoch == before and trainer.control.should_epoch_stop:
                self._skip_rest_of_epoch()
            ended = self.loader.epoch > before or trainer.control.should_training_stop
            if ended and not self.engine.stop_requested:  # then it is done when the job is resumed
                self._end_epoch()
        self._end_epochs()
        return self._finish(began)

    def _has_steps_left(self) -> bool:
        if self.trainer.control.should_training_stop or self.engine.stop_requested:
            return False
        by_epochs = self.args.max_steps <= 0
        return self.engine.step < self.plan.max_steps and not (by_epochs and self.loader.epoch >= self.plan.epochs)

    def _leaves_here(self) -> bool:
        """A callback asks for it. After the last step of the run the loop ends without."""
        control = self.trainer.control
        return (control.should_epoch_stop or control.should_training_stop) and self.engine.step < self.plan.max_steps

    def _item(self, batch: Any) -> None:
        """One work item: forward and backward; after the last one of a step, the update."""
        engine, args = self.engine, self.args
        item = engine._training().now.item
        assert item is not None
        if item.first_of_step:
            if self._paused:
                self.meters.restart()
                self._paused = False
            self._event("on_step_begin")
        if engine.step + 1 >= self.plan.max_steps:
            engine.stop()
        self.trainer.run_micro_batch(batch, item)
        norm = engine.clip_grad_norm_(args.max_grad_norm) if args.max_grad_norm > 0 else None
        if not engine.sync_gradients:
            self._event("on_substep_end")
            return
        self._update(norm)
        if engine.stepped:
            self._end_step(item)

    def _update(self, norm: float | Tensor | None) -> None:
        trainer = self.trainer
        self._event("on_pre_optimizer_step")
        self.norm, self.rate = norm, trainer._get_learning_rate()
        trainer.optimizer.step()
        self._event("on_optimizer_step")
        if not looks_at_metrics(trainer.lr_scheduler):
            trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad()

    def _end_step(self, item: Any) -> None:
        state, engine = self.trainer.state, self.engine
        state.global_step = engine.step
        steps = self.loader.source.steps
        state.epoch = self._epoch_after(item)
        self.epoch_ends = steps is not None and item.step + 1 == steps
        self.losses.add(engine.means["loss"])
        tokens = round(engine.means["tokens"] * item.step_samples)
        state.num_input_tokens_seen += tokens
        state.total_flos += self._flops * (tokens or item.step_samples)
        timing, loss = engine.timing, engine.means["loss"]
        waits = {"waited_s": timing.waited_for_data_s, "exposed_s": timing.exposed_s}
        self.meters.step(samples=item.step_samples, tokens=tokens, loss=loss, **waits)
        every = self.args.torch_empty_cache_steps
        if every and engine.step % every == 0 and engine.device.type == "cuda":
            torch.cuda.empty_cache()
        self._event("on_step_end")
        if engine.stop_requested:
            self.trainer.control.should_save = True
        self._log_evaluate_save()

    def _end_epoch(self) -> None:
        self.epoch_ends = False
        self._event("on_epoch_end")
        self._log_evaluate_save()

    def _end_epochs(self) -> None:
        """A run counted in epochs that has skipped steps ends without a last step: what that one does is done now."""
        trainer, args = self.trainer, self.args
        control, step = trainer.control, trainer.state.global_step
        stopped = control.should_training_stop or self.engine.stop_requested
        if stopped or not self.began_at_step < step < self.plan.max_steps:
            return
        by_steps = args.eval_strategy == IntervalStrategy.STEPS and args.eval_delay <= step
        control.should_evaluate = by_steps and self.evaluated_step != step
        control.should_save = args.save_strategy == SaveStrategy.STEPS
        self._log_evaluate_save()

    def _skip_rest_of_epoch(self) -> None:
        """A callback set should_epoch_stop: the next epoch begins."""
        place = self.loader.state_dict()
        if place.get("kind") != "positions":
            raise ConfigError("a callback set should_epoch_stop, but a stream has no epochs to end; stop the training")
        self.loader.load_state_dict({**place, "epoch": place["epoch"] + 1, "position": 0, "start": 0, "digest": None})

    # -- log, evaluate, save ------------------------------------------------------------------------------------------

    def _log_evaluate_save(self) -> None:
        """What control asks for, in this order: what is saved knows what was logged and measured."""
        trainer = self.trainer
        control, state = trainer.control, trainer.state
        if control.should_log and self.losses.steps_since_log:
            logs = {"loss": self.losses.mean_since_log(), "learning_rate": self.rate}
            norm = {} if self.norm is None else {"grad_norm": float(self.norm)}
            trainer.log({**logs, **norm, **self.meters.since_last_log()})
        score: float | None = None
        self._paused = self._paused or control.should_evaluate or control.should_save
        if control.should_evaluate:
            score, is_best = self._evaluate()
            self.evaluated_step = state.global_step
            if self.args.save_strategy is SaveStrategy.BEST and not self.engine.stop_requested:
                trainer.control.should_save = is_best
        if trainer.control.should_save and self.saved_step != state.global_step:
            self._save(score)

    def _evaluate(self) -> tuple[float | None, bool]:
        """The metric that decides which model is best, and whether this one is; where none is, None."""
        trainer, args = self.trainer, self.args
        metrics = trainer.evaluate(ignore_keys=self._ignore_keys)
        plateau = trainer.lr_scheduler if looks_at_metrics(trainer.lr_scheduler) else None
        if args.metric_for_best_model is None:
            if plateau is not None:
                kind = type(plateau).__name__
                raise ConfigError(f"a {kind} scheduler looks at a metric: set metric_for_best_model")
            return None, False
        value = metric_for_best(args, metrics)
        is_best = trainer._determine_best_metric(metrics, trial=None)
        if plateau is not None:
            plateau.step(value)
        return value, is_best

    def _save(self, score: float | None) -> None:
        trainer, state = self.trainer, self.trainer.state
        self._score, self._is_dropped = score, False
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(self._folder())
        trainer._save_checkpoint(trainer.model, trial=None)
        if self._is_dropped:
            return  # a warning says why; training continues
        self.saved_step = state.global_step
        if trainer.callback_handler.listens("on_save"):
            self.checkpoints.wait()  # a callback may want to look at it
        self._event("on_save")

    def save_checkpoint(self) -> None:
        """What the Trainer's _save_checkpoint does."""
        trainer, score = self.trainer, self._score
        if self.args.save_only_model and not self.engine.stop_requested:
            self._save_model_alone()
            return
        score = None if score is None or math.isnan(score) else score
        greater = True if score is None else bool(self.args.greater_is_better)
        own, wanted = trainer.saves_by_itself(), self.args.pretrained_files
        opens = wanted and not own  # with from_pretrained
        beside = self._files.writer(trainer.state_with_callbacks()) if opens and self._is_main() else None
        weights = opens and not self._files.are_adapters
        saved = self.checkpoints.save(
            self._extra(), score=score, greater_is_better=greater, beside=beside, weights=weights
        )
        self._is_dropped = saved is None
        if wanted and own and not self._is_dropped:  # a subclass writes the model: into a folder that is there
            self.checkpoints.wait()
            self._write_model(self._folder())

    def _save_model_alone(self) -> None:
        trainer = self.trainer
        if trainer.saves_by_itself() or self._files.are_adapters:
            self._write_model(self._folder())
        else:
            beside = self._files.writer(trainer.state_with_callbacks()) if self._is_main() else None
            self._is_dropped = self.checkpoints.save_weights(beside=beside) is None
        best = trainer.state.best_model_checkpoint
        run_folder.prune_weights(self.args, best, main=self._is_main())

    def _write_model(self, folder: Path) -> None:
        self.trainer.save_model(folder, _internal_call=True)
        if self._is_main():
            write_state(folder, self.trainer.state_with_callbacks())

    def _is_main(self) -> bool:
        return self.trainer.is_world_process_zero()

    def _folder(self) -> Path:
        return Path(self.args.output_dir) / checkpoint_name(self.trainer.state.global_step)

    def _extra(self) -> dict[str, Any]:
        return {
            "trainer": self.trainer.state.to_dict(),
            "callbacks": self.trainer.callback_handler.states(),
            "losses": asdict(self.losses),
            "epoch_ends": self.epoch_ends,
            "plan": self.plan.saved(),
            "scheduler": self.trainer.lr_scheduler.state_dict() if is_greedy(self.trainer.lr_scheduler) else None,
        }

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish(self, began: float) -> TrainOutput:
        trainer, state, engine = self.trainer, self.trainer.state, self.engine
        if engine.stop_requested and state.global_step not in (self.saved_step, self.began_at_step):
            self._save(None)
        self.checkpoints.close()
        engine.exit_if_stopped()
        seconds = time.perf_counter() - began
        steps = state.global_step - self.began_at_step
        metrics: dict[str, float] = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(steps * self.plan.samples_per_step / seconds, 3),
            "train_steps_per_second": round(steps / seconds, 3),
            "train_loss": self.losses.in_all / max(1, self.losses.steps),
        }
        metrics.update(trainer._memory.read("train"))
        trainer.log(metrics)
        if self.args.load_best_model_at_end:
            trainer._load_best_model()
        self._event("on_train_end")
        return TrainOutput(state.global_step, metrics["train_loss"], metrics)

    def load_best(self) -> None:
        path = self.trainer.state.best_model_checkpoint
        best = Path(path) if path is not None and Path(path).exists() else self.checkpoints.best
        if best is not None:
            self.engine._note(f"paceline: ends with the best weights, of {best.name}", "trainer")
            self.checkpoints.load_weights(best)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _event(self, event: str, **more: Any) -> None:
        self.trainer.call_event(event, **more)

    def _epoch_after(self, item: Any) -> float:
        """Epochs done, by samples; all steps are the epoch of a stream that has no length."""
        plan = getattr(self.loader.source, "plan", None)
        if plan is None:
            return self.engine.step / (self.plan.steps_per_epoch or self.plan.max_steps)
        done = min(plan.step_range(item.step)[1], plan.samples_per_epoch)
        return float(item.epoch + done / plan.samples_per_epoch)
