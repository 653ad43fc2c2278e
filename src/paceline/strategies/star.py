"""Star: every worker sends its roots to one, who adds them along the canonical tree and sends the sum back.

    weights full · gradients full · optimizer state full    during backward: –    at step: gather to one, sum, send back

The simplest way to train together, and the one that everything else is measured against: all bytes pass worker 0, which
moves (N-1)·Z each way where ddp moves 2·(N-1)/N·Z. The sums have ddp's bits, because the tree is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.collectives.canonical_sum import SumPlan
from paceline.collectives.communicator import Communicator
from paceline.collectives.executor import Scratch
from paceline.collectives.gradient_exchange import TAGS_PER_BUCKET, GradientExchange, PendingSum
from paceline.collectives.star_all_reduce import STAR, canonical_star
from paceline.errors import ConfigError
from paceline.strategies.ddp import DdpMaker
from paceline.strategies.registry import Job, Registered, register


class StarExchange:
    """Nothing moves before the sum is waited for: by then the workers' votes are in, so all of them are there."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._scratch = Scratch()
        self._sets = itertools.count()

    def new_set(self, old: int | None = None) -> int:
        return next(self._sets)

    def slot(self, of: int, bucket: int, elements: int, dtype: torch.dtype) -> Tensor | None:
        return None  # roots travel as messages, from wherever they are

    def start(
        self, of: int, bucket: int, plan: SumPlan, roots: Mapping[int, Tensor], spare: Callable[[], Tensor]
    ) -> PendingSum:
        comm, tag = self._comm, bucket * TAGS_PER_BUCKET
        out = next(iter(roots.values())) if roots else spare()
        if comm.size == 1:
            return PendingSum([out])
        return PendingSum(
            [out], _WhenWaitedFor(lambda: canonical_star(comm, plan, roots, out, tag=tag, scratch=self._scratch))
        )

    def close(self) -> None:
        """It has no thread: nothing to end."""


class _WhenWaitedFor:
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def wait(self) -> None:
        with torch.no_grad():
            self._run()


@dataclass(frozen=True)
class StarConfig:
    """Nothing to choose: worker 0 is the centre."""


def _open(config: StarConfig, job: Job) -> DdpMaker:
    if job.algorithm not in (None, STAR.name):
        raise ConfigError(
            f"strategy='star' with algorithm={job.algorithm!r}: a star is an algorithm of its own; "
            f"leave algorithm out, or choose strategy='ddp' to train over {job.algorithm}"
        )
    if job.reduction == "fast":
        return DdpMaker(job, GradientExchange(job.comm, "fast", STAR.name), overlap=False)
    return DdpMaker(job, StarExchange(job.comm), overlap=False)


register(
    Registered(
        "star",
        StarConfig,
        _open,
        adds_fast=True,
        takes_low_precision=True,
        replicated=True,
        full_weights=True,
        passes_lanes_on=True,
    )
)
