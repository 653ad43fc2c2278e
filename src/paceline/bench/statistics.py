"""Numbers from rounds: a median with its spread, and ratios of things measured side by side.

    round      1      2      3     …
    ours     0.50   0.61   0.52    seconds for the same work
    peer     0.52   0.64   0.53
    ratio    1.04   1.05   1.02    paired: what slowed a whole round slowed both, and cancels

The median of the ratios is steadier than the ratio of the medians: identical runs on one machine drift by up to 13 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True)
class Spread:
    """Median, quartiles (by linear interpolation) and extremes of some values."""

    median: float
    lower_quartile: float
    upper_quartile: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            raise ConfigError("no values to summarise: every round was dropped")
        if len(values) == 1:
            return cls(*[float(values[0])] * 5)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, float(min(values)), float(max(values)))


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """One ratio per round; both sides must come from the same rounds, in order."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]
