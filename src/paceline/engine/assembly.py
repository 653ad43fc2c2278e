"""What an engine is made of, taken apart and put together again when its workers change (see `regrouping`)."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.collectives.communicator import Communicator
from paceline.engine.between_steps import BetweenSteps
from paceline.engine.config import EngineConfig
from paceline.engine.evaluation import place_of
from paceline.engine.group import Group
from paceline.engine.loop_ends import LoopEnds
from paceline.engine.preparation import Preparation
from paceline.engine.prepared_objects import PreparedObjects
from paceline.engine.replicas import plain_name
from paceline.engine.saved_state import kept_models, kept_schedulers, load_model
from paceline.engine.saver import Saver
from paceline.world.world import World


class Assembly:
    """`loop`, `preparation` and `saver` are of the same engine."""

    def __init__(
        self,
        config: EngineConfig,
        group: Group,
        objects: PreparedObjects,
        between: BetweenSteps,
        loop: LoopEnds,
        preparation: Preparation,
        saver: Saver,
    ) -> None:
        self._config, self._group, self._objects, self._between = config, group, objects, between
        self._loop, self._preparation, self._saver = loop, preparation, saver
        self._apart = False

    @property
    def replicated(self) -> bool:
        return self._config.strategy.entry.replicated

    @property
    def takes_places(self) -> bool:
        loader = self._objects.loader
        return loader is not None and loader.source.takes_places

    # -- the state -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Any]:
        own, step = self._objects, self._objects.training()
        return {
            "models": kept_models(own.models, step.strategies.kept),
            "optimizers": [_without_groups(step.strategies.kept_state(optimizer)) for optimizer in own.optimizers],
        }

    def plain(self) -> dict[str, Any]:
        own, step = self._objects, self._objects.training()
        return {
            "step": step.step,
            "left_out_steps": step.count.left_out_steps,
            "loss_scale": None if step.work.loss_scale is None else step.work.loss_scale.state_dict(),
            "schedulers": kept_schedulers(own.schedulers),
            "groups": [_groups_of(optimizer) for optimizer in own.optimizers],
            "shared": [give() for give, _ in own.shared],
            "others": [_untrained(model, own.optimizers) for model in own.models],
            "in loop": self._loop.in_loop,
            "left early": self._loop.left_early and not self._loop.in_loop,
        }

    @property
    def between_updates(self) -> bool:
        return self._objects.training().in_updates

    def place(self, *, step_done: bool) -> Any:
        loader = self._objects.loader
        item = self._objects.training().item_done() if step_done else None
        return None if loader is None else loader.source.state_after(item)

    def put_plain(self, plain: Mapping[str, Any]) -> None:
        own, step = self._objects, self._objects.training()
        step.count.step, step.count.left_out_steps = plain["step"], plain["left_out_steps"]
        if step.work.loss_scale is not None:
            step.work.loss_scale.load_state_dict(plain["loss_scale"])
        for scheduler, saved in zip(own.schedulers, plain["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        for optimizer, groups in zip(own.optimizers, plain["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update({name: value for name, value in settings.items() if name != "params"})

        for (_, take), told in zip(own.shared, plain["shared"], strict=True):
            take(told)

    def put_tensors(self, tensors: Mapping[str, Any], plain: Mapping[str, Any] | None) -> None:
        """What is not trained every worker has, as the body left it after the step; who joins is told."""
        own, step = self._objects, self._objects.training()
        for number, (model, saved) in enumerate(zip(own.models, tensors["models"], strict=True)):
            others = _untrained(model, own.optimizers)
            known = others if plain is None else plain["others"][number]
            load_model(model, step.strategies.put, {**saved, **{name: known[name] for name in others}})
        for optimizer, saved in zip(own.optimizers, tensors["optimizers"], strict=True):
            step.load(optimizer, {**saved, "param_groups": _groups_of(optimizer)})

    def record(self) -> None:
        """Before the step counts: a worker that dies right after that has written it. If it doesn't count, it is void.

        What is void is known by the record of the workers that go on, which begins where the last step that counts
        ended (data/audit.py).
        """
        if self._objects.loader is not None:
            self._objects.loader.write_record()

    def told(self, value: Any) -> list[Any]:
        return self._between.boundary.told(value)

    # -- the parts -------------------------------------------------------------------------------------------------

    def dismantle(self, *, lost: bool) -> None:
        group = self._group
        if lost:
            self._saver.workers_changed()
        if group.comm is not None:
            group.comm.abandon("the workers have changed")
        if not self._apart:
            self._apart = True
            self._objects.training().work.buffers.put_back_lost()
            self._objects.training().strategies.dismantle()
        if group.comm is not None:
            group.comm.close()
            group.comm = None
            gc.collect()  # the parts of a group hold each other, and some 17 MB of shared memory

    def connect(self, world: World) -> Communicator | None:
        return self._group.meet(world)

    def more(self) -> bool:
        loader, step = self._objects.loader, self._objects.training()
        if loader is None or step.stop_agreed or step.in_updates:
            return False
        steps = loader.source.steps
        if step.item is None:
            return loader.source.steps_left != 0
        return steps is None or step.item.step + 1 < steps

    def assemble(self, world: World, comm: Communicator | None) -> None:
        self._group.world = self._group.among = world
        strategies = self._preparation.open_strategies()
        self._apart = False
        self._objects.training().regrouped(comm, strategies)

    def deal_anew(self, world: World, lanes: Sequence[Any] | None, *, joins: bool) -> None:
        own, step, comm = self._objects, self._objects.training(), self._group.comm
        self._between.boundary.together.compare(comm, joins=joins)
        if own.loader is not None:
            source = own.loader.source
            merged = None if lanes is None else source.merged(lanes)
            if joins and merged is not None:
                source.restore(merged)
            source.reassign(step.rides[world.rank], merged)
            own.loader.record_anew()
        mine = own.evaluation_count.told(own.evaluations)
        told = [mine] if comm is None else comm.gather_json(None if joins else mine)
        told = [word for word in told if word is not None]
        if joins:
            own.evaluation_count.begun = max(begun for begun, _ in told)
        for loader in own.evaluations:
            loader.deal_to(world, [place_of(loader.number, word) for word in told])


def _untrained(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Buffers, and weights that no optimizer holds."""
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {
        plain_name(name): value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in model.state_dict(keep_vars=True).items()
        if id(value) not in trained
    }


def _without_groups(state: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of groups are plain, and in step with the schedulers: every worker has them."""
    return {name: value for name, value in state.items() if name != "param_groups"}


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """As in its state_dict, which a sharded strategy guards: parameters by number."""
    number = {id(p): n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    return [{**group, "params": [number[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
