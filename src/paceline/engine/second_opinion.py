"""A second opinion: every so many steps each lane is computed by another worker too, and the bits are compared.

    step 100      lane 0   lane 1   lane 2            one hash of each lane's gradient, told with the ballots
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

from paceline.errors import ConfigError, ReplicaError

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
        if self.every < 1:
            raise ConfigError(
                f"Engine(second_opinion={self.every}): every so many steps, so at least 1; None for never"
            )

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
            wrong += [(rode[lane], lane) for told, rode in self._passes if told[lane] != found]
        return Verdict(again=False, wrong=tuple(dict.fromkeys(wrong)))
