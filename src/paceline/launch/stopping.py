"""Stopping on request: the signal that reached a supervisor goes to every worker once, and they get time to save.

    SIGTERM, Ctrl-C, SIGHUP   passed on as SIGTERM; `--grace-s` later whoever still runs is killed
    SIGUSR1                   a notice, such as SLURM's `--signal=USR1@120`: passed on as it is, and nobody is killed
    a second Ctrl-C           ends everything at once

| how the workers ended                           | outcome                                                          |
|-------------------------------------------------|------------------------------------------------------------------|
| all well, one or more with code 75              | 75: stopped on request, start again to continue                  |
| all well                                        | 0: the job was about to end anyway                               |
| one failed for a reason of its own              | the verdict on it, as ever                                       |
| by the signal, or killed when time was up       | 128 + the signal                                                 |

Only workers are asked. Servers end when their workers do, and loader processes are the workers' affair.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.launch.verdict import Outcome, Process, count

GRACE_S = 30.0
NOTICE = signal.SIGUSR1
TELL_AFTER_S = 1.0
"""A script that doesn't handle SIGTERM is gone by then, and nothing needs to be said about waiting."""


@dataclass(frozen=True)
class Request:
    """What the supervisor was asked, and since when."""

    by: signal.Signals
    where: str
    grace_s: float
    since: float

    @property
    def how(self) -> str:
        return "Ctrl-C" if self.by == signal.SIGINT else self.by.name

    @property
    def passed_on(self) -> signal.Signals:
        return NOTICE if self.by == NOTICE else signal.SIGTERM

    @property
    def deadline(self) -> float:
        return math.inf if self.by == NOTICE else self.since + self.grace_s

    def first_words(self) -> str:
        """To a job whose engine is known to stop after a step."""
        said = "stopping after this step, then saving"
        if self.by == signal.SIGINT:
            return f"paceline: {said}; Ctrl-C again leaves at once"
        limit = "" if self.by == NOTICE else f", for at most {self.grace_s:g} s"
        return f"paceline: {self.how}{self.where}: {said}{limit}"

    def waiting(self, processes: Sequence[Process]) -> str:
        """To a job of which nobody knows what it does with the signal."""
        limit = "" if self.by == NOTICE else f" up to {self.grace_s:g} s"
        again = " again" if self.by == signal.SIGINT else ""
        return f"paceline: waiting{limit} for {count(still_there(processes))} to end; Ctrl-C{again} leaves at once"


def obeyed(process: Process) -> bool:
    """It ended by the signal that we passed on, or because others did: no failure."""
    if process.raised is not None:
        return process.raised.is_consequence
    return process.status in (-signal.SIGTERM, -NOTICE)


def still_there(processes: Sequence[Process]) -> list[Process]:
    """Those whose end is waited for; one that is lost may be on a host that is gone, and tell nobody of its own."""
    return [process for process in processes if not (process.is_server or process.ended or process.lost)]


def cut_short(request: Request, processes: Sequence[Process], *, late: Sequence[Process] = ()) -> Outcome:
    """The outcome of a job that was not left to end by itself, for those that were `late` or because nobody waited."""
    steps = [process.step for process in processes if process.step is not None]
    at = f" at step {max(steps)}" if steps else ""
    told = f"; {count(late)} did not end within {request.grace_s:g} s" if late else ""
    return Outcome(128 + request.by, (f"paceline: stopped by {request.how}{request.where}{at}{told}",))
