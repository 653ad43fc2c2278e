"""The Engine: an ordinary PyTorch loop, on any number of workers, with the same bits.

    engine = paceline.Engine()
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    for batch in loader:
        loss = loss_fn(model(batch[0]), batch[1])
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

The objects are the user's own, with hooks: no wrapper. The rules of the loop are told in docs/concepts/loop.md; where
each part of an engine lives:

    config         what it was given                           boundary            what workers do between steps
    group          the other workers, and how to reach them    state, checkpoints  the state of a job, and saving it
    prepare        `prepare`: the user's objects               assembly            what changes with the workers of an
    loop           the loop over items, and what it retries                        elastic job (elastic/recovery.py)
    step           a step, from lanes to an update             accelerate_names    what its scripts call
"""

from __future__ import annotations

import atexit
import inspect
import math
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from paceline.collectives.byte_count import Traffic
from paceline.collectives.gradient_exchange import Reduction
from paceline.elastic.faults import arm, tell_hash
from paceline.engine import activation_checkpointing as recomputing
from paceline.engine import rules, run_residuals
from paceline.engine.accelerate_names import AccelerateNames, refuse_argument, refuse_name, taken
from paceline.engine.assembly import Assembly
from paceline.engine.boundary import Operation, check_boundary
from paceline.engine.checkpoints import Checkpoints, Saver, WhenBusy
from paceline.engine.compilation import Compile
from paceline.engine.config import config_of, counted, find_device
from paceline.engine.group import Group
from paceline.engine.loop import PreparedLoader
from paceline.engine.one_line_errors import show_our_errors_in_one_line
from paceline.engine.prepare import BetweenSteps, Preparation, PreparedObjects
from paceline.engine.profiling import FOLDER, Profile
from paceline.engine.progress import Bar, Progress
from paceline.engine.second_opinion import SecondOpinion
from paceline.engine.step import Timing, TrainStep
from paceline.engine.stop_signals import StoppedOnRequest, StopSignals
from paceline.errors import ConfigError, LoopError
from paceline.mesh.mesh import Mesh
from paceline.mesh.plans import Plan
from paceline.monitor.events import Part
from paceline.monitor.recorder import Recorder, record_steps
from paceline.optim.loss_scale import LossScale, OnNonFinite
from paceline.optim.offload import OffloadName
from paceline.optim.precision import Precision
from paceline.parameter_server.replay import replay_of
from paceline.tracking.run import MetricsLog
from paceline.world import messages
from paceline.world.checked_values import number, path_of
from paceline.world.control import STOPPED_ON_REQUEST
from paceline.world.determinism import make_deterministic, mix, seed_everything
from paceline.world.environment import read_world
from paceline.world.terminal import SummaryTable
from paceline.world.world import World


