"""A key whose pushes are compressed: its server decodes the payloads of all lanes and adds them up as workers would.

    pushed            a lane's payload of the key                             the sum of a round
    block codecs      rows of the key's blocks                                by the owner of a range: block_range.py
    topk              places in the key, then the bits of values (none: 0)    values in the order of lanes

The server is the key's owner, so the residual of the way back is the server's. Where it updates the weights itself
nothing of the sum comes back, but the sum is encoded and decoded all the same: the bits are those of ddp. Where it only
adds, the sum comes back in rows, which workers decode; after topk it comes as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.compression import BlockCompressor, TopK
from paceline.compression.block_range import BlockRange, OwnedSum, Span
from paceline.compression.topk import PLACE_DTYPE, add_lanes
from paceline.parameter_server.key_ranges import Key


class Decoder(Protocol):
    """The compressed rounds of one key. Its clock is synchronous: a round is over when the next one begins."""

    rows: Tensor | None
    """The last sum as it comes back to workers; None: as it is."""

    def add(self, round: int, lanes: Mapping[int, Tensor]) -> Tensor:
        """The sum of the payloads of all lanes, in memory that the next round uses again."""
        ...

    def commit(self, used: int) -> None:
        """The round is applied; a piece whose bit is not set was used by no lane."""
        ...

    def forget(self) -> None:
        """The round changes nothing."""
        ...

    def residual(self) -> Tensor | None:
        """A copy of what the server keeps, as the key's gradient lies; None: it keeps nothing."""
        ...

    def load_residual(self, residual: Tensor | None) -> None: ...


class BlockDecoder:
    def __init__(self, key: Key, range: BlockRange, *, feedback: bool) -> None:
        self._key, self._feedback = key, feedback
        self._sum = OwnedSum(range, feedback=feedback)
        self._out = torch.empty(key.gradient_elements)
        self.rows: Tensor | None = None

    def add(self, round: int, lanes: Mapping[int, Tensor]) -> Tensor:
        self.rows = self._sum.add(round, lanes, self._out).view(-1)
        return self._out

    def commit(self, used: int) -> None:
        self._sum.commit([bool(used >> place & 1) for place in range(len(self._key.pieces))])
        self._sum.forget()

    def forget(self) -> None:
        self._sum.forget()

    def residual(self) -> Tensor | None:
        return self._sum.residual.clone() if self._feedback else None

    def load_residual(self, residual: Tensor | None) -> None:
        self._sum.begin_anew()
        if residual is not None:
            self._sum.residual.copy_(residual)


class PlacesDecoder:
    rows: Tensor | None = None

    def __init__(self, key: Key) -> None:
        self._out = torch.empty(key.gradient_elements)

    def add(self, round: int, lanes: Mapping[int, Tensor]) -> Tensor:
        add_lanes({lane: code.view(PLACE_DTYPE).view(2, code.numel() // 8) for lane, code in lanes.items()}, self._out)
        return self._out

    def commit(self, used: int) -> None:
        """Residuals are the lanes' alone."""

    def forget(self) -> None: ...

    def residual(self) -> Tensor | None:
        return None

    def load_residual(self, residual: Tensor | None) -> None: ...


def decoders(keys: Sequence[Key], names: Sequence[str], *, seed: int, feedback: bool) -> dict[int, Decoder]:
    """Of those keys that have a compressor, by number; `names` are of all parameters."""
    found: dict[int, Decoder] = {}
    for key in keys:
        if isinstance(key.compressor, TopK):
            found[key.number] = PlacesDecoder(key)
        elif isinstance(key.compressor, BlockCompressor):
            found[key.number] = BlockDecoder(key, range_of(key, key.compressor, names, seed), feedback=feedback)
    return found


def range_of(key: Key, codec: BlockCompressor, names: Sequence[str], seed: int) -> BlockRange:
    """What the rows of a key are of."""
    places = zip(key.pieces, key.gradient_offsets, strict=False)
    spans = [Span(names[piece.parameter], piece.start, piece.elements, offset) for piece, offset in places]
    return BlockRange(codec, tuple(spans), key.gradient_elements, seed)


# -- the worker's side -------------------------------------------------------------------------------------------------


def part_of_key(key: Key, payload: Tensor) -> Tensor:
    """The bytes that a key has of its bucket's payload: of rows, or of places in their order and values."""
    if isinstance(key.compressor, BlockCompressor):
        block = key.compressor.block
        return payload[key.start // block : key.stop // block].reshape(-1)
    places, values = payload
    low, high = torch.searchsorted(places, torch.tensor([key.start, key.stop], dtype=places.dtype)).tolist()
    return torch.stack([places[low:high] - key.start, values[low:high]]).view(-1).view(torch.uint8)


# -- on the wire -------------------------------------------------------------------------------------------------------


def code_bytes(key: Key) -> tuple[int, int]:
    """How many bytes a payload has, at least and at most."""
    if isinstance(key.compressor, BlockCompressor):
        size = key.gradient_elements // key.compressor.block * key.compressor.row_bytes
        return size, size
    return 0, 2 * PLACE_DTYPE.itemsize * key.elements
