"""Failure attribution: why did the job fail? One cause, named first, out of all failures that followed from it.

When a worker dies its peers fail within milliseconds, each with an error about a closed connection. Those are
*consequences*. Whatever else happened is a *cause*, and the first cause to arrive is the one to read:

    arrives first ─▶  worker 2 killed by SIGKILL          cause        ◀─ reported
                      worker 1 raised PeerLostError       consequence
                      worker 3 "Connection closed by peer" consequence
                      worker 0 terminated by us           not a failure at all

A *lost* worker is one that an asynchronous job goes on without (see `exit_rules`): its death was reported when it
happened, and is no cause of later failures.

Exit codes of `paceline run`:

| code  | meaning                                                                              |
|-------|--------------------------------------------------------------------------------------|
| 0     | every process ended well, lost workers excepted, which a warning names               |
| 1     | a worker or server raised, exited with a code of its own (any; the line says which), |
|       | or hung when the others had ended                                                    |
| 2     | wrong usage or bad input, found before anything started                              |
| 3     | the workers or hosts could not meet, or lost each other                              |
| 4     | an elastic job has fewer workers left than --min-workers                             |
| 75    | stopped on request: a signal ended the loop after a step; start again to continue    |
| 128+n | a worker or server was killed by signal n (137: SIGKILL, 139: segmentation fault)    |
| 130   | Ctrl-C (SIGINT), and the workers did not stop by themselves                          |
| 143   | SIGTERM, likewise                                                                    |
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.world.control import STOPPED_ON_REQUEST
from paceline.world.host_limits import oom_kills
from paceline.world.waiting import TIMED_OUT

ENDED_WELL = (0, STOPPED_ON_REQUEST)
WORKER_FAILED = 1
BAD_INPUT = 2
RENDEZVOUS_FAILED = 3


class Phase(Enum):
    """What a process says it is doing. One that never says has no engine, or serves: it may leave when it likes."""

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
    """An exception that escaped the script, as its process reported it."""

    type: str
    text: str
    traceback: str = ""
    place: str = ""
    """The script's line that it came through last."""
    step: int | None = None
    ours: bool = False
    """One of paceline's own errors: its text is the whole story, a traceback would bury it."""
    secondary: bool = False

    @classmethod
    def from_message(cls, body: Mapping[str, Any]) -> Raised:
        raised = cls(**body)
        if not all(isinstance(text, str) for text in (raised.type, raised.text, raised.traceback, raised.place)):
            raise TypeError("an error whose type, text, traceback or place is no text")
        return replace(raised, step=None if raised.step is None else int(raised.step))

    @property
    def is_consequence(self) -> bool:
        text = self.text.lower()
        return self.secondary or (not self.ours and any(phrase in text for phrase in CONSEQUENCES))

    @property
    def at_place(self) -> str:
        """Of an error that is shown without its traceback."""
        return f" ({self.place})" if self.ours and self.place else ""

    @property
    def summary(self) -> str:
        return self.text.strip().splitlines()[0] if self.text.strip() else ""


@dataclass(frozen=True)
class MemoryReport:
    """What a worker reported of its memory limit, and how many processes that had killed by then."""

    text: str
    kills_file: Path
    kills: int


@dataclass(frozen=True)
class Waits:
    """A worker waits for others, in a call of the script."""

    call: str
    place: str
    """The script's line, if it is known."""
    since: float

    def __str__(self) -> str:
        return f"{self.call} ({self.place})" if self.place else self.call


@dataclass(frozen=True)
class FailedWait:
    """A wait of a worker for others, as in `waits`, has ended with an error."""

    waits: Waits
    doing: str
    seconds: float
    text: str
    at: float
    generation: int | None = None
    """Of an elastic job: the one in which it waited, if it is known."""

    @property
    def timed_out(self) -> bool:
        return TIMED_OUT.search(self.text) is not None


