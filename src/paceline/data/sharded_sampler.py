"""Which samples go into which lane: every global batch is cut into L lanes × `accumulate` micro-batches.

    positions of one step      0 1 2 3 | 4 5 6 7 | 8 9 …              L = 3 lanes, accumulate = 2, batch_size = 4
    micro-batch 0              lane 0    lane 1    lane 2
    micro-batch 1              lane 0    lane 1    lane 2

The last, smaller step deals what is left into as few micro-batches as can hold it, of equal length, first micro-batches
first; nobody gets a sample twice and a lane that gets nothing is *absent* from the step. All of it is a function of the
step's number: the number of workers appears nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True)
class WorkItem:
    """One micro-batch of one lane, as the loop's body sees it."""

    epoch: int
    step: int  # within the epoch
    lane: int
    micro_batch: int
    sample_ids: tuple[int, ...]
    present: tuple[int, ...]  # the lanes that have samples in this step
    step_samples: int  # in all lanes together
    first_of_step: bool  # … on this worker
    first_of_lane: bool
    last_of_lane: bool
    last_of_step: bool  # … on this worker
    shadow: bool = False  # a worker without samples runs the body all the same; everything it computes is dropped


@dataclass(frozen=True)
class BatchPlan:
    """The cut of an epoch of `samples` into steps, lanes and micro-batches."""

    samples: int
    batch_size: int
    lanes: int
    accumulate: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError("the dataset is empty: there is nothing to train on")
        if self.steps == 0:
            raise ConfigError(
                f"{self.samples} samples are fewer than one global batch of {self.global_batch} "
                f"({self.lanes} lanes × {self.accumulate} micro-batches × {self.batch_size}) and drop_last is set; "
                "use a smaller batch_size or drop_last=False"
            )

    @property
    def global_batch(self) -> int:
        return self.lanes * self.accumulate * self.batch_size

    @property
    def steps(self) -> int:
        whole, left = divmod(self.samples, self.global_batch)
        return whole if self.drop_last else whole + (left > 0)

    @property
    def samples_per_epoch(self) -> int:
        return min(self.samples, self.steps * self.global_batch)

    def step_range(self, step: int) -> tuple[int, int]:
        """The positions of the epoch's order that this step uses."""
        low = step * self.global_batch
        return low, min(low + self.global_batch, self.samples)

    def micro_batches(self, step: int) -> dict[int, list[range]]:
        """Per present lane, the position ranges of its micro-batches, in order."""
        low, high = self.step_range(step)
        # As few micro-batches as hold what is left, equally long: many tiny ones would break batch statistics.
        parts = -(-(high - low) // self.batch_size)
        size, longer = divmod(high - low, parts)
        cut: dict[int, list[range]] = {}
        start = low
        for part in range(parts):
            stop = start + size + (part < longer)
            cut.setdefault(part % self.lanes, []).append(range(start, stop))
            start = stop
        return dict(sorted(cut.items()))


def rides(plan: BatchPlan, step: int, lanes: tuple[int, ...]) -> Iterator[tuple[int, int, range, bool]]:
    """This worker's micro-batches of a step as (lane, micro-batch, positions, shadow), lane by lane.

    A worker whose lanes are all absent gets the lowest lane's first micro-batch as a shadow, so that its loop body runs
    as often as a step needs: a collective the user placed there (an evaluation, say) would otherwise hang.
    """
    cut = plan.micro_batches(step)
    mine = [(lane, number, positions) for lane in lanes for number, positions in enumerate(cut.get(lane, ()))]
    if mine:
        for lane, number, positions in mine:
            yield lane, number, positions, False
    else:
        lane, micro_batches = next(iter(cut.items()))
        yield lane, 0, micro_batches[0], True
