"""The outer step: lanes meet, and the mean of (outer weights - lane's weights) is a gradient for one more optimizer.

    lane 0    θ - θ₀ ┐
    lane 1    θ - θ₁ ├─ · nₗ, canonical sum, / Σn ──► .grad ──► outer optimizer ──► θ, with which all lanes go on
    lane 2    θ - θ₂ ┘

nₗ is the weight of the samples that lane l has trained with in the window, so a lane that had fewer counts less. With
SGD of learning rate 1 the step is the mean of the lanes' weights. It moves what ddp moves in a step, once a window, or
in int8 about a quarter of that (`lane_sums.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.collectives.communicator import Communicator
from paceline.sharding.bucket import Bucket
from paceline.strategies.buckets import LaneSums, gradient_specs
from paceline.strategies.local.lane_optimizer import LaneOptimizer, Meeting, copied_state
from paceline.strategies.local.lane_sums import SumOfLanes
from paceline.torch_compat import foreach_mul_


class OuterSteps:
    """Of all optimizers of a job; all workers make the same ones in the same order."""

    def __init__(self, comm: Communicator, sums: SumOfLanes, lanes: int, bucket_bytes: int) -> None:
        """`lanes`: how many there are in the job."""
        self._comm, self._sums, self._lanes, self._bucket_bytes = comm, sums, lanes, bucket_bytes
        self._sets: dict[tuple[int, int], tuple[tuple[int, ...], int, tuple[Bucket, ...]]] = {}
        """By optimizer and fragment."""

    def synchronise(self, lanes: LaneOptimizer) -> None:
        """Close all windows: the parameters are what outer steps make of them."""
        lanes.show_outer()
        for fragment in range(len(lanes.trained)):
            self._step(lanes, self.begin(lanes, fragment))
            lanes.close_window(fragment)

    def begin(self, lanes: LaneOptimizer, fragment: int, round: int = 0) -> Meeting:
        """Send what the lanes have moved; until the end of the meeting they stay where they are."""
        mine = torch.zeros(self._lanes, dtype=torch.float64)
        for lane, weight in lanes.trained[fragment].items():
            mine[lane] = weight
        rows, weighed = self._comm.all_gather(mine)
        parameters = lanes.members(fragment)
        number_of_set, buckets = self._buckets_of(lanes, fragment, parameters)
        sent = []
        for number, bucket in enumerate(buckets):
            sums = LaneSums(bucket, parameters)
            for lane in lanes.lanes:
                with torch.no_grad():
                    self._fill(sums, lanes, parameters, lane, lanes.trained[fragment].get(lane, 0.0))
                self._sums.took(sums, lane)
            sent.append((sums, self._sums.start(number_of_set, number, sums)))
        return Meeting(round, fragment, parameters, rows, weighed, sent)

    def finish(self, lanes: LaneOptimizer, meeting: Meeting) -> None:
        """The fragment's parameters, which hold the outer weights, become what the outer step makes of them."""
        self._step(lanes, meeting)
        lanes.begin_again(meeting.fragment)

    def preview(self, lanes: LaneOptimizer) -> None:
        """Let the model show what that would give; the lanes go on as if nothing had been."""
        if not lanes.in_window or lanes.is_previewed:
            return
        lanes.show_preview()
        kept = lanes.outer_optimizer.state
        lanes.outer_optimizer.state = copied_state(kept)
        try:
            for fragment in range(len(lanes.trained)):
                self._step(lanes, self.begin(lanes, fragment))
        finally:
            lanes.outer_optimizer.state = kept
        lanes.mark_clean()

    def _step(self, lanes: LaneOptimizer, meeting: Meeting) -> None:
        with torch.no_grad():
            weight = meeting.hand_out()
        gradients = [parameter.grad for parameter in meeting.parameters if parameter.grad is not None]
        if weight > 0 and gradients:  # otherwise no lane has trained
            foreach_mul_(gradients, 1 / weight)
            lanes.outer_optimizer.step()
        for parameter in meeting.parameters:
            parameter.grad = None

    def _fill(
        self, sums: LaneSums, lanes: LaneOptimizer, parameters: Sequence[Parameter], lane: int, weight: float
    ) -> None:
        moved: list[Tensor | None] = []
        for entry in sums.bucket.entries:
            parameter = parameters[entry.parameter]
            there = lanes.weights_of(lane, parameter)
            if there is None or weight == 0:
                moved.append(None)
            else:
                outer = lanes.outer[parameter].to(sums.bucket.dtype)
                moved.append((outer - there.to(sums.bucket.dtype)).mul_(weight))
        sums.take(lane, moved)

    def _buckets_of(
        self, lanes: LaneOptimizer, fragment: int, parameters: Sequence[Parameter]
    ) -> tuple[int, tuple[Bucket, ...]]:
        """Cut anew only when what is trained has changed."""
        key, place = tuple(map(id, parameters)), (id(lanes), fragment)
        known = self._sets.get(place)
        if known is None or known[0] != key:
            buckets = self._sums.cut(gradient_specs(parameters), self._bucket_bytes)
            number = self._sums.new_set(None if known is None else known[1])
            known = self._sets[place] = key, number, buckets
        return known[1], known[2]
