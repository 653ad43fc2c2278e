"""What an engine is made of, taken apart and put together again when its workers change (see `regrouping`)."""

from __future__ import annotations

import gc
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline import __version__
from paceline.collectives.communicator import Communicator
from paceline.engine.replicas import plain_name
from paceline.engine.saved_state import kept_models, kept_schedulers, load_model
from paceline.engine.strategy_table import StrategyTable
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


class Assembly:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._apart = False

    @property
    def replicated(self) -> bool:
        return self._engine.config.strategy.entry.replicated

    @property
    def takes_places(self) -> bool:
        loader = self._engine._loader
        return loader is not None and loader.source.takes_places

    # -- the state -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Any]:
        engine, step = self._engine, self._engine._training()
        return {
            "models": kept_models(engine._models, step.strategies.kept),
            "optimizers": [_without_groups(step.strategies.kept_state(optimizer)) for optimizer in engine._optimizers],
        }

    def plain(self) -> dict[str, Any]:
        engine, step = self._engine, self._engine._training()
        return {
            "step": step.step,
            "left_out_steps": step.count.left_out_steps,
            "loss_scale": None if step.work.loss_scale is None else step.work.loss_scale.state_dict(),
            "schedulers": kept_schedulers(engine._schedulers),
            "groups": [_groups_of(optimizer) for optimizer in engine._optimizers],
            "shared": [give() for give, _ in engine._shared],
            "others": [_untrained(model, engine._optimizers) for model in engine._models],
            "in loop": engine._in_loop,
            "left early": engine._left_early and not engine._in_loop,
        }

    @property
    def between_updates(self) -> bool:
        return self._engine._training().in_updates

    def place(self, *, step_done: bool) -> Any:
        loader = self._engine._loader
        item = self._engine._training().item_done() if step_done else None
        return None if loader is None else loader.source.state_after(item)

    def put_plain(self, plain: Mapping[str, Any]) -> None:
        engine, step = self._engine, self._engine._training()
        step.count.step, step.count.left_out_steps = plain["step"], plain["left_out_steps"]
        if step.work.loss_scale is not None:
            step.work.loss_scale.load_state_dict(plain["loss_scale"])
        for scheduler, saved in zip(engine._schedulers, plain["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        for optimizer, groups in zip(engine._optimizers, plain["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update({name: value for name, value in settings.items() if name != "params"})

        for (_, take), told in zip(engine._shared, plain["shared"], strict=True):
            take(told)

    def put_tensors(self, tensors: Mapping[str, Any], plain: Mapping[str, Any] | None) -> None:
        """What is not trained every worker has, as the body left it after the step; who joins is told."""
        engine, step = self._engine, self._engine._training()
        for number, (model, saved) in enumerate(zip(engine._models, tensors["models"], strict=True)):
            others = _untrained(model, engine._optimizers)
            known = others if plain is None else plain["others"][number]
            load_model(model, step.strategies.put, {**saved, **{name: known[name] for name in others}})
        for optimizer, saved in zip(engine._optimizers, tensors["optimizers"], strict=True):
            step.load(optimizer, {**saved, "param_groups": _groups_of(optimizer)})

    def record(self) -> None:
        """Before the step counts: a worker that dies right after that has written it. If it doesn't count, it is void.

        What is void is known by the record of the workers that go on, which begins where the last step that counts
        ended (data/audit.py).
        """
        if self._engine._loader is not None:
            self._engine._loader.write_record()

    def told(self, value: Any) -> list[Any]:
        return self._engine._boundary.told(value)

    # -- the parts -------------------------------------------------------------------------------------------------

    def dismantle(self, *, lost: bool) -> None:
        engine = self._engine
        if lost:
            engine._saver.workers_changed()
        if engine._comm is not None:
            engine._comm.abandon("the workers have changed")
        if not self._apart:
            self._apart = True
            engine._training().strategies.dismantle()
        if engine._comm is not None:
            engine._comm.close()
            engine._comm = None
            gc.collect()  # the parts of a group hold each other, and some 17 MB of shared memory

    def connect(self, world: World) -> Communicator | None:
        engine, config = self._engine, self._engine.config
        if world.size == 1:
            return None
        place = engine._store_of_group()
        assert place is not None
        comm = Communicator.connect(
            world, place, backend=config.backend, device=engine.device, timeout_s=config.timeout_s
        )
        engine._comm = comm
        engine._watch_changes(comm)
        return comm

    def more(self) -> bool:
        loader, step = self._engine._loader, self._engine._training()
        if loader is None or step.stop_agreed or step.in_updates:
            return False
        steps = loader.source.steps
        if step.item is None:
            return loader.source.steps_left != 0
        return steps is None or step.item.step + 1 < steps

    def assemble(self, world: World, comm: Communicator | None) -> None:
        engine, config = self._engine, self._engine.config
        engine.world = engine._among = world
        engine._boundary.regrouped(world, comm)
        job = engine._job()
        strategies = StrategyTable(config.strategy, job)
        self._apart = False
        engine._at_loop_end, engine._lost = job.at_loop_end, job.lost
        engine._training().regrouped(comm, strategies)

    def deal_anew(self, world: World, lanes: Sequence[Any] | None, *, joins: bool) -> None:
        engine, step = self._engine, self._engine._training()
        engine._boundary.together.compare(engine._comm, joins=joins)
        if engine._loader is not None:
            source = engine._loader.source
            merged = None if lanes is None else source.merged(lanes)
            if joins and merged is not None:
                source.restore(merged)
            source.redeal(step.rides[world.rank], step.rides if step.strategies.in_rounds else None, merged)
            engine._loader.record_anew()
        mine = [loader.place() for loader in engine._evaluations]
        places = [mine] if engine._comm is None else engine._comm.gather_json(None if joins else mine)
        for number, loader in enumerate(engine._evaluations):
            loader.deal_to(world, [theirs[number] for theirs in places if theirs is not None])


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


def facts_of_process(more: Mapping[str, Any]) -> dict[str, str | int]:
    """What a worker that joins must have in common with the others."""
    code = _own_code()
    about: dict[str, Any] = {
        "paceline": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        **code,
        **more,
    }
    return {name: value if isinstance(value, int | str) else str(value) for name, value in about.items()}


@cache
def _own_code() -> dict[str, str]:
    """A hash of the script and of every module that is neither Python's nor installed, as they are at the first call:
    before the first loop, on a worker of the start and on one that joins."""
    installed = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        if file.suffix == ".py" and file.is_file() and not str(file.resolve()).startswith(installed):
            label = "script" if name == "__main__" else f"module {name}"
            found[label] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return {name: digest for name, digest in found.items() if not name.startswith("module paceline")}
