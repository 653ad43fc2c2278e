"""Our own errors in one line, as `paceline run` shows them, under plain python and torchrun too.

An uncaught `PacelineError` has said where, what and what to do; forty lines of our call stack would bury it. The line
names the place in the user's script. Other exceptions keep their traceback, and so does an interactive session.
"""

from __future__ import annotations

import sys
from types import TracebackType

from paceline.errors import PacelineError
from paceline.world import out_of_memory
from paceline.world.script_line import place_of_error


def show_our_errors_in_one_line() -> None:
    """Install the hook once; whatever hook was there before still sees everything else."""
    before = sys.excepthook
    if getattr(before, "one_line", False) or hasattr(sys, "ps1"):
        return

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, PacelineError):
            place = place_of_error(frames)
            at = f"{place}: " if place else ""
            print(f"paceline: {at}{kind.__name__}: {error}", file=sys.stderr, flush=True)
        else:
            out_of_memory.explain(error)
            before(kind, error, frames)

    hook.one_line = True  # type: ignore[attr-defined]
    sys.excepthook = hook
