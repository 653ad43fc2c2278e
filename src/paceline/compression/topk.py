"""topk: of each parameter's gradient the largest values and where they are.      bytes: 2 · share of fp32

    share     of the values that are sent; the others wait in the residual until they have grown
    warmup    steps in which the share falls from 1/4 to its final value, each step by the same factor
    momentum  m: u = m·u + g is what accumulates in the residual, and both are cleared where a value is sent, so that
              the optimizer (plain SGD then) sees the momentum that it would have had (Lin et al., 2018)

The threshold of a large gradient is found by a sample: every so many-th value, from a place that is another one in each
step. What is above the threshold is sorted out exactly, so that there are always as many values as the share says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.world.checked_values import number, whole_number

FIRST_SHARE = 0.25
SAMPLE = 2**14  # values, from which on a sample is worth it
PLACE_DTYPE = torch.int32
MARGIN = 1.5  # so many more than wanted should be above the threshold


@dataclass(frozen=True)
class TopK:
    """Of each gradient the `share` of the largest values travels, and more of them in the first `warmup` steps.

    With `momentum` what waits has the momentum that plain SGD would have given it.
    """

    share: float = 0.01
    momentum: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        why = "of a gradient more than nothing is sent, and at most all of it"
        object.__setattr__(self, "share", number("TopK(share=…)", self.share, above=0, most=1, why=why))
        object.__setattr__(self, "momentum", number("TopK(momentum=…)", self.momentum, least=0, below=1))
        whole_number("TopK(warmup=…)", self.warmup, why="a number of steps")

    def count(self, elements: int, steps: int) -> int:
        """Of so many values, how many are sent after so many compressed steps."""
        share = self.share
        if steps < self.warmup and share < FIRST_SHARE:
            share = FIRST_SHARE * (share / FIRST_SHARE) ** (steps / self.warmup)
        return min(elements, max(1, math.ceil(share * elements - 1e-9)))


def add_lanes(payloads: Mapping[int, Tensor], total: Tensor) -> None:
    """Of each lane a row of places and one of the bits of values; `total` becomes their sum, in the order of lanes."""
    total.zero_()
    for lane in sorted(payloads):
        places, values = payloads[lane].to(total.device)
        total.index_add_(0, places, values.view(total.dtype))


def largest(values: Tensor, count: int, seed: int) -> Tensor:
    """Where the `count` values of largest size are, in order of place. `seed` chooses the sample, never the result."""
    if count >= values.numel():
        return torch.arange(values.numel(), device=values.device)
    sizes = values.abs()
    candidates = _above_threshold(sizes, count, seed)
    if candidates is None:
        return torch.topk(sizes, count).indices.sort().values
    return candidates[torch.topk(sizes[candidates], count).indices].sort().values


def _above_threshold(sizes: Tensor, count: int, seed: int) -> Tensor | None:
    """Where values are that may be among the largest; None: all may be, or the sample was a bad one."""
    every = sizes.numel() // SAMPLE
    if every < 2:
        return None
    sample = sizes[seed % every :: every]
    wanted = math.ceil(MARGIN * count * sample.numel() / sizes.numel()) + 1
    if wanted >= sample.numel() // 2:
        return None
    threshold = torch.topk(sample, wanted).values[-1]
    found = (sizes < threshold).logical_not_().nonzero().view(-1)  # what is not a number is above
    return found if found.numel() >= count else None
