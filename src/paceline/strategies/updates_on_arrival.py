"""Parameter server, asynchronous: every lane's gradient is an update of its own, applied when it reaches the servers.

    lane 0 ─► push ─► update 17 ┐     weights are read between rounds, the newest that have come; the clock says
    lane 1 ─► push ─► update 19 ┘     which updates must be in them

A lane's push is its mean gradient (times L times its share of the round's samples, where that is not 1/L), and it is
applied with 1/L of the learning rate: a round of L pushes moves the weights as far as one synchronous update. To scale
the gradient instead would be the same for SGD, but not for Adam, which takes a step of the same length whatever the
gradient's scale, nor for weight decay: both would act L times a round.

Where the loop weighs micro-batches by tokens each lane's tokens per sample count as typical, since nobody knows those
of all. Clipping, too, is each lane's own: its mean gradient is clipped, so its buckets leave when all are there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.optim.gradient_norm import clip_coefficient, global_norm
from paceline.parameter_server.meeting_point import MeetingPoint
from paceline.strategies.strategy import ItemPlace
from paceline.strategies.updates_on_servers import UpdatesOnServers


@dataclass
class _HeldLane:
    """A lane whose pushes wait for the norm of all of them."""

    place: ItemPlace
    buckets: list[tuple[int, Tensor, Sequence[int]]] = field(default_factory=list)  # (number, gradient, used bits)


class UpdatesOnArrival(UpdatesOnServers):
    def __init__(self, *parts: Any, meeting: MeetingPoint | None = None, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._meeting = meeting
        self._told: Sequence[float] | None = None
        self._used = [False] * len(self.parameters)
        self._held: dict[int, _HeldLane] = {}
        self._clips: bool | None = None  # whether the loop clipped in the last round; None: there was none yet
        self._norm = math.nan

    # -- one round ---------------------------------------------------------------------------------------------------

    def _start_reading(self) -> None:
        super()._start_reading()
        settings = self._settings.with_learning_rates(self._settings.read(), 1 / self._all_lanes)
        if settings != self._told:
            self._client.tell_settings(settings)
            self._told = settings
        self._used = [False] * len(self.parameters)

    def _begin_item(self, place: ItemPlace) -> None:
        super()._begin_item(place)
        if place.last_of_step and not self._clock.see_own_updates:
            self._client.ask(self._round + 1)  # no earlier: what comes before this backward is done is early enough
        if place.last_of_lane:  # that is when gradients are taken: what is marked from here on is this lane's
            self._used = list(self.used())
            self._buckets.used = [False] * len(self.parameters)

    def used(self) -> Sequence[bool]:
        return [before or now for before, now in zip(self._used, self._buckets.used, strict=True)]

    def _leave(self, number: int, nodes: dict[int, Tensor]) -> None:
        place = self._place
        for lane, node in nodes.items():
            if place.left_out or place.weight == 0:
                self._buckets.sums[number].give_back(node)
            elif self._clips is False:
                self._push(number, lane, node, self._used_bits(number), self._all_lanes * _share(place))
            else:
                held = self._held.setdefault(lane, _HeldLane(place))
                held.buckets.append((number, node, self._used_bits(number)))

    def clip(self, max_norm: float) -> float:
        if self._clips is False:
            warnings.warn(
                "engine.clip_grad_norm_() was not called in the step before, so this step's gradients have left "
                "unclipped; it counts from the next one on",
                stacklevel=4,
            )
        self._max_norm = max_norm
        self._norm = max((self._norm_of(held) for held in self._held.values()), default=self._norm)
        return self._norm

    def _norm_of(self, held: _HeldLane) -> float:
        """Of the lane's mean gradient."""
        sums = self._buckets.sums
        gradients = [
            node[member.offset : member.offset + member.elements]
            for number, node, _ in held.buckets
            for member in sums[number].bucket.members
        ]
        return global_norm(gradients) * _share(held.place) * self._tally_of_round().samples / held.place.samples

    def _end_round(self) -> None:
        for lane, held in self._held.items():
            weight = self._all_lanes * _share(held.place)
            if self._max_norm is not None:
                weight *= clip_coefficient(self._norm_of(held), self._max_norm)
            for number, node, used in held.buckets:
                self._push(number, lane, node, used, weight)
        self._held.clear()
        self._clips = self._max_norm is not None
        self._close(self._tally_of_round(), settings=self._settings.read())
        if self._clock.see_own_updates:
            self._client.ask(self._round)

    # -- between rounds ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """What all workers pushed is in before any of them reads, and nobody pushes before all have read."""
        self._client.have_been_heard()
        self._all_workers_are_here()
        if self._ever_opened:
            self._client.refresh(self._round, self._weights.put)
            self._seen = self._weights.versions()
        self._all_workers_are_here()

    def _all_workers_are_here(self) -> None:
        """Those that are left."""
        if self._meeting is not None:
            self._lost |= self._meeting.meet()

    def _hand_over(self, *parts: Any) -> None:
        super()._hand_over(*parts)
        self._told = None


def _share(place: ItemPlace) -> float:
    """Backward has multiplied by the lane's weight over the round's samples; what makes that its share of them."""
    return place.samples / place.weight
