"""Where the training loop begins and ends: what all workers agree on there, and what the supervisor hears of it.

    for batch in loader:  ◄── enter: was anybody asked to stop? the same data order? an elastic job may admit joiners
        …
                          ◄── leave: settle, tell; early (`break`, an exception): a note for those who wait for us

A worker that comes later joins here, in front of the loop or already in it.
"""

from __future__ import annotations

from pathlib import Path

from paceline.data.sample_log import LogHeader, SampleLog, next_attempt
from paceline.data.work_source import WorkSource
from paceline.engine.between_steps import BetweenSteps
from paceline.engine.config import EngineConfig
from paceline.engine.group import Group
from paceline.engine.prepared_objects import PreparedObjects
from paceline.engine.process_facts import facts_of_process
from paceline.engine.regrouping import Elastic
from paceline.engine.sources import check_same_order
from paceline.engine.stop_signals import StopSignals
from paceline.engine.train_step import TrainStep
from paceline.strategies.registry import LoopEndListener
from paceline.world.determinism import mix, seed_everything


class LoopEnds:
    def __init__(
        self,
        config: EngineConfig,
        group: Group,
        objects: PreparedObjects,
        between: BetweenSteps,
        stops: StopSignals,
        record_folder: Path | None,
    ) -> None:
        """`record_folder`: of the samples used, if they are to be on record."""
        self._config, self._group, self._objects, self._between = config, group, objects, between
        self._stops, self._record_folder = stops, record_folder
        self.listeners: list[LoopEndListener] = []
        self.in_loop = self.left_early = False

    def enter(self) -> bool:
        """Whether there is a loop to run."""
        group, told = self._group, self._between.boundary.told
        if group.elastic is not None and not self._enter_with_others(group.elastic):
            return False
        if self.in_loop:
            return True
        if group.comm is not None:
            group.comm.take_back_note()
        if not self._stops.enter_loop(told):
            return False
        self.in_loop = True
        loader = self._objects.loader
        if loader is not None and loader.source.digest is not None:
            check_same_order(told(loader.source.digest))
        group.tell("phase", name="training")
        self.tell_step()
        if group.elastic is not None:
            group.elastic.enter(self._objects.training().count.rounds, self._facts())
        return True

    def leave(self, early: bool) -> None:
        self.in_loop = False
        step, elastic = self._objects.training(), self._group.elastic
        if elastic is not None:
            self.left_early, elastic.left_early = early, False
            if elastic.changed and not step.inside_step:
                elastic.start_over()  # somebody joins after the last step: it leaves the loop as well
            elastic.member.leave(elastic.loop)
        if early:
            step.forget_untouched()
            if step.inside_step:
                step.broken = f"this worker left its training loop inside step {step.step + 1}"
            self.say_left()
        else:
            self._end_together(step)
        if not (early and step.inside_step):
            self._group.tell("phase", name="idle")
            self.tell_step()

    def _end_together(self, step: TrainStep) -> None:
        if step.stops_alone:
            self.say_left()
        self._between.settle()
        if step.never_agrees:  # inside the loop a signal was this worker's own affair
            self._stops.end_loop(self._between.boundary.told)
        for tell in self.listeners:
            tell(step.step, self._objects.hash)
        step.stopped()
        seed_everything(mix(self._config.seed, "after the loop", step.step))

    def say_left(self) -> None:
        """To those who may wait for this worker in a step."""
        if self._group.comm is None:
            return
        step = self._objects.training()
        where = f"inside step {step.step + 1}" if step.inside_step else f"after step {step.step}"
        self._group.comm.leave_note(f"it left its training loop {where}", votes=step.votes)

    def tell_step(self) -> None:
        """What the launcher names when this worker fails: the step it is in, or the last one after the loop."""
        step = self._objects.step
        self._group.tell("step", step=(0 if step is None else step.step) + self.in_loop)

    # -- joining -----------------------------------------------------------------------------------------------------

    def join(self, any_loop: bool) -> bool:
        """A worker that comes later, in front of its loop; False: the others are past it."""
        if not self._group.elastic_parts().join(self._facts(), any_loop=any_loop):
            return False
        self.in_loop = True
        self._group.tell("phase", name="training")
        self.tell_step()
        return True

    def _enter_with_others(self, elastic: Elastic) -> bool:
        """Whether this loop is one of the others', too; a joiner may be in it already."""
        if self.in_loop:
            return True
        elastic.loop += 1
        return elastic.admitted or self.join(False)

    def _facts(self) -> dict[str, str | int]:
        """What has to be the same in all of them."""
        config = self._config
        more = {"threads": config.threads, "strategy": str(config.strategy), "backend": config.backend}
        return facts_of_process({**self._between.job_facts(), **more})

    # -- the sample log ---------------------------------------------------------------------------------------

    def attempt(self, regrouping: bool) -> int | None:
        """The number of the sample log that all workers begin now."""
        if self._record_folder is None:
            return None
        number = next_attempt(self._record_folder)
        if not regrouping:
            return int(max(self._between.boundary.told(number)))
        return number if self._group.comm is None else int(max(self._group.comm.gather_json(number)))

    def start_record(self, source: WorkSource, attempt: int) -> SampleLog:
        assert self._record_folder is not None
        world = self._group.world
        header = LogHeader(worker=world.rank, workers=world.size, lanes=self._config.lanes, **source.log_header())
        return SampleLog.start(self._record_folder, attempt, header)
