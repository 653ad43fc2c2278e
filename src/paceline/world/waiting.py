"""Long waits for other workers: the call of the script that waits is reported to the supervisor, which knows for whom.

    a wait begins              noted: one entry of a dictionary, and nothing else on the way of a step
    it lasts REPORT_AFTER_S      {"kind": "waits", …} to the supervisor, who knows where the others are
    it lasts PRINT_AFTER_S     a line on stderr, where there is no supervisor (torchrun, SLURM, MPI)
    it ends                    {"kind": "goes_on"}
    it fails                   {"kind": "wait_failed", …}: if its time was up, the supervisor says who has not come,
                               and where there is none the workers do (`hang_board`)

The call and the line of the script are read from the stack of the thread that waits, by another one, and only then.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from paceline.errors import WorldError
from paceline.world import messages
from paceline.world.control import Supervisor
from paceline.world.flight_recorder import tell_flight_record
from paceline.world.hang_board import HangBoard
from paceline.world.script_line import frames_to_script, place_of

LOOK_EVERY_S = 0.5
REPORT_AFTER_S = 1.0
PRINT_AFTER_S = 5.0
LONGEST_TEXT = 500
ENDS_WITHIN_S = 1.0  # a watching thread: it may be asking a store that does not answer any more
TIMED_OUT = re.compile(r"timeout|timed out|took longer than|did not come", re.IGNORECASE)
"""What errors of gloo, NCCL, torch's stores and our own say when the time of a wait was up."""

LOOP = "the training loop"
CALLS = {
    "Engine.__init__": "Engine()",
    "Engine.backward": LOOP,
    "Engine.update": LOOP,
    "Engine.clip_grad_norm_": LOOP,
    "PreparedLoader.__iter__": LOOP,
    "OncePerStep.adopt.<locals>.acts_once_per_step": LOOP,
    "EvaluationLoader.__iter__": "an evaluation loop",
}
"""What a script writes, by the name of the code that it enters there; methods of an Engine are named as they are."""


class Noted(NamedTuple):
    """A wait of a thread: for whom, as far as it knows, since when, and in what."""

    whom: str
    since: float
    doing: str


waited: dict[int, float] = {}
"""By thread: the seconds that it has waited for others so far."""
_noted: dict[int, Noted] = {}
_watches: list[WaitWatch] = []


class Waiting:
    """`with Waiting("worker 1"):` around whatever waits for others; of nested ones the outermost counts.

    `doing` are words about it: `in the vote of step 7`.
    """

    __slots__ = ("_doing", "_outer", "_thread", "_whom")

    def __init__(self, whom: str = "the other workers", doing: str = "") -> None:
        self._whom, self._doing = whom, doing

    def __enter__(self) -> Waiting:
        self._thread = threading.get_ident()
        self._outer = _noted.get(self._thread)
        if self._outer is None:
            _noted[self._thread] = Noted(self._whom, time.monotonic(), self._doing)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._outer is None:
            noted = _noted.pop(self._thread, None)
            if noted is not None:
                waited[self._thread] = waited.get(self._thread, 0.0) + time.monotonic() - noted.since
            if isinstance(error, Exception) and noted is not None:
                for watch in tuple(_watches):
                    watch.failed(noted, error)

    def still_for(self, whom: str) -> None:
        """It is known better now."""
        _noted[self._thread] = _noted[self._thread]._replace(whom=whom)


class WaitWatch:
    """Watches whether the thread that made it waits; its maker closes it."""

    def __init__(
        self,
        supervisor: Supervisor,
        name: str,
        board: HangBoard | None = None,
        *,
        generation: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`board`: where workers tell each other who is late, if there is no supervisor.

        `generation` is asked when a wait fails: which one of an elastic job it was in.
        """
        self._supervisor, self._name, self._board, self._generation = supervisor, name, board, generation
        self._thread = threading.get_ident()
        self._reported_since: float | None = None
        self._printed: set[tuple[str, str]] = set()
        self._closed = threading.Event()
        _watches.append(self)
        self._watching = threading.Thread(target=self._keep, name="paceline-waits", daemon=True)
        self._watching.start()

    def close(self) -> None:
        self._closed.set()
        if self in _watches:
            _watches.remove(self)
        self._watching.join(ENDS_WITHIN_S)

    def failed(self, noted: Noted, error: Exception) -> None:
        """Whatever the script makes of the error: the supervisor hears of it at once."""
        call, place = waiting_call(sys._getframe(1))
        text = str(error).partition("\n")[0][:LONGEST_TEXT]
        seconds = time.monotonic() - noted.since
        what: dict[str, str | float | None] = {"call": call, "place": place, "doing": noted.doing, "text": text}
        self._tell("wait_failed", **what, seconds=seconds, generation=self._generation())
        if not TIMED_OUT.search(text):
            return
        tell_flight_record(self._name)
        if self._board is not None:
            self._board.report(f"{noted.doing or f'in {call}'}{f' ({place})' if place else ''}", seconds)

    def _keep(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            self._look(time.monotonic())
            if self._board is not None:
                noted = _noted.get(self._thread)
                self._board.look(None if noted is None else noted.doing)

    def _look(self, now: float) -> None:
        noted = _noted.get(self._thread)
        if self._reported_since is not None and (noted is None or noted.since != self._reported_since):
            self._reported_since = None
            self._tell("goes_on")
        if noted is None or noted.since == self._reported_since:
            return
        since = noted.since
        if now - since < (REPORT_AFTER_S if self._supervisor.is_there else PRINT_AFTER_S):
            return
        call, place = waiting_call(sys._current_frames().get(self._thread))
        self._reported_since = since
        if self._supervisor.is_there:
            self._tell("waits", call=call, place=place, seconds=now - since)
        elif call != LOOP and (call, place) not in self._printed:  # a slow step is not reported
            self._printed.add((call, place))
            where = f"{call} ({place})" if place else call
            line = f"paceline: {self._name} has waited {now - since:.0f} s in {where} for {noted.whom}"
            messages.logger("world").warning(line)

    def _tell(self, kind: str, **fields: str | float | None) -> None:
        with contextlib.suppress(OSError, WorldError):  # the engine is being closed, or the supervisor is stopped
            self._supervisor.tell(kind, **fields)


def waiting_call(innermost: FrameType | None) -> tuple[str, str]:
    """What a thread was asked to do by the script, and at which line of it; empty where that is not known."""
    inside, script = frames_to_script(innermost)
    return _named(list(reversed(inside))), "" if script is None else place_of(script)


def _named(frames: list[FrameType]) -> str:
    """The outermost of ours that a script knows by name."""
    names = [frame.f_code.co_qualname for frame in frames]
    for name in names:
        if name in CALLS:
            return CALLS[name]
        if name.startswith("Engine."):
            return f"engine.{name.removeprefix('Engine.')}()"
    return f"{names[0]}()" if names else "a call"
