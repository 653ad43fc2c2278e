"""What an engine is made of, taken apart and put together again when its workers change.

`Assembly` is the `Parts` of elastic/recovery.py, whose `_regroup` calls it in this order:

    teardown      strategies and communicator of the generation that is over; models and optimizers are plain again
    connect       a communicator between the workers that there are now
    assemble      strategies opened for them, and with these the lanes assigned
    put_tensors   the committed state, where this worker's own is not right as it stands
    deal_anew     the loaders' shares of the data, for training and evaluation

What a commit asks for is here too: this worker's part of the state, its place in the data, the record of samples, and
whether the loop has more to do.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.collectives.communicator import Communicator, SingleWorker
from paceline.engine.checkpoints import Saver
from paceline.engine.config import EngineConfig
from paceline.engine.evaluation import place_of
from paceline.engine.group import Group
from paceline.engine.prepare import BetweenSteps, Preparation, PreparedObjects
from paceline.world.world import World


class Assembly:
    """`preparation` and `saver` are of the same engine."""

    def __init__(
        self,
        config: EngineConfig,
        group: Group,
        objects: PreparedObjects,
        between: BetweenSteps,
        preparation: Preparation,
        saver: Saver,
    ) -> None:
        self._config, self._group, self._objects, self._between = config, group, objects, between
        self._preparation, self._saver = preparation, saver
        self._apart = False

    @property
    def replicated(self) -> bool:
        return self._config.strategy.entry.replicated

    @property
    def keeps_residuals(self) -> bool:
        return self._config.compression is not None

    @property
    def takes_places(self) -> bool:
        loader = self._objects.loader
        return loader is not None and loader.source.takes_places

    # -- the state -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Any]:
        return self._between.job_state().tensors()

    def plain(self) -> dict[str, Any]:
        return self._between.job_state().plain()

    @property
    def in_loop(self) -> bool:
        return self._objects.loader is not None and self._objects.loader.in_loop

    @property
    def between_updates(self) -> bool:
        return self._objects.training().in_updates

    def place(self, *, step_done: bool) -> Any:
        return self._between.job_state().place(step_done=step_done)

    def put_plain(self, plain: Mapping[str, Any]) -> None:
        self._between.job_state().put_plain(plain)

    def residuals(self) -> dict[str, Any]:
        return self._between.job_state().residuals()

    def put_residuals(self, tensors: Mapping[str, Any]) -> None:
        self._between.job_state().put_residuals(tensors)

    def put_tensors(self, tensors: Mapping[str, Any], plain: Mapping[str, Any] | None) -> None:
        self._between.job_state().put_tensors(tensors, plain)

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

    def teardown(self, *, lost: bool) -> None:
        group = self._group
        if lost:
            self._saver.abandon("the workers have changed")
        group.comm.abandon("the workers have changed")
        if not self._apart:
            self._apart = True
            self._objects.training().buffers.put_back_lost()
            self._objects.training().strategies.teardown()
        if group.comm.size > 1:
            group.comm.close()
            group.comm = SingleWorker()
            gc.collect()  # the parts of a group hold each other, and some 17 MB of shared memory

    def connect(self, world: World) -> Communicator:
        return self._group.meet(world)

    def more(self) -> bool:
        loader, step = self._objects.loader, self._objects.training()
        if loader is None or step.stop_agreed or step.in_updates:
            return False
        steps = loader.source.steps
        if step.now.item is None:
            return loader.source.steps_left != 0
        return steps is None or step.now.item.step + 1 < steps

    def assemble(self, world: World) -> None:
        self._group.world = self._group.among = world
        strategies = self._preparation.open_strategies()
        self._apart = False
        self._objects.training().regrouped(strategies)

    def deal_anew(self, world: World, lanes: Sequence[Any] | None, *, joins: bool) -> None:
        own, step, comm = self._objects, self._objects.training(), self._group.comm
        self._between.boundary.retryable.compare(comm, joins=joins)
        if own.loader is not None:
            source = own.loader.source
            merged = None if lanes is None else source.merged(lanes)
            if joins and merged is not None:
                source.restore(merged)
            source.reassign(step.strategies.assignment[world.rank], merged)
            own.loader.record_anew()
        mine = self._group.evaluation_count.told(self._group.evaluations)
        told = comm.gather_json(None if joins else mine)
        told = [word for word in told if word is not None]
        if joins:
            self._group.evaluation_count.begun = max(begun for begun, _ in told)
        for loader in self._group.evaluations:
            loader.deal_to(world, [place_of(loader.number, word) for word in told])
