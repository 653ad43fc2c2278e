"""The optimizers and schedulers that the loop's body steps in every item act once per step of the job.

optimizer.step()    in the body, per item  ─► TrainStep.optimizer_step: acts when the step's gradient is there
scheduler.step()    likewise               ─► acts when the optimizer did (TrainStep.scheduler_acts)
after close()       torch's own again, unless what the next step would go on from was the job's
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer

from paceline.engine import rules
from paceline.engine.config import EngineConfig
from paceline.torch_compat import SCALES_BY_ITSELF, WRAPPED_BY_SCHEDULER

OF_TRAINING = "paceline_training"
"""An attribute of a prepared optimizer's `step`: the `OncePerStep` that it belongs to."""


class Step(Protocol):
    def optimizer_step(self, optimizer: Optimizer, closure: Any) -> Any: ...

    def scheduler_acts(self, scheduler: Any, *, given: bool) -> bool: ...


class OncePerStep:
    def __init__(self, step: Step, config: EngineConfig) -> None:
        self._step, self._config = step, config
        self.original_steps: dict[int, Callable[..., Any]] = {}
        """That make an update, by the id of the optimizer."""
        self._optimizers: list[Optimizer] = []
        self._kinds_of_schedulers: list[tuple[Any, type]] = []  # the class that each had
        self.is_closed = False

    def adopt(self, optimizer: Optimizer) -> None:
        original = self.original_steps[id(optimizer)] = optimizer.step
        self._optimizers.append(optimizer)
        prepared = self

        def acts_once_per_step(self: Optimizer, closure: Any = None) -> Any:
            if not prepared.is_closed:
                return prepared._step.optimizer_step(self, closure)
            prepared.check_left_whole()
            return original() if closure is None else original(closure)

        setattr(acts_once_per_step, OF_TRAINING, self)  # a scheduler that wraps it hands this on
        # A scheduler made before prepare() has wrapped step() already and warns when the mark of that is gone.
        if getattr(original, WRAPPED_BY_SCHEDULER, False):
            setattr(acts_once_per_step, WRAPPED_BY_SCHEDULER, True)
        setattr(optimizer, SCALES_BY_ITSELF, rules.NoGradScaler())
        # A bound method, because a scheduler made later looks at `step.__func__`.
        optimizer.step = types.MethodType(acts_once_per_step, optimizer)  # type: ignore[method-assign]

    def adopt_scheduler(self, scheduler: Any) -> None:
        """It gets a class of its own and no attribute: those are what its state_dict() consists of."""
        training, kind = self._step, type(scheduler)

        def step(self: Any, *args: Any, **options: Any) -> Any:
            acts = training.scheduler_acts(self, given=bool(args or options))
            return kind.step(self, *args, **options) if acts else None

        def as_it_was(self: Any, protocol: Any) -> tuple[Any, ...]:
            """A copy, or what is unpickled, follows nobody."""
            return copyreg.__newobj__, (kind,), self.__dict__.copy()  # type: ignore[attr-defined]

        own = {
            "step": step,
            "__reduce_ex__": as_it_was,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
        }
        scheduler.__class__ = type(kind.__name__, (kind,), own)
        self._kinds_of_schedulers.append((scheduler, kind))

    def check_left_whole(self) -> None:
        """That the optimizers have, after the end, what their next step goes on from."""
        config = self._config
        if not config.strategy.entry.replicated or config.precision.is_low:
            raise rules.optimizer_of_closed_engine(config.strategy.name, str(config.precision))

    def close(self) -> None:
        self.is_closed = True
        for optimizer in self._optimizers:
            if hasattr(optimizer, SCALES_BY_ITSELF):
                delattr(optimizer, SCALES_BY_ITSELF)
        for scheduler, kind in self._kinds_of_schedulers:
            scheduler.__class__ = kind


def check_is_free(optimizer: Optimizer) -> None:
    """That no other engine has it, and none has kept what its next step would go on from."""
    owner: OncePerStep | None = getattr(optimizer.step, OF_TRAINING, None)
    if owner is not None and not owner.is_closed:
        raise rules.optimizer_of_open_engine()
    if owner is not None:
        owner.check_left_whole()
