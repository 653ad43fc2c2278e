"""The Engine: an ordinary PyTorch loop, on any number of workers, with the same bits.

    engine = paceline.Engine()
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    for batch in loader:
        loss = loss_fn(model(batch[0]), batch[1])
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

The objects are the user's own, with hooks: no wrapper. What happens inside a step is told in `train_step.py`, the rules
of the loop in docs/concepts/loop.md.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.collectives.byte_count import Traffic
from paceline.collectives.communicator import Communicator
from paceline.collectives.gradient_exchange import Reduction
from paceline.data.sample_record import RecordHeader, SampleRecord, next_attempt
from paceline.data.work_source import Deal, WorkSource
from paceline.elastic.fault_injection import arm
from paceline.elastic.member import Generation, Member
from paceline.elastic.told_hash import tell_hash
from paceline.engine import activation_checkpointing as recomputing
from paceline.engine.acting_once import is_scheduler, let_optimizer_act_once, let_scheduler_follow
from paceline.engine.assembly import Assembly, facts_of_process
from paceline.engine.boundary import Boundary, Operation, check_boundary
from paceline.engine.checkpoints import Checkpoints, WhenBusy
from paceline.engine.config import EngineConfig, counted, one_of
from paceline.engine.evaluation import EvaluationLoader, no_rows
from paceline.engine.job_state import JobState
from paceline.engine.memory_check import check_memory
from paceline.engine.one_line_errors import show_our_errors_in_one_line
from paceline.engine.prepared_loader import PreparedLoader
from paceline.engine.progress import Bar, Progress
from paceline.engine.regrouping import Elastic
from paceline.engine.replaying_source import ReplayingSource
from paceline.engine.replicas import check_same_models, named_state, parameter_names, weights_hash
from paceline.engine.saved_state import job_facts
from paceline.engine.saver import Saver, Surroundings
from paceline.engine.second_opinion import SecondOpinion
from paceline.engine.serving import Serving
from paceline.engine.sources import as_loader, check_same_order, make_source
from paceline.engine.step_so_far import Timing
from paceline.engine.stop_signals import StoppedOnRequest, StopSignals
from paceline.engine.strategy_table import StrategyTable
from paceline.engine.surroundings import (
    among_members,
    call_supervisor,
    check_backend,
    connect_workers,
    default_backend,
    find_device,
    open_meeting,
)
from paceline.engine.train_step import TrainStep
from paceline.errors import ConfigError, LoopError, ReplicaError
from paceline.optim.loss_scale import LossScale, OnNonFinite, loss_scale_of
from paceline.optim.offload import OffloadName, check_offload
from paceline.optim.precision import Precision, precision_of
from paceline.parameter_server.replay import replay_of
from paceline.strategies.meta_weights import check_states, fill, is_on_meta, module_names, moved
from paceline.strategies.registry import STRATEGIES, Job, LoopEndListener, choose
from paceline.world.determinism import default_threads, make_deterministic, mix, seed_everything
from paceline.world.environment import read_world
from paceline.world.summary_table import SummaryTable
from paceline.world.world import World

DEFAULT_SEED = 0


class Engine:
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
        activation_checkpointing: recomputing.Wanted = None,
        global_batch_size: int | None = None,
        on_nonfinite: OnNonFinite = "stop",
        record_samples: str | Path | None = None,
        timeout_s: float = 600.0,
        second_opinion: int | None = None,
        world: World | None = None,
    ) -> None:
        show_our_errors_in_one_line()
        self._seat = self.world = read_world() if world is None else world
        elastic = self._seat.elastic
        arm(self._seat.rank, 0 if elastic is None else elastic.incarnation)
        told = self.world.settings
        strategy = one_of("strategy", strategy, told.strategy) or "ddp"
        precision = precision_of(one_of("precision", precision, told.precision) or "fp32")
        offload = one_of("offload", offload, told.offload)  # type: ignore[arg-type]
        flag: recomputing.Wanted = told.activation_checkpointing
        again = one_of("activation_checkpointing", activation_checkpointing, flag)
        self.device = find_device(self.world, device)
        lanes = one_of("lanes", lanes, told.lanes) or self.world.size
        backend = backend or told.backend or default_backend(self.world, self.device)
        check_backend(self.world, backend)
        self.world = among_members(self._seat)
        self.config = EngineConfig(
            lanes=lanes,
            accumulate=accumulate,
            seed=one_of("seed", seed, told.seed) if (seed, told.seed) != (None, None) else DEFAULT_SEED,  # type: ignore[arg-type]
            strategy=choose(strategy),
            reduction=reduction,
            algorithm=algorithm,
            backend=backend,
            threads=one_of("threads", threads, told.threads) or default_threads(lanes),
            bucket_mib=bucket_mib,
            overlap=overlap,
            global_batch_size=global_batch_size,
            on_nonfinite=on_nonfinite,
            timeout_s=timeout_s,
            activation_checkpointing=recomputing.parse(again),
            precision=precision,
            loss_scale=loss_scale_of(loss_scale, precision),
            offload=offload,
        )
        self.config.check_against(self.world)
        able = [entry.name for entry in STRATEGIES.values() if entry.takes_offload]
        check_offload(offload, self.device, self.config.strategy.name, able)
        self._client = call_supervisor(self._seat)
        self._opened_store, self._store = open_meeting(self._seat, self._client, timeout_s)
        self._serving: Serving | None = None
        self._elastic = self._join_elastic_job()
        self._comm = connect_workers(
            self.world, self._store, backend=self.config.backend, device=self.device, timeout_s=timeout_s
        )
        self._boundary = Boundary(
            self.world, self._store, self._comm, self.device, timeout_s, start_over=self._start_over
        )
        torch.set_num_threads(self.config.threads)
        if reduction == "exact":
            make_deterministic(self.device.type)
        seed_everything(mix(self.config.seed, "start"))
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._schedulers: list[Any] = []
        self._step: TrainStep | None = None
        self._recomputed: recomputing.Recomputed | None = None
        self._loader: PreparedLoader | None = None
        self._evaluations: list[EvaluationLoader] = []
        self._record_folder = None if record_samples is None else Path(record_samples)
        self._replay = None if told.replay is None else replay_of(Path(told.replay))
        self._at_loop_end: list[LoopEndListener] = []
        self._lost: Set[int] = frozenset()
        self._second_opinion = None if second_opinion is None else SecondOpinion(second_opinion)
        self._shared: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self._saver = Saver(self.config, self._surroundings, self._state)
        if self._elastic is not None and self._comm is not None:
            self._watch_changes(self._comm)
        tells = self.world.is_main and self._client is None  # the launcher has told it otherwise
        self._stops = StopSignals(self.world.name, tells=tells, is_server=self.world.is_server)
        self._among = self.world  # the workers that are left, under their ranks there
        self._in_loop = self._left_early = False
        self._closed = False
        atexit.register(self.close)

    # -- the five lines of a loop ------------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Take the model, optimizer, scheduler and training loader, in any order, and hand the same objects back.

        A loader given in a call without an optimizer is an evaluation loader. In place of a loader a plain dataset will
        do where the Engine knows its `global_batch_size`; for training it is shuffled.
        """
        training = any(isinstance(thing, Optimizer) for thing in objects)
        objects = tuple(as_loader(thing, self.config, shuffle=training) for thing in objects)
        loaders = [thing for thing in objects if isinstance(thing, DataLoader)]
        if training and len(loaders) > 1:
            raise ConfigError(
                f"prepare() got {len(loaders)} loaders beside an optimizer and can't tell which one trains; give the "
                "training loader here and the others in a prepare() call of their own"
            )
        for thing in objects:
            self._adopt(thing)
        if training:
            self._start_training()
        out = tuple(self._prepared(thing, training) for thing in objects)
        return out if len(out) > 1 else out[0]

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, last: bool = True) -> None:
        """Backward for this item. `loss` is the mean over `weight` samples or tokens (default: the samples handed out).

        `last=False` holds buckets back when an item has several losses.
        """
        self._training().backward(loss, None if weight is None else float(weight), last=last)

    def update(self, optimizer: Optimizer, loss_fn: Callable[[Any], Any]) -> None:
        """Run `loss_fn(batch)` for every item of this step and let `optimizer` act: one call per optimizer (a GAN).

        `loss_fn` returns the loss, or (loss, weight). The loop's body then runs once per step.
        """
        step, loader = self._training(), self._loader
        if loader is None or step.item is None:
            raise LoopError("engine.update() belongs inside `for batch in loader` of a prepared training loader")
        if id(optimizer) not in {id(known) for known in self._optimizers}:
            raise LoopError("engine.update() got an optimizer that was not given to engine.prepare()")
        step.retract_item()
        while True:
            for item, batch in loader.rest_of_step():
                step.begin_item(item, optimizers=[optimizer])
                if step.is_lost:
                    break
                result = loss_fn(batch)
                loss, weight = result if isinstance(result, tuple) else (result, None)
                step.backward(loss, weight, last=True)
            step.finish_update(optimizer)
            if not step.is_lost:
                return
            loader.restart_step()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradient of the global batch by its norm; call it between `backward` and `step`. Returns the norm.

        On items before the step's last one there is no gradient yet: the norm of the step before is returned.
        """
        return self._training().clip(max_norm)

    def mean(self, name: str, value: Tensor | float, *, weight: float | None = None) -> None:
        """Collect a value of this item; after the step `engine.means[name]` is its mean over the global batch."""
        self._training().add_mean(name, value.detach() if isinstance(value, Tensor) else value, weight)

    @property
    def means(self) -> dict[str, float]:
        return self._training().work.means

    @property
    def step(self) -> int:
        """Committed steps."""
        return self._step.step if self._step is not None else 0

    @property
    def stepped(self) -> bool:
        """True after an item whose step acted: the moment for logging, evaluation, saving."""
        return self._step is not None and self._step.stepped

    @property
    def step_samples(self) -> int:
        """Samples of all workers in the step that the loop is in."""
        item = self._training().item
        return 0 if item is None else item.step_samples

    @property
    def timing(self) -> Timing:
        return self._training().work.timing

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by in backward, now: 1 unless the model computes in fp16."""
        scale = self._training().work.loss_scale
        return 1.0 if scale is None else scale.value

    @property
    def traffic(self) -> Traffic:
        """What this worker sent and received in its last step, by peer and operation."""
        return self._training().work.traffic

    def stop(self) -> None:
        """End the loop of all workers after the same step: this one, or the next if this one has acted already."""
        self._training().stop()

    def stop_on_signals(self, *numbers: signal.Signals) -> None:
        """From now on a signal to any worker ends the loop of all after the same step; call it on every worker.

        Without `numbers`: SIGTERM, Ctrl-C and SIGUSR1. What follows is told in docs/concepts/stopping.md.
        """
        self._stops.watch(numbers)
        if self._client is not None:
            self._client.tell("policy", stops_on_request=True)

    @property
    def stop_requested(self) -> bool:
        """All workers have agreed that a signal ends the training: after this step when asked inside the loop."""
        return self._stops.agreed

    def exit_if_stopped(self) -> None:
        """After the loop and the last save: leave with code 75 if a signal ended the loop; otherwise do nothing."""
        if self._stops.agreed:
            if self._client is None:  # the launcher says it otherwise
                self.print(f"paceline: stopped on request after step {self.step}; start again to continue")
            raise StoppedOnRequest

    def share_with_joiners(self, give: Callable[[], Any], take: Callable[[Any], None]) -> None:
        """What the loop keeps besides the prepared objects; called before it, by every worker.

        A worker that joins an elastic job takes over what one of the others gives: a tree of plain values and tensors.
        """
        self._shared.append((give, take))

    def progress(self, loader: Any, *, total: int | None = None) -> Progress:
        """The loader with a progress line; `total` in steps."""
        if total is None and isinstance(loader, PreparedLoader):
            left = loader.source.steps_left
            total = None if left is None else self.step + left
        return Progress(loader, bar=lambda: self.bar(total), total=total, engine=self)

    def bar(self, total: int | None) -> Bar:
        """A progress line that the caller moves on: one for several loops, or for none; close it."""
        return Bar(step=self.step, total=total, main=lambda: self.is_main_process, client=self._client)

    def show_table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Two columns, shown once: by the launcher where there is one, otherwise printed."""
        if self.is_main_process and self._client is not None:
            self._client.tell("table", title=title, rows=[list(row) for row in rows])
        elif self.is_main_process:
            SummaryTable.of(title, rows).print()

    # -- between steps -----------------------------------------------------------------------------------------------

    @property
    def is_main_process(self) -> bool:
        """One of all workers: the first, or when that one is lost the first of the others."""
        return self._among.is_main if self._elastic is None else self._elastic.is_main

    def print(self, *values: object, **options: Any) -> None:
        """Print once, not once per worker."""
        if self.is_main_process:
            print(*values, **({"flush": True} | options))

    def reduce(self, tensor: Tensor, operation: Operation = "mean") -> Tensor:
        """Combine one tensor of each worker, in rank order, at a step boundary."""
        check_boundary(self._step, "reduce")
        evaluation = self._evaluation_round()
        if evaluation is None:
            return self._boundary.reduced(tensor, operation)
        return self._boundary.in_round(
            lambda: tensor.detach() if evaluation.void else self._boundary.reduced(tensor, operation), tensor.detach
        )

    def gather_for_metrics(self, values: Any) -> Any:
        """All workers' results of this round of an evaluation loader, every sample once, in the dataset's order."""
        check_boundary(self._step, "gather_for_metrics")
        evaluation = self._evaluation_round()
        if evaluation is None:
            return self._boundary.gathered_rows(values, None)

        def gather() -> Any:
            if evaluation.void:
                return no_rows(values)
            rows = self._boundary.gathered_rows(values, evaluation.real_rows)
            evaluation.confirmed()
            return rows

        return self._boundary.in_round(gather, lambda: no_rows(values))

    def _evaluation_round(self) -> EvaluationLoader | None:
        return next((loader for loader in self._evaluations if loader.real_rows is not None), None)

    def barrier(self) -> None:
        """No worker goes on before all are here; nor, up to `prepare` of what is trained, before all servers are."""
        check_boundary(self._step, "barrier")
        self._boundary.barrier(with_servers=self._step is None)

    def weights_hash(self) -> str:
        """`sha256:…` of parameters and persistent buffers; raises if the workers don't agree."""
        check_boundary(self._step, "weights_hash")
        self._settle()
        mine = self._boundary.alike(self._hash)
        hashes = self._boundary.told(mine)
        if len(set(hashes)) > 1:
            raise ReplicaError(f"the workers' weights differ: {dict(enumerate(hashes))}")
        for tell in self._at_loop_end:
            tell(self.step, lambda: mine)
        tell_hash(self._seat.rank, mine)
        return mine

    def state_dict(self) -> dict[str, Tensor]:
        """Whole weights and buffers by name, on the host, whatever the strategy; all workers call it and get them."""
        check_boundary(self._step, "state_dict")
        self._settle()

        def everything() -> dict[str, Tensor]:
            whole = Tensor.detach if self._step is None else self._step.strategies.whole
            return {name: whole(value).to("cpu", copy=True) for name, value in named_state(self._models).items()}

        return self._boundary.alike(everything)

    def save_state(self, folder: str | Path) -> None:
        """Everything needed to continue, at a step boundary; every worker writes its part. Not in a replay."""
        if self._at_boundary("save_state"):
            self._saver.save(Path(folder))

    def load_state(self, folder: str | Path, *, accept: Sequence[str] = ()) -> None:
        """Continue from `save_state`, on any number of workers, with the next sample.

        A job that differs in something the bits depend on is refused; `accept` names what may differ all the same.
        """
        check_boundary(self._step, "load_state")
        self._saver.load(Path(folder), accept)

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
            Path(folder),
            self._saver,
            around=self._surroundings,
            at_boundary=self._at_boundary,
            resumes=lambda: self._elastic is None or self._elastic.admitted,  # who joins gets its state from others
            step=lambda: self.step,
            keep=keep,
            asynchronous=asynchronous,
            when_busy=when_busy,
        )

    def close(self) -> None:
        """Leave the job: threads, hooks, group and control connection end. Called at exit by itself."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._stops.close()
        if self._in_loop and self._comm is not None:
            if self._elastic is None:
                self._say_left()
            else:
                self._comm.abandon("this worker leaves in the middle of its loop")  # the others go on without it
        self._saver.finish()
        if self._loader is not None:
            self._loader.close()
        if self._step is not None:
            self._step.close()
        if self._recomputed is not None:
            self._recomputed.close()
        if self._comm is not None:
            self._comm.close()
        if self._elastic is not None:
            self._elastic.close()
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _adopt(self, thing: Any) -> None:
        if isinstance(thing, nn.Module):
            self._models.append(moved(thing, self.device))
        elif isinstance(thing, Optimizer):
            self._optimizers.append(thing)
        elif is_scheduler(thing):
            self._schedulers.append(thing)
            if self._step is not None:  # made from a prepared optimizer, as a schedule over len(loader) must be
                let_scheduler_follow(thing, self._step)
        elif not isinstance(thing, DataLoader):
            raise ConfigError(
                "engine.prepare() takes models, optimizers, schedulers, DataLoaders and datasets, "
                f"not {type(thing).__name__}"
            )

    def _start_training(self) -> None:
        if self._step is not None:
            raise ConfigError("engine.prepare() was given an optimizer twice; prepare all optimizers in one call")
        if not self._models:
            raise ConfigError("engine.prepare() got an optimizer but no model; give both in one call")
        self._fill_models()
        check_same_models(self._comm, self._models)
        check_memory(self.config, self.world, self._comm, self.device, self._optimizers, self._client)
        if self.config.activation_checkpointing is not None:
            self._recomputed = recomputing.Recomputed(self.config.activation_checkpointing, self._models)
            self.print(f"paceline: {self._recomputed.described}")
        if self._serving is not None and self._serving.joins:
            facts = job_facts(self.config, {}, self.device)
            del facts["machine device"]  # its own, wherever the workers compute
            self._serving.join(facts_of_process(facts))
            self.world = self._serving.next_world("")
        job = self._job()
        self._at_loop_end, self._lost = job.at_loop_end, job.lost
        strategies = StrategyTable(self.config.strategy, job)
        trained = (self._models, self._optimizers, self._schedulers)
        self._step = TrainStep(self.config, self._comm, *trained, strategies, self._stops, self._second_opinion)
        self._step.on_settled = self._go_on_without_the_lost
        if self._elastic is None:  # otherwise READY has said it
            self._step.on_step = self._tell_step
        self._step.lost = self._lost
        self._step.commit_with(self._elastic)
        for optimizer in self._optimizers:
            let_optimizer_act_once(optimizer, self._step)
        for scheduler in self._schedulers:
            let_scheduler_follow(scheduler, self._step)

    def _fill_models(self) -> None:
        """Models built on the meta device get their first weights here, where the strategy doesn't do it itself."""
        if not any(map(is_on_meta, self._models)):
            return
        check_states(self._optimizers)
        if not self.config.strategy.entry.fills_meta:
            names = module_names(self._models)
            for model in self._models:
                fill(model, names, seed=self.config.seed, device=self.device)

    def _job(self) -> Job:
        config = self.config
        return Job(
            world=self.world,
            comm=self._comm,
            store=self._store_of_group(),
            client=self._client,
            device=self.device,
            models=self._models,
            names=parameter_names(self._models),
            optimizers=self._optimizers,
            lanes=config.lanes,
            reduction=config.reduction,
            algorithm=config.algorithm,
            backend=config.backend,
            bucket_bytes=int(config.bucket_mib * 2**20),
            overlap=config.overlap,
            timeout_s=config.timeout_s,
            seed=config.seed,
            precision=config.precision,
            offload=config.offload is not None,
            facts=job_facts(config, {}, self.device),
            replay=self._replay,
            generation=self._generation or 1,
            adopt_group=self._adopt_group if self._generation is not None else None,
            next_group=self._next_group if self._serving is not None else None,
        )

    def _prepared(self, thing: Any, training: bool) -> Any:
        if not isinstance(thing, DataLoader):
            return thing
        if not training:
            seed, timeout_s = self.config.seed, self.config.timeout_s
            self._evaluations.append(
                EvaluationLoader(
                    thing,
                    self._among,
                    self.device,
                    seed=seed,
                    timeout_s=timeout_s,
                    on_start=self._settle,
                    on_end=self._end_evaluation,
                )
            )
            return self._evaluations[-1]
        step, config = self._training(), self.config
        ride = step.rides[self.world.rank]
        deal = Deal(
            config.lanes,
            config.accumulate,
            ride,
            config.seed,
            config.global_batch_size,
            config.timeout_s,
            rides=step.rides if step.strategies.in_rounds else None,
        )
        source = self._replayed(make_source(thing, deal, lambda: self._comm, step), step)
        self._check_second_opinion(source)
        self._loader = PreparedLoader(
            source,
            step,
            self.device,
            on_enter=self._enter_loop,
            on_leave=self._leave_loop,
            attempt=self._attempt,
            start_record=lambda attempt: self._start_record(source, attempt),
            deal=self._deal_lanes,
            elastic=self._elastic,
            join=self._join,
        )
        self.print(self._described(source))
        return self._loader

    def _deal_lanes(self, source: WorkSource) -> None:
        """The lanes that this worker has now, from the committed place on."""
        step = self._training()
        source.redeal(step.rides[self.world.rank], step.rides if step.strategies.in_rounds else None)

    def _check_second_opinion(self, source: WorkSource) -> None:
        name, able = self.config.strategy.name, ("ddp", "star", "zero1", "zero2", "zero3")
        if self._second_opinion is None:
            return
        if name not in able or source.takes_places or self.config.reduction != "exact":
            what = f"strategy={name!r}" if name not in able else "this"
            raise ConfigError(
                f"Engine(second_opinion=…) with {what}: lanes are passed on to other workers under {', '.join(able)}, "
                "with exact sums and a dataset that has positions (not a stream)"
            )

    def _replayed(self, source: WorkSource, step: TrainStep) -> WorkSource:
        if self._replay is None:
            return source
        replaying = ReplayingSource(source, self._replay, step)
        step.on_step = replaying.acted
        return replaying

    def _described(self, source: WorkSource) -> str:
        config = self.config
        batch, amount = source.described()
        summed = config.reduction if config.strategy.is_synchronous else "weights may be old"
        return (
            f"paceline: global batch {batch} · "
            f"{counted(self.world.size, 'worker')} × {counted(config.threads, 'thread')} ({self.world.source}) · "
            f"{config.strategy}, {summed}{' over ' + config.algorithm if config.algorithm else ''} · "
            f"{config.backend if self.world.size > 1 else 'no'} communication · {self.device.type}"
            f"{' in ' + str(config.precision) if config.precision != Precision() else ''} · {amount}"
        )

    def _attempt(self, regrouping: bool) -> int | None:
        """The number of the record of samples that all workers begin now."""
        folder = self._record_folder
        if folder is None or self._replay is not None:
            return None
        number = next_attempt(folder)
        if not regrouping:
            return max(self._boundary.told(number))
        return number if self._comm is None else int(max(self._comm.gather_json(number)))

    def _start_record(self, source: WorkSource, attempt: int) -> SampleRecord:
        assert self._record_folder is not None
        lanes, world = self.config.lanes, self.world
        header = RecordHeader(worker=world.rank, workers=world.size, lanes=lanes, **source.record_header())
        return SampleRecord.start(self._record_folder, attempt, header)

    def _enter_loop(self) -> bool:
        """Whether there is a loop to run."""
        if self._elastic is not None and not self._enter_with_others(self._elastic):
            return False
        if self._in_loop:
            return True
        if self._comm is not None:
            self._comm.take_back_note()
        if not self._stops.enter_loop(self._boundary.told):
            return False
        self._in_loop = True
        if self._loader is not None and self._loader.source.digest is not None:
            check_same_order(self._boundary.told(self._loader.source.digest))
        if self._client is not None:
            self._client.tell("phase", name="training")
        self._tell_step()
        if self._elastic is not None:
            self._elastic.enter(self._round, self._elastic_facts())
        return True

    def _leave_loop(self, early: bool) -> None:
        self._in_loop = False
        if self._elastic is not None:
            self._left_early, self._elastic.left_early = early, False
            if self._elastic.changed and not self._training().inside_step:
                self._elastic.start_over()  # somebody joins after the last step: it leaves the loop as well
            self._elastic.member.leave(self._elastic.loop)
        step = self._training()
        if early:
            step.forget_untouched()
            if step.inside_step:
                step.broken = f"this worker left its training loop inside step {step.step + 1}"
            self._say_left()
        else:
            if step.stops_alone:
                self._say_left()
            self._settle()
            if step.never_agrees:  # inside the loop a signal was this worker's own affair
                self._stops.end_loop(self._boundary.told)
            for tell in self._at_loop_end:
                tell(step.step, self._hash)
            step.stopped()
            seed_everything(mix(self.config.seed, "after the loop", step.step))
        if self._client is not None and not (early and step.inside_step):
            self._client.tell("phase", name="idle")
            self._tell_step()

    # -- elastic jobs ------------------------------------------------------------------------------------------------

    def _join_elastic_job(self) -> Elastic | None:
        """In an elastic job workers come and go: who commits steps, and how those that are left go on."""
        seat = self._seat
        if seat.elastic is None or self._client is None:
            return None
        if not self.config.strategy.is_synchronous:
            raise ConfigError(
                f"--elastic with strategy {self.config.strategy}: its workers don't wait for each other: there is no "
                "step that all could do again; it goes on without lost workers by itself: start it without --elastic"
            )
        members = tuple(slot for slot, _ in seat.elastic.members) or tuple(range(seat.size))
        servers = tuple(range(seat.size, seat.size + seat.servers))
        first = Generation(0 if seat.elastic.joins else 1, members, main=members[0], servers=servers)
        member = Member(self._client, seat.rank, seat.elastic.incarnation, first, self.config.timeout_s)
        if seat.is_server:
            self._serving = Serving(member, seat, self._store_of, self.config.timeout_s)
            return None
        return Elastic(member, seat, Assembly(self), self.print)

    def _watch_changes(self, comm: Communicator) -> None:
        """From the moment that the workers have changed nothing waits for those that are gone."""
        elastic = self._elastic_parts()

        def change(why: str) -> None:
            comm.abandon(why)
            self._saver.workers_changed()

        elastic.member.on_change = change
        if elastic.member.is_newer_than(elastic.now_in):
            comm.abandon("the workers have changed")

    def _adopt_group(self, comm: Communicator) -> None:
        """A group of a strategy's own ends with the generation, where the workers have none that it could end with."""
        if self._serving is not None:
            self._serving.adopt(comm)
            return
        elastic = self._elastic_parts()
        before = elastic.member.on_change

        def change(why: str) -> None:
            comm.abandon(why)
            before(why)

        elastic.member.on_change = change
        if elastic.member.is_newer_than(elastic.now_in):
            comm.abandon("the workers have changed")

    def _next_group(self, why: str) -> Job:
        """Of a server: with the workers and servers of the next generation."""
        assert self._serving is not None
        self.world = self._serving.next_world(why)
        return self._job()

    def _end_evaluation(self) -> None:
        """None leaves an evaluation that another has to run a round of again."""
        if self._elastic is not None:
            self._boundary.barrier()

    def _start_over(self) -> None:
        """Workers were lost in something that all do together between two steps."""
        if self._loader is not None and self._loader.in_loop:
            self._loader.start_over()
        else:
            self._elastic_parts().start_over()

    def _store_of_group(self) -> Store | None:
        """In an elastic job keys are those of one generation: nobody finds what an older one left there."""
        if self._generation is None or self._store is None:
            return self._store
        return self._store_of(self._generation)

    def _store_of(self, generation: int) -> Store:
        assert self._store is not None
        return PrefixStore(f"elastic/{generation}", self._store)

    @property
    def _generation(self) -> int | None:
        """Of an elastic job: the one that this process is in, or is about to be."""
        part = self._elastic or self._serving
        return None if part is None else part.now_in

    def _elastic_parts(self) -> Elastic:
        assert self._elastic is not None
        return self._elastic

    @property
    def _round(self) -> int:
        return self._training().count.rounds

    def _elastic_facts(self) -> dict[str, str | int]:
        config = self.config
        more = {"threads": config.threads, "strategy": str(config.strategy), "backend": config.backend}
        return facts_of_process({**self._job_facts(), **more})

    def _join(self, any_loop: bool) -> bool:
        """A worker that comes later, in front of its loop; False: the others are past it."""
        elastic = self._elastic_parts()
        if not elastic.join(self._elastic_facts(), any_loop=any_loop):
            return False
        self._in_loop = True
        if self._client is not None:
            self._client.tell("phase", name="training")
        self._tell_step()
        return True

    def _enter_with_others(self, elastic: Elastic) -> bool:
        """Whether this loop is one of the others', too; a joiner may be in it already."""
        if self._in_loop:
            return True
        elastic.loop += 1
        return elastic.admitted or self._join(False)

    def _say_left(self) -> None:
        if self._comm is None:
            return
        step = self._training()
        where = f"inside step {step.step + 1}" if step.inside_step else f"after step {step.step}"
        self._comm.leave_note(f"it left its training loop {where}", votes=step.votes)

    def _tell_step(self) -> None:
        """What the launcher names when this worker fails: the step it is in, or the last one after the loop."""
        if self._client is not None:
            self._client.tell("step", step=self.step + self._in_loop)

    def _training(self) -> TrainStep:
        if self._step is None:
            raise LoopError("nothing to train yet: give a model and an optimizer to engine.prepare() first")
        return self._step

    def _at_boundary(self, operation: str) -> bool:
        """All workers are between two steps, with the newest weights; False: nothing is saved here.

        So it is in a replay, and on a worker that has yet to join the others.
        """
        check_boundary(self._step, operation)
        self._settle()
        return self._replay is None and (self._elastic is None or self._elastic.admitted)

    def _surroundings(self) -> Surroundings:
        return Surroundings(self._among, self._boundary.told, self._client)

    def _state(self) -> JobState:
        facts, step = self._job_facts(), self._training()
        return JobState(self._models, self._optimizers, self._schedulers, step, self._loader, facts, self.config.seed)

    def _settle(self) -> None:
        """All workers are at a boundary: updates that are under way end, and the model holds the newest weights."""
        if self._step is not None and not self._step.inside_step:
            self._boundary.alike(self._step.settle)

    def _go_on_without_the_lost(self) -> None:
        """Where the strategy goes on without a worker, so does everything that workers do together."""
        if len(self._lost) == self.world.size - self._among.size or self._comm is None or self._store is None:
            return
        self._among = self.world.without(self._lost)
        named = ", ".join(map(str, sorted(self._lost)))
        self._comm.reconnect(self._among, PrefixStore(f"without/{named}", self._store))
        for loader in self._evaluations:
            loader.deal_to(self._among)
        plural, whose = ("s", "their") if len(self._lost) > 1 else ("", "its")
        self.print(f"paceline: going on without worker{plural} {named}; samples left in {whose} lanes are not seen")

    def _hash(self) -> str:
        return (
            weights_hash(self._models)
            if self._step is None
            else weights_hash(self._models, self._step.strategies.whole)
        )

    def _job_facts(self) -> dict[str, Any]:
        data = self._loader.source.facts() if self._loader is not None else {}
        return job_facts(self.config, data, self.device)
