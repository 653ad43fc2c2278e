"""A training step that is written down for `paceline verify`: the one place where a job meets the recorder.

`prepare` makes it in place of a `TrainStep` where PACELINE_VERIFY names a folder. It adds nothing to what a step does:
each method is that of `TrainStep`, with a word to the recorder before or after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.data.sharded_sampler import WorkItem
from paceline.data.work_source import WorkSource
from paceline.engine import rules
from paceline.engine.facts import job_facts
from paceline.engine.replicas import named_state
from paceline.engine.step import Phase, TrainStep
from paceline.verify.recorder import Recorder
from paceline.verify.request import Request


class RecordedSource:
    """A `WorkSource` whose batches the recorder sees; everything else is the source's own."""

    def __init__(self, source: WorkSource, recorder: Recorder) -> None:
        self._source, self._recorder = source, recorder

    def items(self) -> Iterator[tuple[WorkItem, Any]]:
        return self._recorder.fetched(self._source.items())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class RecordedStep(TrainStep):
    def __init__(self, *parts: Any, folder: Path, full: Callable[[Tensor], Tensor]) -> None:
        """`full`: all of a parameter or buffer; every worker calls it, in the same order."""
        super().__init__(*parts)
        config, world = self._config, self._group.world
        about = {
            "worker": world.rank,
            "workers": world.size,
            "strategy": config.strategy.name,
            "whole": config.strategy.entry.full_weights,
            "synchronous": config.strategy.bits_of_one_process,
            "optimizers": [f"{type(one).__module__}.{type(one).__qualname__}" for one in self._optimizers],
            "facts": {name: _plain(value) for name, value in job_facts(config, {}, self._group.device).items()},
            "reduction": config.reduction,
            "lanes": config.lanes,
        }
        self.recorder = Recorder(Request.read(folder), about, self._state, full)

    def watch(self, source: WorkSource) -> WorkSource:
        return cast(WorkSource, RecordedSource(source, self.recorder))

    def begin_item(self, item: WorkItem, *, optimizers: Sequence[Optimizer] | None = None) -> None:
        if item.first_of_step and self.update == 0:
            self.end_item()
            self.drain()
            self.recorder.begin_step()
        super().begin_item(item, optimizers=optimizers)
        self.recorder.begin_item(item, self.update)

    def _run_backward(self, item: WorkItem, loss: Tensor, weight: float, *, last: bool) -> None:
        if not item.shadow:
            self.recorder.forward_done(loss, weight)
        super()._run_backward(item, loss, weight, last=last)
        if last:
            self.recorder.leave_item()

    def _collect(self, item: WorkItem) -> bool:
        collected = super()._collect(item)
        self.recorder.collected({name: value for name, value in self._state().items() if isinstance(value, Parameter)})
        return collected

    def _count(self) -> None:
        is_new = not self.now.counted
        super()._count()
        if is_new:
            self.drain()
            rates = [value for _, value in rules.learning_rates(self._optimizers)]
            self.recorder.end_step(rates, update=self.update, empty=self.now.empty)

    def end_item(self) -> None:
        super().end_item()
        if self.now.phase is Phase.BETWEEN_STEPS and self.recorder.is_done:
            raise SystemExit(0)  # on all workers, after the same step

    def close(self) -> None:
        self.recorder.close()
        super().close()

    def _state(self) -> dict[str, Tensor]:
        return named_state(self.models)


def _plain(value: Any) -> str | int | float | bool | None:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
