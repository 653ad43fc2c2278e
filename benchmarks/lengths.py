"""Length grouping, counted and not timed: what padding wastes, and how unevenly the lanes of a step are loaded.

    python benchmarks/lengths.py --lanes 8 --accumulate 4

    one step        lane 0   ▆▆▆▆▆▆▆▆▆▆▆▆▆▆░░░░      ▆ tokens   ░ padding, up to the longest of its micro-batch
                    lane 1   ▆▆▆▆▆▆▆▆▆░░             padding   = ░ / (▆ + ░), over the epoch
                    lane 2   ▆▆▆▆▆▆▆▆▆▆▆░░░          spread    = most of a lane / mean of the lanes - 1, mean over steps
                                                     slowest   = Σ over steps of the most (▆ + ░) / what a lane would
                                                                 have if nothing were padded and all had the same

The spreads leave the epoch's last step out: it is short, in ways that are not the order's. transformers' grouping is
told batch_size × accumulate, as its Trainer does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from command_line import command, run
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from paceline.data.global_order import GlobalOrder, Shuffled
from paceline.data.length_grouped import (
    DistributedLengthGroupedSampler,
    LengthGrouped,
    LengthGroupedSampler,
    Lengths,
)
from paceline.data.sharded_sampler import BatchPlan
from paceline.data.token_budget import TokenBudgetSampler
from paceline.errors import ConfigError
from paceline.world.determinism import drawing_from

MEDIAN_TOKENS = 200
SEEDS = 5

Batch: TypeAlias = Sequence[int]
Step: TypeAlias = list[list[Batch]]  # per lane, its micro-batches


@dataclass(frozen=True)
class Grouping:
    """What is grouped, and for whom. Lengths are log-normal: with `sigma` 1 one in 730 has 20 times the median."""

    samples: int = 20_000
    lanes: int = 8
    batch_size: int = 8
    accumulate: int = 1
    sigma: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("lanes", self.lanes), ("batch-size", self.batch_size), ("accumulate", self.accumulate)):
            if value < 1:
                raise ConfigError(f"--{name} {value}: it must be at least 1")
        if self.sigma < 0:
            raise ConfigError(f"--sigma {self.sigma}: it can't be negative; 0 makes all lengths equal")
        if self.samples < 2 * self.per_step:
            raise ConfigError(f"--samples {self.samples}: two steps or more are compared, of {self.per_step} samples")

    @property
    def per_step(self) -> int:
        return self.lanes * self.batch_size * self.accumulate

    @property
    def cut(self) -> BatchPlan:
        return BatchPlan(self.samples, self.batch_size, self.lanes, self.accumulate)

    def lengths(self, seed: int) -> Lengths:
        drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN_TOKENS), self.sigma, self.samples)
        return np.maximum(1, drawn.round()).astype(np.int64)


@dataclass(frozen=True)
class Weight:
    """The figures of one order."""

    padding: float
    tokens_spread: float
    padded_spread: float
    slowest: float
    steps: float


Order: TypeAlias = Callable[[Grouping, Lengths, int], list[Step]]


def at_random(grouping: Grouping, lengths: Lengths, seed: int) -> list[Step]:
    return _in_order(grouping, Shuffled(len(lengths), seed, 0))


def every_nth(grouping: Grouping, lengths: Lengths, seed: int) -> list[Step]:
    """transformers' DistributedLengthGroupedSampler: lane l takes samples l, l + lanes, … of the grouped order."""
    size = grouping.batch_size * grouping.accumulate
    lanes = [
        list(DistributedLengthGroupedSampler(size, None, grouping.lanes, lane, seed, lengths=lengths))
        for lane in range(grouping.lanes)
    ]
    starts = range(0, len(lanes[0]), size)
    return [[_batches(lane[start : start + size], grouping.batch_size) for lane in lanes] for start in starts]


def whole_batches(grouping: Grouping, lengths: Lengths, seed: int) -> list[Step]:
    """transformers' LengthGroupedSampler as accelerate shards it: lane l takes batches l, l + lanes, …"""
    generator = torch.Generator().manual_seed(seed)
    sampler = LengthGroupedSampler(grouping.batch_size * grouping.accumulate, lengths=lengths, generator=generator)
    return _in_turn(grouping, _batches(list(sampler), grouping.batch_size))


def balanced(grouping: Grouping, lengths: Lengths, seed: int) -> list[Step]:
    return _in_order(grouping, LengthGrouped(lengths, seed, 0, grouping.cut))


def budgeted(grouping: Grouping, lengths: Lengths, seed: int) -> list[Step]:
    """As many tokens as `batch_size` samples have in the mean, but at least the longest sample."""
    tokens = max(int(lengths.max()), int(grouping.batch_size * lengths.mean()))
    with drawing_from(seed):
        return _in_turn(grouping, list(TokenBudgetSampler(lengths, tokens)))


