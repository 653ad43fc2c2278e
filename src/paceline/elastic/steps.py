"""Which steps of an elastic job are committed, and what the READYs of all its members say of the next one.

| all are ready                            | found        | then                                                   |
|------------------------------------------|--------------|--------------------------------------------------------|
| for one step, with equal checks          | Agreed       | it is committed, once and for ever                     |
| for one step, most with equal checks     | FenceWorkers | those who differ are out: silent corruption            |
| for one step, no check has a majority    | MeetAgain    | it is done again; the second time in a row: Hopeless   |
| for different steps                      | Hopeless     | the job ends                                           |

A step may be committed in several updates, so a place is (step, update). Places only grow, but for `take_up`: a loop
begins where a checkpoint has brought the workers to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.elastic.decisions import Rewind
from paceline.elastic.findings import FenceWorkers, Hopeless, MeetAgain
from paceline.elastic.slots import Ready, named

WHOLE_STEP = 1 << 62
"""As the update of a step that is done with all its updates."""


@dataclass(frozen=True)
class Agreed:
    step: int
    update: int
    more: bool
    """Nobody's loop ends with it."""
    is_new: bool
    """No earlier start of the job had come so far."""


class Steps:
    def __init__(self) -> None:
        self._committed = (0, WHOLE_STEP)
        self._furthest = (0, 0)
        self._ties = 0
        self._raised_in: set[tuple[tuple[int, int], bool]] = set()

    @property
    def last(self) -> int:
        """The last one that is committed."""
        return self._committed[0]

    def is_behind(self, ready: Ready) -> bool:
        """Whether it is for a place that is committed."""
        return ready.place <= self._committed

    def where(self, *, in_loop: bool, running: bool) -> str:
        """What is being worked on, in words."""
        step, update = self._committed
        if in_loop:
            return f"in step {step + 1 if update == WHOLE_STEP or update == 0 else step}"
        if step:
            return f"after step {step}"
        return "before its first step" if running else "while starting"

    def take_up(self, said: Mapping[int, int], *, first: bool) -> Rewind | Hopeless | None:
        """The loop begins where all, by slot, say: at the step that a checkpoint left, or that was last."""
        if len(set(said.values())) > 1:
            told = ", ".join(f"worker {number} after step {at}" for number, at in said.items())
            return Hopeless(f"the workers begin at different steps ({told}); they loaded different checkpoints?")
        step = next(iter(said.values()))
        elsewhere = step != self.last
        if elsewhere:
            self._committed = (step, WHOLE_STEP)
        return Rewind(step) if elsewhere or first else None

    def begin_anew(self) -> None:
        """All start again, and will say where."""
        self._ties = 0

    def failed_before(self, *, at_start: bool = False) -> bool:
        """The code of a script failed in the step that is being worked on, or before it: not for the first time?"""
        place = self._committed, at_start
        again = place in self._raised_in
        self._raised_in.add(place)
        return again

    def compare(self, readies: Mapping[int, Ready]) -> Agreed | FenceWorkers | MeetAgain | Hopeless:
        """All are ready, by slot: for the same step, and with the same result?"""
        if len({ready.place for ready in readies.values()}) > 1:
            told = ", ".join(f"worker {number} for step {ready.step}" for number, ready in readies.items())
            return Hopeless(f"the workers are ready for different steps: {told}")
        first = next(iter(readies.values()))
        checks = {number: ready.check for number, ready in readies.items() if ready.check}
        if len(set(checks.values())) > 1:
            return self._disagree(first.step, checks)
        self._committed = first.place
        self._ties = 0
        is_new, self._furthest = first.place > self._furthest, max(first.place, self._furthest)
        return Agreed(first.step, first.update, more=all(ready.more for ready in readies.values()), is_new=is_new)

    def _disagree(self, step: int, checks: dict[int, int]) -> FenceWorkers | MeetAgain | Hopeless:
        """Full copies that should be equal are not: what the majority has is right."""
        most, holders = Counter(checks.values()).most_common(1)[0]
        if holders * 2 > len(checks):
            right = named([number for number, check in checks.items() if check == most])
            how = f"weights differ from those of {right} in step {step}: silent corruption"
            return FenceWorkers({n: f"worker {n}'s {how}" for n, check in checks.items() if check != most})
        self._ties += 1
        both = f"the weights of {named(list(checks))} differ in step {step}"
        if self._ties > 1:
            return Hopeless(f"{both}, twice: silent corruption, and nobody can say whose are right")
        why = f"{both}; the step is done again"
        return MeetAgain(why, said=why)
