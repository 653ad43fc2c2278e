"""Ballots: the few numbers every worker tells every other at the end of a step, in one small all-gather.

    step, update       a worker that is elsewhere is named instead of mixing its gradients in
    stop               honoured by all at the end of the same step; and whether a signal asked for it
    check              a 64-bit sum over a rotating part of the weights: replicas that drift apart are named
    used               which parameters got a gradient here
    lanes              weight, loss and running means of every lane that this worker rode

Means and weights are added in lane order from these reports, so they too are the same at any number of workers.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.engine.stop_signals import Stop
from paceline.errors import ConfigError

MOST_MEANS = 16
_HEAD = struct.Struct("<qqqqq")
_LANE = struct.Struct("<qddqq")
_MEAN = struct.Struct("<Qdd")


@dataclass
class LaneReport:
    """What one lane contributes to the step besides its gradient."""

    lane: int
    weight: float = 0.0
    loss: float = 0.0  # of the first micro-batch that was not finite, otherwise of the last
    finite: bool = True
    means: dict[int, tuple[float, float]] = field(default_factory=dict)  # name's key -> (Σ value·weight, Σ weight)
    left_out: bool = False  # known to this worker alone, in rounds that never agree
    samples: int = 0  # likewise
    check: int = 0  # of the lane's gradient, in steps that want a second opinion

    def add_mean(self, key: int, value: float, weight: float) -> None:
        total, weights = self.means.get(key, (0.0, 0.0))
        if key not in self.means and len(self.means) == MOST_MEANS:
            raise ConfigError(f"engine.mean takes at most {MOST_MEANS} different names per step")
        self.means[key] = (total + value * weight, weights + weight)


@dataclass(frozen=True)
class Ballot:
    step: int
    update: int
    stop: Stop
    check: int
    used: tuple[bool, ...]
    lanes: tuple[LaneReport, ...]


def name_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def pack(ballot: Ballot, most_lanes: int) -> Tensor:
    """Ballots of one job all have the same size, whatever is in them."""
    parts = [_HEAD.pack(ballot.step, ballot.update, ballot.stop, ballot.check, len(ballot.lanes))]
    bits = sum(1 << place for place, used in enumerate(ballot.used) if used)
    parts.append(bits.to_bytes(_used_bytes(len(ballot.used)), "little"))
    for report in ballot.lanes:
        parts.append(_LANE.pack(report.lane, report.weight, report.loss, report.finite, report.check))
        means = list(report.means.items())
        parts += [_MEAN.pack(key, *pair) for key, pair in means]
        parts.append(bytes(_MEAN.size * (MOST_MEANS - len(means))))
    payload = b"".join(parts)
    size = _HEAD.size + _used_bytes(len(ballot.used)) + most_lanes * (_LANE.size + MOST_MEANS * _MEAN.size)
    return torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8)


def unpack(packed: Tensor, parameters: int) -> Ballot:
    data = packed.numpy().tobytes()
    step, update, stop, check, count = _HEAD.unpack_from(data)
    place = _HEAD.size
    bits = int.from_bytes(data[place : place + _used_bytes(parameters)], "little")
    place += _used_bytes(parameters)
    lanes = []
    for _ in range(count):
        lane, weight, loss, finite, lane_check = _LANE.unpack_from(data, place)
        place += _LANE.size
        means = {}
        for number in range(MOST_MEANS):
            key, total, weights = _MEAN.unpack_from(data, place + number * _MEAN.size)
            if key:
                means[key] = (total, weights)
        place += MOST_MEANS * _MEAN.size
        lanes.append(LaneReport(lane, weight, loss, bool(finite), means, check=lane_check))
    used = tuple(bool(bits >> index & 1) for index in range(parameters))
    return Ballot(step, update, Stop(stop), check, used, tuple(lanes))


def any_used(ballots: Sequence[Ballot]) -> list[bool]:
    return [any(flags) for flags in zip(*(ballot.used for ballot in ballots), strict=True)]


def lanes_in_order(ballots: Sequence[Ballot]) -> list[LaneReport]:
    return sorted((report for ballot in ballots for report in ballot.lanes), key=lambda report: report.lane)


def means_over(reports: Sequence[LaneReport], names: Mapping[int, str]) -> dict[str, float]:
    """The means that the lanes' values add up to, in lane order, by the names that `names` has for their keys."""
    totals: dict[int, list[tuple[float, float]]] = {}
    for report in reports:
        for key, pair in report.means.items():
            totals.setdefault(key, []).append(pair)
    return {
        names[key]: math.fsum(value for value, _ in pairs) / weight
        for key, pairs in totals.items()
        if key in names and (weight := math.fsum(weight for _, weight in pairs)) > 0
    }


def _used_bytes(parameters: int) -> int:
    return -(-parameters // 8)
