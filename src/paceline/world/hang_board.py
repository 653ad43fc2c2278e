"""Who has not come, where no supervisor of ours knows all workers (torchrun, SLURM, MPI): they tell it in the store.

    the first whose wait has timed out     asked ◄── its rank                          every worker's watching thread
    every worker                           answer/3 ◄── it waits, or its stack         looks for `asked` twice a second
    the first, ANSWERS_S later             one line, and the stacks of those that don't wait

A worker that is stopped does not answer, nor does one whose script is in a C call that keeps Python's lock; `paceline
run` shows the stack of that one too.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.errors import WorldError
from paceline.world import messages

if TYPE_CHECKING:
    from paceline.torch_compat import Store

ANSWERS_S = 1.2
"""Longer than a watching thread sleeps, and short enough for a report within 2 s of the timeout."""
STORE_S = 0.4
"""For a store that does not answer: the process that serves it may be the one that is stopped."""
GONE = (RuntimeError, OSError, WorldError)


class HangBoard:
    """`store`: a connection of its own, as a store answers one thread at a time."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._thread = threading.get_ident()
        self._answered = False

    def look(self, waits: str | None) -> None:
        """On the watching thread: answer if there was a question; `waits` tells what the main thread waits in."""
        if self._answered:
            return
        with contextlib.suppress(*GONE):
            if self._store.check(["asked"]):
                self._answer(waits)

    def report(self, doing: str, seconds: float) -> None:
        """A wait of this worker has timed out; returns when the first such has told, or could not."""
        telling = threading.Thread(target=self._tell, args=(doing, seconds), name="paceline-hang", daemon=True)
        telling.start()
        telling.join(ANSWERS_S + STORE_S)
        if telling.is_alive() and not self._answered:
            self._say(f"worker {self._rank} waited {seconds:.3g} s {doing}; the store does not answer either: is the "
                      "process that serves it (worker 0, or the launcher's agent) stopped?")  # fmt: skip

    def _tell(self, doing: str, seconds: float) -> None:
        with contextlib.suppress(*GONE):
            self._answer(doing)
            is_first = self._store.add("asked", 1) == 1
            time.sleep(ANSWERS_S)  # also where another tells: launchers end the job with the first that fails
            if is_first:
                for line in self._lines(doing, seconds, self._answers()):
                    self._say(line)

    def _answer(self, waits: str | None) -> None:
        frame = sys._current_frames().get(self._thread)
        stack = [] if waits is not None or frame is None else traceback.format_stack(frame)
        self._store.set(f"answer/{self._rank}", json.dumps({"waits": waits, "stack": stack}))
        self._answered = True

    def _answers(self) -> dict[int, dict[str, Any]]:
        keys = {rank: f"answer/{rank}" for rank in range(self._size)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _lines(self, doing: str, seconds: float, answers: Mapping[int, Mapping[str, Any]]) -> list[str]:
        late = [rank for rank in range(self._size) if rank not in answers or answers[rank]["waits"] is None]
        came = ", ".join(str(rank) for rank in range(self._size) if rank not in late)
        what = f"hang: of {self._size} workers {came} waited {seconds:.3g} s {doing}"
        if not late:
            return [f"{what}, and all have come: is the network between them broken?"]
        lines = [f"{what}, and {', '.join(map(str, late))} did not come"]
        for rank in late:
            if rank in answers:
                lines += [f"worker {rank}:", *(line.rstrip("\n") for line in answers[rank]["stack"])]
            else:
                lines.append(f"worker {rank} does not answer: is it stopped, or in a call that keeps Python's lock?")
        return lines

    def _say(self, line: str) -> None:
        ours = "" if line.startswith("  ") else "paceline: "
        messages.logger("world").error(f"{ours}{line}")
