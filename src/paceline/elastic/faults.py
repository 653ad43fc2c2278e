"""Faults on order: a worker that dies, stops, fails or dawdles at a named point of a named step.

    PACELINE_FAULTS="kill:rank=2,step=5,phase=exchange;stop:rank=1,step=7,phase=forward"

    kind    what happens in the process              further words
    kill    SIGKILL to itself                        phase
    stop    SIGSTOP to itself                        phase
    raise   RuntimeError("injected fault …")         phase
    slow    it sleeps                                phase, ms (200)
    flip    the engine turns over one bit            tensor (a parameter's name; without it the first)

`rank` is the slot that the launcher gave. `step` counts from 1; without it the first step that comes there. A fault
happens once, in the process that the job began with, or in the slot's n-th replacement with `incarnation=n`: what
takes a dead worker's place must not die of the same order.

The engine calls `fault_point(phase, step)` where a phase begins, and on the way of a step only `if ordered:`: a step
comes here in tests alone. What happens is announced in a line on stderr.

Whether a fault has changed a bit is told by the hash of the weights. `engine.weights_hash()` calls `tell_hash` on every
worker, which writes lines `slot hash` to the file that PACELINE_HASH_FILE names; `paceline chaos` reads what two runs
of a job have told. Faults at random moments, from outside the process, are in `random_faults`.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.world import environment

PHASES = (
    "data", "forward", "backward", "bucket", "exchange", "ready", "before_commit", "after_commit", "apply",
    "snapshot", "write", "join", "serve",
)  # fmt: skip
"""`bucket`: one is in flight; `snapshot` and `write`: of a checkpoint; `join`: of a worker that comes later;
`serve`: a server has taken a push."""

KINDS = ("kill", "stop", "raise", "slow", "flip")
NUMBERS = {"rank": 0, "step": 1, "incarnation": 0, "ms": 1}
"""Words whose value is a number, and the least it may be."""


@dataclass(frozen=True)
class Fault:
    """One order, complete and without contradiction."""

    kind: str
    rank: int
    step: int | None = None
    phase: str | None = None
    incarnation: int = 0
    ms: int = 200
    tensor: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"{self.kind!r} is no kind of fault; there are {', '.join(KINDS)}")
        if self.kind != "flip" and self.phase not in PHASES:
            was = "no phase" if self.phase is None else f"phase={self.phase}"
            raise ConfigError(f"{self.kind} with {was}; the phases of a step are {', '.join(PHASES)}")

    def __str__(self) -> str:
        words = {"rank": self.rank, "step": self.step, "phase": self.phase, "tensor": self.tensor}
        words["incarnation"] = self.incarnation or None
        return f"{self.kind}:" + ",".join(f"{name}={value}" for name, value in words.items() if value is not None)


def parsed(text: str) -> list[Fault]:
    """The orders in a text such as `kill:rank=2,step=5,phase=exchange;slow:rank=0,phase=data,ms=50`."""
    return [_fault(order.strip()) for order in text.split(";") if order.strip()]


ordered: list[Fault] = []
"""What has yet to happen in this process; empty in every process that is not being tested."""


def arm(rank: int, incarnation: int = 0, orders: str | None = None) -> None:
    """This process is `rank`: what is ordered for it (by PACELINE_FAULTS) will happen from now on."""
    text = orders if orders is not None else environment.injected_faults()
    faults = parsed(text or "")
    ordered[:] = [fault for fault in faults if (fault.rank, fault.incarnation) == (rank, incarnation)]


_now = [0]


def begin_step(step: int) -> None:
    """For those who don't know in which step they are."""
    _now[0] = step


def fault_point(phase: str, step: int | None = None) -> None:
    """Here a process may fail in the course of `step`, by default the one that began last."""
    if ordered:
        step = _now[0] if step is None else step
        for fault in [fault for fault in ordered if fault.phase == phase and fault.step in (step, None)]:
            ordered.remove(fault)
            _happen(fault, phase, step)


def flips_due(step: int) -> list[Fault]:
    """Flips for the engine to make in this step, each handed out once."""
    if not ordered:
        return []
    due = [fault for fault in ordered if fault.kind == "flip" and fault.step in (step, None)]
    for fault in due:
        ordered.remove(fault)
    return due


def _happen(fault: Fault, phase: str, step: int) -> None:
    # Past every buffer: of what a killed process had not written nothing would be seen.
    os.write(2, f"paceline: injected fault {fault} in phase {phase} of step {step}\n".encode())
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise RuntimeError(f"injected fault in phase {phase} of step {step} (PACELINE_FAULTS has {fault})")
        case "slow":
            time.sleep(fault.ms / 1000)


def _fault(order: str) -> Fault:
    kind, _, rest = order.partition(":")
    words: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in rest.split(","))):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or name not in _WORDS or name in words:
            why = "is there twice" if name in words else f"is none of {', '.join(sorted(_WORDS))}"
            raise ConfigError(f"PACELINE_FAULTS: {order!r}: {word!r} {why} (kind:name=value,name=value)")
        words[name] = value
    if "rank" not in words:
        raise ConfigError(f"PACELINE_FAULTS: {order!r} says not whom it concerns; add rank=, the slot of a worker")
    numbers = {name: _number(order, name, value) for name, value in words.items() if name in NUMBERS}
    try:
        return Fault(kind=kind.strip(), phase=words.get("phase"), tensor=words.get("tensor"), **numbers)
    except ConfigError as error:
        raise ConfigError(f"PACELINE_FAULTS: {order!r}: {error}") from None


_WORDS = {*NUMBERS, "phase", "tensor"}


def _number(order: str, name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < NUMBERS[name]:
        raise ConfigError(f"PACELINE_FAULTS: {order!r}: {name}={value} is no whole number from {NUMBERS[name]} on")
    return int(value)


def tell_hash(slot: int, digest: str) -> None:
    file = environment.hash_file()
    if file is not None:
        with file.open("a", encoding="utf-8") as out:
            out.write(f"{slot} {digest}\n")


def last_hash(file: Path) -> str | None:
    """Of the last call in the job; None where no worker has made one."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    told = [words for line in lines if len(words := line.split()) == 2]
    return told[-1][1] if told else None