ORDERS: dict[str, Order] = {
    "random": at_random,
    "transformers, every n-th sample": every_nth,
    "transformers, whole batches": whole_batches,
    "paceline": balanced,
    "paceline, token budget": budgeted,
}


def measure_lengths(grouping: Grouping, seeds: int = SEEDS) -> dict[str, Any]:
    weights: dict[str, list[Weight]] = {name: [] for name in ORDERS}
    for seed in range(seeds):
        lengths = grouping.lengths(seed)
        for name, order in ORDERS.items():
            weights[name].append(weigh(order(grouping, lengths, seed), lengths))
    return {
        "grouping": asdict(grouping),
        "seeds": seeds,
        "orders": {name: asdict(_median(found)) for name, found in weights.items()},
        "by_seed": {name: [asdict(weight) for weight in found] for name, found in weights.items()},
    }


def weigh(steps: list[Step], lengths: Lengths) -> Weight:
    tokens = _per_lane(steps, lambda batch: int(lengths[batch].sum()))
    padded = _per_lane(steps, lambda batch: len(batch) * int(lengths[batch].max()))
    return Weight(
        padding=1 - float(tokens.sum() / padded.sum()),
        tokens_spread=_spread(tokens),
        padded_spread=_spread(padded),
        slowest=float(padded.max(axis=1).sum() * padded.shape[1] / tokens.sum()),
        steps=len(steps),
    )


def show_lengths(result: dict[str, Any], out: Console) -> None:
    shape = result["grouping"]
    out.print(
        f"{shape['samples']:,} samples of log-normal length, median {MEDIAN_TOKENS}, σ {shape['sigma']:g} · "
        f"{shape['lanes']} lanes × {shape['batch_size']} samples, accumulate {shape['accumulate']} · "
        f"medians of {result['seeds']} seeds"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("order", "padding", "spread, tokens", "spread, padded", "slowest lane", "steps"):
        table.add_column(column, justify="right" if table.columns else "left", no_wrap=True)
    for name, weight in result["orders"].items():
        shares = [f"{weight[what]:.2%}" for what in ("padding", "tokens_spread", "padded_spread")]
        table.add_row(name, *shares, f"{weight['slowest']:.3f}", f"{weight['steps']:,.0f}")
    out.print(table)
    out.print(
        "padding: share of what is computed. Spread: the lane with the most over the mean of the lanes, mean of the "
        "steps.\nSlowest lane: what it computes, padding included, over an equal share of the tokens; 1 is the least."
    )


def _in_order(grouping: Grouping, order: GlobalOrder) -> list[Step]:
    cut = grouping.cut
    steps = [cut.micro_batches(step) for step in range(cut.steps)]
    return [
        [[order.samples_at(places) for places in step.get(lane, [])] for lane in range(cut.lanes)] for step in steps
    ]


def _in_turn(grouping: Grouping, batches: Sequence[Batch]) -> list[Step]:
    count = grouping.lanes * grouping.accumulate
    steps = [batches[start : start + count] for start in range(0, len(batches), count)]
    return [[list(step[lane :: grouping.lanes]) for lane in range(grouping.lanes)] for step in steps]


def _batches(ids: Batch, size: int) -> list[Batch]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def _per_lane(steps: list[Step], cost: Callable[[Batch], int]) -> NDArray[np.int64]:
    return np.array([[sum(cost(batch) for batch in lane) for lane in step] for step in steps], np.int64)


def _spread(loads: NDArray[np.int64]) -> float:
    whole = loads[:-1] if len(loads) > 1 else loads
    return float((whole.max(axis=1) / whole.mean(axis=1) - 1).mean())


def _median(weights: list[Weight]) -> Weight:
    return Weight(
        *(statistics.median(values) for values in zip(*(asdict(each).values() for each in weights), strict=True))
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = command(__doc__)
    parser.add_argument("--samples", type=int, default=20_000, help="in the epoch, of log-normal length")
    parser.add_argument("--lanes", type=int, default=8, help="that share a step")
    parser.add_argument("--batch-size", type=int, default=8, help="samples in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a lane in a step")
    parser.add_argument("--sigma", type=float, default=1.0, help="how much lengths differ: the deviation of their log")
    asked = parser.parse_args(words)

    def measure() -> dict[str, Any]:
        return measure_lengths(Grouping(asked.samples, asked.lanes, asked.batch_size, asked.accumulate, asked.sigma))

    run(parser, asked.json, measure, show_lengths)


if __name__ == "__main__":
    main()
