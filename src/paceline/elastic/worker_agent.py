"""The worker agent: a worker's connection to the coordinator. It says READY, hears COMMIT, and learns who is there now.

    worker        lanes, exchange ─► READY(generation, step) ───────────────────► applied, step + 1
    coordinator                          all are ready ─► step log ─► COMMIT(step)
                                         a worker died ─► GENERATION(number, members)      the step is done again

    worker        ENTER(generation, loop, step) ─────────────────► the loop's first step
    coordinator           all have entered ─► BEGIN(loop)          a worker died: enter again, in the new generation

What the coordinator says comes on one ordered line, read by the control client's thread. A COMMIT that was said before
a GENERATION is heard before it, so of the workers that are left either all count a step or none does. When a new
generation is heard whatever was watched for the old one (`watch`: its group, connections to other hosts) is abandoned
at once, wherever the loop waits in it; unless no worker is lost: then COMMIT or BEGIN has told of it, and all change to
it together, before the next step.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.elastic.decisions import Generation
from paceline.elastic.faults import fault_point
from paceline.errors import WorldError
from paceline.world import messages
from paceline.world.control import SUPERVISOR_GONE, ControlClient
from paceline.world.waiting import Waiting

ASK_AFTER_S = 1.0
LAST = 1 << 62  # update of a step that is over


class Abandonable(Protocol):
    """What ends with a generation: a group of workers, a connection to one of them."""

    def abandon(self, why: str) -> None:
        """End every wait in it at once, from any thread; for good."""
        ...


class WorkerAgent:
    """`slot` names this worker for the life of the job; `wait_s` is how long the coordinator may take to decide.

    A server process has one too, by its rank. It hears of no commits, so where a worker joins `on_joining` is told.
    """

    _of_process: WorkerAgent | None = None

    @classmethod
    def others_changed(cls) -> bool:
        """Of this process, if it is one of an elastic job: it has yet to regroup with others."""
        return cls._of_process is not None and cls._of_process.changed

    def __init__(self, client: ControlClient, slot: int, incarnation: int, first: Generation, wait_s: float) -> None:
        self.slot = slot
        self._name = f"server {first.servers.index(slot)}" if slot in first.servers else f"worker {slot}"
        self.joins = incarnation > 0
        self.now = first  # what this worker is grouped in
        self.on_joining: Callable[[Generation], None] = lambda generation: None
        self._client, self._wait_s = client, wait_s
        self._newest = first
        self._committed = (0, 0)  # step, update
        self._begun = 0  # the loop that all have entered
        self._announced = 0  # the generation to change to before the next step
        self._watched: list[tuple[int, Abandonable]] = []  # and of which generation it is
        self._refused: str | None = None
        self._loop_of_others = 0
        self._news = threading.Condition()
        WorkerAgent._of_process = self
        client.heard = self._hear
        client.tell("elastic.here", incarnation=incarnation)

    # -- what the loop asks ------------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """There is a newer generation than the one that this worker is grouped in, or will be in a moment."""
        return max(self._newest.number, self._announced) > self.now.number

    def commits(self, step: int, update: int, *, check: int, more: bool) -> bool:
        """Say READY and wait for the decision: True if the step counts, False if it is to be done again."""
        number = self.now.number
        self._client.tell("elastic.ready", generation=number, step=step, update=update, check=check, more=more)
        fault_point("before_commit", step)
        with self._news:
            self._wait_for(
                lambda: self._committed >= (step, update) or self._newest.number > number,
                f"the coordinator (`paceline run` on host 0) to commit step {step}; is that process stopped (SIGSTOP)?",
            )
            return self._committed >= (step, update)

    def next_generation(self, after: int, why: str) -> Generation:
        """The newest one, if its number is above `after`; waits until it is, and says that something broke, and `why`.

        A death is known to the coordinator within milliseconds, so it is asked for a new generation only later.
        """
        told, deadline = False, time.monotonic() + self._wait_s
        with Waiting("the coordinator"), self._news:
            while self._newest.number <= after:
                self._news.wait(ASK_AFTER_S)
                if self._newest.number <= after and not told:
                    told = True
                    self.failed(after, why)
                if time.monotonic() > deadline:
                    raise WorldError(f"{self._name} waited {self._wait_s:g} s to hear who goes on, after: {why}")
            return self._newest

    def is_newer_than(self, number: int) -> bool:
        return self._newest.number > number

    def watch(self, one: Abandonable, generation: int) -> None:
        """It is of this generation, and is abandoned as soon as there is another: now, where that is known already."""
        with self._news:
            late = self._newest.number > generation
            watched = [(number, other) for number, other in self._watched if number == generation]
            self._watched = watched if late else [*watched, (generation, one)]
        if late:
            one.abandon("the workers have changed")

    def grouped(self, generation: Generation) -> None:
        self.now = generation
        self._client.tell("elastic.grouped", generation=generation.number)

    def failed(self, number: int, why: str) -> None:
        """The coordinator has told of no death, but this generation's communication broke here."""
        self._client.tell("elastic.failed", generation=number, why=why)

    def lost_state(self, number: int, why: str) -> None:
        """No copy of a part of the state is left, so no worker can go on: all are to start anew."""
        self._client.tell("elastic.lost", generation=number, why=why)

    def enters(self, loop: int, step: int, facts: Mapping[str, str | int]) -> bool:
        """Wait until all have entered the loop: True. False: the workers have changed before."""
        number = self.now.number
        with self._news:
            self._committed = (step, LAST)  # it may have gone back to an older state
        self._client.tell("elastic.enter", generation=number, loop=loop, step=step, facts=dict(facts))
        with self._news:
            self._wait_for(
                lambda: self._begun >= loop or self._newest.number > number,
                "all workers to enter their training loop; has one of them not come to it, or is the coordinator "
                "(`paceline run` on host 0) stopped (SIGSTOP)?",
            )
            return self._begun >= loop

    def leave(self, loop: int) -> None:
        self._client.tell("elastic.leave", loop=loop)

    def ask_to_join(self, loop: int, facts: Mapping[str, str | int]) -> Generation | None:
        """Stand in front of loop number `loop` until the others take this worker in; None: they are past that loop.

        `loop` 0 is whichever they are in, or come to. It may take as long as the others need for a step, or for what
        they do between two loops.
        """
        if 0 < loop < self._loop_of_others:
            return None
        self._client.tell("elastic.join", loop=loop, facts=dict(facts))
        with self._news:
            while True:
                if self._refused is not None:
                    raise WorldError(f"{self._name} may not join: {self._refused}")
                if self.changed:
                    return self._newest
                if loop and self._loop_of_others > loop:
                    return None
                self._news.wait(1.0)  # ends with the job: the control client ends the process when its line goes dead

    # -- what the coordinator says -----------------------------------------------------------------------------------

    def _hear(self, kind: str, body: dict[str, Any]) -> None:
        """On the control client's thread."""
        if kind == "elastic.generation":
            self._change(Generation.of_message(body))
            return
        with self._news:
            match kind:
                case "elastic.commit":
                    self._committed = max(self._committed, (int(body["step"]), int(body["update"])))
                case "elastic.begin":
                    self._begun = max(self._begun, int(body["loop"]))
                case "elastic.refused":
                    self._refused = str(body["why"])
                case "elastic.wait":
                    self._loop_of_others = int(body["loop"])
            self._announced = max(self._announced, int(body.get("then") or 0))
            self._news.notify_all()

    def _change(self, generation: Generation) -> None:
        if self.slot not in (*generation.members, *generation.servers):
            # Fenced, and still here: what it would do from now on is another's to do.
            left_out = f"the coordinator goes on without {self._name} ({generation.why}); this process exits"
            messages.logger("elastic").warning(f"paceline: {left_out}")
            os._exit(SUPERVISOR_GONE)
        with self._news:
            if generation.number <= self._newest.number:
                return
            told_of = generation.number == self._announced  # a server hears of no commit: who is there tells it
            comes = self.slot in generation.servers and not self.now.includes(generation)
            only_joins = (told_of or comes) and generation.includes(self.now)
            self._newest = generation
            if not only_joins:
                over, self._watched = self._watched, []
            self._news.notify_all()
        if only_joins:
            self.on_joining(generation)
            return
        for _, one in over:
            one.abandon(generation.why)

    def _wait_for(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._wait_s
        with Waiting():
            while not true():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WorldError(f"{self._name} waited {self._wait_s:g} s for {what}")
                self._news.wait(min(left, 1.0))
