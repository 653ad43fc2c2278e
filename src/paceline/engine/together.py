"""What workers do together between two steps, in an elastic job: done by all that are left, once each.

    worker 0    reduce #1 ✓    barrier #2 …            worker 2 dies, after worker 0 had the result of #1 and before
    worker 1    reduce #1 …                            worker 1 had it: worker 1 gets it from worker 0, then both do #2

An operation that nobody has finished is done again by those that are left. Since nobody begins one before all have come
to the one before, two workers are never more than one apart. A joiner comes between two steps, where none is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.collectives.communicator import Communicator
from paceline.errors import GenerationEnded

T = TypeVar("T")


class Together:
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
                try:
                    result = operation()
                except GenerationEnded:
                    start_over()
                    continue
            self._done, self._last = self._done + 1, result
            return result

    def compare(self, comm: Communicator | None, *, joins: bool) -> None:
        """After a regrouping: who has finished the last operation tells its result to who has not."""
        self._has_given = False
        if comm is None:
            return
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
