"""`engine.prepare`: the user's objects are taken as they are, and get what they need to train together.

model        ─► on its device, the same weights everywhere
optimizer    ─► with the models: a strategy, a TrainStep; its `step()` acts once per step
scheduler    ─► follows the optimizer
DataLoader   ─► beside an optimizer: work items of this worker's lanes; by itself: an evaluation loader
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.data.work_source import Deal, WorkSource
from paceline.engine import activation_checkpointing as recomputing
from paceline.engine.acting_once import is_scheduler, let_optimizer_act_once, let_scheduler_follow
from paceline.engine.between_steps import BetweenSteps
from paceline.engine.config import EngineConfig, counted
from paceline.engine.evaluation import EvaluationLoader
from paceline.engine.group import Group
from paceline.engine.loop_ends import LoopEnds
from paceline.engine.memory_check import check_memory
from paceline.engine.prepared_loader import PreparedLoader
from paceline.engine.prepared_objects import PreparedObjects
from paceline.engine.process_facts import facts_of_process
from paceline.engine.replaying_source import ReplayingSource
from paceline.engine.replicas import check_belong_together, check_same_models, parameter_names
from paceline.engine.saved_state import chosen_by_script, job_facts
from paceline.engine.seal import Seal
from paceline.engine.second_opinion import SecondOpinion, check_second_opinion
from paceline.engine.sources import as_loader, check_same_data, facts_of_data, make_source
from paceline.engine.stop_signals import StopSignals
from paceline.engine.strategy_table import StrategyTable
from paceline.engine.train_step import TrainStep
from paceline.errors import ConfigError
from paceline.optim.precision import Precision
from paceline.parameter_server.replay import Replay
from paceline.strategies.meta_device import check_states, fill, is_on_meta, module_names, moved
from paceline.strategies.registry import Job


class Preparation:
    def __init__(
        self,
        config: EngineConfig,
        group: Group,
        objects: PreparedObjects,
        between: BetweenSteps,
        loop: LoopEnds,
        stops: StopSignals,
        opinion: SecondOpinion | None,
        replay: Replay | None,
    ) -> None:
        self._config, self._group, self._objects, self._between = config, group, objects, between
        self._loop, self._stops, self._opinion, self._replay = loop, stops, opinion, replay

    def prepare(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        training = any(isinstance(thing, Optimizer) for thing in objects)
        objects = tuple(as_loader(thing, self._config, shuffle=training) for thing in objects)
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
        return tuple(self._prepared(thing, training) for thing in objects)

    def _adopt(self, thing: Any) -> None:
        own = self._objects
        if isinstance(thing, nn.Module):
            own.models.append(moved(thing, self._group.device))
        elif isinstance(thing, Optimizer):
            own.optimizers.append(thing)
        elif is_scheduler(thing):
            own.schedulers.append(thing)
            if own.step is not None:  # made from a prepared optimizer, as a schedule over len(loader) must be
                check_belong_together(own.models, own.optimizers, [thing])
                let_scheduler_follow(thing, own.step)
        elif not isinstance(thing, DataLoader):
            raise ConfigError(
                "engine.prepare() takes models, optimizers, schedulers, DataLoaders and datasets, "
                f"not {type(thing).__name__}"
            )

    # -- what trains -------------------------------------------------------------------------------------------------

    def _start_training(self) -> None:
        own, config, group = self._objects, self._config, self._group
        if own.step is not None:
            raise ConfigError("engine.prepare() was given an optimizer twice; prepare all optimizers in one call")
        if not own.models:
            raise ConfigError("engine.prepare() got an optimizer but no model; give both in one call")
        check_belong_together(own.models, own.optimizers, own.schedulers)
        self._fill_models()
        check_same_models(group.comm, own.models)
        check_memory(config, group.world, group.comm, group.device, own.optimizers, group.client)
        if config.activation_checkpointing is not None:
            own.recomputed = recomputing.Recomputed(config.activation_checkpointing, own.models)
            group.print(f"paceline: {own.recomputed.described}")
        if group.serving is not None and group.serving.joins:
            facts = job_facts(config, {}, group.device)
            del facts["machine device"]  # its own, wherever the workers compute
            group.serving.join(facts_of_process(facts))
            group.world = group.serving.next_world("")
        strategies = self.open_strategies()
        trained = (own.models, own.optimizers, own.schedulers)
        own.step = TrainStep(config, group.comm, *trained, strategies, self._stops, self._opinion)
        own.step.on_settled = self._between.go_on_without_the_lost
        if group.elastic is None:  # otherwise READY has said it
            own.step.on_step = self._loop.tell_step
        own.step.lost = group.lost
        if group.elastic is not None and self._opinion is not None:
            group.elastic.seal = Seal(group.world.name)
        own.step.commit_with(group.elastic)
        for optimizer in own.optimizers:
            let_optimizer_act_once(optimizer, own.step)
        for scheduler in own.schedulers:
            let_scheduler_follow(scheduler, own.step)

    def _fill_models(self) -> None:
        """Models built on the meta device get their first weights here, where the strategy doesn't do it itself."""
        models = self._objects.models
        if not any(map(is_on_meta, models)):
            return
        check_states(self._objects.optimizers)
        if not self._config.strategy.entry.fills_meta:
            names = module_names(models)
            for model in models:
                fill(model, names, seed=self._config.seed, device=self._group.device)

    def open_strategies(self) -> StrategyTable:
        """For the workers that there are now."""
        job = self.job()
        self._loop.listeners, self._group.lost = job.at_loop_end, job.lost
        return StrategyTable(self._config.strategy, job)

    def job(self) -> Job:
        config, group, own = self._config, self._group, self._objects
        return Job(
            world=group.world,
            comm=group.comm,
            store=group.store_of_generation(),
            client=group.client,
            device=group.device,
            models=own.models,
            names=parameter_names(own.models),
            optimizers=own.optimizers,
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

    def _prepared(self, thing: Any, training: bool) -> Any:
        if not isinstance(thing, DataLoader):
            return thing
        return self._training_loader(thing) if training else self._evaluation_loader(thing)

    def _evaluation_loader(self, loader: DataLoader[Any]) -> EvaluationLoader:
        if self._group.elastic is None:  # a worker that has joined prepares when the others have done so long ago
            self._compare(loader)
        self._objects.evaluations.append(
            EvaluationLoader(
                loader,
                self._group.among,
                self._group.device,
                seed=self._config.seed,
                timeout_s=self._config.timeout_s,
                on_start=self._between.settle,
                on_end=self._between.end_evaluation,
                count=self._objects.evaluation_count,
            )
        )
        return self._objects.evaluations[-1]

    def _training_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        step, config, group, loop = self._objects.training(), self._config, self._group, self._loop
        deal = Deal(
            config.lanes,
            config.accumulate,
            step.rides[group.world.rank],
            config.seed,
            config.global_batch_size,
            config.timeout_s,
        )
        source = self._replayed(make_source(loader, deal, lambda: group.comm, step), step)
        self._compare(loader)
        if self._opinion is not None:
            check_second_opinion(config, source)
        self._objects.loader = PreparedLoader(
            source,
            step,
            group.device,
            on_enter=loop.enter,
            on_leave=loop.leave,
            attempt=loop.attempt,
            start_record=lambda attempt: loop.start_record(source, attempt),
            deal=self.deal_lanes,
            elastic=group.elastic,
            join=loop.join,
        )
        group.print(self._described(source))
        return self._objects.loader

    def _compare(self, loader: DataLoader[Any]) -> None:
        """Whether every worker was given the same; found by what it leads to, the difference has cost an epoch."""
        step = self._objects.step
        if self._group.comm is None or (step is not None and step.inside_step):
            return
        settings = job_facts(self._config, {}, self._group.device)
        check_same_data(self._between.boundary.told(facts_of_data(loader) | chosen_by_script(settings)))

    def deal_lanes(self, source: WorkSource) -> None:
        """The lanes that this worker has now, from the committed place on."""
        step = self._objects.training()
        source.redeal(step.rides[self._group.world.rank])

    def _replayed(self, source: WorkSource, step: TrainStep) -> WorkSource:
        if self._replay is None:
            return source
        replaying = ReplayingSource(source, self._replay, step)
        step.on_step = replaying.acted
        return replaying

    def _described(self, source: WorkSource) -> str:
        config, world = self._config, self._group.world
        batch, amount = source.described()
        summed = config.reduction if config.strategy.is_synchronous else "weights may be old"
        return (
            f"paceline: global batch {batch} · "
            f"{counted(world.size, 'worker')} × {counted(config.threads, 'thread')} ({world.source}) · "
            f"{config.strategy}, {summed}{' over ' + config.algorithm if config.algorithm else ''} · "
            f"{config.backend if world.size > 1 else 'no'} communication · {self._group.device.type}"
            f"{' in ' + str(config.precision) if config.precision != Precision() else ''} · {amount}"
        )
