"""The step vote: a few numbers that every worker tells every other at the end of a step, in one small all-gather.

    step, update       a worker that is elsewhere is named instead of mixing its gradients in
    stop               honoured by all at the end of the same step; and whether a signal asked for it
    rates              a checksum of learning rates and the like: a difference would not show in weights in shards
    check              a 64-bit sum over a rotating part of the weights: replicas that drift apart are named
    used               which parameters got a gradient here
    evaluations        one that some workers run alone is told: they have a part of the data
    lanes              weight, loss and running means of every lane that this worker computed

Means and weights are added in lane order from these reports, so they too are the same at any number of workers. What
is told of a value on the device is on its way to the host until the vote reads it (`HostReading`).
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.communicator import Communicator
from paceline.errors import ConfigError, LoopError, ReplicaError
from paceline.strategies.registry import LaneAssignment

# Elements of the weights looked at per step; a drift is found within parameters / WATCHED steps.
WATCHED = 1 << 16
# Where a difference can be mended, by redoing the step without the worker that has it, more is looked at: 0.3 ms.
PARTS_AT_ONCE = 32


MOST_MEANS = 16
_HEAD = struct.Struct("<qqqqqqqq")
_LANE = struct.Struct("<qddqq")
_MEAN = struct.Struct("<Qdd")


class HostReading:
    """A few numbers of the device, for the host: it does not wait for work that was queued after they were made.

        device   forward ─ loss ─┬─ backward ──────────────── update
                                 └─ copy ─ event
        host     forward, backward, then read(): waits for the event, while backward runs

    `float(loss)` before backward would leave the device without work until the host has queued some, and after it the
    host would wait for backward too.
    """

    def __init__(self, value: Tensor) -> None:
        """Of the value as it is now."""
        value = value.detach()
        self._done: Any = None
        if value.device.type != "cuda":
            self._host = value.to("cpu", copy=True)
            return
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(value.device))

    def read(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._host

    def number(self) -> float:
        return float(self.read())


class Stop(IntEnum):
    """What a vote says about the end of the loop."""

    NO = 0
    WANTED = 1  # by the loop: engine.stop()
    REQUESTED = 2  # by a signal

    @classmethod
    def vote(cls, *, asked: bool, wanted: bool, later: bool) -> Stop:
        """Of a worker that a signal has `asked`, or its loop; a signal waits where workers agree in a `later` round."""
        if asked and not later:
            return cls.REQUESTED
        return cls.WANTED if wanted else cls.NO


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
class StepVote:
    """One worker's."""

    step: int
    update: int
    stop: Stop
    check: int
    used: tuple[bool, ...]
    lanes: tuple[LaneReport, ...]
    rates: int = 0
    evaluations: tuple[int, int] = (0, 0)  # over prepared loaders: that it has begun, and run through to their ends


def checksum_of_rates(rates: Sequence[tuple[str, float]]) -> int:
    """Of settings by name."""
    return zlib.crc32(struct.pack(f"<{len(rates)}d", *(value for _, value in rates)))


def name_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def pack(vote: StepVote, most_lanes: int) -> Tensor:
    """The votes of one job all have the same size, whatever is in them."""
    head = (vote.step, vote.update, vote.stop, vote.check, vote.rates, *vote.evaluations, len(vote.lanes))
    parts = [_HEAD.pack(*head)]
    bits = sum(1 << place for place, used in enumerate(vote.used) if used)
    parts.append(bits.to_bytes(_used_bytes(len(vote.used)), "little"))
    for report in vote.lanes:
        parts.append(_LANE.pack(report.lane, report.weight, report.loss, report.finite, report.check))
        means = list(report.means.items())
        parts += [_MEAN.pack(key, *pair) for key, pair in means]
        parts.append(bytes(_MEAN.size * (MOST_MEANS - len(means))))
    payload = b"".join(parts)
    size = _HEAD.size + _used_bytes(len(vote.used)) + most_lanes * (_LANE.size + MOST_MEANS * _MEAN.size)
    return torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8)


def unpack(packed: Tensor, parameters: int) -> StepVote:
    data = packed.numpy().tobytes()
    step, update, stop, check, rates, begun, whole, count = _HEAD.unpack_from(data)
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
    return StepVote(step, update, Stop(stop), check, used, tuple(lanes), rates, (begun, whole))


def any_used(votes: Sequence[StepVote]) -> list[bool]:
    return [any(flags) for flags in zip(*(vote.used for vote in votes), strict=True)]


def lanes_in_order(votes: Sequence[StepVote]) -> list[LaneReport]:
    return sorted((report for vote in votes for report in vote.lanes), key=lambda report: report.lane)


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


