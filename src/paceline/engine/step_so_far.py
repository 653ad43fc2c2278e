"""What accumulates over one item and one step of the loop, and what is known of the last one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.nn import Parameter

from paceline.collectives.byte_count import Traffic
from paceline.data.sharded_sampler import WorkItem
from paceline.engine.ballot import LaneReport
from paceline.strategies.strategy import Agreement, ItemPlace


@dataclass
class Timing:
    """Seconds of the last step."""

    backward_s: float = 0.0
    exposed_s: float = 0.0  # from the end of the last backward until the gradient was there
    left_during_backward: int = 0  # buckets
    waited_for_data_s: float = 0.0


@dataclass
class StepSoFar:
    """What accumulates over one step."""

    agreement: Agreement = Agreement.NOW
    lowest: int = 0  # lane that has samples
    owner: int = 0  # the worker that rides it
    in_step: bool = True  # what workers send before their last backward is in the same order everywhere
    reports: dict[int, LaneReport] = field(default_factory=dict)
    learning_rates: list[float] | None = None
    gradient_versions: list[tuple[Parameter, int]] = field(default_factory=list)
    acted: set[int] = field(default_factory=set)
    traffic_before: Traffic = field(default_factory=Traffic)
    empty: bool = False  # all workers leave it out: Σ weight was 0, or the loss was not finite and is skipped
    overflowed: bool = False  # the scaled gradient was not finite: nobody applies it
    check: int = 0  # of what all workers must have alike
    committed: bool = True  # it counts, whatever happens to workers from now on
    counted: bool = False
    watched: bool = False  # its lanes' gradients are hashed, for a second opinion
    holders: Sequence[Sequence[int]] = ()  # of its lanes, by worker
    was_asked_to_stop: bool = False  # before this step
    loss_scale: dict[str, Any] | None = None  # likewise
    left_out: set[tuple[int, int]] = field(default_factory=set)  # (lane, micro-batch) that had no backward

    def report(self, lane: int) -> LaneReport:
        return self.reports.setdefault(lane, LaneReport(lane))

    def place(self, item: WorkItem) -> ItemPlace:
        if item.shadow:
            return ItemPlace(item.lane, item.last_of_lane, item.last_of_step, shadow=True)
        report = self.reports[item.lane]
        told = report.weight, report.left_out, report.samples
        return ItemPlace(item.lane, item.last_of_lane, item.last_of_step, False, *told)


@dataclass
class ItemSoFar:
    """What has happened with the item that is out."""

    step_called: bool = False
    ran_last: bool = False
    forward_done: bool = False  # its buffers are taken
    before: LaneReport | None = None  # what its lane had told before the first backward, until the last one is done
    failed: bool = False  # a backward raised

    @property
    def has_run(self) -> bool:
        """Some backward, or a part of one."""
        return self.ran_last or self.failed or self.before is not None

    def tell(self, report: LaneReport, item: WorkItem, loss: float, weight: float, *, last: bool) -> None:
        """What a backward of the item adds to its lane's report."""
        if self.before is None:
            self.before = replace(report)
        if last:
            report.weight += weight
            report.samples += item.samples
        if report.finite:
            report.loss, report.finite = loss, math.isfinite(loss)

    def take_back(self, report: LaneReport) -> None:
        """The item counts as empty: its lane has told nothing about it. Means stay, as for an item without backward."""
        if self.before is not None:
            report.weight, report.samples, report.left_out = (
                self.before.weight, self.before.samples, self.before.left_out
            )  # fmt: skip
            report.loss, report.finite = self.before.loss, self.before.finite
            self.before = None
