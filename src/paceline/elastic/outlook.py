"""What becomes of an elastic job that has lost processes: it depends on who is left, and on what was lost.

| left                                            | then                                                            |
|-------------------------------------------------|-----------------------------------------------------------------|
| members who have the state                      | they meet again and redo the step; a replacement may start      |
| fewer of them than --min-workers                | the job ends with code 4                                        |
| nobody who has the state                        | all start anew, where that is allowed and enough can            |
| nobody who has it, and some have finished       | the job ends; the launcher judges                               |
| everyone: the lost one had not joined           | nobody meets; it is only said                                   |
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.decisions import TOO_FEW_LEFT, Rules, Say
from paceline.elastic.findings import Hopeless, MeetAgain, StateLost
from paceline.elastic.newcomers import Newcomers
from paceline.elastic.places import MOST_STARTS, Places
from paceline.elastic.servers import Servers
from paceline.elastic.slots import Slot, Standing, workers


class Outlook:
    def __init__(self, rules: Rules, places: Places, newcomers: Newcomers) -> None:
        self._rules, self._places, self._newcomers = rules, places, newcomers

    def after_members(self, what: str, lost: Sequence[int], left: Sequence[Slot]) -> MeetAgain | StateLost | Hopeless:
        """`what` befell workers of whom one at least was a member."""
        if all(slot.number in self._newcomers for slot in left):
            finished = any(slot.standing is Standing.FINISHED for slot in self._places.slots)
            return Hopeless("", code=None) if finished else StateLost(f"{what}; no worker is left")
        if len(left) < self._rules.min_workers:
            rest = f"{workers(len(left))} left, and --min-workers is {self._rules.min_workers}"
            return Hopeless(f"{what}; {rest}", code=TOO_FEW_LEFT)
        goes_on = "go on" if len(left) > 1 else "goes on"
        return MeetAgain(what, said=f"{what}; {workers(len(left))} {goes_on}{self._replaced(lost, left)}")

    def after_others(self, what: str, lost: Sequence[int], left: Sequence[Slot]) -> list[Say]:
        """It befell workers who had not joined; of those who were refused that is known."""
        slots = [self._places.slots[number] for number in lost]
        if all(slot.closed for slot in slots):
            return []
        and_so = self._replaced(lost, left) or ("" if slots[0].away else "; its place stays empty")
        return [Say(f"{what}, before it had joined{and_so}")]

    def _replaced(self, lost: Sequence[int], left: Sequence[Slot]) -> str:
        in_time = any(slot.in_loop for slot in left)
        replaced = in_time and any(self._places.may_refill(self._places.slots[number]) for number in lost)
        return ", a replacement starts" if replaced else ""

    def after_servers(
        self, what: str, lost: Sequence[int], servers: Servers, left: Sequence[Slot], *, served: bool
    ) -> MeetAgain | Say | None:
        """It befell servers, of whom one at least `served`; or they had not joined."""
        in_time = any(slot.in_loop for slot in left) and not self._places.stopping
        replaced = in_time and all(map(servers.may_refill, lost))
        and_so = ", a replacement starts" if replaced else ""
        if not served:
            refused = all(servers.slot(rank).closed for rank in lost)
            return None if refused else Say(f"{what}, before it had joined{and_so or '; its place stays empty'}")
        staying = [slot.number for slot in left if slot.number not in self._newcomers]
        said = f"{what}; {servers.instead(staying)}{and_so}"
        return MeetAgain(what, said) if staying else Say(said)

    def without_state(self, what: str) -> Hopeless | None:
        """Why the job can't even start anew, if it can't."""
        here, fewest = len(self._places.here), self._rules.min_workers
        if not self._places.may_begin_anew():
            often = f", after {MOST_STARTS} starts anew without a new step" if self._places.restarts else ""
            return Hopeless(f"{what}{often}", code=TOO_FEW_LEFT)
        if here < fewest:
            rest = f"{workers(here)} could start anew, and --min-workers is {fewest}"
            return Hopeless(f"{what}; {rest}", code=TOO_FEW_LEFT)
        return None