@dataclass
class Process:
    """What the supervisor knows of one worker or server."""

    rank: int
    server_index: int | None = None
    pid: int | None = None
    step: int | None = None
    phase: Phase = Phase.UNKNOWN
    raised: Raised | None = None
    status: int | None = None
    """Exit code, or minus the signal, once it has ended."""
    connected: bool = False
    failed_as: int | None = None
    """The place of its failure in order of request."""
    lost: bool = False
    """It failed, and the job goes on without it."""
    holds: str = ""
    """What is lost with it, in its own words, such as a server's keys."""
    fenced: bool = False
    """The supervisor killed it, and announced why."""
    memory: MemoryReport | None = None
    waits: Waits | None = None
    failed_wait: FailedWait | None = None
    """The last one."""
    evaluations: tuple[int, int] | None = None
    """Loops over prepared evaluation loaders: that it has begun, and run through, when its Engines ended."""
    ended_at: float | None = None
    heard_at: float = 0.0
    """When it last sent a message, wrote output or used a processor."""

    @property
    def is_server(self) -> bool:
        return self.server_index is not None

    @property
    def role(self) -> str:
        return "worker" if self.server_index is None else "server"

    @property
    def number(self) -> int:
        """Among those of its role."""
        return self.rank if self.server_index is None else self.server_index

    @property
    def name(self) -> str:
        holding = f", holding {self.holds}" if self.holds else ""
        return f"{self.role} {self.number} (pid {self.pid}{holding})"

    @property
    def at_step(self) -> str:
        step = self.raised.step if self.raised is not None and self.raised.step is not None else self.step
        return "" if step is None else f" at step {step}"

    @property
    def ended(self) -> bool:
        return self.status is not None

    @property
    def left_early(self) -> bool:
        return self.status in ENDED_WELL and self.phase is Phase.TRAINING

    @property
    def is_failure(self) -> bool:
        return self.raised is not None or (self.status is not None and self.status not in ENDED_WELL)


@dataclass(frozen=True)
class Outcome:
    """How the job ended, and what to say about it."""

    code: int
    lines: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    """Printed last, after every process was stopped."""
    hung: tuple[int, ...] = ()
    """The ranks whose stacks are shown before they are stopped."""

    def as_message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Outcome:
        words = (tuple(message[name]) for name in ("lines", "closing", "hung"))
        return cls(int(message["code"]), *words)


def has_cause(processes: Sequence[Process]) -> bool:
    return any(_is_cause(process) for process in processes)


def attribute_failure(processes: Sequence[Process]) -> Outcome:
    """The outcome of a job in which at least one process failed or left early."""
    failed = sorted((p for p in processes if p.failed_as is not None and not p.lost), key=lambda p: p.failed_as or 0)
    causes = [process for process in failed if _is_cause(process)]
    root = (causes or failed)[0]
    agreed = _same_error_everywhere(processes, root)
    lines = [f"paceline: {agreed}"] if agreed else describe(root, processes)
    others = [process for process in processes if process is not root]
    closing = [] if agreed or not others else [f"paceline: also stopped: {_list(others, root)}"]
    return Outcome(_exit_code(root), tuple(lines), tuple(closing))


def describe(process: Process, processes: Sequence[Process], and_so: str = "") -> list[str]:
    """How a process failed: one line, and the traceback of an exception that is not ours."""
    lines = [f"paceline: {process.name} {what_happened(process, processes)}{and_so}"]
    if process.raised is not None and not process.raised.ours and process.raised.traceback:
        lines.append(process.raised.traceback.rstrip())
    return lines


def _is_cause(process: Process) -> bool:
    if process.failed_as is None or process.lost:
        return False
    return process.raised is None or not process.raised.is_consequence


