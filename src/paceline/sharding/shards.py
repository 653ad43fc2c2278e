"""Shards: every bucket cut into one range per worker, between blocks; worker r owns range r of each.

    bucket 0      |── worker 0 ──|── worker 1 ──|         blocks are counted from each parameter's first element
    bucket 1      |──── 0 ────|────── 1 ────────|         what bucket 0 gave one too much, bucket 1 makes up for
    its pieces     head.weight[8192:]   ln.bias            the parts of parameters inside a range

Cutting each bucket, and not the model as a whole, lets every worker own something of whatever travels, so that sums and
updates of all buckets are shared. Over all buckets the first r workers together hold r/N of the bytes, up to a block.
A parameter whose memory is not in logical (row-major) order is not cut: an update walks it as it lies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from paceline.sharding.bucket import ALIGNED, Bucket, Member
from paceline.sharding.flat_layout import BLOCK, Piece

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
        members, offsets, offset = [], dict[int, int](), 0
        step = ALIGNED // self.bucket.dtype.itemsize
        for member in self.bucket.members:
            if member.parameter in numbers:
                members.append(Member(numbers[member.parameter], offset, member.shape))
                offsets[member.parameter] = offset
                offset += -(-member.elements // step) * step
        if not members:
            return None
        bucket = Bucket(tuple(members), self.bucket.dtype, self.bucket.device)
        starts = [bucket.elements]
        for worker in reversed(range(len(self.ranges))):
            mine = [owned.piece for owned in self.pieces(worker) if owned.piece.parameter in offsets]
            starts.append(offsets[mine[0].parameter] + mine[0].start if mine and worker else starts[-1])
        starts[-1] = 0
        return BucketShards(bucket, tuple(pairwise(reversed(starts))))

    def _pieces_in(self, start: int, stop: int) -> Iterator[OwnedPiece]:
        for member in self.bucket.members:
            low, high = max(start, member.offset), min(stop, member.offset + member.elements)
            if low < high:
                yield OwnedPiece(Piece(member.parameter, low - member.offset, high - member.offset), low - start)


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
    for member in bucket.members:
        inside = element - member.offset
        if inside < member.elements:
            low = 0 if member.parameter in uncut else inside // BLOCK * BLOCK
            high = member.elements if member.parameter in uncut else min(low + BLOCK, member.elements)
            return member.offset + (low if inside - low <= high - inside else high)
    return bucket.elements
