"""Block codecs: a gradient in blocks of equal length, each of which becomes a row of bytes that is read by itself.

    parameter   |─ block 0 ─|─ block 1 ─|─ block 2 (0 beyond the end) ─|
    payload     |─── row ───|─── row ───|───────────── row ────────────|      uint8, all rows of one length

Blocks are counted from the beginning of a parameter, so a payload has the same bytes wherever buckets and the ranges of
owners are cut (at multiples of 4096 elements of a parameter, which a block divides). Rows can be sliced, sent and
decoded by themselves. What is not finite stays so: the sum must show it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.collectives.shared_memory.kernels import Merges

Partial = Sequence[tuple[int, int]]  # rows at the ends of parameters: (row, elements that it has)


class OwnedRows(NamedTuple):
    """Rows that a worker or server owns, in which it adds up all lanes' payloads."""

    partial: Partial
    noise: Tensor | None
    residual: Tensor | None
    lost: Tensor  # gets what encoding the sum loses
    out: Tensor  # gets what it decodes to


class BlockCodec(ABC):
    """Values are fp32, of shape (rows, block)."""

    @property
    @abstractmethod
    def block(self) -> int: ...

    @property
    @abstractmethod
    def row_bytes(self) -> int: ...

    @property
    def draws(self) -> bool:
        """Whether `encode` wants random numbers: one in [0, 1) for each value."""
        return False

    @abstractmethod
    def encode(self, values: Tensor, partial: Partial, noise: Tensor | None = None) -> Tensor: ...

    @abstractmethod
    def decode(self, payload: Tensor, partial: Partial, out: Tensor) -> None: ...

    def split(self, values: Tensor, partial: Partial, noise: Tensor | None, residual: Tensor | None) -> Tensor:
        """Encode values plus residual; what that loses is left in `values`."""
        if residual is not None:
            values.add_(residual)
        payload = self.encode(values, partial, noise)
        sent = torch.empty_like(values)
        self.decode(payload, partial, sent)
        values.sub_(sent)
        return payload

    def sum(self, parts: Sequence[Tensor], merges: Merges, rows: OwnedRows) -> Tensor:
        """What the owner of rows does with all lanes' payloads: decode, add along `merges` (to part 0) and to
        the residual, encode."""
        values = [rows.lost, *(torch.empty_like(rows.lost) for _ in parts[1:])]
        for part, room in zip(parts, values, strict=True):
            self.decode(part, rows.partial, room)
        for left, right in merges:
            values[left].add_(values[right])
        payload = self.split(rows.lost, rows.partial, rows.noise, rows.residual)
        self.decode(payload, rows.partial, rows.out)
        return payload


def payload_like(values: Tensor, row_bytes: int) -> Tensor:
    return torch.empty((values.shape[0], row_bytes), dtype=torch.uint8, device=values.device)


def clear_beyond(values: Tensor, partial: Partial) -> None:
    """What is beyond the end of a parameter is 0, also in a row whose scale is not finite: its memory is used again."""
    for row, elements in partial:
        values[row, elements:] = 0


def row_scales(payload: Tensor) -> Tensor:
    """The fp32 number with which each row ends, as a column in the payload's memory."""
    return payload[:, -4:].view(torch.float32)
