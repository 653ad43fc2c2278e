"""Weights once per host: the parameters of all its workers are views of one shared buffer.

    worker 0   model.weight ──┐                        update     each worker writes its own pieces, nobody else's
    worker 1   model.weight ──┼──► one buffer          gather     none: what one has written all can read
    worker 2   model.weight ──┘                        memory     once instead of N times

Who reads and who writes is settled by two barriers around the update: no worker writes before all have finished their
backward, none reads the next weights before all have written. Anything else that writes would do so once for every
worker, into the same memory: in-place changes are found by the parameters' version counters, when the next step starts
and at boundaries such as a hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.communicator import Communicator
from paceline.errors import ConfigError, LoopError
from paceline.sharding.bucket import ALIGNED
from paceline.strategies.own_pieces import extent
from paceline.world.process import give_back_free_memory

Weights = Literal["per host", "per worker"]


class HostWeights:
    def __init__(self, comm: Communicator, strategy: str) -> None:
        self._comm, self._strategy = comm, strategy
        self._held: dict[int, tuple[str, Parameter]] = {}  # by id
        self._seen: dict[int, tuple[int, int]] = {}  # by id: version and address when they were last right

    @staticmethod
    def possible(comm: Communicator | None) -> bool:
        return comm is not None and comm.backend == "paceline"

    def hold(self, named: Sequence[tuple[str, Parameter]]) -> None:
        """Move parameters that all workers have alike into the shared buffer; all workers call it together."""
        new = [(name, p) for name, p in named if id(p) not in self._held]
        if not new:
            return
        offsets = [0]
        for _, parameter in new:
            offsets.append(offsets[-1] + -(-extent(parameter) * parameter.element_size() // ALIGNED) * ALIGNED)
        memory = self._comm.common(offsets[-1])
        assert memory is not None
        views = [_view(memory[start:], parameter) for start, (_, parameter) in zip(offsets, new, strict=False)]
        if self._comm.rank == 0:
            with torch.no_grad():
                for view, (_, parameter) in zip(views, new, strict=True):
                    view.copy_(parameter)
        self._comm.barrier()
        for view, (name, parameter) in zip(views, new, strict=True):
            parameter.data = view
            self._held[id(parameter)] = name, parameter
        give_back_free_memory()  # in which the weights were
        self.take_as_right()

    @contextmanager
    def being_written(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        """All workers' updates of their own pieces of these parameters."""
        self._comm.barrier()
        yield
        self._comm.barrier()
        self.take_as_right(parameters)

    def take_as_right(self, parameters: Iterable[Parameter] | None = None) -> None:
        """What was written so far was meant to be: by the update, or by the engine loading a state."""
        for parameter in (p for _, p in self._held.values()) if parameters is None else parameters:
            self._seen[id(parameter)] = _mark(parameter)

    def dismantle(self) -> None:
        """Let the buffer go: parameters get memory of their own, for values that are still to come.

        It is not touched before they do, so the weights of a host don't exist once for each worker in between.
        """
        for _, parameter in self._held.values():
            parameter.data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
        self._held.clear()
        self._seen.clear()

    def check(self) -> None:
        """Raise if something else has written to the weights, or put others in their place."""
        for number, (name, parameter) in self._held.items():
            if _mark(parameter) == self._seen[number]:
                continue
            moved = parameter.data_ptr() != self._seen[number][1]
            raise LoopError(
                f"worker {self._comm.rank}: {name!r} was {'replaced' if moved else 'changed'} outside the optimizer. "
                f"Under strategy={self._strategy!r} the workers of a host share one copy of the weights, and every one "
                "of them would write to it: load weights before engine.prepare() or with engine.load_state(). To "
                "change weights between steps give each worker its own: "
                f"strategy={self._strategy.capitalize()}Config(weights='per worker')"
            )


def _mark(parameter: Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def _view(memory: Tensor, parameter: Parameter) -> Tensor:
    """The parameter's shape and strides at the start of some bytes."""
    room = memory[: extent(parameter) * parameter.element_size()].view(parameter.dtype)
    return room.as_strided(parameter.shape, parameter.stride(), room.storage_offset())


def where_weights_go(wanted: Weights | None, comm: Communicator | None, strategy: str) -> HostWeights | None:
    """Once per host if that is wanted, or can be had and nothing else is wanted."""
    if wanted not in (None, "per host", "per worker"):
        raise ConfigError(f"weights={wanted!r} is not known; choose 'per host' or 'per worker'")
    if wanted == "per host" and not HostWeights.possible(comm):
        raise ConfigError(
            f"strategy={strategy!r} with weights='per host' needs workers that share memory: several on one host, "
            f"training on the CPU with backend 'paceline', not {'one worker' if comm is None else comm.backend}"
        )
    if wanted == "per worker" or comm is None or not HostWeights.possible(comm):
        return None
    return HostWeights(comm, strategy)
