"""Which samples go into which lane: every global batch is cut into L lanes × `accumulate` micro-batches.

    positions of one step      0 1 2 3 | 4 5 6 7 | 8 9 …              L = 3 lanes, accumulate = 2, batch_size = 4
    micro-batch 0              lane 0    lane 1    lane 2
    micro-batch 1              lane 0    lane 1    lane 2

A *cut* says which positions of the epoch's order a micro-batch holds; the order says which samples stand there.

    BatchPlan      every micro-batch has `batch_size` samples; the last, smaller step cuts what is left into as few
                   micro-batches as can hold it, of equal length
    ListedPlan     micro-batches as a batch sampler gave them, of any length

No lane gets a sample of another, and a lane that gets nothing is *absent* from the step. All of it is a function of the
step's number: the number of workers appears nowhere.

A worker's *work items* of a step are the micro-batches of its lanes, lane by lane. In a short last step all lanes of a
worker may be absent. It then gets a *shadow*: the first micro-batch of the lowest lane once more, of which loss,
gradient and buffers are dropped. Its loop body runs all the same, so that a collective that the user placed there meets
every worker.
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
    """The cut of an epoch of `samples` into equal micro-batches.

    It begins at 0, or at `start`: where the epoch was when the job went on with another cut.
    """

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
        """The positions of the epoch's order that this step uses."""
        low = self.start + step * self.global_batch
        return low, min(low + self.global_batch, self.samples)

    def step_at(self, position: int) -> int:
        """The step that begins at `position`."""
        return -(-(position - self.start) // self.global_batch)

    def micro_batches(self, step: int) -> dict[int, list[range]]:
        """Per present lane, the position ranges of its micro-batches, in order."""
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


Cut = BatchPlan | ListedPlan


def _in_lanes(parts: Sequence[range], lanes: int) -> dict[int, list[range]]:
    return {lane: list(parts[lane::lanes]) for lane in range(min(lanes, len(parts)))}


class ItemKey(NamedTuple):
    """Which micro-batch of a step a work item is."""

    lane: int
    micro_batch: int
    shadow: bool
    last_of_lane: bool


def assigned_items(counts: Mapping[int, int], lanes: Sequence[int]) -> list[ItemKey]:
    """What a worker with these lanes does in a step of `counts` micro-batches per present lane, lane by lane."""
    mine = [
        ItemKey(lane, number, shadow=False, last_of_lane=number + 1 == counts[lane])
        for lane in lanes
        for number in range(counts.get(lane, 0))
    ]
    return mine or [ItemKey(min(counts), 0, shadow=True, last_of_lane=True)]


def count_items(plan: Cut, lanes: Sequence[int]) -> int:
    """How many items a worker with these lanes has in an epoch; only the last step may be short."""
    if plan.steps < 1:
        return 0
    last = {lane: len(ranges) for lane, ranges in plan.micro_batches(plan.steps - 1).items()}
    return (plan.steps - 1) * len(lanes) * plan.accumulate + len(assigned_items(last, lanes))


def work_items(
    plan: Cut, order: GlobalOrder, lanes: tuple[int, ...], *, epoch: int, first_step: int
) -> Iterator[WorkItem]:
    """What a worker with these lanes does in an epoch, from `first_step` on."""
    steps = range(first_step, plan.steps)
    together = FEW_STEPS
    while steps:
        yield from _items_of(plan, order, [(step, lanes) for step in steps[:together]], epoch)
        steps, together = steps[together:], MANY_STEPS


def lane_items(plan: Cut, order: GlobalOrder, turns: Iterable[tuple[int, int]], *, epoch: int) -> Iterator[WorkItem]:
    """The micro-batches of (step, lane) after (step, lane), each as if it were a step of its own: for replay."""
    for step, lane in turns:
        if lane not in plan.micro_batches(step):
            raise DataError(f"step {step} of epoch {epoch} has no samples for lane {lane}; the data have changed")
        yield from _items_of(plan, order, [(step, (lane,))], epoch)


def _items_of(
    plan: Cut, order: GlobalOrder, steps: Sequence[tuple[int, tuple[int, ...]]], epoch: int
) -> Iterator[WorkItem]:
    """The items of some steps, each with its lanes; the ids of all of them are looked up at once."""
    cuts = [plan.micro_batches(step) for step, _ in steps]
    keys = [
        assigned_items({lane: len(ranges) for lane, ranges in cut.items()}, lanes)
        for cut, (_, lanes) in zip(cuts, steps, strict=True)
    ]
    positions = [cut[key.lane][key.micro_batch] for cut, mine in zip(cuts, keys, strict=True) for key in mine]
    looked_up = zip(positions, _ids_at(order, positions), strict=True)
    for (step, _), cut, mine in zip(steps, cuts, keys, strict=True):
        low, high = plan.step_range(step)
        present = tuple(cut)
        for number, key in enumerate(mine):
            at, ids = next(looked_up)
            yield WorkItem(
                epoch=epoch,
                step=step,
                lane=key.lane,
                micro_batch=key.micro_batch,
                position=at.start,
                samples=len(at),
                sample_ids=tuple(ids),
                present=present,
                step_samples=high - low,
                first_of_step=number == 0,
                first_of_lane=key.micro_batch == 0,
                last_of_lane=key.last_of_lane,
                last_of_step=number + 1 == len(mine),
                shadow=key.shadow,
            )


def _ids_at(order: GlobalOrder, ranges: Sequence[range]) -> list[list[int]]:
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
    """The assignment behind `Engine.prepare` for other loops: `DataLoader(data, batch_sampler=ShardedSampler(…))`.

    Yields the micro-batches of the lanes of worker `rank` of `workers`; every iteration is the next epoch. The
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
            raise ConfigError(f"worker {rank} of {workers} can't have one of {lanes} lanes: 0 ≤ rank < workers ≤ lanes")
        samples = data if isinstance(data, int) else len(data)
        self.plan = BatchPlan(samples, batch_size, lanes, accumulate, drop_last)
        self._own_lanes = neighbouring_lanes(lanes, workers)[rank]
        self._shuffle, self._seed = shuffle, seed
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        return sum(
            len(self.plan.micro_batches(step).get(lane, ())) for step in self._steps() for lane in self._own_lanes
        )

    def __iter__(self) -> Iterator[list[int]]:
        samples = self.plan.samples
        order = Shuffled(samples, self._seed, self.epoch) if self._shuffle else Sequential(samples)
        for item in work_items(self.plan, order, self._own_lanes, epoch=self.epoch, first_step=self._steps().start):
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