class Engine(AccelerateNames):
    """A worker's view of the job. Create it before the model: it seeds, so that all workers build the same weights."""

    def __init__(
        self,
        *,
        lanes: int | None = None,
        accumulate: int = 1,
        seed: int | None = None,
        strategy: str | object | None = None,
        reduction: Reduction = "exact",
        algorithm: str | None = None,
        backend: str | None = None,
        threads: int | None = None,
        device: str | torch.device | None = None,
        bucket_mib: float = 16.0,
        overlap: bool = True,
        precision: str | Precision | None = None,
        loss_scale: LossScale | float | None = None,
        offload: OffloadName | None = None,
        compression: Any = None,
        mesh: Mesh | None = None,
        activation_checkpointing: recomputing.Wanted = None,
        compile: Compile | bool | None = None,
        global_batch_size: int | None = None,
        on_nonfinite: OnNonFinite = "stop",
        record_samples: str | Path | None = None,
        timeout_s: float = 600.0,
        second_opinion: int | None = None,
        log_with: str | Sequence[str] | None = None,
        project_dir: str | Path | None = None,
        world: World | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        **unknown: Any,
    ) -> None:
        """What the script leaves out the flags of `paceline run` may say; where neither does there is a default.

        Args:

        - `lanes`: Logical workers, for the life of the job; by default as many as workers at the start.
        - `accumulate`: Micro-batches of each lane in a step.
        - `seed`: Of all random numbers; 0 by default.
        - `strategy`: A name such as "ddp" (the default), "zero2", "fsdp", "auto", or a config of `paceline.strategies`.
        - `reduction`: "exact", the same bits on any number of workers, or "fast", the backend's own all-reduce.
        - `algorithm`: With `reduction="fast"` the all-reduce to train over, such as "ring".
        - `backend`: "paceline" (shared memory), "gloo" or "nccl"; by default what suits the device and the hosts.
        - `threads`: Of a worker, for the life of the job; by default cores // lanes, at least 1.
        - `device`: Of models and batches; by default the worker's accelerator, or the CPU where there is none.
        - `bucket_mib`: Size up to which small gradients are sent together.
        - `overlap`: Whether gradients are sent while backward still runs.
        - `precision`: "fp32" (the default), "bf16", "fp16" or a `Precision`.
        - `loss_scale`: With fp16: a fixed number, or a `LossScale`, which moves; by default it moves.
        - `offload`: What of a GPU's job stays in the host's memory: "optimizer" or "parameters".
        - `compression`: Of gradients: a name such as "int8", a compressor, or rules by parameter name.
        - `mesh`: Workers that share sequences (cp) or layers (tp); by default none do.
        - `activation_checkpointing`: What backward computes again: "blocks", k for every k-th block, or module classes.
        - `compile`: True or a `Compile`: the modules that a model repeats are compiled, under every strategy.
        - `global_batch_size`: Samples of a step, over all lanes and micro-batches, in place of the DataLoader's own.
        - `on_nonfinite`: What a step with a NaN or infinite loss does: "stop", "skip" or "continue".
        - `record_samples`: The run's folder, where the log of used samples is written.
        - `timeout_s`: How long a worker waits for the others before it is an error.
        - `second_opinion`: Each lane of every so many steps is computed by another worker too, and compared.
        - `log_with`: The trackers that `init_trackers` starts: "tensorboard", "wandb", "mlflow", …
        - `project_dir`: The folder of reports and profiles; "runs" by default.
        - `world`: This worker's place among the others; by default read from the environment.
        - `mixed_precision`: Accelerate's name for `precision`: "no", "bf16" or "fp16".
        - `gradient_accumulation_steps`: Accelerate's name for `accumulate`.
        """
        show_our_errors_in_one_line()
        for name in unknown:
            refuse_argument(name, inspect.signature(type(self)).parameters)
        seat = read_world() if world is None else world
        arm(seat.rank, 0 if seat.elastic is None else seat.elastic.incarnation)
        self.device = find_device(seat, device)
        """Where this worker's models are, and where its batches come."""
        self.config = config_of(
            seat,
            self.device,
            lanes=lanes,
            accumulate=accumulate,
            seed=seed,
            strategy=strategy,
            reduction=reduction,
            algorithm=algorithm,
            backend=backend,
            threads=threads,
            bucket_mib=bucket_mib,
            overlap=overlap,
            precision=precision,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            loss_scale=loss_scale,
            offload=offload,
            compression=compression,
            mesh=mesh,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            global_batch_size=global_batch_size,
            on_nonfinite=on_nonfinite,
            timeout_s=timeout_s,
        )
        """The job's constants, to be read: `lanes`, `accumulate`, `seed`, `strategy`, `precision`, `threads`, …"""
        if self.config.mesh.splits_model and (second_opinion is not None or record_samples is not None):
            which = "second_opinion" if second_opinion is not None else "record_samples"
            raise ConfigError(f"{self.config.mesh} with {which}: not for workers that share samples; leave one out")
        opinion = None if second_opinion is None else SecondOpinion(second_opinion)
        record_folder = None if record_samples is None else path_of("record_samples", record_samples)
        self._project_dir = Path("runs") if project_dir is None else path_of("project_dir", project_dir)
        self._metrics_log = MetricsLog(
            log_with,
            self._project_dir,
            is_main=lambda: self._writes_reports,
            world=self.resolved,
            say=self._note,
            at_end=self.store_residuals,
        )
        self._group = Group(seat, self.config, self.device)
        self._recorder: Recorder | None = None
        self._put_together(opinion, record_folder)
        torch.set_num_threads(self.config.threads)
        if reduction == "exact":
            make_deterministic(self.device.type)
        self._tell_seed_replaced()
        seed_everything(mix(self.config.seed, "start"))
        self._closed = False
        atexit.register(self._close_at_exit)

    def _tell_seed_replaced(self) -> None:
        """A script that has seeded torch before us would draw other data than it means to, and see no reason."""
        found = torch.initial_seed()
        if found < 2**32 and found != self.config.seed:  # set by hand: torch's own choices, and ours, are larger
            self._note(
                f"paceline: torch's seed {found}, set before Engine(), gives way to Engine(seed={self.config.seed}). "
                "For data and splits that the script draws itself set it after Engine()"
            )

    def _put_together(self, opinion: SecondOpinion | None, record_folder: Path | None) -> None:
        config, group = self.config, self._group
        told = group.seat.settings
        self._replay = None if told.replay is None else replay_of(Path(told.replay))
        tells = group.world.is_main and not group.supervisor.is_there  # the launcher has told it otherwise
        self._stops = StopSignals(group.world.name, tells=tells, is_server=group.world.is_server)
        self._objects = PreparedObjects()
        self._between = BetweenSteps(config, group, self._objects)
        self._saver = Saver(config, self._between.surroundings, self._between.job_state, self._time_saving)
        group.ends_with_it.append(self._saver)
        parts = (config, group, self._objects, self._between)
        recorded = record_folder if self._replay is None else None
        self._is_run = self._replay is None and told.plan is None and told.verify is None
        of_preparation = (*parts, self._stops, opinion, self._replay, recorded)
        if told.plan is None:
            self._preparation = Preparation(*of_preparation)
        else:  # `paceline plan` runs this script
            from paceline.engine.script_profile import ScriptPreparation

            self._preparation = ScriptPreparation(*of_preparation).order(Path(told.plan))
        group.connect(Assembly(*parts, self._preparation, self._saver))

    def resolved(self) -> dict[str, Any]:
        """What followed from the arguments, the launcher and the hardware."""
        config = self.config
        return {
            "workers": self.world.size,
            "lanes": config.lanes,
            "threads": config.threads,
            "strategy": str(config.strategy),
            "device": self.device.type,
            "precision": str(config.precision),
            "torch": torch.__version__,
        }

    @property
    def world(self) -> World:
        """This worker's place among those who are there; in an elastic job it may change with every generation."""
        return self._group.world

    # -- the five lines of a loop ------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, weights: str | Path | None = None, plan: Plan = None, **there: Any) -> Any:
        """Take models, optimizers, schedulers and loaders, in any order, and hand them back in that order.

        Of several loaders beside an optimizer the first that shuffles (or has a sampler of its own, or reads a stream)
        trains, or if none does the first; the others, and all in a call without an optimizer, are for evaluation. In
        place of a loader a plain dataset will do where the Engine knows its `global_batch_size`.

        `weights`: of a model built under `torch.device("meta")`, the folder of safetensors files that they come from.
        `plan`: how tensor parallelism shards the model (docs/concepts/mesh.md); without one, the model's own.
        """
        taken("prepare", there)
        out = self._preparation.prepare(objects, weights, plan)
        return out[0] if len(out) == 1 else out

    def backward(
        self, loss: Tensor, *, weight: float | Tensor | None = None, last: bool = True, **unknown: Any
    ) -> None:
        """Backward for this item. `loss` is the mean over `weight` samples or tokens (default: the samples handed out).

        `last=False` holds buckets back when an item has several losses.
        """
        for name in unknown:
            rules.refuse_options(name)
        for evaluation in self._group.evaluations:
            evaluation.check_not_trained()
        self._training().backward(loss, weight, last=last)

    def update(self, optimizer: Optimizer, loss_fn: Callable[[Any], Any]) -> None:
        """Run `loss_fn(batch)` for every item of this step and let `optimizer` act: one call per optimizer (a GAN).

        `loss_fn` returns the loss, or (loss, weight). The loop's body then runs once per step.
        """
        step, loader = self._training(), self._objects.loader
        if loader is None or step.now.item is None:
            raise LoopError("engine.update() belongs inside `for batch in loader` of a prepared training loader")
        if id(optimizer) not in {id(known) for known in self._objects.optimizers}:
            raise LoopError("engine.update() got an optimizer that was not given to engine.prepare()")
        loader.run_update(optimizer, loss_fn)

    @overload
    def clip_grad_norm_(self, max_norm: float, /) -> float | Tensor: ...

    @overload
    def clip_grad_norm_(self, *, max_norm: float) -> float | Tensor: ...

    @overload
    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor: ...

    def clip_grad_norm_(self, parameters: Any = None, max_norm: Any = None, norm_type: float = 2.0) -> float | Tensor:
        """Clip the gradient of the global batch by its norm; call it between `backward` and `step`. Returns the norm.

        On items before the step's last one there is no gradient yet: the norm of the step before is returned.
        `parameters`, if given as torch wants them, are all that are trained. Training on a GPU the norm is a tensor
        there: `float(norm)` waits until it has been computed, so read it when it is logged and not in every step.
        """
        alone = parameters is None or max_norm is None
        wanted = parameters if max_norm is None else max_norm
        if wanted != math.inf:  # which asks for the norm alone, as torch's does
            wanted = number("max_norm", wanted, least=0)
        if norm_type != 2:
            raise LoopError(f"engine.clip_grad_norm_(norm_type={norm_type}): the norm is the Euclidean one, 2")
        if not alone and self._ends_step:
            rules.check_all_are_clipped(parameters, self._objects.optimizers)
        norm = self._training().clip(wanted)
        return norm if alone else torch.as_tensor(norm, dtype=torch.float32)

    def mean(self, name: str, value: Tensor | float, *, weight: float | None = None) -> None:
        """Collect a value of this item; after the step `engine.means[name]` is its mean over the global batch."""
        self._training().add_mean(name, value.detach() if isinstance(value, Tensor) else value, weight)

    @property
    def means(self) -> dict[str, float]:
        """Of the last step, over all workers: what `engine.mean` was told, by name."""
        self._asked_for_step()
        return self._training().means

    @property
    def step(self) -> int:
        """Committed steps."""
        return 0 if (step := self._asked_for_step()) is None else step.step

    @property
    def stepped(self) -> bool:
        """True after an item whose step acted: the moment for logging, evaluation, saving."""
        return (step := self._asked_for_step()) is not None and step.stepped

    @property
    def lane(self) -> int | None:
        """The lane of the item that the loop has, for looking at: `breakpoint()` in one of them; None between steps."""
        step = self._objects.step
        return None if step is None or step.now.item is None else step.now.item.lane

    @property
    def step_samples(self) -> int:
        """Samples of all workers in the step that the loop is in."""
        item = self._training().now.item
        return 0 if item is None else item.step_samples

    @property
    def timing(self) -> Timing:
        """Seconds of this worker's last step, by part."""
        return self._training().timing

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by in backward, now: 1 unless the model computes in fp16."""
        scale = self._training().loss_scale
        return 1.0 if scale is None else scale.value

    @property
    def traffic(self) -> Traffic:
        """What this worker sent and received in its last step, by peer and operation."""
        return self._training().traffic

    def stop(self) -> None:
        """End the loop of all workers after the same step: this one, or the next if this one has acted already."""
        self._training().stop()

    def stop_on_signals(self, *numbers: signal.Signals) -> None:
        """From now on a signal to any worker ends the loop of all after the same step; call it on every worker.

        Without `numbers`: SIGTERM, Ctrl-C and SIGUSR1. What follows is told in docs/concepts/stopping.md.
        """
        self._stops.watch(numbers)
        self._group.supervisor.tell("policy", stops_on_request=True)

    @property
    def stop_requested(self) -> bool:
        """All workers have agreed that a signal ends the training: after this step when asked inside the loop."""
        self._asked_for_step()
        return self._stops.agreed

    def exit_if_stopped(self) -> None:
        """After the loop and the last save: leave with code 75 if a signal ended the loop; otherwise do nothing."""
        if self._stops.agreed:
            if not self._group.supervisor.is_there:  # the launcher says it otherwise
                self._note(f"paceline: stopped on request after step {self.step}; start again to continue")
            raise StoppedOnRequest

    def share_with_joiners(self, give: Callable[[], Any], take: Callable[[Any], None]) -> None:
        """What the loop keeps besides the prepared objects; called before it, by every worker.

        A worker that joins an elastic job takes over what one of the others gives: a tree of plain values and tensors.
        """
        self._objects.shared.append((give, take))

    def steps_per_epoch(self, loader: Any) -> int:
        """Of a DataLoader for training, prepared or not: what a schedule is made from, at any number of workers."""
        return self._preparation.steps_per_epoch(loader)

    def progress(self, loader: Any, *, total: int | None = None) -> Progress:
        """The loader with a progress line; `total` in steps."""
        if total is None and isinstance(loader, PreparedLoader):
            left = loader.source.steps_left
            total = None if left is None else self.step + left
        return Progress(loader, bar=lambda: self.bar(total), total=total, engine=self)

    def bar(self, total: int | None) -> Bar:
        """A progress line that the caller moves on: one for several loops, or for none; close it."""
        return Bar(step=self.step, total=total, main=lambda: self.is_main_process, supervisor=self._group.supervisor)

    def show_table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Two columns, shown once: by the launcher where there is one, otherwise printed."""
        if not (self.is_main_process and messages.shows_notes()):
            return
        if self._group.supervisor.is_there:
            self._group.supervisor.tell("table", title=title, rows=[list(row) for row in rows])
        else:
            messages.show_table(SummaryTable.of(title, rows), "engine")

    def full_gradients(self) -> dict[str, Tensor]:
        """The global batch's gradient of each whole parameter, by name: after the last `backward` of a step.

        For looking at, under ddp and star, whose workers have them; on any mesh. All workers call it.
        """
        return self._objects.full_gradients() if self._ends_step else {}

    def positions(self, tokens: Tensor) -> Tensor:
        """Where this worker's tokens, (batch, length), stand in their sequences: not 0, 1, 2, … if they are shared."""
        return self._group.sequences.positions(tokens)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The job's mesh as torch knows it, of ("dp", "cp", "tp")."""
        if self._group.device_mesh is None:
            raise ConfigError("engine.device_mesh: this job has none; give Engine(mesh=paceline.Mesh(tp=…, cp=…))")
        return self._group.device_mesh

    # -- between steps -----------------------------------------------------------------------------------------------

    @property
    def is_main_process(self) -> bool:
        """One of all workers: the first, or when that one is lost the first of the others."""
        return self._group.is_main

    def print(self, *values: object, **options: Any) -> None:
        """Print once, not once per worker."""
        self._group.print(*values, **options)

    def reduce(self, values: Any = None, reduction: Operation = "sum", **there: Any) -> Any:
        """Combine a tensor (or each in a list, tuple or dict) of all workers, in rank order, at a step boundary."""
        [values] = taken("reduce", there, values=values)
        check_boundary(self._objects.step, "reduce")
        return self._between.reduce(values, reduction)

    def gather_for_metrics(self, values: Any = None, *, whole: bool = False, **there: Any) -> Any:
        """All workers' results of this round of an evaluation loader, every sample once, in the dataset's order.

        Workers that share sequences give a mean over their targets, or values of their tokens, which are put together
        again; `whole=True`: they have the same values.
        """
        [values] = taken("gather_for_metrics", there, values=values)
        check_boundary(self._objects.step, "gather_for_metrics")
        return self._between.gather_rows(values, whole=whole)

    def gather(self, values: Any = None, **there: Any) -> Any:
        """The rows of all workers, one worker's after another's; over an evaluation loader `gather_for_metrics`."""
        [values] = taken("gather", there, values=values)
        check_boundary(self._objects.step, "gather")
        return self._between.gather_rows(values)

    def barrier(self) -> None:
        """No worker goes on before all are here; nor, up to `prepare` of what is trained, before all servers are."""
        check_boundary(self._objects.step, "barrier")
        self._between.barrier()

    def weights_hash(self) -> str:
        """`sha256:…` of parameters and persistent buffers; raises if the workers don't agree."""
        check_boundary(self._objects.step, "weights_hash")
        agreed = self._between.agreed_hash()
        if self._objects.step is not None:
            for listener in self._objects.step.strategies.loop_end_listeners:
                listener(self.step, lambda: agreed)
        tell_hash(self._group.seat.rank, agreed)
        return agreed

    def state_dict(self) -> dict[str, Tensor]:
        """Whole weights and buffers by name, on the host, whatever the strategy; all workers call it and get them."""
        check_boundary(self._objects.step, "state_dict")
        return self._between.full_state()

    def save_state(self, folder: str | Path | None = None, **there: Any) -> None:
        """Everything needed to continue, at a step boundary; every worker writes its part. Not in a replay."""
        [folder] = taken("save_state", there, folder=folder)
        if self._at_boundary("save_state"):
            self._saver.save(path_of("folder", folder))

    def load_state(self, folder: str | Path | None = None, *, accept: Sequence[str] = (), **there: Any) -> None:
        """Continue from `save_state`, on any number of workers, with the next sample.

        A job that differs in something the bits depend on is refused; `accept` names what may differ all the same.
        What `paceline checkpoint import` made is no job: its weights, and its optimizer's state if it has one, are
        what a new training begins with.
        """
        [folder] = taken("load_state", there, folder=folder)
        check_boundary(self._objects.step, "load_state")
        if self._preparation.trains:
            self._saver.load(path_of("folder", folder), accept)
            if (loader := self._objects.loader) is not None and loader.source.epoch:
                epoch = f"epoch {loader.source.epoch}, after step {self.step}"
                self._note(f"paceline: goes on in {epoch}: a loop over epochs is `range(loader.epoch, epochs)` now")

    def checkpoints(
        self,
        folder: str | Path,
        *,
        keep: int | None = None,
        asynchronous: bool = True,
        when_busy: WhenBusy = "wait",
    ) -> Checkpoints:
        """`folder/checkpoint-{step}`, saved while training goes on; `keep` stay, the newest and the best among them."""
        return Checkpoints(
            path_of("checkpoints: folder", folder),
            self._saver,
            around=self._between.surroundings,
            at_boundary=self._at_boundary,
            # Who joins gets its state from others.
            resumes=lambda: self._group.recovery.admitted and self._preparation.trains,
            step=lambda: self.step,
            keep=keep,
            asynchronous=asynchronous,
            when_busy=when_busy,
        )

    # -- values of one's own loop ------------------------------------------------------------------------------------

    def init_trackers(self, project_name: str, config: Mapping[str, Any] | None = None, **there: Any) -> None:
        """Begin the reports of a run, in `project_dir/project_name`; after `load_state`, if the job goes on."""
        taken("init_trackers", there)
        self._metrics_log.start(project_name, config or {}, self.step)
        self.record_events(self._project_dir / project_name)

    def log(self, values: Mapping[str, Any], step: int | None = None, **there: Any) -> None:
        """Numbers by name, of a step that is done; called by every worker, written once."""
        taken("log", there)
        self._metrics_log.log(values, self.step if step is None else step)

    def record_events(self, folder: str | Path | None) -> None:
        """From now on where each step's time goes is written to `folder/events`: what `paceline top` reads.

        `init_trackers` and the Trainer call it, on every worker. None: from now on it is not.
        """
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        seat = self._group.seat
        if folder is None or seat.is_server or not self._is_run:
            return
        folder = path_of("record_events: folder", folder)
        about = {"worker": seat.rank, "step": self.step, "joins": not self._group.recovery.admitted, **self.resolved()}
        if self._objects.step is not None:  # until then the strategy may be ours to choose, and the batch is not known
            about |= run_residuals.setting_of(self.config, self.world, self._objects.loader)
        self._recorder = record_steps(folder, about, self._group, lambda: self._objects.step, self.device)
        if self._recorder is not None and self.is_main_process:
            self._group.supervisor.tell("run", folder=str(folder.resolve()))

    def profile(
        self,
        *given: Any,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        **there: Any,
    ) -> Profile:
        """`with` it, torch's profiler records `active` steps after `wait` and `warmup` others; all workers call it.

        Each worker's trace goes to `project_dir/profile`; the main one shows what took longest.
        """
        taken("profile", there)
        options = {"record_shapes": record_shapes, "profile_memory": profile_memory, "with_stack": with_stack}
        return Profile(self, self._project_dir / FOLDER, given, wait, warmup, active, **options)

    def close(self) -> None:
        """Leave the job: threads, hooks, group and control connection end. Called at exit by itself."""
        loader = self._objects.loader
        in_flight = sys.exc_info()[1]  # in a `finally`; after a whole loop it is an older one's, of another matter
        self._close(in_flight if loader is not None and loader.left_early else None)

    def _close(self, error: BaseException | None) -> None:
        """`error`: what ended the script's loop, or the script; its reports tell that it did."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        self._stops.close()
        group = self._group
        loader = self._objects.loader
        if loader is not None:
            loader.end_steps()
        if loader is not None and (loader.in_loop or loader.failed):
            if not group.recovery.is_elastic:
                loader.say_left()
                group.comm.give_up()
            else:
                group.comm.abandon("this worker leaves in the middle of its loop")  # the others go on without it
        for evaluation in group.evaluations:
            evaluation.say_apart()
        self._saver.finish()
        if (compiled := self._objects.compiled) is not None:
            self._note(f"paceline: {counted(compiled.graphs, 'graph')} compiled for {compiled.kinds}")
        self._objects.close()
        if not group.recovery.is_elastic:
            count = group.evaluation_count
            group.supervisor.tell("evaluated", begun=count.begun, whole=count.whole)
        self._metrics_log.close(ok=not (ends_badly(error) or (loader is not None and loader.failed)))
        self.record_events(None)
        group.close()

    end_training = close

    if not TYPE_CHECKING:  # which tells the names that there are by itself

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or hasattr(type(self), name):  # a part that is not made yet; a property that raised
                return object.__getattribute__(self, name)
            return refuse_name(name, dir(self))

    def _at_boundary(self, operation: str) -> bool:
        """All workers are between two steps, with the newest weights; False: nothing is saved here.

        So it is where the script is planned, replayed or verified, and on a worker that has yet to join the others.
        """
        check_boundary(self._objects.step, operation)
        if not self._preparation.trains:
            return False
        self._between.drain()
        return self._is_run and self._group.recovery.admitted

    def store_residuals(self, folder: Path, times: Sequence[tuple[int, float]]) -> None:
        """At the end of a run, in its folder: what it measured beside what was predicted (`paceline plan`)."""
        if self._objects.step is not None and self._is_run:
            known = self.config, self.world, self.device, self._objects.step, self._objects.loader
            run_residuals.store(folder, times, *known)

    @property
    def _writes_reports(self) -> bool:
        return self.is_main_process and self._is_run

    def _time_saving(self) -> AbstractContextManager[None]:
        step = self._objects.step
        return nullcontext() if step is None else step.timing.inside(Part.CHECKPOINT)

    def _note(self, text: str, area: str = "engine") -> None:
        self._group.note(text, area)

    def _asked_for_step(self) -> TrainStep | None:
        """By the script, which therefore does not count the loop's items alone."""
        step = self._objects.step
        if step is not None:
            step.was_asked_for = True
        return step

    def _training(self) -> TrainStep:
        if self._objects.step is None:
            raise rules.nothing_to_train()
        return self._objects.step

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._give_up_after(error)
        self._close(error)

    def _close_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # what ends the script, and has been shown already
        self._give_up_after(error)
        self._close(None if hasattr(sys, "ps1") else error)  # of a session it is that of any line before

    def _give_up_after(self, error: BaseException | None) -> None:
        """After an error in the loop's body nothing waits until the others have read this worker's shards."""
        loader = self._objects.loader
        if loader is None:
            return
        if error is None or isinstance(error, SystemExit):
            loader.tell_items_counted()
        elif loader.left_early and not self._group.recovery.is_elastic:
            self._group.comm.give_up()


def ends_badly(error: BaseException | None) -> bool:
    """Not by `sys.exit()`, or the code that means "start again to continue"."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0, STOPPED_ON_REQUEST)
    return error is not None
