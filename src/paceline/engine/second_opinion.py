"""A second opinion: every so many steps each lane is computed by another worker too, and the bits are compared.

    step 100      lane 0   lane 1   lane 2            one hash of each lane's gradient, told with the step votes
    first pass    w0: a    w1: b    w2: c
    second pass   w1: a    w2: b    w0: d             lane 2 differs: a third pass
    third pass    w2: a    w0: b    w1: c             two have c, so worker 0 has computed it wrong

A processor that computes wrong, or memory that turns a bit over while a gradient is made, leaves no other trace: all
workers add up the same wrong number. Nothing of a pass is applied before two workers agree on every lane.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.data.work_source import WorkSource
from paceline.elastic.memory_checkpoint.shard_checksum import NoShardChecksum
from paceline.engine.config import EngineConfig
from paceline.engine.step import OnePass
from paceline.engine.vote import LaneReport
from paceline.errors import ConfigError, ReplicaError
from paceline.strategies.registry import STRATEGIES, LaneAssignment
from paceline.strategies.strategy import Strategy
from paceline.world import messages
from paceline.world.checked_values import whole_number

MOST_PASSES = 5


@dataclass(frozen=True)
class Verdict:
    again: bool
    wrong: tuple[tuple[int, int], ...] = ()  # (worker, lane), where two others agree on something else


@dataclass
class SecondOpinion:
    every: int
    _passes: list[tuple[dict[int, int], dict[int, int]]] = field(default_factory=list)  # hashes and riders, by lane

    def __post_init__(self) -> None:
        whole_number("second_opinion", self.every, least=1, why="every so many steps, so at least 1; None for never")

    def due(self, round: int) -> bool:
        return (round + 1) % self.every == 0

    @property
    def rotation(self) -> int:
        """By how many workers the lanes of the pass that comes next are passed on."""
        return len(self._passes)

    def forget(self) -> None:
        self._passes.clear()

    def hear(self, hashes: Mapping[int, int], holders: Sequence[Sequence[int]], step: int) -> Verdict:
        """What a pass gave for each lane; all workers hear the same, and so decide the same."""
        riders = {lane: worker for worker, lanes in enumerate(holders) for lane in lanes}
        self._passes.append((dict(hashes), riders))
        if len(self._passes) == 1:
            return Verdict(again=True)
        wrong: list[tuple[int, int]] = []
        for lane, mine in hashes.items():
            found, times = Counter(told[lane] for told, _ in self._passes).most_common(1)[0]
            if times < 2 or found != mine:
                if len(self._passes) == MOST_PASSES:
                    raise ReplicaError(
                        f"lane {lane} of step {step} was computed {MOST_PASSES} times, and no two workers agree in the "
                        "end; the model draws random numbers of its own, or the hardware is broken"
                    )
                return Verdict(again=True)
            wrong += [(computed_by[lane], lane) for told, computed_by in self._passes if told[lane] != found]
        return Verdict(again=False, wrong=tuple(dict.fromkeys(wrong)))


class ComparedPasses(OnePass):
    """The passes of a step, and whose lanes are whose in them."""

    def __init__(self, opinion: SecondOpinion, assignment: LaneAssignment, part: NoShardChecksum) -> None:
        self.opinion, self._part = opinion, part
        self._assignment = assignment  # of the workers when no lane is passed on

    def regrouped(self, assignment: LaneAssignment) -> None:
        self._assignment, self.are_on = assignment, False

    def forget(self) -> None:
        self.opinion.forget()

    def check_part(self, round: int) -> None:
        self._part.check(round)

    def next_assignment(self) -> LaneAssignment:
        self.again = False
        turn = self.opinion.rotation % len(self._assignment)
        self.are_on = turn > 0
        return (*self._assignment[turn:], *self._assignment[:turn])

    def watch(self, active: Strategy, round: int) -> bool:
        watched = self.opinion.due(round)
        active.watch_lanes(watched)
        return watched

    def wants_another(
        self, reports: Sequence[LaneReport], holders: Sequence[Sequence[int]], step: int, rank: int
    ) -> bool:
        """Compare the lanes' gradients with what other workers have made of them, if they have."""
        verdict = self.opinion.hear({report.lane: report.check for report in reports}, holders, step)
        for worker, lane in verdict.wrong:
            text = f"worker {worker} computed lane {lane} of step {step} otherwise than two other passes did"
            if worker == rank and len(holders) > 1:
                raise ReplicaError(f"{text}: its processor or its memory is not to be trusted")
            messages.warn(f"{text}; their result is used")
        self.again = verdict.again
        if not verdict.again:
            self.opinion.forget()
        return verdict.again


def check_second_opinion(config: EngineConfig, source: WorkSource) -> None:
    """Whether lanes can be passed on to other workers at all."""
    name, able = config.strategy.name, sorted(n for n, entry in STRATEGIES.items() if entry.passes_lanes_on)
    if config.compression is not None:
        raise ConfigError(
            "Engine(second_opinion=…) with compression: a lane's residual stays with the worker that computes it, so "
            "no other can compute it again; choose one of the two"
        )
    if name not in able or source.takes_places or config.reduction != "exact":
        what = f"strategy={name!r}" if name not in able else "this"
        raise ConfigError(
            f"Engine(second_opinion=…) with {what}: lanes are passed on to other workers under {', '.join(able)}, "
            "with exact sums and a dataset that has positions (not a stream)"
        )