def _same_error_everywhere(processes: Sequence[Process], root: Process) -> str | None:
    """One of our own errors in every worker, and in the servers too unless they had not come so far."""
    first = root.raised
    if first is None or not first.ours:
        return None
    same = [p for p in processes if p.raised is not None and (p.raised.type, p.raised.text) == (first.type, first.text)]
    others = [process for process in processes if process not in same]
    if len(same) == 1 or any(not process.is_server or process.failed_as is not None for process in others):
        return None
    those = f"all {count(same)}" if sum(not process.is_server for process in same) > 1 else count(same)
    return f"{those} raised {first.type}{root.at_step}{first.at_place}: {first.text}"


def what_happened(process: Process, processes: Sequence[Process], where: str | None = None) -> str:
    """How a process failed, without its name; `where` it was, if the caller knows better than the process."""
    at = process.at_step if where is None else f" {where}"
    if process.raised is not None:
        text = process.raised.text if process.raised.ours else process.raised.summary
        return f"raised {process.raised.type}{at}{process.raised.at_place}" + (f": {text}" if text else "")
    if process.status is not None and process.status < 0:
        hint = _killed_by(process) if -process.status == signal.SIGKILL else ""
        return f"was killed by {signal_name(-process.status)}{at}{hint if where is None or hint[:1] == ':' else ''}"
    if process.left_early:
        others = [p for p in processes if p is not process and not p.is_server]
        training = [p for p in others if not (p.ended and not p.is_failure)]
        left = "1 other was" if len(training) == 1 else f"{len(training)} others were"
        return f"exited with code {process.status}{at} while {left} still training"
    return f"exited with code {process.status}{at}"


def _killed_by(process: Process) -> str:
    """Of a SIGKILL: the kernel's, when a limit of memory was reached, the supervisor's, or another's."""
    memory = process.memory
    if process.fenced:
        return " by its supervisor"
    if memory is None or not memory.kills_file.exists():  # it may be on another host
        return " (out of memory?)"
    if oom_kills(memory.kills_file) > memory.kills:
        return f": out of memory. {memory.text[0].upper()}{memory.text[1:]}"
    return ""


def count(processes: Sequence[Process]) -> str:
    """`4 workers`, `4 workers and 1 server`."""
    servers = sum(process.is_server for process in processes)
    numbers = {"worker": len(processes) - servers, "server": servers}
    return " and ".join(f"{n} {role}{'s' if n > 1 else ''}" for role, n in numbers.items() if n)


def numbers(processes: Sequence[Process]) -> str:
    """`workers 0, 2, server 1`."""
    named = {
        role: ", ".join(str(process.number) for process in processes if process.role == role)
        for role in ("worker", "server")
    }
    return ", ".join(f"{role}{'s' if ',' in listed else ''} {listed}" for role, listed in named.items() if listed)


def _list(others: Sequence[Process], root: Process) -> str:
    groups: dict[tuple[str, str], list[int]] = {}
    for process in others:
        groups.setdefault((process.role, _fate(process, root)), []).append(process.number)
    return "; ".join(
        f"{role}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}{f' ({fate})' if fate else ''}"
        for (role, fate), numbers in groups.items()
    )


def _fate(process: Process, root: Process) -> str:
    before = "lost before: " if process.lost else ""
    if process.raised is not None:
        raised = process.raised
        if root.raised is not None and (raised.type, raised.text) == (root.raised.type, root.raised.text):
            return f"{before}the same {raised.type}"
        summary = raised.summary
        return f"{before}{raised.type}: {summary if len(summary) <= 120 else summary[:117] + '...'}"
    if process.failed_as is not None and process.status is not None:
        return before + (signal_name(-process.status) if process.status < 0 else f"exit code {process.status}")
    return "had finished" if process.status in ENDED_WELL else ""


def _exit_code(root: Process) -> int:
    if root.raised is not None:
        return RENDEZVOUS_FAILED if root.raised.type == "WorldError" else WORKER_FAILED
    return 128 - root.status if root.status is not None and root.status < 0 else WORKER_FAILED


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
