"""`engine.prepare`: the user's objects are taken as they are, and get what they need to train together.

model        ─► on its device, the same weights everywhere
optimizer    ─► with the models: a strategy, a TrainStep; its `step()` acts once per step
scheduler    ─► follows the optimizer
DataLoader   ─► beside an optimizer: work items of this worker's lanes; by itself, or as a second one: for evaluation

Of several loaders beside an optimizer one trains: the first that is not in its dataset's plain order, or if all are so
the first. Whoever shuffles an evaluation gives it after the training data, as everybody does.

`PreparedObjects` are what was handed over, `BetweenSteps` is what all workers do with it together at a step boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from paceline.checkpoint.weights_file import PretrainedWeights
from paceline.data.fetching import sequence_like
from paceline.data.loader import steps_of
from paceline.data.step_source import StepSource
from paceline.data.work_source import Assignment, WorkSource
from paceline.elastic.memory_checkpoint.shard_checksum import ShardChecksum
from paceline.engine import activation_checkpointing as recomputing
from paceline.engine.activation_checkpointing import Recomputed
from paceline.engine.attention_kernels import AttentionKernels
from paceline.engine.auto_strategy import settle
from paceline.engine.boundary import Boundary, Operation
from paceline.engine.causal_masks import CausalMasks
from paceline.engine.checkpoints import Surroundings
from paceline.engine.compilation import CompiledBlocks
from paceline.engine.config import EngineConfig, counted
from paceline.engine.default_group import check_batch_norms
from paceline.engine.evaluation import EvaluationLoader, check_rows, no_rows, note_collective
from paceline.engine.facts import chosen_by_script, facts_of_process, job_facts
from paceline.engine.group import Group
from paceline.engine.loop import PreparedLoader
from paceline.engine.memory_check import check_memory, cost_of_lanes
from paceline.engine.once_per_step import check_is_free
from paceline.engine.outside_modules import OutsideModules
from paceline.engine.peer_checks import PeerChecks, SequencePeers
from paceline.engine.replaying_source import ReplayingSource
from paceline.engine.replicas import (
    check_bare,
    check_belong_together,
    check_same_models,
    named_state,
    parameter_names,
    weights_hash,
)
from paceline.engine.rules import (
    NO_COINCIDENCE,
    has_history,
    lengths_of_schedule,
    multiple_of_length,
    nothing_to_train,
)
from paceline.engine.second_opinion import ComparedPasses, SecondOpinion, check_second_opinion
from paceline.engine.sequence_parts import WholeBatch
from paceline.engine.sources import (
    as_loader,
    check_same_data,
    facts_of_data,
    hear_epochs,
    lengths_seen,
    make_source,
    undivided,
)
from paceline.engine.state import JobState
from paceline.engine.step import NoPeers, NotCompiled, OnePass, TrainStep
from paceline.engine.stop_signals import StopSignals
from paceline.engine.strategy_table import StrategyTable
from paceline.engine.vote import WeightsWatch
from paceline.errors import CheckpointError, ConfigError, ReplicaError
from paceline.mesh.full_tensors import FullTensors, ShardedTensors
from paceline.mesh.plans import Plan, shard
from paceline.mesh.random_streams import ShardedRandomNumbers
from paceline.mesh.tensor_parallel import TensorParallelPeers, replace_in
from paceline.optim.precision import Precision
from paceline.optim.range_optimizer import check_elementwise
from paceline.parameter_server.replay import Replay
from paceline.strategies.meta_device import Given, check_states, fill, is_on_meta, module_names, moved
from paceline.strategies.registry import Job
from paceline.strategies.strategy import TensorPeers
from paceline.world import messages
from paceline.world.checked_values import path_of
from paceline.world.determinism import own_generators


@dataclass
class PreparedObjects:
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    step: TrainStep | None = None  # with the first optimizer
    loader: PreparedLoader | None = None  # that trains
    recomputed: Recomputed | None = None
    causal_masks: CausalMasks | None = None
    attention_kernels: AttentionKernels | None = None
    compiled: CompiledBlocks | None = None
    shared: list[tuple[Callable[[], Any], Callable[[Any], None]]] = field(default_factory=list)  # with joiners
    has_history: bool = False  # the optimizers were given with a state
    steps_were_asked: bool = False  # of an epoch: schedules are made from them
    workers_were_asked: bool = False  # how many they are: Accelerate's scripts multiply schedules by it
    registered: list[Any] = field(default_factory=list)  # saved and loaded with these
    random_numbers: ShardedRandomNumbers | None = None
    whole: FullTensors = field(default_factory=FullTensors)  # of what tensor parallelism has sharded
    outside: OutsideModules = field(init=False)

    def __post_init__(self) -> None:
        self.outside = OutsideModules(self.models)

    def training(self) -> TrainStep:
        if self.step is None:
            raise nothing_to_train()
        return self.step

    def full_tensor(self, weights: Tensor) -> Tensor:
        """Of a parameter or buffer, whatever part of it this worker has."""
        local = weights.detach() if self.step is None else self.step.strategies.full_tensor(weights)
        return self.whole.full(weights, local)

    def hash(self) -> str:
        return weights_hash(self.models, self.full_tensor)

    def full_gradients(self) -> dict[str, Tensor]:
        """Of what is trained; a placeholder says where its gradient is."""
        named = {name: value for name, value in named_state(self.models).items() if isinstance(value, nn.Parameter)}
        return {name: self.whole.full(p, p.grad).clone() for name, p in named.items() if p.grad is not None}

    def close(self) -> None:
        self.outside.close()
        hooks = self.recomputed, self.causal_masks, self.attention_kernels, self.compiled, self.random_numbers
        for part in (self.loader, self.step, *hooks):
            if part is not None:
                part.close()


class BetweenSteps:
    def __init__(self, config: EngineConfig, group: Group, objects: PreparedObjects) -> None:
        self._config, self._group, self._objects = config, group, objects
        self.boundary = Boundary(group)

    def drain(self) -> None:
        """Updates that are under way end, and the model holds the newest weights."""
        self.boundary.drain(self._objects.step)

    def reduce(self, values: Any, operation: Operation) -> Any:
        if isinstance(values, dict):
            return {key: self.reduce(value, operation) for key, value in values.items()}
        if isinstance(values, list | tuple):
            return sequence_like(values, [self.reduce(value, operation) for value in values])
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values, device=self._group.device)
        evaluation = self._evaluation_round()
        note_collective(self._group.evaluations)
        if evaluation is None:
            return self.boundary.reduced(tensor, operation)

        def reduce() -> Tensor:
            if evaluation.void or evaluation.batch is None:
                return tensor.detach()
            is_mean = operation == "mean"
            mine = evaluation.batch.mean(tensor) if is_mean else tensor
            return self.boundary.reduced(mine, operation, evaluation.real_workers(whole=is_mean))

        return self.boundary.in_round(reduce, tensor.detach)

    def padded(self, values: Any, dim: int, pad: int, first: bool) -> Any:
        """To the longest of all workers, those with a repeated batch among them: their rows are gathered as well."""
        if isinstance(values, dict):
            return {key: self.padded(value, dim, pad, first) for key, value in values.items()}
        if isinstance(values, list | tuple):
            return sequence_like(values, [self.padded(value, dim, pad, first) for value in values])
        if dim >= values.dim():
            return values
        longest = int(self.reduce(torch.tensor(values.shape[dim], device=self._group.device), "max"))
        shape = list(values.shape)
        shape[dim] = longest - values.shape[dim]
        filler = values.new_full(shape, pad)
        return torch.cat([filler, values] if first else [values, filler], dim)

    def gather_rows(self, values: Any, *, whole: bool = False) -> Any:
        check_rows(values)
        evaluation = self._evaluation_round()
        note_collective(self._group.evaluations)
        if evaluation is None:
            return self.boundary.gathered_rows(values, None)

        def gather() -> Any:
            if evaluation.void or evaluation.batch is None:
                return no_rows(values)
            mine = values if whole else evaluation.batch.rows(values)
            rows = self.boundary.gathered_rows(mine, evaluation.real_rows)
            evaluation.confirmed()
            return rows

        return self.boundary.in_round(gather, lambda: no_rows(values))

    def evaluation_batch(self, batch: Any) -> WholeBatch:
        """Of the round that is under way, of which the loop's body has this batch, or a part of it."""
        evaluation = self._evaluation_round()
        return WholeBatch(batch) if evaluation is None or evaluation.batch is None else evaluation.batch

    def _evaluation_round(self) -> EvaluationLoader | None:
        return next((loader for loader in self._group.evaluations if loader.real_rows is not None), None)

    def barrier(self) -> None:
        for loader in self._group.evaluations:
            loader.meets()
        self.boundary.barrier(with_servers=self._objects.step is None)

    def end_evaluation(self) -> None:
        """None leaves an evaluation that another has to run a round of again."""
        if self._group.recovery.is_elastic:
            self.boundary.barrier()

    def agreed_hash(self) -> str:
        self.drain()
        mine = self.boundary.alike(self._objects.hash)
        hashes = self.boundary.told(mine)
        if len(set(hashes)) > 1:
            raise ReplicaError(f"the workers' weights differ: {dict(enumerate(hashes))}")
        return mine

    def full_state(self, models: Sequence[nn.Module] | None = None) -> dict[str, Tensor]:
        """Of these models, or of all; tied weights are one tensor."""
        self.drain()
        objects = self._objects

        def everything() -> dict[str, Tensor]:
            known: dict[int, Tensor] = {}
            named = named_state(objects.models if models is None else models)
            for value in named.values():
                if id(value) not in known:
                    known[id(value)] = objects.full_tensor(value).to("cpu", copy=True)
            return {name: known[id(value)] for name, value in named.items()}

        return self.boundary.alike(everything)

    @contextmanager
    def goes_first(self, first: bool) -> Iterator[None]:
        """The others come to what is inside when those that are `first` have done it."""
        meets_servers = self._objects.step is None
        if not first:
            self.boundary.barrier(with_servers=meets_servers)
        yield
        if first:
            self.boundary.barrier(with_servers=meets_servers)

    # -- for those who save ------------------------------------------------------------------------------------------

    def surroundings(self) -> Surroundings:
        return Surroundings(self._group.all_world, self.boundary.told, self.boundary.alike, self._group.supervisor)

    def job_state(self) -> JobState:
        objects, step = self._objects, self._objects.training()
        trained, seed = (objects.models, objects.optimizers, objects.schedulers), self._config.seed
        of_script = (objects.shared, objects.registered)
        return JobState(*trained, step, objects.loader, *of_script, self.job_facts, seed, objects.whole)

    def job_facts(self) -> dict[str, Any]:
        loader = self._objects.loader
        return job_facts(self._config, {} if loader is None else loader.source.facts(), self._group.device)


