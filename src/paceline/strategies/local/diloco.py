"""DiLoCo: local SGD with an outer optimizer, SGD with Nesterov momentum, on what the lanes have moved.

    weights 1 + m · gradients m · optimizer state m · outer momentum 1, for m lanes of a worker
    once in `every` steps: all-reduce of (outer weights - lane's weights), then the outer step on every worker

The inner optimizer is the script's, AdamW in "DiLoCo: Distributed Low-Communication Training of Language Models"
(Douillard et al., 2023), whose outer learning rate and momentum are the defaults here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.strategies.local.local_training import LocalMaker, Windows
from paceline.strategies.local.outer_step import WIRES, Wire
from paceline.strategies.registry import Job, Registered, register
from paceline.world.checked_values import number, one_word, switch, whole_number


@dataclass(frozen=True)
class DilocoConfig:
    """`every`: steps from one outer step to the next; `outer_gradients`: what is sent of the lanes' moves.

    `fragments`: parts of the parameters that have their outer steps one after another, each while a step is computed.
    `start_after`: the first steps, which are those of ddp.
    """

    every: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    outer_gradients: Wire = "fp32"
    fragments: int = 1
    start_after: int = 0

    def __post_init__(self) -> None:
        why = "lanes meet every so many steps, so it is at least 1"
        whole_number("DilocoConfig: every", self.every, least=1, why=why)
        number("DilocoConfig: outer_lr", self.outer_lr, above=0)
        number("DilocoConfig: outer_momentum", self.outer_momentum, least=0, below=1)
        one_word("DilocoConfig: outer_gradients", self.outer_gradients, WIRES)
        switch("DilocoConfig: nesterov", self.nesterov)
        whole_number("DilocoConfig: fragments", self.fragments, least=1)
        whole_number("DilocoConfig: start_after", self.start_after, why="a number of steps")
        if self.fragments > self.every:
            raise ConfigError(
                f"DilocoConfig: fragments={self.fragments} with every={self.every}: a step has the outer step of one "
                "fragment at most, so there are at most as many as steps from one to the next"
            )
        if self.nesterov and self.outer_momentum == 0:
            raise ConfigError("DilocoConfig: nesterov=True needs an outer_momentum above 0; or choose nesterov=False")


def _outer_optimizer(config: DilocoConfig, parameters: Sequence[Parameter]) -> Optimizer:
    """With its momentum from the start: what does not fit fails there, and not after `every` steps."""
    made = torch.optim.SGD(parameters, lr=config.outer_lr, momentum=config.outer_momentum, nesterov=config.nesterov)
    for parameter in parameters:
        if config.outer_momentum and parameter.requires_grad:
            made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return made


def _open(config: DilocoConfig, job: Job) -> LocalMaker:
    outer = partial(_outer_optimizer, config)
    how = (config.every, outer, config.outer_gradients, config.fragments, config.start_after)
    return LocalMaker(job, Windows("diloco", *how))


register(
    Registered(
        "diloco",
        DilocoConfig,
        _open,
        adds_fast=True,
        examples=(
            DilocoConfig(every=3),
            DilocoConfig(every=4, outer_gradients="int8", fragments=3),
            DilocoConfig(every=4, start_after=3),
        ),
        full_weights=True,
        bits_of_ddp=False,
        lanes_apart=True,
    )
)
