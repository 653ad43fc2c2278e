"""Local SGD: lanes train apart for `every` steps, then all of them go on with the mean of their weights.

    weights 1 + m · gradients m · optimizer state m, for m lanes of a worker        once in `every` steps: all-reduce

With every=1 and plain SGD it is ddp, but for rounding. Each lane keeps its own momentum (or Adam's moments) through the
mean, as in "Local SGD Converges Fast and Communicates Little" (Stich, 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from paceline.strategies.local.local_training import LocalMaker, Windows
from paceline.strategies.local.outer_step import WIRES, Wire
from paceline.strategies.registry import Job, Registered, register
from paceline.world.checked_values import one_word, whole_number


@dataclass(frozen=True)
class LocalSgdConfig:
    """`every`: steps from one mean of the weights to the next; `outer_gradients`: what is sent of the lanes' moves.

    `start_after`: the first steps, which are those of ddp.
    """

    every: int = 8
    outer_gradients: Wire = "fp32"
    start_after: int = 0

    def __post_init__(self) -> None:
        why = "lanes meet every so many steps, so it is at least 1; every=1 is a mean after each step"
        whole_number("LocalSgdConfig: every", self.every, least=1, why=why)
        one_word("LocalSgdConfig: outer_gradients", self.outer_gradients, WIRES)
        whole_number("LocalSgdConfig: start_after", self.start_after, why="a number of steps")


def _open(config: LocalSgdConfig, job: Job) -> LocalMaker:
    outer = partial(torch.optim.SGD, lr=1.0)
    windows = Windows("local_sgd", config.every, outer, config.outer_gradients, start_after=config.start_after)
    return LocalMaker(job, windows)


register(
    Registered(
        "local_sgd",
        LocalSgdConfig,
        _open,
        adds_fast=True,
        examples=(LocalSgdConfig(every=2), LocalSgdConfig(every=3, start_after=2)),
        full_weights=True,
        bits_of_ddp=False,
        lanes_apart=True,
    )
)
