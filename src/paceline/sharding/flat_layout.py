"""The flat layout: a model's parameters one after the other in one space, each starting at a block boundary.

    parameter     embed.weight      bias  head.weight
    flat space    |─────|─────|─····|─····|─────|─────|──···|       | block boundary     · nothing (padding)
    cut in two    |─────── shard 0 ───────|──── shard 1 ────|

A *block* is 4096 elements counted from a parameter's first element. Shards are whole blocks, so an update element by
element and a norm block by block give the same bits however many shards there are. A *piece* is the part of one
parameter inside a shard. The space is an address, not memory: padding costs nothing until someone allocates it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor
from torch.nn import Parameter

BLOCK = 4096


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of one parameter, in logical (row-major) order."""

    parameter: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Shard:
    """The range [start, stop) of the flat space, and what lies in it."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        """Without padding."""
        return sum(piece.elements for piece in self.pieces)


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter of a model lies: a pure function of the names, shapes and dtypes, in the model's order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.shapes) == len(self.dtypes):
            raise ValueError(f"{len(self.names)} names, {len(self.shapes)} shapes and {len(self.dtypes)} dtypes")

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> FlatLayout:
        rows = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]
        return cls(tuple(row[0] for row in rows), tuple(row[1] for row in rows), tuple(row[2] for row in rows))

    # -- where things are --------------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts in the flat space; one more for the end of it all."""
        return tuple(accumulate((_blocks(size) * BLOCK for size in self.sizes), initial=0))

    @property
    def extent(self) -> int:
        """The length of the flat space, with padding."""
        return self.offsets[-1]

    @property
    def blocks(self) -> int:
        return self.extent // BLOCK

    @property
    def elements(self) -> int:
        """The elements of all parameters, without padding."""
        return self._elements_before[-1]

    @cached_property
    def _elements_before(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))

    # -- cutting -----------------------------------------------------------------------------------------------------

    def cut(self, parts: int) -> tuple[Shard, ...]:
        """Shards of whole blocks that together are everything, alike in elements up to one block.

        Padding does not count: a thousand biases of 64 elements weigh as little as they are.
        """
        if parts < 1:
            raise ValueError(f"a layout is cut into at least one part, not {parts}")
        cuts = [self._boundary_at(part * self.elements // parts) for part in range(parts)] + [self.extent]
        return tuple(self.shard(start, stop) for start, stop in pairwise(cuts))

    def shard(self, start: int, stop: int) -> Shard:
        """The range [start, stop) of the flat space; both must be block boundaries."""
        if start % BLOCK or stop % BLOCK or not 0 <= start <= stop <= self.extent:
            raise ValueError(f"[{start}, {stop}) is not a range of whole blocks of [0, {self.extent})")
        return Shard(start, stop, tuple(self._pieces(start, stop)))

    def _pieces(self, start: int, stop: int) -> Iterator[Piece]:
        for parameter in range(self._at(start), len(self.sizes)):
            offset, size = self.offsets[parameter], self.sizes[parameter]
            if offset >= stop:
                return
            low, high = max(0, start - offset), min(size, stop - offset)
            if low < high:
                yield Piece(parameter, low, high)

    def split(self, parameter: int, parts: int) -> tuple[Piece, ...]:
        """One parameter in at most `parts` pieces of whole blocks, as equal as blocks allow."""
        size, blocks = self.sizes[parameter], _blocks(self.sizes[parameter])
        parts = min(parts, blocks)
        cuts = [part * blocks // parts * BLOCK for part in range(parts)] + [size]
        return tuple(Piece(parameter, start, stop) for start, stop in pairwise(cuts))

    def _boundary_at(self, element: int) -> int:
        """The block boundary nearest to an element, counted over all parameters without padding."""
        if element == 0:
            return 0
        parameter = bisect_right(self._elements_before, element) - 1
        inside = element - self._elements_before[parameter]
        low = inside // BLOCK * BLOCK
        high = min(low + BLOCK, self.sizes[parameter])
        return self.offsets[parameter] + (low if inside - low <= high - inside else low + BLOCK)

    def _at(self, place: int) -> int:
        """The parameter that lies at `place`."""
        return max(0, bisect_right(self.offsets, place) - 1)

    # -- identity ----------------------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """Equal on two processes exactly when names, shapes and dtypes are, in order."""
        rows = zip(self.names, self.shapes, self.dtypes, strict=True)
        return hashlib.sha256(repr([(name, shape, str(dtype)) for name, shape, dtype in rows]).encode()).hexdigest()


PieceOf = Callable[[Parameter, Piece], Tensor]  # where the values of a piece are


def part_of(tensor: Tensor, piece: Piece) -> Tensor:
    """The piece of a parameter-shaped tensor: a view wherever the tensor's memory is in logical order.

    A piece is one-dimensional, except that the only piece of a scalar is the scalar: so what an optimizer keeps for
    each element of it and what it keeps once look the same for the piece and for the whole.
    """
    flat = tensor.detach().reshape(-1)[piece.start : piece.stop]
    return flat.view(()) if tensor.dim() == 0 else flat


def in_logical_order(parameter: Tensor) -> bool:
    """Whether memory and elements have the same order, so that a piece is a range of both."""
    return parameter.is_contiguous()


def piece_of(parameter: Parameter, piece: Piece) -> Tensor:
    return part_of(parameter, piece) if in_logical_order(parameter) else parameter.detach()


def extent(tensor: Tensor) -> int:
    """From the first to the last element in memory, in elements; gaps between them count."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def joined(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """All pieces of a parameter, in order, as one tensor of its shape."""
    return torch.cat([part.reshape(-1) for part in parts]).view(shape)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)
