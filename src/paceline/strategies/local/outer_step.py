"""The outer step: lanes meet, and the mean of (outer weights - lane's weights) is a gradient for one more optimizer.

    lane 0    θ - θ₀ ┐
    lane 1    θ - θ₁ ├─ · nₗ/Σn, canonical sum ──► .grad ──► outer optimizer ──► θ, with which all lanes go on
    lane 2    θ - θ₂ ┘

nₗ is the weight of the samples that lane l has trained with in the window, so a lane that had fewer counts less. With
SGD of learning rate 1 the step is the mean of the lanes' weights. It moves what ddp moves in a step, once a window, or
in int8 about a quarter of that (`lane_sums.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.communicator import Communicator
from paceline.sharding.bucket import Bucket
from paceline.strategies.buckets import LaneSums, gradient_specs
from paceline.strategies.ddp import Pending
from paceline.strategies.local.lane_optimizer import LaneOptimizer, copied_state
from paceline.strategies.local.lane_sums import SumOfLanes

UNDER_WAY = 2  # buckets: one is sent while the next is filled


class OuterSteps:
    """Of all optimizers of a job; all workers make the same ones in the same order."""

    def __init__(self, comm: Communicator, sums: SumOfLanes, lanes: int, bucket_bytes: int) -> None:
        """`lanes`: how many there are in the job."""
        self._comm, self._sums, self._lanes, self._bucket_bytes = comm, sums, lanes, bucket_bytes
        self._sets: dict[int, tuple[tuple[int, ...], int, tuple[Bucket, ...]]] = {}  # by optimizer

    def synchronise(self, lanes: LaneOptimizer) -> None:
        """Close the window: the parameters are what the outer step makes of them."""
        lanes.show_outer()
        self._step(lanes)
        lanes.close_window()

    def preview(self, lanes: LaneOptimizer) -> None:
        """Let the model show what that would give; the lanes go on as if nothing had been."""
        if not lanes.in_window or lanes.is_previewed:
            return
        lanes.show_preview()
        kept = lanes.outer_optimizer.state
        lanes.outer_optimizer.state = copied_state(kept)
        try:
            self._step(lanes)
        finally:
            lanes.outer_optimizer.state = kept
        lanes.mark_clean()

    def _step(self, lanes: LaneOptimizer) -> None:
        shares = self._shares(lanes)
        if shares is None:  # no lane has trained
            return
        with torch.no_grad():
            self._average(lanes, list(lanes.outer), shares)
        lanes.outer_optimizer.step()
        for parameter in lanes.outer:
            parameter.grad = None

    def _shares(self, lanes: LaneOptimizer) -> dict[int, float] | None:
        """By lane, how much it counts: every worker knows those of its own."""
        mine = torch.zeros(self._lanes, dtype=torch.float64)
        for lane, weight in lanes.trained.items():
            mine[lane] = weight
        rows, handle = self._comm.all_gather(mine)
        handle.wait()
        weights = rows.view(self._comm.size, -1).sum(0).tolist()  # exact: all others have 0 for a lane
        total = math.fsum(weights)
        return None if total == 0 else {lane: weight / total for lane, weight in enumerate(weights)}

    def _average(self, lanes: LaneOptimizer, parameters: Sequence[Parameter], shares: dict[int, float]) -> None:
        """`.grad` becomes the weighted mean of what the lanes have moved, with its sign turned."""
        number_of_set, buckets = self._buckets_of(lanes, parameters)
        under_way: list[tuple[LaneSums, Pending]] = []
        used = [True] * len(parameters)
        for number in itertools.count():
            if number < len(buckets):
                sums = LaneSums(buckets[number], parameters)
                for lane in lanes.lanes:
                    self._fill(sums, lanes, parameters, lane, shares[lane])
                    self._sums.took(sums, lane)
                under_way.append((sums, self._sums.start(number_of_set, number, sums)))
            if len(under_way) == UNDER_WAY or (under_way and number >= len(buckets)):
                sums, pending = under_way.pop(0)
                sums.hand_out(pending.wait(), used)
            elif not under_way:
                break

    def _fill(
        self, sums: LaneSums, lanes: LaneOptimizer, parameters: Sequence[Parameter], lane: int, share: float
    ) -> None:
        moved: list[Tensor | None] = []
        for entry in sums.bucket.entries:
            parameter = parameters[entry.parameter]
            weights = lanes.weights_of(lane, parameter)
            if weights is None or share == 0:
                moved.append(None)
            else:
                outer = lanes.outer[parameter].to(sums.bucket.dtype)
                moved.append((outer - weights.to(sums.bucket.dtype)).mul_(share))
        sums.take(lane, moved)

    def _buckets_of(self, lanes: LaneOptimizer, parameters: Sequence[Parameter]) -> tuple[int, tuple[Bucket, ...]]:
        """Cut anew only when what is trained has changed."""
        key, known = tuple(map(id, parameters)), self._sets.get(id(lanes))
        if known is None or known[0] != key:
            buckets = self._sums.cut(gradient_specs(parameters), self._bucket_bytes)
            number = self._sums.new_set(None if known is None else known[1])
            known = self._sets[id(lanes)] = key, number, buckets
        return known[1], known[2]
