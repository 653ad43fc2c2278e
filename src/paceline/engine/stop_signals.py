"""Stop and go: a signal to any worker ends the loop of all of them after one and the same step.

    SIGTERM  ─┐
    SIGINT   ─┼─▶ worker 2 is *asked* ─▶ its next vote says so ─▶ every worker has *agreed*: the loop ends here,
    SIGUSR1  ─┘                                                     the script saves, and leaves with code 75

A handler only takes note: Python runs it between two instructions of the main thread, where nothing may be sent and
hardly anything printed. A second Ctrl-C, a second or more after the first, is not taken note of but obeyed at once.
(Sooner it may be the same one: torchrun passes on what the terminal has sent to its workers already.)
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from paceline.errors import ConfigError, LoopError
from paceline.world.control import STOPPED_ON_REQUEST

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is what SLURM sends ahead of the time limit when asked to: `--signal=USR1@120`."""

SAME_CTRL_C_S = 1.0
EMPTY_LOOPS = 1000


class StoppedOnRequest(SystemExit):
    """The loop was ended by a signal; the process leaves with a code that means "start again to continue"."""

    def __init__(self) -> None:
        super().__init__(STOPPED_ON_REQUEST)


class StopSignals:
    """What this worker was asked by signals, and what all have agreed on."""

    def __init__(
        self, name: str, *, tells: bool, is_server: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.asked: signal.Signals | None = None
        self.agreed = False
        self._name, self._tells, self._is_server = name, tells, is_server
        self._clock = clock
        self._asked_at = 0.0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        self._empty_loops = 0

    @property
    def watching(self) -> bool:
        return bool(self._before)

    def watch(self, numbers: Sequence[signal.Signals] = ()) -> None:
        """Install the handlers: of `numbers`, or of those of `STOP_SIGNALS` that nobody else handles already."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"{self._name}: engine.stop_on_signals() was called in thread {threading.current_thread().name!r}; "
                "Python hands signals to the main thread only: call it there"
            )
        for number in numbers or STOP_SIGNALS:
            before = signal.getsignal(number)
            free = bool(numbers) or before in (signal.SIG_DFL, signal.default_int_handler)
            if free and number not in self._before:
                self._before[number] = before
                signal.signal(number, self._take_note)

    def close(self) -> None:
        """Put back what was there, unless somebody has put something else there since."""
        here = threading.current_thread() is threading.main_thread()
        while self._before:
            number, before = self._before.popitem()
            if here and signal.getsignal(number) == self._take_note:
                signal.signal(number, before)

    def enter_loop(self, told: Callable[[bool], list[bool]]) -> bool:
        """Whether a loop that begins now has anything to do: not when any worker was asked to stop meanwhile.

        `told` gathers a word of every worker, and so is called by all or none.
        """
        if self.watching and not self.agreed:
            self.agreed = any(told(self.asked is not None))
        if self.agreed:
            self._empty_loops += 1
            if self._empty_loops > EMPTY_LOOPS:
                raise LoopError(
                    f"{self._name}: the training loop was entered {EMPTY_LOOPS:,} times since it was stopped by a "
                    "signal, and each time it ended at once; a `while` around it must end on engine.stop_requested"
                )
        return not self.agreed

    def end_loop(self, told: Callable[[bool], list[bool]]) -> None:
        """All workers have left a loop in which they did not hear each other: from here on they agree."""
        if self.watching:
            self.agreed = any(told(self.agreed))

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid or self._is_server:
            return  # a loader process, forked with our handler; or a server, which ends when its workers do
        if self.asked is None:
            self.asked, self._asked_at = signal.Signals(number), self._clock()
            if self._tells:
                # Not print: the handler may have interrupted one, and its buffer can't be entered twice.
                os.write(2, self._first_words(self.asked).encode())
        elif number == signal.SIGINT and self._clock() - self._asked_at >= SAME_CTRL_C_S:
            raise KeyboardInterrupt

    def _first_words(self, number: signal.Signals) -> str:
        live = sys.stderr is not None and sys.stderr.isatty()  # then the cursor is behind a progress line, or a ^C
        said = "stopping after this step"
        if number == signal.SIGINT:
            said += "; Ctrl-C again leaves at once"
        else:
            said = f"{number.name}: {said}"
        return "\n" * live + f"paceline: {said}\n"
