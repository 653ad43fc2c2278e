"""Why did the job fail? One cause, named first, out of everything that fell over with it.

When a worker dies its peers fail within milliseconds, each with an error about a closed connection. Those are
*consequences*. Whatever else happened is a *cause*, and the first cause to arrive is the one to read:

    arrives first ─▶  worker 2 killed by SIGKILL          cause        ◀─ the verdict
                      worker 1 raised PeerLostError       consequence
                      worker 3 "Connection closed by peer" consequence
                      worker 0 terminated by us           not a failure at all

Exit codes of `paceline run`:

| code  | meaning                                                                             |
|-------|-------------------------------------------------------------------------------------|
| 0     | every worker ended well                                                             |
| 1     | a worker raised, or exited with a code of its own (any; the line says which)         |
| 2     | wrong usage or bad input, found before anything started                             |
| 3     | the workers or hosts could not meet, or lost each other                             |
| 128+n | a worker was killed by signal n (137: SIGKILL, 139: segmentation fault)             |
| 130   | Ctrl-C (SIGINT)                                                                     |
| 143   | SIGTERM                                                                             |
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

WORKER_FAILED = 1
BAD_INPUT = 2
NO_MEETING = 3


class Phase(Enum):
    """What a worker says it is doing. One that never says is a script without an engine: it may leave when it likes."""

    UNKNOWN = "unknown"
    IDLE = "idle"
    TRAINING = "training"


# What torch and gloo say when the other end of a connection has gone.
CONSEQUENCES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "socket closed",
    "broken pipe",
    "application timeout caused pair closure",
    "timed out waiting",
    "recv failed",
    "remote process exited",
)


@dataclass(frozen=True)
class Raised:
    """An exception that escaped the script, as its worker reported it."""

    type: str
    text: str
    traceback: str = ""
    step: int | None = None
    ours: bool = False
    """One of paceline's own errors: its text is the whole story, a traceback would bury it."""
    secondary: bool = False

    @property
    def is_consequence(self) -> bool:
        said = self.text.lower()
        return self.secondary or (not self.ours and any(phrase in said for phrase in CONSEQUENCES))

    @property
    def summary(self) -> str:
        return self.text.strip().splitlines()[0] if self.text.strip() else ""


@dataclass
class Worker:
    """What the supervisor knows of one worker."""

    rank: int
    pid: int | None = None
    step: int | None = None
    phase: Phase = Phase.UNKNOWN
    raised: Raised | None = None
    status: int | None = None
    """Exit code, or minus the signal, once it has ended."""
    connected: bool = False
    failed_as: int | None = None
    """The place of its failure in order of arrival."""

    @property
    def name(self) -> str:
        return f"worker {self.rank} (pid {self.pid})"

    @property
    def at_step(self) -> str:
        step = self.raised.step if self.raised is not None and self.raised.step is not None else self.step
        return "" if step is None else f" at step {step}"

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def left_early(self) -> bool:
        return self.status == 0 and self.phase is Phase.TRAINING

    @property
    def is_failure(self) -> bool:
        return self.raised is not None or (self.status is not None and self.status != 0)


@dataclass(frozen=True)
class Outcome:
    """How the job ended, and what to say about it."""

    code: int
    lines: tuple[str, ...] = ()
    closing: tuple[str, ...] = field(default=())
    """Said last, after everyone was stopped."""

    def as_message(self) -> dict[str, Any]:
        return {"code": self.code, "lines": list(self.lines), "closing": list(self.closing)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Outcome:
        return cls(int(message["code"]), tuple(message["lines"]), tuple(message["closing"]))


def has_cause(workers: Sequence[Worker]) -> bool:
    return any(_is_cause(worker) for worker in workers)


def judge(workers: Sequence[Worker]) -> Outcome:
    """The verdict on a job in which at least one worker failed or left early."""
    fallen = sorted((w for w in workers if w.failed_as is not None), key=lambda w: w.failed_as or 0)
    causes = [worker for worker in fallen if _is_cause(worker)]
    root = (causes or fallen)[0]
    agreed = _same_error_everywhere(workers, root)
    lines = [f"paceline: {agreed or _describe(root, workers)}"]
    if root.raised is not None and not root.raised.ours and root.raised.traceback:
        lines.append(root.raised.traceback.rstrip())
    others = [worker for worker in workers if worker is not root]
    closing = [] if agreed or not others else [f"paceline: also stopped: {_list(others, root)}"]
    return Outcome(_exit_code(root), tuple(lines), tuple(closing))


def _is_cause(worker: Worker) -> bool:
    if worker.failed_as is None:
        return False
    return worker.raised is None or not worker.raised.is_consequence


def _same_error_everywhere(workers: Sequence[Worker], root: Worker) -> str | None:
    first = root.raised
    if first is None or not first.ours or len(workers) == 1:
        return None
    same = all(w.raised is not None and (w.raised.type, w.raised.text) == (first.type, first.text) for w in workers)
    return f"all {len(workers)} workers raised {first.type}{root.at_step}: {first.text}" if same else None


def _describe(worker: Worker, workers: Sequence[Worker]) -> str:
    if worker.raised is not None:
        said = worker.raised.text if worker.raised.ours else worker.raised.summary
        return f"{worker.name} raised {worker.raised.type}{worker.at_step}" + (f": {said}" if said else "")
    if worker.status is not None and worker.status < 0:
        hint = " (out of memory?)" if -worker.status == signal.SIGKILL else ""
        return f"{worker.name} was killed by {signal_name(-worker.status)}{worker.at_step}{hint}"
    if worker.left_early:
        training = [w for w in workers if w is not worker and not (w.ended and not w.is_failure)]
        others = "1 other was" if len(training) == 1 else f"{len(training)} others were"
        return f"{worker.name} exited with code 0{worker.at_step} while {others} still training"
    return f"{worker.name} exited with code {worker.status}{worker.at_step}"


def _list(others: Sequence[Worker], root: Worker) -> str:
    groups: dict[str, list[int]] = {}
    for worker in others:
        groups.setdefault(_fate(worker, root), []).append(worker.rank)
    return "; ".join(
        f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}{f' ({fate})' if fate else ''}"
        for fate, ranks in groups.items()
    )


def _fate(worker: Worker, root: Worker) -> str:
    if worker.raised is not None:
        if root.raised is not None and (worker.raised.type, worker.raised.text) == (root.raised.type, root.raised.text):
            return f"the same {worker.raised.type}"
        summary = worker.raised.summary
        return f"{worker.raised.type}: {summary if len(summary) <= 120 else summary[:117] + '...'}"
    if worker.failed_as is not None and worker.status is not None:
        return signal_name(-worker.status) if worker.status < 0 else f"exit code {worker.status}"
    return "had finished" if worker.status == 0 else ""


def _exit_code(root: Worker) -> int:
    if root.raised is not None:
        return NO_MEETING if root.raised.type == "WorldError" else WORKER_FAILED
    return 128 - root.status if root.status is not None and root.status < 0 else WORKER_FAILED


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
