"""The pieces that a worker owns: tensors that its optimizers' twins update in place, with gradients from the sums.

    bucket's sum, own range     |── 8192 ──|─ 6 ─|────── 4096 ──────|
    pieces                       weight[0:8192]  bias  head[0:4096]        views of the parameters, .grad a view above

A piece of a parameter is one-dimensional. A parameter whose memory is not in logical order has only one piece, itself,
and a gradient with its strides: optimizers walk both by memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import ConfigError
from paceline.sharding.flat_layout import BLOCK, Piece, part_of
from paceline.sharding.shards import OwnedPiece, Shards
from paceline.sharding.slices import Slices
from paceline.strategies.released_parameter import is_released

Keep = Callable[[Parameter, Piece], Tensor]


class OwnPieces:
    def __init__(
        self, named: Sequence[tuple[str, Parameter]], shards: Shards, worker: int, keep: Keep | None = None
    ) -> None:
        """`keep` says where the values of a piece are kept; by default in the parameter itself."""
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.shards, self.worker = shards, worker
        self.index = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        keep = keep or piece_of
        self.tensors = {piece: keep(self.parameters[piece.parameter], piece) for piece in shards.pieces(worker)}
        self._views: dict[int, tuple[int, list[Tensor]]] = {}  # by bucket: of the sum at that address
        self._slices: dict[int, Slices] = {}  # by parameter

    def take_gradients(self, number: int, total: Tensor, used: Sequence[bool]) -> None:
        """Make the own range of a bucket's finished sum the gradients of its pieces; unused parameters have none."""
        owned = self.shards.buckets[number].pieces(self.worker)
        for place, gradient in zip(owned, self._gradients(number, total, owned), strict=True):
            piece = place.piece
            tensor = self.tensors[piece]
            tensor.grad = _as_gradient_of(tensor, gradient) if used[piece.parameter] else None

    def _gradients(self, number: int, total: Tensor, owned: Sequence[OwnedPiece]) -> list[Tensor]:
        address, views = self._views.get(number, (0, []))
        if address != total.data_ptr():
            views = [total[place.offset : place.offset + place.piece.elements] for place in owned]
            self._views[number] = total.data_ptr(), views
        return views

    def drop_gradients(self) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        return [tensor.grad for tensor in self.tensors.values() if tensor.grad is not None]

    def slices_of(self, number: int, dtype: torch.dtype) -> Slices:
        """The values of all own pieces of a parameter, of now and, as long as they stay in memory, of later."""
        if number not in self._slices:
            mine = [(piece.start, tensor) for piece, tensor in self.tensors.items() if piece.parameter == number]
            slices = Slices.of(self.parameters[number].shape, dtype, mine)
            if not all(in_logical_order(tensor) for _, tensor in mine):
                return slices  # it is a copy
            self._slices[number] = slices
        return self._slices[number]

    @cached_property
    def most_blocks(self) -> int:
        """Of the worker that owns the most."""
        owned = [self.shards.pieces(worker) for worker in range(self.shards.workers)]
        return max(sum(-(-piece.elements // BLOCK) for piece in pieces) for pieces in owned)


def in_logical_order(parameter: Tensor) -> bool:
    """Whether memory and elements have the same order, so that a piece is a range of both."""
    return parameter.is_contiguous()


def piece_of(parameter: Parameter, piece: Piece) -> Tensor:
    return part_of(parameter, piece) if in_logical_order(parameter) else parameter.detach()


def _as_gradient_of(tensor: Tensor, gradient: Tensor) -> Tensor:
    if in_logical_order(tensor):
        return gradient.view(tensor.shape).to(tensor.dtype)
    return torch.empty_like(tensor, memory_format=torch.preserve_format).copy_(gradient.view(tensor.shape))


def check_apart(named: Sequence[tuple[str, Parameter]]) -> None:
    """Two parameters over the same memory would be updated by two owners."""
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + extent(p) * p.element_size(), name)
        for name, p in named
        if p.numel() and not is_released(p) and not p.is_meta
    )
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise ConfigError(
                f"parameters {first!r} and {second!r} are two objects over the same memory, which two workers would "
                "update; tie them by giving both modules one Parameter (b.weight = a.weight), or use strategy='ddp'"
            )


def extent(tensor: Tensor) -> int:
    """From the first to the last element in memory, in elements; gaps between them count."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
