"""The all-gather of updated weights: every worker sends its pieces to all others, who write them into their models.

    worker 0   |── own ──|─────────|        bytes sent per worker: (N-1) · own pieces, in all (N-1)/N · Z each
    worker 1   |─────────|── own ──|

A large piece travels from and into the parameters' own memory; small ones are packed, those of one owner and dtype in
one message. Devices whose tensors can't be sent one by one pack everything and use the backend's all-gather.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.communicator import Communicator, Handle, wait_all
from paceline.errors import GenerationEnded
from paceline.sharding.flat_layout import Piece, part_of
from paceline.sharding.shards import Shards
from paceline.strategies.own_pieces import in_logical_order

ALONE_FROM = 64 * 2**10  # bytes: from here on a copy costs more than a message
_OPERATION = "all-gather of weights"


class WeightGather:
    """The pieces of some of a cut's parameters, by owner."""

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
        arriving = [(package, package.room(), peer) for peer in others for package in self._packages[peer]]
        handles: list[Handle] = [
            comm.receive(room, source=peer, tag=0, operation=_OPERATION) for _, room, peer in arriving
        ]
        for package in self._packages[comm.rank]:
            packed = package.packed()
            handles += [comm.send(packed, to=peer, tag=0, operation=_OPERATION) for peer in others]
        _wait_for_all(handles)
        for package, room, _ in arriving:
            package.unpack(room)

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

    def room(self) -> Tensor:
        if self._in_place is not None:
            return self._in_place
        return torch.empty(self.elements, dtype=self.dtype, device=self.parameters[0].device)

    def unpack(self, room: Tensor) -> None:
        if self._in_place is not None and room.data_ptr() == self._in_place.data_ptr():
            return
        parts = torch.split(room, [piece.elements for piece in self.pieces])
        for parameter, piece, part in zip(self.parameters, self.pieces, parts, strict=True):
            if in_logical_order(parameter):
                part_of(parameter, piece).view(-1).copy_(part)
            else:
                parameter.detach().copy_(part.view(parameter.shape))


def _wait_for_all(handles: Sequence[Handle]) -> None:
    """If the group ends: until none of them can write to weights any more."""
    try:
        wait_all(handles)
    except GenerationEnded:
        for handle in handles:
            with suppress(GenerationEnded):
                handle.wait()
        raise


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
