"""Where a model's weights are, and how what each worker has updated of them gets to all others.

    WeightsPerWorker    every worker has its own copy, and an all-gather after the update
    WeightsInShards     every worker has its shard, and gathers a unit when it uses it (`fsdp/weights.py`)
    WeightsPerHost      the parameters of all workers of a host are views of one shared buffer:

    worker 0   model.weight ──┐                        update     each worker writes its own pieces, no other's
    worker 1   model.weight ──┼──► one buffer          gather     none: what one has written all can read
    worker 2   model.weight ──┘                        memory     once instead of N times

Two barriers around the update keep readers and writers apart: no worker writes before all have finished their
backward, none reads the next weights before all have written. Anything else that writes would do so once for every
worker, into the same memory, while others read it: in-place changes are found by the parameters' version counters,
before the update, when the next step starts and at boundaries such as a hash.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.communicator import Communicator, wait_all
from paceline.errors import ConfigError, LoopError
from paceline.sharding.bucket import ALIGNED, Shards
from paceline.sharding.flat_layout import Piece, extent, in_logical_order, part_of
from paceline.strategies.strategy import WriteWatch
from paceline.strategies.zero.sharded_optimizer import OptimizerShard
from paceline.world.process import give_back_free_memory

Weights = Literal["per host", "per worker"]


class ModelWeights:
    """The weights of a job's models, held in one of the ways above. This one does nothing about them."""

    on_every_worker: bool  # every worker has them whole, in its own memory

    def hold(self, named: Sequence[tuple[str, Parameter]]) -> None:
        """Parameters that are trained: all workers have them alike, and call this together. The same may come again."""

    def check(self) -> None:
        """Raise if something else than an update has written to them, where that can't be right."""

    def mark_clean(self, parameters: Sequence[Parameter] | None = None) -> None:
        """What was written so far, to these or to all, was meant to be, as by the engine that loaded a state."""

    def update(self, shard: OptimizerShard, run: Callable[[], Any]) -> Any:
        """Run the update of this worker's pieces, which all workers do now; then all have what was updated."""
        return run()

    def close(self) -> None: ...

    def teardown(self) -> None:
        """In place of `close`, when the group is over: parameters have memory of their own, for values to come."""


class WeightsPerWorker(ModelWeights):
    """Every worker has its own copy."""

    on_every_worker = True

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._gathers: WeakKeyDictionary[OptimizerShard, WeightGather] = WeakKeyDictionary()

    def update(self, shard: OptimizerShard, run: Callable[[], Any]) -> Any:
        result = run()
        if self._comm.size > 1:
            gather = self._gathers.get(shard)
            if gather is None:
                gather = WeightGather(self._comm, shard.pieces.parameters, shard.pieces.shards, shard.numbers)
                self._gathers[shard] = gather
            gather.run()
        return result


class WeightsPerHost(ModelWeights):
    """One copy in shared memory, for workers that are all on one host."""

    on_every_worker = False

    def __init__(self, comm: Communicator, strategy: str) -> None:
        self._comm, self._strategy = comm, strategy
        self._held: dict[int, tuple[str, Parameter]] = {}  # by id
        self._watch = WriteWatch(addresses=True)

    @staticmethod
    def possible(comm: Communicator) -> bool:
        return comm.backend == "paceline"

    def hold(self, named: Sequence[tuple[str, Parameter]]) -> None:
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
        self.mark_clean()

    def update(self, shard: OptimizerShard, run: Callable[[], Any]) -> Any:
        self.check()  # a write within the step, also one that the script takes back: the marks below would hide it
        self._comm.barrier()
        result = run()
        self._comm.barrier()
        self._watch.mark_clean(shard.parameters)
        return result

    def mark_clean(self, parameters: Sequence[Parameter] | None = None) -> None:
        self._watch.mark_clean(self._parameters if parameters is None else parameters)

    def check(self) -> None:
        found = self._watch.first_changed(self._parameters)
        if found is not None:
            changed = "replaced" if self._watch.was_moved(found) else "changed"
            raise LoopError(
                f"worker {self._comm.rank}: {self._held[id(found)][0]!r} was {changed} outside the optimizer. "
                f"Under strategy={self._strategy!r} the workers of a host share one copy of the weights, and every one "
                "of them would write to it: load weights before engine.prepare() or with engine.load_state(). To "
                "change weights between steps give each worker its own: "
                f"strategy={self._strategy.capitalize()}Config(weights='per worker')"
            )

    def teardown(self) -> None:
        """Memory is not touched before values come, so a host's weights don't exist once for each worker in between."""
        for parameter in self._parameters:
            parameter.data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
        self._held.clear()

    @property
    def _parameters(self) -> list[Parameter]:
        return [parameter for _, parameter in self._held.values()]


def _view(memory: Tensor, parameter: Parameter) -> Tensor:
    """The parameter's shape and strides at the start of some bytes."""
    part = memory[: extent(parameter) * parameter.element_size()].view(parameter.dtype)
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())


