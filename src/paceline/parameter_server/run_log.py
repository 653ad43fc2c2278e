"""This process's part of the log of a run, begun with its first round: only then is it known which that is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.errors import LoopError
from paceline.parameter_server.application_log import ApplicationLog, Applied, JobFacts, LoopEnd, Read, Role


class RunLog:
    def __init__(self, folder: Path, attempt: int, role: Role, number: int, job: JobFacts) -> None:
        self._folder, self._attempt, self._role, self._number, self._job = folder, attempt, role, number, job
        self._log: ApplicationLog | None = None
        self._lock = threading.Lock()

    def begin(self, round: int) -> None:
        """The first round of this start of the job; others that follow are no news."""
        with self._lock:
            if self._log is None:
                job = replace(self._job, first_round=round)
                self._log = ApplicationLog.start(self._folder, self._attempt, self._role, self._number, job)

    def read(self, record: Read) -> None:
        self._begun().read(record)

    def applied(self, record: Applied) -> None:
        self._begun().applied(record)

    def loop_ended(self, rounds: int, weights: Callable[[], str]) -> None:
        if self._log is not None:
            self._log.loop_ended(LoopEnd(rounds, weights()))

    def check_not_begun(self) -> None:
        if self._log is not None:
            raise LoopError(
                "engine.load_state() after the first round of a run that is being recorded: what follows could not be "
                "replayed; load the state before the loop, or start a new run"
            )

    def end(self, *, well: bool) -> None:
        """A run that did not end well has a log without an end."""
        with self._lock:
            if self._log is not None:
                self._log.finish() if well else self._log.close()
                self._log = None

    def _begun(self) -> ApplicationLog:
        assert self._log is not None, "a round is opened before anything of it is recorded"
        return self._log
