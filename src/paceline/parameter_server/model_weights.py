"""Weights on their way into the model: what a server holds by key is copied into the parameters it is made of.

    key 3 |── ln.weight ──|─ ln.bias ─|── head[0:4096] ──|  ──put──►  ln.weight, ln.bias, the first part of head

A parameter whose memory is not in logical order has no part that could be written to: it goes through a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.parameter_server.key_ranges import Key
from paceline.sharding.flat_layout import Piece


class ModelWeights:
    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._flat: dict[int, tuple[int, Tensor]] = {}  # by parameter: its address when that was found
        self._kept: list[Tensor] | None = None

    def put(self, key: Key, weights: Tensor) -> None:
        device = self._parameters[key.pieces[0].parameter].device
        with torch.no_grad():
            targets: list[Tensor] = []
            parts: list[Tensor] = []
            for piece, part in zip(key.pieces, key.views(weights.to(device)), strict=True):
                parameter = self._parameters[piece.parameter]
                if parameter.is_contiguous():
                    targets.append(self._flat_of(piece.parameter)[piece.start : piece.stop])
                    parts.append(part)
                else:
                    _put_piece(parameter, piece, part)
            if targets:
                torch._foreach_copy_(targets, parts)

    def _flat_of(self, index: int) -> Tensor:
        parameter = self._parameters[index]
        address, flat = self._flat.get(index, (0, parameter))
        if address != parameter.data_ptr():
            flat = parameter.detach().view(-1)
            self._flat[index] = parameter.data_ptr(), flat
        return flat

    # -- a round's weights while others are shown --------------------------------------------------------------------

    def keep(self) -> None:
        """Remember the weights as they are, unless some are remembered already."""
        if self._kept is None:
            self._kept = self.copies()

    def restore(self) -> None:
        """Put back what was remembered, if anything."""
        if self._kept is not None:
            self.put_all(self._kept)
            self._kept = None

    def copies(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    def put_all(self, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self._parameters), list(weights))

    def remember(self, weights: Sequence[Tensor] | None) -> None:
        """Others than the model holds; None: nothing."""
        self._kept = None if weights is None else list(weights)

    @property
    def remembered(self) -> Sequence[Tensor] | None:
        return self._kept

    def versions(self) -> list[int]:
        """They change when somebody writes to a parameter."""
        return [parameter._version for parameter in self._parameters]


def _put_piece(parameter: Parameter, piece: Piece, part: Tensor) -> None:
    flat = parameter.detach().reshape(-1)
    flat[piece.start : piece.stop] = part
    parameter.copy_(flat.view(parameter.shape))