class Preparation:
    trains = True
    """Otherwise the script is only looked at, and nothing is saved or loaded."""

    def __init__(
        self,
        config: EngineConfig,
        group: Group,
        objects: PreparedObjects,
        between: BetweenSteps,
        stops: StopSignals,
        opinion: SecondOpinion | None,
        replay: Replay | None,
        record_folder: Path | None,
    ) -> None:
        self._config, self._group, self._objects, self._between = config, group, objects, between
        self._stops, self._opinion, self._replay, self._record_folder = stops, opinion, replay, record_folder
        self._given: Given = {}
        self._watched: Callable[[WorkSource], WorkSource] = lambda source: source  # by `paceline verify`, if it is

    def prepare(
        self, objects: tuple[Any, ...], weights: str | Path | None = None, plan: Plan = None
    ) -> tuple[Any, ...]:
        objects = tuple(map(undivided, objects))
        trains = any(isinstance(thing, Optimizer) for thing in objects)
        if weights is not None:
            models = [thing for thing in objects if isinstance(thing, nn.Module)]
            self._open_weights(path_of("weights", weights), models, trains=trains)
        place = place_of_training_data(objects) if trains else None
        objects = tuple(as_loader(thing, self._config, trains=at == place) for at, thing in enumerate(objects))
        for thing in objects:
            self._adopt(thing)
        if trains:
            self._start_training(plan)
        for thing in objects:
            if isinstance(thing, nn.Module):
                self._group.sequences.attach(thing)
        loaders = [at for at, thing in enumerate(objects) if isinstance(thing, DataLoader)]
        which = ""
        if place is not None and len(loaders) > 1:
            which = f" (trains on loader {loaders.index(place) + 1} of {len(loaders)})"
        return tuple(self._prepared(thing, which if at == place else None) for at, thing in enumerate(objects))

    def _adopt(self, thing: Any) -> None:
        own = self._objects
        if isinstance(thing, nn.Module):
            own.models.append(moved(thing, self._group.device))
        elif isinstance(thing, Optimizer):
            check_is_free(thing)
            own.optimizers.append(thing)
        elif isinstance(thing, LRScheduler | ReduceLROnPlateau):
            own.schedulers.append(thing)
            self._note_times_workers(thing)
            if own.step is not None:  # made from a prepared optimizer, as a schedule over len(loader) must be
                check_belong_together(own.models, own.optimizers, [thing])
                if own.loader is not None and own.loader.was_measured:
                    counted = "the items of this worker's loop"
                    if_meant = "call engine.steps_per_epoch(loader) before prepare(): who knows it is not asked"
                    self._check_schedules([thing], own.loader, own.loader.source.steps, counted, if_meant)
                own.step.prepared.adopt_scheduler(thing)
        elif not isinstance(thing, DataLoader):
            raise ConfigError(
                "engine.prepare() takes models, optimizers, schedulers, DataLoaders, datasets and a StepSource, "
                f"not {type(thing).__name__}"
            )

    # -- what trains -------------------------------------------------------------------------------------------------

    def _start_training(self, plan: Plan) -> None:
        own, config, group = self._objects, self._config, self._group
        if own.step is not None:
            raise ConfigError(
                "engine.prepare() has been given an optimizer before: give all of a training in one call. For another "
                "training, as of the next fold, close this engine and make another: with Engine(…) as engine:"
            )
        if not own.models:
            raise ConfigError("engine.prepare() got an optimizer but no model; give both in one call")
        check_bare(own.models)
        self._shard_models(plan)
        check_belong_together(own.models, own.optimizers, own.schedulers)
        check_batch_norms(own.models, config.reduction)
        settle(config, group, own.models, own.optimizers)
        own.has_history = has_history(own.optimizers, [])  # a sharded strategy takes the state elsewhere
        self._fill_models()
        check_same_models(group.comm, own.models)
        check_memory(config, group.world, group.comm, group.device, own.models, own.optimizers, group.supervisor)
        if config.compile is not None:
            no_graphs = config.compile.why_no_graphs(
                group.device,
                low_precision=all(map(config.precision.lowers_all_of, own.models)),
                in_place=config.strategy.entry.full_weights,
                recomputed=config.activation_checkpointing is not None,
            )
            own.compiled = CompiledBlocks(config.compile, own.models, no_graphs)
            group.note(f"paceline: {own.compiled.described}")
        if cost := cost_of_lanes(config, group.world, own.optimizers):
            group.note(cost)
        if slow := config.precision.emulated_on(group.device):
            group.note(f"paceline: {slow}")
        if config.activation_checkpointing is not None:
            own.recomputed = recomputing.Recomputed(config.activation_checkpointing, own.models)
            group.note(f"paceline: {own.recomputed.described}")
        if group.serving is not None and group.serving.joins:
            facts = job_facts(config, {}, group.device)
            del facts["machine device"]  # its own, wherever the workers compute
            group.serving.join(facts_of_process(facts))
            group.world = group.serving.next_world("")
        for model in own.models:
            group.sequences.attach(model)
        strategies = self.open_strategies()
        trained = (own.models, own.optimizers, own.schedulers)
        passes = OnePass()
        if self._opinion is not None:
            group.recovery.shard_checksum = ShardChecksum(group.world.name, WeightsWatch)
            passes = ComparedPasses(self._opinion, strategies.assignment, group.recovery.shard_checksum)
        peers = NoPeers() if group.parallel is None else SequencePeers(group.sequences)
        if group.parallel is not None and group.tensor_peers.size > 1:
            peers = PeerChecks(group.sequences, group.tensor_peers, group.parallel)
        compiled = NotCompiled() if own.compiled is None else own.compiled

        def joiners_lack_it() -> bool:
            return group.recovery.is_elastic and not (own.shared or own.registered)

        parts = (strategies, self._stops, passes, compiled, peers, own.outside.copies, joiners_lack_it)
        own.step = self._new_step(config, group, *trained, *parts)
        if group.device.type == "cuda":
            own.causal_masks = CausalMasks(own.models)
            if config.reduction == "exact":
                own.attention_kernels = AttentionKernels(own.models, group.device, group.note)
        for optimizer in own.optimizers:
            own.step.prepared.adopt(optimizer)
        for scheduler in own.schedulers:
            own.step.prepared.adopt_scheduler(scheduler)

    def _new_step(self, *parts: Any) -> TrainStep:
        folder = self._group.seat.settings.verify
        if folder is None:
            return TrainStep(*parts)
        from paceline.engine.recorded_step import RecordedStep  # for `paceline verify` alone

        recorded = RecordedStep(*parts, folder=Path(folder), full=self._objects.full_tensor)
        self._watched = recorded.watch
        return recorded

    def _shard_models(self, plan: Plan) -> None:
        """By tensor parallelism; from here on models and optimizers are as small as this worker's part of them."""
        own, group, parallel = self._objects, self._group, self._group.parallel
        if parallel is None or self._config.mesh.tp == 1:
            if plan is not None:
                raise ConfigError("engine.prepare(plan=…) is for tensor parallelism: give Engine(mesh=Mesh(tp=…)) too")
            return
        self._fill_models(always=True)
        check_same_models(group.all, own.models)
        own.whole = ShardedTensors(parallel, group.tensor_peers)
        own.random_numbers = ShardedRandomNumbers(parallel, group.device)
        for model in own.models:
            moved = shard(model, plan, parallel)
            own.random_numbers.attach(model)
            for optimizer in own.optimizers:
                replace_in(optimizer.param_groups, moved)
        for optimizer in own.optimizers:
            check_elementwise(optimizer, group.device)

    def _open_weights(self, path: Path, models: Sequence[nn.Module], *, trains: bool) -> None:
        """The first weights of the one model in the call; which files they are in is compared, values are not."""
        if not trains or len(models) != 1 or not is_on_meta(models[0]):
            raise ConfigError(
                "engine.prepare(weights=…) is for one model, built under torch.device('meta') and prepared with its "
                "optimizer: one on a real device has its weights, from its own from_pretrained or load_state_dict"
            )
        digest = failure = ""
        try:
            opened = PretrainedWeights.open(path)
            digest, self._given = opened.digest(), opened.values_for(models[0])
        except CheckpointError as error:
            failure = str(error)
        said = self._group.comm.gather_json([digest, failure])
        if text := next((text for _, text in said if text), None):
            raise CheckpointError(text)
        if len({digest for digest, _ in said}) > 1:
            raise CheckpointError(f"the workers see different weights in {path}; give the same files to every host")
        with torch.no_grad():
            for tensor in (*models[0].parameters(), *models[0].buffers()):
                if not tensor.is_meta and id(tensor) in self._given:  # as where a script built a part of it elsewhere
                    tensor.copy_(self._given[id(tensor)]())

    def _fill_models(self, *, always: bool = False) -> None:
        """Models built on the meta device get their first weights here, where the strategy doesn't do it itself."""
        models = self._objects.models
        if not any(map(is_on_meta, models)):
            return
        check_states(self._objects.optimizers)
        if always or not self._config.strategy.entry.fills_meta:
            names = module_names(models, self._given)
            for model in models:
                fill(model, names, seed=self._config.seed, device=self._group.device)

    def open_strategies(self) -> StrategyTable:
        """For the workers that there are now."""
        job = self.job()
        self._group.lost = job.lost
        return StrategyTable(self._config.strategy, job)

    def job(self) -> Job:
        config, group, own = self._config, self._group, self._objects
        return Job(
            world=group.world,
            comm=group.comm,
            store=group.store_of_generation(),
            supervisor=group.supervisor,
            device=group.device,
            models=own.models,
            names=parameter_names(own.models),
            optimizers=own.optimizers,
            lanes=config.summed_lanes,
            parts=config.mesh.cp,
            reduction=config.reduction,
            algorithm=config.algorithm,
            backend=config.backend,
            bucket_bytes=int(config.bucket_mib * 2**20),
            overlap=config.overlap,
            timeout_s=config.timeout_s,
            seed=config.seed,
            given=self._given,
            precision=config.precision,
            offload=config.offload is not None,
            whole=() if own.compiled is None else tuple({type(module) for module in own.compiled.modules}),
            compression=config.compression,
            peers=TensorPeers() if group.parallel is None else TensorParallelPeers(group.tensor_peers, group.parallel),
            facts=job_facts(config, {}, group.device),
            replay=self._replay,
            generation=group.generation or 1,
            adopt_group=group.adopt if group.generation is not None else None,
            next_group=self._next_group if group.serving is not None else None,
        )

    def _next_group(self, why: str) -> Job:
        """Of a server: with the workers and servers of the next generation."""
        assert self._group.serving is not None
        self._group.world = self._group.serving.next_world(why)
        return self.job()

    # -- loaders -----------------------------------------------------------------------------------------------------

    def _prepared(self, thing: Any, which: str | None) -> Any:
        """`which`: of the loader that trains, what to say about it."""
        if not isinstance(thing, DataLoader):
            return thing
        return self._evaluation_loader(thing) if which is None else self._training_loader(thing, which)

    def _evaluation_loader(self, loader: DataLoader[Any]) -> EvaluationLoader:
        if (
            not self._group.recovery.is_elastic
        ):  # a worker that has joined prepares when the others have done so long ago
            self._compare(loader)
        self._group.evaluations.append(
            EvaluationLoader(
                loader,
                self._group.among,
                self._group.device,
                seed=self._config.seed,
                timeout_s=self._config.timeout_s,
                on_start=self._between.drain,
                on_end=self._between.end_evaluation,
                tell=self._group.note,
                count=self._group.evaluation_count,
                # Strategies that fill a model from the meta device are those that gather weights in forward.
                needs_all=lambda: self._objects.step is not None and self._config.strategy.entry.fills_meta,
                in_step=lambda: self._objects.step is not None and self._objects.step.inside_step,
                sequences=self._group.sequences,
            )
        )
        return self._group.evaluations[-1]

    def _training_loader(self, loader: DataLoader[Any], which: str) -> PreparedLoader:
        step, config, group = self._objects.training(), self._config, self._group
        made = make_source(loader, self._assignment(), lambda: group.comm, step)
        source = self._watched(self._replayed(made, step))
        self._compare(loader)
        counted = "batches, of which a step takes one for each lane and micro-batch"
        if_meant = "give the scheduler to a prepare() of its own after the loader's"
        self._check_schedules(self._objects.schedulers, loader, source.steps, counted, if_meant)
        if self._opinion is not None:
            check_second_opinion(config, source)
        own = self._objects
        own.loader = PreparedLoader(
            source, step, config, group, self._between.boundary, self._stops, self._record_folder,
            begun_elsewhere=lambda: own.has_history or has_history(own.optimizers, own.schedulers),
            new_schedules=lambda: [type(one).__name__ for one in own.schedulers if not getattr(one, "last_epoch", 1)],
        )  # fmt: skip
        hear_epochs(loader, own.loader.set_epoch)
        group.note(self._described(source) + which)
        if config.lanes > 1 and group.is_main and (found := own_generators(loader.dataset)):
            messages.logger("engine").warning(
                f"paceline: the {type(loader.dataset).__name__} has a random generator of its own, {min(found)!r}. "
                "What samples draw from it depends on those that their worker had before: draw from torch, numpy or "
                "random without a generator, which are seeded for every item"
            )
        return own.loader

    def _assignment(self) -> Assignment:
        config, step = self._config, self._objects.step
        world = self._group.world
        parts = config.mesh.cp
        if step is None:
            own = config.strategy.assign_lanes(config.lanes, world.size // parts)[world.rank // parts]
        else:
            own = tuple(lane // parts for lane in step.strategies.assignment[world.rank])
        is_compared = self._group.seat.settings.verify is not None
        return Assignment(
            config.lanes, config.accumulate, own, config.seed, config.global_batch_size, config.timeout_s, is_compared
        )

    def steps_per_epoch(self, loader: Any) -> int:
        self._objects.steps_were_asked = True
        if isinstance(loader, StepSource):
            return loader.steps
        if not isinstance(loader, DataLoader | PreparedLoader):
            raise ConfigError(
                f"engine.steps_per_epoch() takes the loader that trains, prepared or not, not {type(loader).__name__}"
            )
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            return steps_of(undivided(loader), self._assignment())
        steps = loader.source.steps if isinstance(loader, PreparedLoader) else None
        if steps is None:
            raise ConfigError(
                "engine.steps_per_epoch() can't know the steps of a stream that has no length or is not prepared yet; "
                "make the schedule over a number of steps that you choose"
            )
        return steps

    def _check_schedules(
        self, schedulers: Sequence[Any], loader: Any, steps: int | None, counted: str, if_meant: str
    ) -> None:
        """That none was made over len(loader), where this is not the number of steps.

        In a short epoch it may be a coincidence, and is a warning.
        """
        if not steps:
            return
        for length in lengths_seen(loader):
            for scheduler in schedulers:
                found = multiple_of_length(scheduler, length, steps, self._config.accumulate)
                if found is None:
                    continue
                if self._objects.steps_were_asked and found.whole % steps == 0:  # then it may be as many epochs
                    self._group.note(
                        f"paceline: the {found.kind} {found.counts}, {found.whole // steps} epochs of {steps}. That is "
                        f"also {found.seen}, which counts {counted}: if you train other epochs, make it for "
                        "engine.steps_per_epoch(loader) times these"
                    )
                    continue
                text = found.told(steps, counted, if_meant)
                if length >= NO_COINCIDENCE:
                    raise ConfigError(text)
                if self._group.is_main:
                    messages.logger("engine").warning(f"paceline: {text}")

    def _note_times_workers(self, scheduler: Any) -> None:
        """Under Accelerate a prepared scheduler steps once for each process, and its scripts count so."""
        workers = self._group.world.size
        if workers == 1 or not self._objects.workers_were_asked:
            return
        for whole in lengths_of_schedule(scheduler):
            if whole and whole % workers == 0:
                self._group.note(
                    f"paceline: the {type(scheduler).__name__} is over {whole} steps. A scheduler steps once with the "
                    "optimizer, not once for each process as under Accelerate: if that is "
                    f"{whole // workers} × engine.num_processes, leave `* engine.num_processes` out"
                )
                return

    def _compare(self, loader: DataLoader[Any]) -> None:
        """Whether every worker was given the same; found by what it leads to, the difference has cost an epoch."""
        step = self._objects.step
        if step is not None and step.inside_step:
            return
        settings = job_facts(self._config, {}, self._group.device)
        check_same_data(self._between.boundary.told(facts_of_data(loader) | chosen_by_script(settings)))

    def _replayed(self, source: WorkSource, step: TrainStep) -> WorkSource:
        if self._replay is None:
            return source
        replaying = ReplayingSource(source, self._replay, step)
        step.replayed = replaying
        return replaying

    def _described(self, source: WorkSource) -> str:
        config, world = self._config, self._group.world
        batch, amount = source.described()
        strategy = f"{config.strategy} ({config.chosen_because})" if config.chosen_because else str(config.strategy)
        started = world.source + (f", {config.mesh}" if config.mesh.splits_model else "")
        entry = config.strategy.entry
        summed: str = config.reduction if entry.adds_fast else "exact"
        if not config.strategy.bits_of_one_process:
            summed = "weights may be old" if entry.uses_servers else "bits depend on the number of workers"
        return (
            f"paceline: global batch {batch} · "
            f"{counted(world.size * config.mesh.tp, 'worker')} × {counted(config.threads, 'thread')} ({started}) · "
            f"{strategy}, {summed}{' over ' + config.algorithm if config.algorithm else ''}"
            f"{'' if config.compression is None else f', compressed ({config.compression})'} · "
            f"{self._described_backend()} · {self._group.device.type}"
            f"{' in ' + str(config.precision) if config.precision != Precision() else ''} · {amount}"
        )

    def _described_backend(self) -> str:
        if self._group.world.size == 1:
            return "no communication"
        kernels = self._group.comm.kernels
        return f"{self._config.backend} communication{'' if kernels is None else f' (kernels: {kernels})'}"


def place_of_training_data(objects: Sequence[Any]) -> int | None:
    """Of the loader or dataset that trains, among what `prepare` was given with an optimizer."""
    data = [at for at, thing in enumerate(objects) if isinstance(thing, DataLoader | Dataset | StepSource)]
    return next((at for at in data if not _in_plain_order(objects[at])), data[0] if data else None)


def _in_plain_order(thing: Any) -> bool:
    return isinstance(thing, DataLoader) and thing.batch_size is not None and type(thing.sampler) is SequentialSampler
