"""Buckets: gradients that travel together, in the order in which backward finishes them.

    bucket 0      bucket 1              bucket 2
    head.weight   ln.weight ln.bias …   layers.4.weight          a large gradient travels alone and in its own memory:
    (alone)       (packed)              (alone)                  no copy in, no copy out

Small gradients are packed into one flat buffer. Which gradients share a bucket changes when bytes move, never what they
sum to: the canonical sum is element by element.

Where updates are shared, every bucket is cut into one range per worker; worker r owns range r of each:

    bucket 0      |── worker 0 ──|── worker 1 ──|         cuts fall between blocks of each parameter
    bucket 1      |──── 0 ────|────── 1 ────────|         what bucket 0 gave one too much, bucket 1 makes up for
    its pieces     head.weight[8192:]   ln.bias            the parts of parameters inside a range

Cutting each bucket, and not the model as a whole, lets every worker own something of whatever travels, so that sums and
updates of all buckets are shared. Over all buckets the first r workers together hold r/N of the bytes, up to a block.
A parameter whose memory is not in logical (row-major) order is not cut: an update walks it as it lies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod

import torch

from paceline.sharding.flat_layout import BLOCK, Piece

LAST_PART = 8
ALIGNED = 64  # bytes: where torch's own memory starts. Products and sums of a tensor have other bits where it starts
# elsewhere, so what is handed to modules or optimizers whole starts there too


@dataclass(frozen=True)
class GradientSpec:
    """What a bucket needs to know about one parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the parameter
    device: torch.device
    group: int = 0  # gradients of different groups don't share a bucket
    block: int = 1  # elements: entries of such buckets start, and the buckets end, at multiples of it

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Gradients are added in fp32, whatever the parameter's precision; fp64 stays fp64."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class BucketEntry:
    parameter: int
    offset: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    entries: tuple[BucketEntry, ...]
    dtype: torch.dtype
    device: torch.device
    block: int = 1

    @cached_property
    def elements(self) -> int:
        """Of the flat buffer; there may be gaps between entries, and where it has blocks one after the last."""
        end = self.entries[-1].offset + self.entries[-1].elements
        return -(-end // self.block) * self.block

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Elements of the flat buffer that are no entry's."""
        ends = [entry.offset + entry.elements for entry in self.entries]
        nexts = [*(entry.offset for entry in self.entries[1:]), self.elements]
        return [(start, stop) for start, stop in zip(ends, nexts, strict=True) if start < stop]

    @property
    def alone(self) -> bool:
        """One gradient is all of it, so that it can travel in its own memory."""
        return len(self.entries) == 1 and not self.gaps


def plan_buckets(
    specs: Sequence[GradientSpec], order: Sequence[int], bucket_bytes: int, *, aligned: bool = True
) -> tuple[Bucket, ...]:
    """Cut `order` into buckets, filled from its end: the last holds an eighth of `bucket_bytes`, those before it more.

    What leaves last has nothing to hide behind, so it should be small; what leaves early should be large, because every
    message costs. A gradient of half a bucket or more travels alone. Buckets are numbered by the place of their *last*
    entry in `order`, since that is when they can leave. `aligned`: every entry starts where memory is aligned.
    """
    planned: list[tuple[int, list[int]]] = []
    filling: dict[tuple[torch.dtype, torch.device, int], _Filling] = {}
    for place, index in reversed(list(enumerate(order))):
        spec = specs[index]
        size = spec.elements * spec.sum_dtype.itemsize
        if size * 2 >= bucket_bytes:
            planned.append((place, [index]))
            continue
        key = spec.sum_dtype, spec.device, spec.group
        bucket = filling.setdefault(key, _Filling(max(1, bucket_bytes // LAST_PART)))
        bucket.add(place, index, size)
        if bucket.bytes >= bucket.wanted:
            planned.append(bucket.empty(bucket_bytes))
    planned += [bucket.empty(bucket_bytes) for bucket in filling.values() if bucket.entries]
    step = ALIGNED if aligned else 1
    return tuple(packed(specs, entries[::-1], step) for _, entries in sorted(planned))


@dataclass
class _Filling:
    """A bucket being filled from its last entry backwards."""

    wanted: int
    last_place: int = -1
    entries: list[int] = field(default_factory=list)
    bytes: int = 0

    def add(self, place: int, index: int, size: int) -> None:
        if not self.entries:
            self.last_place = place
        self.entries.append(index)
        self.bytes += size

    def empty(self, bucket_bytes: int) -> tuple[int, list[int]]:
        """What was filled; the next may grow to twice as much."""
        filled = self.last_place, self.entries
        self.wanted, self.entries, self.bytes = min(bucket_bytes, 2 * self.wanted), [], 0
        return filled


def packed(specs: Sequence[GradientSpec], parameters: Sequence[int], aligned_to: int = 1) -> Bucket:
    """Parameters in one bucket, each at a multiple of so many bytes."""
    first = specs[parameters[0]]
    step = max(1, aligned_to // first.dtype.itemsize)  # weights are laid out as their sums are, and are smaller
    step = max(step, first.block)
    entries: list[BucketEntry] = []
    offset = 0
    for parameter in parameters:
        entries.append(BucketEntry(parameter, offset, specs[parameter].shape))
        offset += -(-specs[parameter].elements // step) * step
    return Bucket(tuple(entries), first.sum_dtype, first.device, first.block)


# -- every bucket cut into one range per worker ------------------------------------------------------------------------

Range = tuple[int, int]


@dataclass(frozen=True)
class OwnedPiece:
    """A piece and where its gradient starts inside its owner's range of the bucket."""

    piece: Piece
    offset: int


@dataclass(frozen=True)
class BucketShards:
    """One bucket's ranges, in elements of its flat gradient: one for each worker, some maybe empty."""

    bucket: Bucket
    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        ends = [0, *(stop for _, stop in self.ranges)]
        if [start for start, _ in self.ranges] + [self.bucket.elements] != ends:
            raise ValueError(f"ranges {self.ranges} are not a cut of {self.bucket.elements} elements")

    def width(self, worker: int) -> int:
        start, stop = self.ranges[worker]
        return stop - start

    @cached_property
    def _pieces(self) -> tuple[tuple[OwnedPiece, ...], ...]:
        return tuple(tuple(self._pieces_in(start, stop)) for start, stop in self.ranges)

    def pieces(self, worker: int) -> tuple[OwnedPiece, ...]:
        """In the bucket's order."""
        return self._pieces[worker]

    def only(self, numbers: Mapping[int, int]) -> BucketShards | None:
        """The same owners of fewer parameters, under the numbers that these have elsewhere; None: of none."""
        entries, offsets, offset = [], dict[int, int](), 0
        step = ALIGNED // self.bucket.dtype.itemsize
        for entry in self.bucket.entries:
            if entry.parameter in numbers:
                entries.append(BucketEntry(numbers[entry.parameter], offset, entry.shape))
                offsets[entry.parameter] = offset
                offset += -(-entry.elements // step) * step
        if not entries:
            return None
        bucket = Bucket(tuple(entries), self.bucket.dtype, self.bucket.device)
        starts = [bucket.elements]
        for worker in reversed(range(len(self.ranges))):
            mine = [owned.piece for owned in self.pieces(worker) if owned.piece.parameter in offsets]
            starts.append(offsets[mine[0].parameter] + mine[0].start if mine and worker else starts[-1])
        starts[-1] = 0
        return BucketShards(bucket, tuple(pairwise(reversed(starts))))

    def _pieces_in(self, start: int, stop: int) -> Iterator[OwnedPiece]:
        for entry in self.bucket.entries:
            low, high = max(start, entry.offset), min(stop, entry.offset + entry.elements)
            if low < high:
                yield OwnedPiece(Piece(entry.parameter, low - entry.offset, high - entry.offset), low - start)


@dataclass(frozen=True)
class Shards:
    """All buckets of a model, cut for a number of workers: the same on each of them."""

    workers: int
    buckets: tuple[BucketShards, ...]

    def pieces(self, worker: int) -> list[Piece]:
        """All that `worker` owns."""
        return [owned.piece for shards in self.buckets for owned in shards.pieces(worker)]

    @cached_property
    def owners(self) -> dict[int, tuple[tuple[int, Piece], ...]]:
        """For each parameter its pieces in order, and who owns them."""
        found: dict[int, list[tuple[int, Piece]]] = {}
        for shards in self.buckets:
            for worker in range(self.workers):
                for owned in shards.pieces(worker):
                    found.setdefault(owned.piece.parameter, []).append((worker, owned.piece))
        return {parameter: tuple(pieces) for parameter, pieces in found.items()}


def cut_buckets(buckets: Sequence[Bucket], workers: int, uncut: Collection[int] = ()) -> Shards:
    """Cut every bucket for `workers`; the parameters in `uncut` stay whole."""
    if workers < 1:
        raise ValueError(f"buckets are cut for at least one worker, not {workers}")
    held = [0] * workers  # bytes before this bucket, of all workers below
    everything = 0
    shards = []
    for bucket in buckets:
        size = bucket.dtype.itemsize
        everything += bucket.elements * size
        cuts = [0]
        for worker in range(1, workers):
            wanted = (everything * worker // workers - held[worker]) // size
            cuts.append(max(cuts[-1], _boundary_near(bucket, wanted, uncut)))
            held[worker] += cuts[-1] * size
        shards.append(BucketShards(bucket, tuple(pairwise([*cuts, bucket.elements]))))
    return Shards(workers, tuple(shards))


def _boundary_near(bucket: Bucket, element: int, uncut: Collection[int]) -> int:
    """The place nearest to `element` where the bucket may be cut."""
    if element <= 0:
        return 0
    ends = [*(entry.offset for entry in bucket.entries[1:]), bucket.elements]
    for entry, end in zip(bucket.entries, ends, strict=True):
        inside = element - entry.offset
        if inside < entry.elements:
            low = 0 if entry.parameter in uncut else inside // BLOCK * BLOCK
            high = entry.elements if entry.parameter in uncut else min(low + BLOCK, entry.elements)
            if inside - low <= high - inside:
                return entry.offset + low
            return end if high == entry.elements else entry.offset + high  # a gap belongs to what is before it
    return bucket.elements
