"""All compressed buckets of a strategy; without compression, `NotCompressed` answers in its place.

Gradients of one compressor share buckets; those without one have buckets of their own, which travel as they are. Before
`start_after` rounds all of them do. Buckets are not rebuilt: the way back has owners, whose residuals would have to
move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.gradient_exchange import GradientExchange
from paceline.compression import BlockCompressor, Compression, Compressor, PowerSgd, TopK
from paceline.sharding.bucket import Bucket, BucketShards, GradientSpec, Shards
from paceline.strategies.buckets import LaneSums, NotCompressed, PendingTotal
from paceline.strategies.compressed.blocks import BlockBucket
from paceline.strategies.compressed.bucket import CompressedBucket, CompressedLanes, Exchanging, State, Step
from paceline.strategies.compressed.low_rank import LowRankBucket
from paceline.strategies.compressed.sparse import SparseBucket
from paceline.strategies.registry import Job
from paceline.strategies.strategy import ItemPlace

Lanes = TypeVar("Lanes", bound=CompressedLanes)


@dataclass(frozen=True)
class _Total:
    """A bucket's sum that is under way."""

    gradients: CompressedGradients
    bucket: CompressedBucket

    def wait(self) -> Tensor:
        return self.gradients.scaled(self.bucket.wait())

    def own_range(self) -> Tensor | None:
        """Where owners keep the sums: None if this worker owns nothing of it."""
        total = self.wait()
        return total if total.numel() else None


@dataclass(frozen=True)
class ChosenCompressors:
    """The compressor of each parameter, if it has one."""

    compressors: tuple[Compressor | None, ...]

    @classmethod
    def by(cls, compression: Compression, named: Sequence[tuple[str, Parameter]]) -> ChosenCompressors:
        return cls(tuple(compression.compressor(name, tuple(parameter.shape)) for name, parameter in named))

    def grouped(self, specs: Sequence[GradientSpec]) -> Sequence[GradientSpec]:
        """Marked, so that gradients of one compressor share buckets."""
        different = list(dict.fromkeys(self.compressors))

        def marked(spec: GradientSpec, compressor: Compressor | None) -> GradientSpec:
            if compressor is None or spec.sum_dtype.itemsize != 4:
                return spec
            block = compressor.block if isinstance(compressor, BlockCompressor) else 1
            return replace(spec, group=1 + different.index(compressor), block=block)

        return [marked(spec, compressor) for spec, compressor in zip(specs, self.compressors, strict=True)]

    def of(self, bucket: Bucket) -> Compressor | None:
        return self.compressors[bucket.entries[0].parameter] if bucket.dtype.itemsize == 4 else None


class CompressedByLane(NotCompressed, Generic[Lanes]):
    """Each lane's gradient is compressed when it is finished; where it goes from there is the subclass's affair."""

    any = True

    def __init__(self, compression: Compression, named: Sequence[tuple[str, Parameter]]) -> None:
        self._start_after = compression.start_after
        self._chosen = ChosenCompressors.by(compression, named)
        self._buckets: dict[int, Lanes] = {}
        self._opened = self._begun = False
        self._step: Step | None = None

    def _made(self, number: int, sums: LaneSums, shards: BucketShards, compressor: Compressor) -> Lanes:
        raise NotImplementedError

    def grouped(self, specs: Sequence[GradientSpec]) -> Sequence[GradientSpec]:
        return self._chosen.grouped(specs)

    def open(self, sums: Sequence[LaneSums], shards: Callable[[], Shards]) -> None:
        """Once, when the buckets are there."""
        if self._opened:
            return
        self._opened = True
        cut = shards()
        for number, one in enumerate(sums):
            compressor = self._chosen.of(one.bucket)
            if compressor is not None:
                self._buckets[number] = self._made(number, one, cut.buckets[number], compressor)

    def has(self, number: int) -> bool:
        return number in self._buckets

    # -- one step ----------------------------------------------------------------------------------------------------

    def begin(self, round: int, plan: SumPlan, sums: Sequence[LaneSums], shards: Callable[[], Shards]) -> None:
        self.open(sums, shards)
        self._step = Step(round, round - self._start_after, plan) if round >= self._start_after else None
        self._begun = self._begun or self._step is not None
        self.now = () if self._step is None else self._buckets.keys()

    def take(self, number: int, place: ItemPlace, gradient: Tensor) -> bool:
        if self._step is None or number not in self.now:
            return False
        if place.loss_scale != 1.0:
            gradient.div_(place.loss_scale)
        self._buckets[number].take(self._step, place.lane, gradient)
        return True

    def commit(self, used: Sequence[bool]) -> None:
        for bucket in self._buckets.values() if self._step is not None else ():
            bucket.commit(used)

    def forget(self) -> None:
        for bucket in self._buckets.values():
            bucket.forget()

    # -- the state ---------------------------------------------------------------------------------------------------

    def state(self, lanes: Sequence[int], sums: Sequence[LaneSums], shards: Callable[[], Shards]) -> State:
        """Nothing before the first step that is compressed."""
        if not self._begun:
            return {}
        return {name: kept for bucket in self._buckets.values() for name, kept in bucket.state(lanes).items()}

    def load(
        self, saved: Mapping[str, Any], lanes: Sequence[int], sums: Sequence[LaneSums], shards: Callable[[], Shards]
    ) -> None:
        self._buckets, self._opened, self._begun = {}, False, bool(saved)
        self.open(sums, shards)
        for bucket in self._buckets.values() if saved else ():
            bucket.load(saved, lanes)


class CompressedGradients(CompressedByLane[CompressedBucket]):
    """Workers exchange payloads among themselves."""

    def __init__(
        self,
        compression: Compression,
        job: Job,
        named: Sequence[tuple[str, Parameter]],
        exchange: GradientExchange,
        *,
        whole: bool,
    ) -> None:
        super().__init__(compression, named)
        names = [name for name, _ in named]
        self._shared = Exchanging(names, job.lanes, job.seed, compression.feedback, job.comm, exchange, whole)
        self._loss_scale = 1.0

    def _made(self, number: int, sums: LaneSums, shards: BucketShards, compressor: Compressor) -> CompressedBucket:
        if isinstance(compressor, TopK):
            return SparseBucket(number, sums, shards, compressor, self._shared)
        if isinstance(compressor, PowerSgd):
            return LowRankBucket(number, sums, shards, compressor, self._shared)
        return BlockBucket(number, sums, shards, compressor, self._shared)

    def start(self, number: int) -> PendingTotal:
        assert self._step is not None
        self._buckets[number].start(self._step)
        return _Total(self, self._buckets[number])

    def advance(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale  # of a worker without lanes too
        if self._step is not None:
            for bucket in self._buckets.values():
                bucket.advance()

    def scaled(self, total: Tensor) -> Tensor:
        """As the gradients came, by which the step will divide."""
        return total if self._loss_scale == 1.0 else total.mul_(self._loss_scale)


def compressed_gradients(
    job: Job, named: Sequence[tuple[str, Parameter]], exchange: GradientExchange, *, whole: bool
) -> NotCompressed:
    if job.compression is None:
        return NotCompressed()
    return CompressedGradients(job.compression, job, named, exchange, whole=whole)
