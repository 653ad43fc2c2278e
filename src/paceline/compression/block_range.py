"""A flat range of gradients in a codec's blocks: what its rows are of, and how its owner adds the lanes' rows up.

    spans of the range    |── ln.weight ──··|─ head[4096:8192] ─|      each at the beginning of a block; ·: nothing
    a lane's rows         |─ row ─|── row ──|─ row ─|─ … ─ row ─|
    its owner             decode all lanes, canonical sum, + its own residual ──encode──► rows of the sum

The owner of a range is a worker of ddp or ZeRO, or a server that holds it as a key. The way back loses as the way there
does: what it loses is the owner's residual, staged until the step is applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.collectives.canonical_sum import merges
from paceline.compression.block_codec import BlockCodec, OwnedRows, Partial
from paceline.compression.noise import uniform
from paceline.world.determinism import mix

BACK = -1  # in place of a lane, in the seed of the way back


@dataclass(frozen=True)
class Span:
    """So many elements of a parameter, from `start` on, at `offset` of a range; both at beginnings of blocks."""

    name: str
    start: int
    elements: int
    offset: int


@dataclass(frozen=True)
class BlockRange:
    codec: BlockCodec
    spans: tuple[Span, ...]
    elements: int  # with what is behind the ends of parameters
    seed: int

    @cached_property
    def partial(self) -> Partial:
        """The last row of every parameter that does not fill it."""
        block = self.codec.block
        ends = [(span.offset + span.elements, span.elements) for span in self.spans]
        return [(end // block, end % block) for end, elements in ends if elements and end % block]

    def partial_in(self, start: int, stop: int) -> Partial:
        """Of rows [start, stop)."""
        return [(row - start, elements) for row, elements in self.partial if start <= row < stop]

    def noise(self, round: int, lane: int, device: torch.device) -> Tensor | None:
        """By position in each parameter, where the codec draws."""
        if not self.codec.draws:
            return None
        block = self.codec.block
        noise = torch.empty(self.elements, dtype=torch.float32, device=device)
        for span in self.spans:
            count = -(-span.elements // block) * block
            seed = mix(self.seed, "compression", span.name, round, lane)
            noise[span.offset : span.offset + count] = uniform(seed, span.start, count, device)
        return noise.view(-1, block)

    def decode(self, rows: Tensor, out: Tensor) -> None:
        """Rows of the range, of any shape, to its flat values."""
        self.codec.decode(rows.view(-1, self.codec.row_bytes), self.partial, out.view(-1, self.codec.block))


class OwnedSum:
    """What the owner of a range does in a step."""

    def __init__(self, range: BlockRange, *, feedback: bool, device: torch.device | None = None) -> None:
        self._range, self._feedback, self._device = range, feedback, device
        self._now: Tensor | None = None
        self._next: Tensor | None = None
        self._spare: Tensor | None = None  # memory for the next one

    def add(self, round: int, lanes: Mapping[int, Tensor], out: Tensor) -> Tensor:
        """The rows of the sum of all lanes' rows; `out`, flat, gets what they decode to."""
        range, present = self._range, tuple(sorted(lanes))
        steps = [(present.index(merge.left), present.index(merge.right)) for merge in merges(present)]
        lost = torch.empty_like(out) if self._spare is None else self._spare
        self._spare = None
        values = out.view(-1, range.codec.block)
        owned = OwnedRows(
            range.partial,
            range.noise(round, BACK, out.device),
            None if self._now is None else self._now.view_as(values),
            lost.view_as(values),
            values,
        )
        rows = range.codec.sum([lanes[lane].view(-1, range.codec.row_bytes) for lane in present], steps, owned)
        self._next = lost
        return rows

    def commit(self, used: Sequence[bool]) -> None:
        """The step is about to be committed; what no lane used (by span) keeps its residual."""
        kept, old = self._next, self._now
        if kept is None or not self._feedback:
            return
        for span, is_used in zip(self._range.spans, used, strict=True):
            if not is_used:
                where = slice(span.offset, span.offset + span.elements)
                kept[where] = 0 if old is None else old[where]
        self._spare, self._now, self._next = old, kept, None

    def forget(self) -> None:
        """The step is over."""
        if self._next is not None:
            self._spare, self._next = self._next, None

    @property
    def residual(self) -> Tensor:
        """Flat, as the range is."""
        if self._now is None:
            self._now = torch.zeros(self._range.elements, device=self._device)
        return self._now

    def begin_anew(self) -> None:
        self._now = self._next = None
