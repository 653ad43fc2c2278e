"""Which samples go into which lane: every global batch is cut into L lanes × `accumulate` micro-batches.

    positions of one step      0 1 2 3 | 4 5 6 7 | 8 9 …              L = 3 lanes, accumulate = 2, batch_size = 4
    micro-batch 0              lane 0    lane 1    lane 2
    micro-batch 1              lane 0    lane 1    lane 2

A *cut* says which positions of the epoch's order a micro-batch holds; the order says which samples stand there.

    BatchPlan      every micro-batch has `batch_size` samples; the last, smaller step deals what is left into as few
                   micro-batches as can hold it, of equal length
    ListedPlan     micro-batches as a batch sampler gave them, of any length

Nobody gets a sample twice and a lane that gets nothing is *absent* from the step. All of it is a function of the step's
number: the number of workers appears nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from paceline.data.global_order import GlobalOrder, Sequential, Shuffled
from paceline.data.slots import Slot, slots_of
from paceline.errors import ConfigError, DataError
from paceline.world.lanes import neighbouring_lanes

# Steps whose ids are looked up at once: numpy takes 0.15 ms to shuffle 64 positions, and 0.8 ms to shuffle 16,384.
FEW_STEPS, MANY_STEPS = 16, 256


class WorkItem(NamedTuple):
    """One micro-batch of one lane, as the loop's body sees it."""

    epoch: int
    step: int  # within the epoch
    lane: int
    micro_batch: int
    position: int  # of its first sample: in the epoch's order, or in the lane's own stream
    samples: int
    sample_ids: tuple[int, ...]  # a stream's samples have none
    present: tuple[int, ...]  # the lanes that have samples in this step
    step_samples: int  # in all lanes together
    first_of_step: bool  # … on this worker
    first_of_lane: bool
    last_of_lane: bool
    last_of_step: bool  # … on this worker
    shadow: bool = False  # a worker with nothing to do runs the body all the same; everything it computes is dropped


