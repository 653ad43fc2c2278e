"""The step boundary: what workers do together between two steps, values gathered and combined in rank order.

Inside a step workers have different numbers of items, so a collective there would hang: it is refused, with the place
in the user's code. In an elastic job each of these collectives can be tried again, by those that are left, once each:

    worker 0    reduce #1 ✓    barrier #2 …            worker 2 dies, after worker 0 had the result of #1 and before
    worker 1    reduce #1 …                            worker 1 had it: worker 1 gets it from worker 0, then both do #2

Since no worker begins an operation before all have come to the one before, two workers are never more than one apart. A
worker joins between two steps, where none is under way.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from paceline.collectives.communicator import Communicator
from paceline.data.fetching import sequence_like
from paceline.engine.config import counted
from paceline.engine.evaluation import padded_rows
from paceline.engine.group import Group
from paceline.engine.step import TrainStep
from paceline.errors import ConfigError, GenerationEnded, LoopError, PeerLostError
from paceline.torch_compat import Store
from paceline.world.script_line import frames_to_script, place_of

Operation = Literal["sum", "mean", "max", "min"]
T = TypeVar("T")


class Boundary:
    def __init__(self, group: Group) -> None:
        self._group = group
        self.retryable = Retryable()
        self._again = True  # what workers are lost in is done again
        self._barriers = itertools.count()

    @property
    def _comm(self) -> Communicator:
        return self._group.comm

    def barrier(self, *, with_servers: bool = False) -> None:
        store = self._group.store
        if with_servers and self._group.world.servers and store is not None:
            self._meet_in_store(store, f"barrier/{next(self._barriers)}")
        else:
            self.retryable.run(lambda: self._group.all.barrier(), self._group.start_over)

    def drain(self, step: TrainStep | None) -> None:
        """Updates that are under way end, and the model holds the newest weights."""
        if step is not None and not step.inside_step:
            self.alike(step.drain)

    def alike(self, operation: Callable[[], T]) -> T:
        """What every worker gets by an operation of all of them; done again if one of them is lost in it."""
        found: list[T] = []

        def run() -> None:
            found[:] = [operation()]
            if self._comm.world.is_elastic:
                self._comm.barrier()  # who passes it knows that all have got theirs

        self.retryable.run(run, self._group.start_over)
        return found[0]

    def _meet_in_store(self, store: Store, name: str) -> None:
        """The workers' own group has no servers in it."""
        world, timeout_s = self._group.world, self._group.timeout_s
        if store.add(name, 1) == world.size + world.servers:
            store.set(f"{name}/all", "")
        try:
            store.wait([f"{name}/all"], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerLostError(
                f"{world.name} waited {timeout_s:g} s in engine.barrier() for {counted(world.size, 'worker')} "
                f"and {counted(world.servers, 'server')}, but {store.add(name, 0)} came; "
                "servers run the script too, up to prepare()"
            ) from error

    def told(self, value: Any) -> list[Any]:
        """What every worker says, in rank order."""
        return self.retryable.run(lambda: self._group.all.gather_json(value), self._group.start_over)

    def reduced(self, tensor: Tensor, operation: Operation, real: Sequence[int] | None = None) -> Tensor:
        """Of the workers in `real` (None: of all); the largest and smallest always of all."""
        if operation not in ("sum", "mean", "max", "min"):
            raise ConfigError(f"engine.reduce: operation {operation!r} is not known; choose sum, mean, max or min")
        rows = self._gathered(tensor.detach())
        if operation == "max":
            return rows.amax(0)
        if operation == "min":
            return rows.amin(0)
        rows = rows if real is None else rows[list(real)]
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total / len(rows) if operation == "mean" else total

    def gathered_rows(self, values: Any, real: Sequence[int] | None) -> Any:
        """The rows of each worker in `real` (None: of all), one after another, for each tensor in `values`."""
        if isinstance(values, dict):
            return {key: self.gathered_rows(value, real) for key, value in values.items()}
        if isinstance(values, list | tuple):
            return sequence_like(values, [self.gathered_rows(value, real) for value in values])
        value = torch.as_tensor(values, device=self._group.device).detach()
        value = value.reshape(1) if value.dim() == 0 else value
        lengths = self._gathered(torch.tensor([value.shape[0]], device=self._group.device)).view(-1).tolist()
        rows = self._gathered(padded_rows(value, max(lengths)))
        parts = [rows[rank][: lengths[rank]] for rank in (range(self._comm.size) if real is None else real)]
        return torch.cat(parts) if parts else value[:0]

    def _gathered(self, tensor: Tensor) -> Tensor:
        def gather() -> Tensor:
            rows, handle = self._comm.all_gather(tensor)
            handle.wait()
            return rows.view(self._comm.size, *tensor.shape)

        return self.retryable.run(gather, self._group.start_over) if self._again else gather()

    def in_round(self, operation: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """In the body of an evaluation: where workers are lost its round begins again, and this counts for nothing."""

        def start_over() -> None:
            self._again = True
            self._group.start_over()

        self._again = False
        try:
            result = _attempt(operation, start_over)
        finally:
            self._again = True
        return otherwise() if isinstance(result, _Lost) else result


SAVES = ("state_dict", "save_state", "checkpoints.save", "checkpoints.save_weights", "get_state_dict", "save_model")


def check_boundary(step: TrainStep | None, name: str) -> None:
    """Raise unless the caller's caller may call `engine.<name>()` here."""
    if step is None:
        return
    script = frames_to_script(sys._getframe(1))[1]
    caller = place_of(script or sys._getframe(2))
    if step.broken:
        raise LoopError(
            f"engine.{name}() at {caller}: {step.broken}; end a loop early with engine.stop(). Half a step "
            "can't be taken back: after an error go on in a new process, from the last saved state"
        )
    if step.inside_step:
        raise LoopError(
            f"engine.{name}() at {caller} was called inside step {step.step + 1}: workers have different numbers "
            "of items there, so it would hang; call it when engine.stepped is true, or use engine.mean() for values"
        )
    step.is_seen_by(f"engine.{name}() at {caller}", saves=name in SAVES)


class _Lost:
    """In place of a result."""


def _attempt(operation: Callable[[], T], start_over: Callable[[], None]) -> T | _Lost:
    """What the operation gives; where the workers change in it, `start_over` has them meet again."""
    try:
        return operation()
    except GenerationEnded:
        start_over()
        return _Lost()


class Retryable:
    """Collectives between two steps, counted: one that no worker has finished is done again."""

    def __init__(self) -> None:
        self._done = 0
        self._last: Any = None
        self._given: Any = None
        self._has_given = False

    def run(self, operation: Callable[[], T], start_over: Callable[[], None]) -> T:
        """The operation's result, or that of the others where they had it before the workers changed."""
        while True:
            if self._has_given:
                result: T = self._given
                self._given, self._has_given = None, False
            else:
                attempt = _attempt(operation, start_over)
                if isinstance(attempt, _Lost):
                    continue
                result = attempt
            self._done, self._last = self._done + 1, result
            return result

    def compare(self, comm: Communicator, *, joins: bool) -> None:
        """After a recovery: workers that have finished the last operation tell its result to those that have not."""
        self._has_given = False
        done: list[int] = comm.gather_json(-1 if joins else self._done)
        most = max(done)
        if joins:
            self._done = most
        behind = [rank for rank, count in enumerate(done) if 0 <= count < most]
        if not behind:
            return
        result = _broadcast(comm, self._last, root=done.index(most))
        if comm.rank in behind:
            self._given, self._has_given = result, True


def _broadcast(comm: Communicator, value: Any, *, root: int) -> Any:
    is_tensor = isinstance(value, Tensor)
    about: Any = None
    if comm.rank == root:
        about = (
            ["tensor", list(value.shape), str(value.dtype).removeprefix("torch.")] if is_tensor else ["plain", value]
        )
    kind, *rest = comm.gather_json(about)[root]
    if kind == "plain":
        return rest[0]
    shape, dtype = rest
    tensor = value if comm.rank == root else torch.empty(shape, dtype=getattr(torch, dtype))
    tensor = tensor.contiguous()
    comm.broadcast(tensor, root=root).wait()
    return tensor
