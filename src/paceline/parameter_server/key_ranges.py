"""Keys: what a server holds, pushes and pulls as one: a run of a bucket's gradient, cut between blocks.

    bucket 0 (one large gradient)      bucket 1 (small ones, packed)
    |── key 0 ──|── key 1 ──|─ key 2 ─||ln.weight|ln.bias|…: key 3|         server 0: keys 0, 3      server 1: keys 1, 2

A key is a slice of its bucket's flat gradient, so it is pushed without a copy, and its bucket's keys become ready
together. It has one dtype, at most MOST_PIECES pieces (one bit each in a push says which were used), and about
`key_bytes`: small enough that sending one hides behind updating another, large enough that messages don't count.

Where gradients are compressed by blocks, pieces of a gradient start at blocks, so it has gaps that weights don't have:

    gradient   |── ln.weight ──···|─ ln.bias ─····|        weights   |── ln.weight ──|─ ln.bias ─|
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from paceline.compression import BlockCompressor, Compressor
from paceline.errors import ConfigError
from paceline.sharding.bucket import Bucket
from paceline.sharding.flat_layout import FlatLayout, Piece, part_of

KEY_BYTES = 4 << 20
LEAST_KEY_BYTES = 64 << 10
MOST_PIECES = 62


@dataclass(frozen=True)
class Key:
    number: int
    server: int
    bucket: int
    start: int  # in the bucket's flat gradient
    pieces: tuple[Piece, ...]
    dtype: torch.dtype  # of the parameters
    sum_dtype: torch.dtype  # of the gradients
    compressor: Compressor | None = None  # of pushes, as long as they are compressed

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each piece starts inside the key; one more for its end."""
        return tuple(accumulate((piece.elements for piece in self.pieces), initial=0))

    @property
    def elements(self) -> int:
        return self.offsets[-1]

    @cached_property
    def gradient_offsets(self) -> tuple[int, ...]:
        """The same inside its gradient."""
        block = _block(self.compressor)
        return tuple(accumulate((-(-piece.elements // block) * block for piece in self.pieces), initial=0))

    @property
    def gradient_elements(self) -> int:
        return self.gradient_offsets[-1]

    @property
    def stop(self) -> int:
        return self.start + self.gradient_elements

    @property
    def gradient_bytes(self) -> int:
        return self.elements * self.sum_dtype.itemsize

    def of_bucket(self, flat: Tensor) -> Tensor:
        """This key's part of its bucket's flat gradient: a view."""
        return flat[self.start : self.stop]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The pieces of a tensor of this key's elements."""
        return [flat[start:stop] for start, stop in pairwise(self.offsets)]

    def gradient_views(self, flat: Tensor) -> list[Tensor]:
        """The pieces of a gradient of this key."""
        starts = zip(self.gradient_offsets, self.pieces, strict=False)
        return [flat[start : start + piece.elements] for start, piece in starts]

    def gathered(self, parameters: Sequence[Tensor]) -> Tensor:
        """A copy of the key's elements of the given parameters."""
        parts = [part_of(parameters[piece.parameter], piece).reshape(-1) for piece in self.pieces]
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()


@dataclass(frozen=True)
class KeyTable:
    """All keys of a job and who holds them: the same on every worker and server."""

    layout: FlatLayout
    keys: tuple[Key, ...]
    servers: int

    @cached_property
    def _of_server(self) -> tuple[tuple[Key, ...], ...]:
        return tuple(tuple(key for key in self.keys if key.server == server) for server in range(self.servers))

    def of_server(self, server: int) -> tuple[Key, ...]:
        return self._of_server[server]

    @cached_property
    def _of_bucket(self) -> dict[int, tuple[Key, ...]]:
        buckets: dict[int, list[Key]] = {}
        for key in self.keys:
            buckets.setdefault(key.bucket, []).append(key)
        return {bucket: tuple(keys) for bucket, keys in buckets.items()}

    def of_bucket(self, bucket: int) -> tuple[Key, ...]:
        return self._of_bucket.get(bucket, ())

    @cached_property
    def digest(self) -> int:
        """63 bits that differ as soon as two processes disagree about the model or about the keys."""
        rows = [(key.server, key.bucket, key.start, key.pieces, key.compressor) for key in self.keys]
        seen = hashlib.sha256(f"{self.layout.digest} {self.servers} {rows}".encode()).digest()
        return int.from_bytes(seen[:8], "little") & (2**63 - 1)

    def name(self, number: int) -> str:
        """A key for people: `key 3 (ln.weight … head.bias[0:4096])`."""
        pieces = self.keys[number].pieces
        ends = pieces[:1] if len(pieces) == 1 else (pieces[0], pieces[-1])
        return f"key {number} ({' … '.join(self._piece_name(piece) for piece in ends)})"

    def held_by(self, server: int) -> str:
        """What a server holds, for people: `keys 0–3, 7 (head.weight … embedding.weight)`."""
        numbers = [key.number for key in self.of_server(server)]
        ends = [place for place, (low, high) in enumerate(pairwise(numbers)) if high != low + 1]
        runs, first = [], 0
        for last in [*ends, len(numbers) - 1]:
            runs.append(f"{numbers[first]}–{numbers[last]}" if last > first else f"{numbers[first]}")
            first = last + 1
        pieces = [piece for number in (numbers[0], numbers[-1]) for piece in self.keys[number].pieces]
        names = dict.fromkeys(self.layout.names[piece.parameter] for piece in (pieces[0], pieces[-1]))
        return f"key{'s' if len(numbers) > 1 else ''} {', '.join(runs)} ({' … '.join(names)})"

    def _piece_name(self, piece: Piece) -> str:
        name = self.layout.names[piece.parameter]
        whole = piece.elements == self.layout.sizes[piece.parameter]
        return name if whole else f"{name}[{piece.start}:{piece.stop}]"


def plan_keys(
    layout: FlatLayout,
    buckets: Sequence[Bucket],
    *,
    servers: int = 1,
    key_bytes: int | None = None,
    compressor_of: Callable[[Bucket], Compressor | None] = lambda bucket: None,
) -> KeyTable:
    """Cut every bucket into keys and deal the keys to the servers by size.

    Without `key_bytes` a key has 4 MiB, or less in a small model, so that every server gets several.
    """
    if servers < 1:
        raise ConfigError(f"servers={servers}: a parameter server needs at least one")
    if key_bytes is not None and key_bytes < 1:
        raise ConfigError(f"key_bytes={key_bytes}: a key holds at least one block")
    keys: list[Key] = []
    for size in _sizes_to_try(buckets, servers) if key_bytes is None else [key_bytes]:
        keys = []
        for number, bucket in enumerate(buckets):
            cut = _keys_of(layout, number, bucket, size, compressor_of(bucket))
            keys += [replace(key, number=len(keys) + place) for place, key in enumerate(cut)]
        if len(keys) >= servers:
            break
    if servers > len(keys):
        raise ConfigError(
            f"{servers} servers but only {len(keys)} key{'s' if len(keys) != 1 else ''} to hold: "
            f"{servers - len(keys)} of them would have nothing to do; start with --servers {max(1, len(keys))}"
        )
    holder = _dealt([key.gradient_bytes for key in keys], servers)
    return KeyTable(layout, tuple(replace(key, server=holder[key.number]) for key in keys), servers)


def _sizes_to_try(buckets: Sequence[Bucket], servers: int) -> Iterator[int]:
    """Four keys or more for each server; in a model so small that there are fewer keys than servers, finer cuts."""
    everything = sum(bucket.elements * bucket.dtype.itemsize for bucket in buckets)
    yield min(KEY_BYTES, max(LEAST_KEY_BYTES, everything // (4 * servers)))
    yield max(1, everything // (4 * servers))
    yield 1


def _keys_of(
    layout: FlatLayout, number: int, bucket: Bucket, key_bytes: int, compressor: Compressor | None
) -> Iterator[Key]:
    itemsize = bucket.dtype.itemsize
    run: list[Piece] = []
    start = 0

    def key() -> Key:
        return Key(0, 0, number, start, tuple(run), layout.dtypes[run[0].parameter], bucket.dtype, compressor)

    for piece in _pieces_of(layout, bucket, key_bytes):
        elements = sum(other.elements for other in run)
        if run and (
            (elements + piece.elements) * itemsize > key_bytes
            or len(run) == MOST_PIECES
            or layout.dtypes[piece.parameter] != layout.dtypes[run[0].parameter]
        ):
            yield (made := key())
            start, run = made.stop, []
        run.append(piece)
    if run:
        yield key()


def _pieces_of(layout: FlatLayout, bucket: Bucket, key_bytes: int) -> Iterator[Piece]:
    """The bucket's gradients in its order; one larger than a key is cut into pieces of equal size."""
    for entry in bucket.entries:
        yield from layout.split(entry.parameter, -(-entry.elements * bucket.dtype.itemsize // key_bytes))


def _block(compressor: Compressor | None) -> int:
    return compressor.block if isinstance(compressor, BlockCompressor) else 1


def _dealt(sizes: Sequence[int], servers: int) -> dict[int, int]:
    """The largest first, each to the server with the least so far: within a third of the best possible."""
    load = [0] * servers
    holder: dict[int, int] = {}
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        holder[number] = min(range(servers), key=lambda server: (load[server], server))
        load[holder[number]] += sizes[number]
    return holder