class Cut(Protocol):
    """The cut of an epoch's positions into steps, lanes and micro-batches.

    It begins at 0, or where the epoch was when the job went on with another cut.
    """

    @property
    def samples(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def samples_per_epoch(self) -> int: ...

    def step_range(self, step: int) -> tuple[int, int]:
        """The positions of the epoch's order that this step uses."""
        ...

    def step_at(self, position: int) -> int:
        """The step that begins at `position`."""
        ...

    def micro_batches(self, step: int) -> dict[int, list[range]]:
        """Per present lane, the position ranges of its micro-batches, in order."""
        ...


class OrderedSampler(Protocol):
    """A sampler that `Engine.prepare` asks for an epoch's order instead of iterating it."""

    def __len__(self) -> int: ...

    @property
    def identity(self) -> str:
        """What its orders depend on besides seed, epoch and cut."""
        ...

    def order(self, seed: int, epoch: int, cut: BatchPlan) -> GlobalOrder: ...


@dataclass(frozen=True)
class BatchPlan:
    """The cut of an epoch of `samples` into equal micro-batches."""

    samples: int
    batch_size: int
    lanes: int
    accumulate: int
    drop_last: bool = False
    start: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError("the dataset is empty: there is nothing to train on")
        if self.steps == 0 and self.start == 0:
            raise ConfigError(
                f"{self.samples} samples are fewer than one global batch of {self.global_batch} "
                f"({self.lanes} lanes × {self.accumulate} micro-batches × {self.batch_size}) and drop_last is set; "
                "use a smaller batch_size or drop_last=False"
            )

    @cached_property
    def global_batch(self) -> int:
        return self.lanes * self.accumulate * self.batch_size

    @cached_property
    def steps(self) -> int:
        whole, left = divmod(self.samples - self.start, self.global_batch)
        return whole if self.drop_last else whole + (left > 0)

    @property
    def samples_per_epoch(self) -> int:
        return min(self.samples, self.start + self.steps * self.global_batch)

    def step_range(self, step: int) -> tuple[int, int]:
        low = self.start + step * self.global_batch
        return low, min(low + self.global_batch, self.samples)

    def step_at(self, position: int) -> int:
        return -(-(position - self.start) // self.global_batch)

    def micro_batches(self, step: int) -> dict[int, list[range]]:
        low, high = self.step_range(step)
        if high - low == self.global_batch:
            size, stride = self.batch_size, self.lanes * self.batch_size
            return {
                lane: [range(first, first + size) for first in range(low + lane * size, high, stride)]
                for lane in range(self.lanes)
            }
        # As few micro-batches as hold what is left, equally long: many tiny ones would break batch statistics.
        parts = -(-(high - low) // self.batch_size)
        size, longer = divmod(high - low, parts)
        cuts = [low + part * size + min(part, longer) for part in range(parts + 1)]
        return _in_lanes([range(*ends) for ends in pairwise(cuts)], self.lanes)


@dataclass(frozen=True)
class ListedPlan:
    """The cut that a batch sampler made: micro-batch k holds the positions from `ends[k]` to `ends[k + 1]`."""

    ends: npt.NDArray[np.int64]
    lanes: int
    accumulate: int
    start: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError("the batch sampler gave no batches: there is nothing to train on")

    @property
    def samples(self) -> int:
        return int(self.ends[-1])

    @property
    def steps(self) -> int:
        return -(-(len(self.ends) - 1 - self._first) // self._per_step)

    @property
    def samples_per_epoch(self) -> int:
        return self.samples

    def step_range(self, step: int) -> tuple[int, int]:
        first, last = self._batches(step)
        return int(self.ends[first]), int(self.ends[last])

    def step_at(self, position: int) -> int:
        batch = int(np.searchsorted(self.ends, position))
        return -(-(batch - self._first) // self._per_step)

    def micro_batches(self, step: int) -> dict[int, list[range]]:
        first, last = self._batches(step)
        cuts = [int(end) for end in self.ends[first : last + 1]]
        return _in_lanes([range(*ends) for ends in pairwise(cuts)], self.lanes)

    @property
    def _first(self) -> int:
        return int(np.searchsorted(self.ends, self.start))

    @property
    def _per_step(self) -> int:
        return self.lanes * self.accumulate

    def _batches(self, step: int) -> tuple[int, int]:
        first = self._first + step * self._per_step
        return first, min(first + self._per_step, len(self.ends) - 1)


def _in_lanes(parts: Sequence[range], lanes: int) -> dict[int, list[range]]:
    return {lane: list(parts[lane::lanes]) for lane in range(min(lanes, len(parts)))}


def rides(plan: Cut, step: int, lanes: tuple[int, ...]) -> Iterator[tuple[int, int, range, bool]]:
    """This worker's micro-batches of a step as (lane, micro-batch, positions, shadow), lane by lane."""
    for slot, positions in _rides_of(plan.micro_batches(step), lanes):
        yield slot.lane, slot.micro_batch, positions, slot.shadow


def _rides_of(cut: Mapping[int, list[range]], lanes: tuple[int, ...]) -> list[tuple[Slot, range]]:
    slots = slots_of({lane: len(micro_batches) for lane, micro_batches in cut.items()}, lanes)
    return [(slot, cut[slot.lane][slot.micro_batch]) for slot in slots]


def work_items(
    plan: Cut,
    order: GlobalOrder,
    ride: tuple[int, ...],
    *,
    epoch: int,
    first_step: int,
) -> Iterator[WorkItem]:
    """What a worker that rides these lanes does in an epoch, from `first_step` on."""
    for step, present, mine, ids in _with_ids(plan, order, ride, first_step):
        low, high = plan.step_range(step)
        for number, (slot, positions) in enumerate(mine):
            yield WorkItem(
                epoch=epoch,
                step=step,
                lane=slot.lane,
                micro_batch=slot.micro_batch,
                position=positions.start,
                samples=len(positions),
                sample_ids=tuple(ids[number]),
                present=present,
                step_samples=high - low,
                first_of_step=number == 0,
                first_of_lane=slot.micro_batch == 0,
                last_of_lane=slot.last_of_lane,
                last_of_step=number + 1 == len(mine),
                shadow=slot.shadow,
            )


def lane_items(plan: Cut, order: GlobalOrder, rides: Iterable[tuple[int, int]], *, epoch: int) -> Iterator[WorkItem]:
    """The micro-batches of (step, lane) after (step, lane), each as if it were a step of its own: for replay."""
    for step, lane in rides:
        cut, (low, high) = plan.micro_batches(step), plan.step_range(step)
        if lane not in cut:
            raise DataError(f"step {step} of epoch {epoch} has no samples for lane {lane}; the data have changed")
        ids = samples_in(order, cut[lane])
        for number, positions in enumerate(cut[lane]):
            first, last = number == 0, number + 1 == len(cut[lane])
            yield WorkItem(
                epoch=epoch,
                step=step,
                lane=lane,
                micro_batch=number,
                position=positions.start,
                samples=len(positions),
                sample_ids=tuple(ids[number]),
                present=tuple(cut),
                step_samples=high - low,
                first_of_step=first,
                first_of_lane=first,
                last_of_lane=last,
                last_of_step=last,
            )


def _with_ids(
    plan: Cut, order: GlobalOrder, ride: tuple[int, ...], first_step: int
) -> Iterator[tuple[int, tuple[int, ...], list[tuple[Slot, range]], list[list[int]]]]:
    """Each step with the lanes present, its rides and their ids, looked up for a few steps first, then many at once."""
    steps = range(first_step, plan.steps)
    together = FEW_STEPS
    while steps:
        cuts = [plan.micro_batches(step) for step in steps[:together]]
        mine = [_rides_of(cut, ride) for cut in cuts]
        ids = iter(samples_in(order, [positions for some in mine for _, positions in some]))
        for step, cut, some in zip(steps, cuts, mine, strict=False):
            yield step, tuple(cut), some, [next(ids) for _ in some]
        steps, together = steps[together:], MANY_STEPS


def samples_in(order: GlobalOrder, ranges: Sequence[range]) -> list[list[int]]:
    """`order.samples_at` of each range; a shuffle does all of them in one array."""
    if not isinstance(order, Shuffled):
        return [order.samples_at(positions) for positions in ranges]
    lengths = np.array([len(positions) for positions in ranges])
    starts = np.array([positions.start for positions in ranges], np.uint64)
    ends = np.cumsum(lengths)
    # A start below the number of positions before it wraps around here, and back in the sum.
    shifted = starts - (ends - lengths).astype(np.uint64)
    ids = order.samples_for(np.repeat(shifted, lengths) + np.arange(ends[-1], dtype=np.uint64)).tolist()
    return [ids[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


class ShardedSampler(Sampler[list[int]]):
    """The deal behind `Engine.prepare` for other loops: `DataLoader(data, batch_sampler=ShardedSampler(…))`.

    Yields the micro-batches of the lanes that worker `rank` of `workers` rides; every iteration is the next epoch. The
    state counts whole steps as they are handed out, and a DataLoader with loader processes asks ahead of its loop: save
    `position` yourself there (the Engine's own loader counts committed steps).
    """

    def __init__(
        self,
        data: int | Sized,
        batch_size: int,
        *,
        lanes: int,
        accumulate: int = 1,
        rank: int = 0,
        workers: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not 0 <= rank < workers <= lanes:
            raise ConfigError(f"worker {rank} of {workers} can't ride {lanes} lanes: 0 ≤ rank < workers ≤ lanes")
        samples = data if isinstance(data, int) else len(data)
        self.plan = BatchPlan(samples, batch_size, lanes, accumulate, drop_last)
        self._ride = neighbouring_lanes(lanes, workers)[rank]
        self._shuffle, self._seed = shuffle, seed
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        return sum(len(self.plan.micro_batches(step).get(lane, ())) for step in self._steps() for lane in self._ride)

    def __iter__(self) -> Iterator[list[int]]:
        samples = self.plan.samples
        order = Shuffled(samples, self._seed, self.epoch) if self._shuffle else Sequential(samples)
        for item in work_items(self.plan, order, self._ride, epoch=self.epoch, first_step=self._steps().start):
            if item.last_of_step:
                self.position = self.plan.step_range(item.step)[1]
            if not item.shadow:
                yield list(item.sample_ids)
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _steps(self) -> range:
        return range(self.plan.step_at(self.position), self.plan.steps)
