"""What time alone brings to an elastic job: each look at the clock and at who is there finds whose time is up.

    a tick ─▶ lingering ─▶ silent ─▶ late ─▶ lost_each_other        each sees what the one before it has led to

    lingering         said that it fails, and does not go           it is fenced, and nobody misses it
    silent            gives no sign of life                         fenced; who computes meanwhile is borne for longer
    late              alive, but not where the others wait          fenced; servers first, as workers wait for them
    lost_each_other   communication broke, and nobody has died,     they meet again, MOST_BREAKS times in one step;
                      nor is one borne who can't come              after FEW_BREAKS who stays away is fenced

How long each may last, and since when it is counted, is for `Deadlines` to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.elastic.deadlines import Deadlines
from paceline.elastic.decisions import Fence, Rules, Say
from paceline.elastic.findings import FenceServers, FenceWorkers, Finding, Hopeless, MeetAgain
from paceline.elastic.servers import Servers
from paceline.elastic.slots import Slot, Standing

FEW_BREAKS, MOST_BREAKS = 2, 5


@dataclass(frozen=True)
class Scene:
    """The job at the moment of a look."""

    workers: Sequence[Slot]
    members: Sequence[Slot]
    """Those of `workers` that belong to the current generation."""
    servers: Servers
    running: bool
    where: str
    """What is being worked on, in words."""

    @property
    def processes(self) -> list[Slot]:
        return [*self.workers, *self.servers.slots]


class Timekeeper:
    def __init__(self, rules: Rules) -> None:
        self._deadlines = Deadlines(rules)
        self._breaks = 0

    # ---- from when on time counts -------------------------------------------------------------------------

    def one_is_ready(self, now: float) -> None:
        self._deadlines.first_ready(now)

    def step_counts(self) -> None:
        self._breaks = 0
        self._deadlines.begin_step()

    def begin_generation(self, now: float) -> None:
        self._deadlines.begin_generation(now)

    def all_have_met(self) -> None:
        self._deadlines.regrouping_since = None

    def complains(self, slot: int, why: str, now: float) -> None:
        """Communication broke for it, and it says so."""
        self._deadlines.broken = self._deadlines.broken or (now, why)
        self._deadlines.complained.add(slot)

    def begin_anew(self) -> None:
        self._breaks = 0
        self._deadlines.forget()

    # ---- looks --------------------------------------------------------------------------------------------

    def may_judge(self, scene: Scene, now: float) -> bool:
        """Not where our own tick is late."""
        return self._deadlines.tick(scene.processes, now)

    def lingering(self, scene: Scene, now: float) -> list[Fence]:
        lingering = [slot for slot in scene.processes if self._deadlines.lingers(slot, now)]
        for slot in lingering:
            slot.standing = Standing.FENCED
        return [Fence(slot.number) for slot in lingering]

    def silent(self, scene: Scene, now: float) -> list[Say | Finding]:
        excused = [slot.number for slot in scene.processes if self._deadlines.is_excused(slot, now)]
        limit = f"a call holds Python's lock? It is given {self._deadlines.longest_silence_s:g} s"
        found: list[Say | Finding] = [
            Say(f"{scene.servers.name(number)} is silent {scene.where}, but computes: {limit}") for number in excused
        ]
        late = {slot.number: why for slot in scene.processes if (why := self._deadlines.silence(slot, now))}
        how = {number: f"{why} {scene.where}" for number, why in late.items()}
        found.append(FenceWorkers({n: f"worker {n} {why}" for n, why in how.items() if not scene.servers.has(n)}))
        found += [FenceServers((number,), why) for number, why in how.items() if scene.servers.has(number)]
        return found

    def late(self, scene: Scene, now: float) -> list[Finding]:
        if not scene.running:
            return []
        slow, limit_s = self._deadlines.late(list(scene.members), now)
        told = f"is alive, but {limit_s:g} s late {scene.where}"
        if slow and (absent := scene.servers.absent()):
            return [FenceServers(tuple(absent), told)]
        return [FenceWorkers({slot.number: f"worker {slot.number} {told}" for slot in slow})]

    def lost_each_other(self, scene: Scene, now: float) -> list[Finding]:
        why = self._deadlines.unexplained(now)
        if not why or not scene.running or not scene.members:
            return []
        if any(self._deadlines.is_borne(slot, now) for slot in scene.members):
            return []
        if self._breaks >= FEW_BREAKS and (absent := self._deadlines.absent(list(scene.members))):
            told = f"is alive, but does not come to where the others meet {scene.where}"
            fenced = FenceWorkers({number: f"worker {number} {told}" for number in absent})
            return [fenced] if self._deadlines.is_long_broken(now) else []
        self._breaks += 1
        if self._breaks > MOST_BREAKS:
            return [Hopeless(f"the workers lost each other {self._breaks} times {scene.where}; the last: {why}")]
        return [MeetAgain(why, said=f"the workers lost each other {scene.where} ({why}); they meet again")]