def where_weights_go(wanted: Weights | None, comm: Communicator, strategy: str) -> ModelWeights:
    """Once per host if that is wanted, or can be had and nothing else is wanted."""
    if wanted not in (None, "per host", "per worker"):
        raise ConfigError(f"weights={wanted!r} is not known; choose 'per host' or 'per worker'")
    if wanted == "per host" and not WeightsPerHost.possible(comm):
        raise ConfigError(
            f"strategy={strategy!r} with weights='per host' needs workers that share memory: several on one host, "
            f"training on the CPU with backend 'paceline', not {'one worker' if comm.size == 1 else comm.backend}"
        )
    if wanted == "per worker" or not WeightsPerHost.possible(comm):
        return WeightsPerWorker(comm)
    return WeightsPerHost(comm, strategy)


# -- the all-gather ----------------------------------------------------------------------------------------------------

ALONE_FROM = 64 * 2**10  # bytes: from here on a copy costs more than a message
_OPERATION = "all-gather of weights"


class WeightGather:
    """Every worker sends its pieces of some parameters to all others, who write them into their models.

        worker 0   |── own ──|─────────|        bytes sent per worker: (N-1) · own pieces, in all (N-1)/N · Z each
        worker 1   |─────────|── own ──|

    A large piece travels from and into the parameters' own memory; small ones are packed, those of one owner and dtype
    in one message. Devices whose tensors can't be sent one by one pack everything and use the backend's all-gather.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[Parameter],
        shards: Shards,
        of: Collection[int],
        *,
        by_messages: bool | None = None,
    ) -> None:
        """`by_messages`: send tensors one by one; by default wherever the device can."""
        self._comm = comm
        wanted = set(of)
        owned = [[piece for piece in shards.pieces(w) if piece.parameter in wanted] for w in range(comm.size)]
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._messages = self._device.type == "cpu" if by_messages is None else by_messages
        self._packages = [list(_packages(parameters, pieces, self._messages)) for pieces in owned]

    def run(self) -> None:
        with torch.no_grad():
            if self._messages:
                self._by_messages()
            else:
                self._by_collectives()

    def _by_messages(self) -> None:
        comm = self._comm
        others = [(comm.rank + hop) % comm.size for hop in range(1, comm.size)]
        arriving = [(package, package.buffer(), peer) for peer in others for package in self._packages[peer]]
        works = [comm.receive(flat, source=peer, tag=0, operation=_OPERATION) for _, flat, peer in arriving]
        for package in self._packages[comm.rank]:
            packed = package.packed()
            works += [comm.send(packed, to=peer, tag=0, operation=_OPERATION) for peer in others]
        wait_all(works)
        for package, flat, _ in arriving:
            package.unpack(flat)

    def _by_collectives(self) -> None:
        for dtype in sorted({package.dtype for packages in self._packages for package in packages}, key=str):
            mine = {w: next((p for p in ps if p.dtype == dtype), None) for w, ps in enumerate(self._packages)}
            longest = max(package.elements for package in mine.values() if package is not None)
            padded = torch.zeros(longest, dtype=dtype, device=self._device)
            own = mine[self._comm.rank]
            if own is not None:
                padded[: own.elements] = own.packed()
            rows, handle = self._comm.all_gather(padded)
            handle.wait()
            for worker, package in mine.items():
                if package is not None and worker != self._comm.rank:
                    package.unpack(rows[worker, : package.elements])


@dataclass(frozen=True)
class Package:
    """Pieces of one dtype and owner that travel together."""

    parameters: tuple[Parameter, ...]
    pieces: tuple[Piece, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in self.pieces)

    @cached_property
    def _in_place(self) -> Tensor | None:
        """The parameter's own memory, if the package is one range of it."""
        if len(self.pieces) > 1 or not in_logical_order(self.parameters[0]):
            return None
        return part_of(self.parameters[0], self.pieces[0]).view(-1)

    def packed(self) -> Tensor:
        if self._in_place is not None:
            return self._in_place
        return torch.cat([part_of(p, piece).reshape(-1) for p, piece in zip(self.parameters, self.pieces, strict=True)])

    def buffer(self) -> Tensor:
        if self._in_place is not None:
            return self._in_place
        return torch.empty(self.elements, dtype=self.dtype, device=self.parameters[0].device)

    def unpack(self, flat: Tensor) -> None:
        if self._in_place is not None and flat.data_ptr() == self._in_place.data_ptr():
            return
        parts = torch.split(flat, [piece.elements for piece in self.pieces])
        for parameter, piece, part in zip(self.parameters, self.pieces, parts, strict=True):
            if in_logical_order(parameter):
                part_of(parameter, piece).view(-1).copy_(part)
            else:
                parameter.detach().copy_(part.view(parameter.shape))


def _packages(parameters: Sequence[Parameter], pieces: Sequence[Piece], some_alone: bool) -> Iterator[Package]:
    small: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        parameter = parameters[piece.parameter]
        if some_alone and piece.elements * parameter.element_size() >= ALONE_FROM:
            yield Package((parameter,), (piece,))
        else:
            small.setdefault(parameter.dtype, []).append(piece)
    for together in small.values():
        yield Package(tuple(parameters[piece.parameter] for piece in together), tuple(together))