class Voting:
    """Every worker hears every vote, with two checks: all are in the same step, and have the same weights."""

    def __init__(self, comm: Communicator, assignment: LaneAssignment, *, raises: bool = True) -> None:
        """`raises`: weights that differ end the job here; otherwise the coordinator of an elastic job decides."""
        self._comm, self._raises = comm, raises
        self._most_lanes = max(len(lanes) for lanes in assignment)
        self._watch: WeightsWatch | None = None
        self._after_update: tuple[int, int] | None = None  # a step, and what it should find of the weights
        self.votes = 0
        self.watching = False

    def watch(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Which weights must be alike."""
        self._watch, self.watching = WeightsWatch(named), True

    def check(self, step: int) -> int:
        """This worker's sum over the part of the weights whose turn it is."""
        if self._comm.size == 1 or self._watch is None:
            return 0
        return self._watch.check(step) if self._raises else self._watch.check_many(step)

    def updated(self, step: int) -> None:
        """The weights are those that `step` begins with. Of two workers, one can be found out only by itself."""
        if not self._raises and self._watch is not None and self._comm.size == 2:
            self._after_update = step, self._watch.check_many(step)

    def _find_out_oneself(self, vote: StepVote, votes: Sequence[StepVote]) -> None:
        if self._raises or self._after_update is None or len({other.check for other in votes}) == 1:
            return
        step, before = self._after_update
        if step == vote.step and before != vote.check:
            raise ReplicaError(
                f"the weights of this worker have changed between the update of step {step} and the end of step "
                f"{step + 1}, and those of the other have not: silent corruption of its memory"
            )

    def cast(self, vote: StepVote) -> list[StepVote]:
        """The votes of all workers, in rank order."""
        if self._comm.size == 1:
            return [vote]
        rows, handle = self._comm.all_gather(pack(vote, self._most_lanes), f"in the vote of step {vote.step + 1}")
        handle.wait_for_vote(self.votes)
        self.votes += 1
        votes = [unpack(row, len(vote.used)) for row in rows]
        for rank, other in enumerate(votes):
            if (other.step, other.update) != (vote.step, vote.update):
                raise ReplicaError(
                    f"worker {self._comm.rank} is in step {vote.step + 1} (update {vote.update}) but worker {rank} "
                    f"is in step {other.step + 1} (update {other.update}); their loops took different turns"
                )
            if other.rates != vote.rates:
                raise ReplicaError(
                    f"worker {self._comm.rank} and worker {rank} have different learning rates in step {vote.step + 1}"
                    ": a scheduler was made or stepped with a number of one worker (its own loss, len(loader)). Give "
                    "ReduceLROnPlateau what all have, as engine.means or engine.reduce(); make lengths from "
                    "engine.steps_per_epoch(loader)"
                )
        self._find_out_oneself(vote, votes)
        if self._raises:  # who joins an elastic job has run through none
            check_evaluations([one.evaluations for one in votes])
        if self._watch is not None and self._raises:
            self._watch.compare(vote.step, [other.check for other in votes])
        return votes


def check_evaluations(told: Sequence[tuple[int, int]]) -> None:
    """Of each worker: how many it has begun, and run through. One may leave early what another runs through."""
    begun, whole = zip(*told, strict=True)
    if max(whole) > min(begun):
        most, least = whole.index(max(whole)), begun.index(min(begun))
        raise LoopError(
            f"worker {most} has run through {whole[most]} loops over prepared evaluation loaders, worker {least} has "
            f"begun {begun[least]}: such a loader deals its batches to all workers, so what one computes alone is "
            "of a part of the data. Run it on every worker (engine.gather_for_metrics, engine.reduce), or on one "
            "over a DataLoader that engine.prepare() was not given"
        )


def can_be_summed(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.element_size() in (2, 4, 8)


def sum_of_bits(part: Tensor) -> Tensor:
    """Of a flat tensor, as whole numbers."""
    size = part.element_size()
    if part.numel() * size % 8 == 0 and part.storage_offset() * size % 8 == 0:
        return part.view(torch.int64).sum()  # twice as fast as sums that are widened
    return part.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).sum(dtype=torch.int64)


class WeightsWatch:
    """The rotating check: every call looks at the next WATCHED elements of the parameters."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._parts = [
            (name, tensor, low, min(low + WATCHED, tensor.numel()))
            for name, tensor in named
            for low in range(0, tensor.numel(), WATCHED)
            if can_be_summed(tensor)
        ]

    def check(self, step: int) -> int:
        if not self._parts:
            return 0
        return int(self._sum(step % len(self._parts)).item())

    def _sum(self, number: int) -> Tensor:
        _, tensor, low, high = self._parts[number]
        return sum_of_bits(tensor.detach().view(-1)[low:high])

    def check_many(self, step: int) -> int:
        """Of as much as a step may cost: all of a small model, and of a large one the next parts in turn."""
        turns = range(min(len(self._parts), PARTS_AT_ONCE))
        if not turns:
            return 0
        sums = torch.stack([self._sum((step * PARTS_AT_ONCE + turn) % len(self._parts)) for turn in turns])
        total = 0
        for one in sums.tolist():
            total = (31 * total + one) % (1 << 62)
        return total

    def compare(self, step: int, checks: Sequence[int]) -> None:
        if len(set(checks)) <= 1:
            return
        name, _, low, high = self._parts[step % len(self._parts)]
        common = max(set(checks), key=checks.count)
        odd = [rank for rank, check in enumerate(checks) if check != common]
        raise ReplicaError(
            f"before step {step + 1} the weights have drifted apart: {name!r} elements {low:,} to {high:,} differ on "
            f"worker {', '.join(map(str, odd))} from the others; something changed them outside the optimizer, "
            "or the workers' hardware or libraries differ (`paceline doctor` on each host)"
        )


def flip_a_bit(wanted: str | None, named: Sequence[tuple[str, Tensor]]) -> None:
    """What a cosmic ray would do to a tensor, by default the first."""
    for name, tensor in named:
        if wanted in (None, name):
            first = tensor.detach().view(-1).view(torch.uint8)[2:3]
            first ^= 1 << 6
            return
    raise ConfigError(f"no tensor {wanted!r} in which a bit could be flipped; there are {[name for name, _ in named]}")
