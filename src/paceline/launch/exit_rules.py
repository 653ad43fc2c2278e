"""Exit rules: when is a job over? Pure rules over what the coordinator knows of its workers and servers.

| what has happened                                 | then                                                            |
|---------------------------------------------------|-----------------------------------------------------------------|
| every process ended well                          | over, code 0                                                    |
| every process ended well, or because a signal     | over, code 75: see `StopRequest`                                |
| asked it to                                       |                                                                 |
| a worker or server failed                         | over: `attribute_failure` finds the cause                       |
| a worker failed, the policy is to survive that,   | the job goes on without it; when the others have ended well,    |
| another is left, and it was not the server        | over, code 0 and a warning                                      |
| only servers are left                             | they have `SERVERS_END_S` to end too, then over, code 1         |
| workers are left, all with an engine, and each is | a line after `QUIET_S`, then after the policy's hang_timeout_s  |
| quiet since another one ended                     | over, code 1, with the stacks of those that hang                |
| a worker waits in a call, and another has ended   | over, code 1, `STUCK_S` after both are known                    |
| well without reaching it                          |                                                                 |
| a worker waits in a call, and another is elsewhere| one line that names both; they may still meet                   |
| for the heartbeat's time                          |                                                                 |

*Quiet* is a worker that reports nothing, prints nothing and uses no processor: one that saves or evaluates after its
peers have left is not, and a script without an engine is left alone, however long it sleeps.

Every worker is needed for a collective, so the wait for one that has ended has no end; only the supervisor knows both.
In a training loop workers wait for each other in every step: a slow one is not reported there. An asynchronous
strategy, which goes on without others, is left alone.

The *policy* comes from the script while it runs, as messages on the control channel, each field when it is known:

    client.tell("policy", survive_worker_loss=True)      an asynchronous strategy: the others don't need the dead one
    client.tell("policy", hang_timeout_s=600.0)          what the engine waits for a peer
    client.tell("policy", stops_on_request=True)         SIGTERM ends its loop after a step, and then it saves

A *stop request* is the signal that reached a supervisor; it goes to every worker once, and they get time to save:

    SIGTERM, Ctrl-C, SIGHUP   passed on as SIGTERM; `--grace-s` later every worker that still runs is killed
    SIGUSR1                   a notice, such as SLURM's `--signal=USR1@120`: passed on as it is, and no worker is killed
    a second Ctrl-C           ends everything at once

| how the workers ended                           | outcome                                                          |
|-------------------------------------------------|------------------------------------------------------------------|
| all well, one or more with code 75              | 75: stopped on request, start again to continue                  |
| all well                                        | 0: the job was about to end anyway                               |
| one failed for a reason of its own              | that failure, as without a request                               |
| by the signal, or killed when time was up       | 128 + the signal                                                 |

Only workers are asked. Servers end when their workers do, and loader processes are the workers' affair.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.launch.failure_attribution import (
    ENDED_WELL,
    WORKER_FAILED,
    Outcome,
    Phase,
    Process,
    Waits,
    count,
    what_happened,
)
from paceline.world.control import STOPPED_ON_REQUEST
from paceline.world.waiting import LOOP

SERVERS_END_S = 10.0
QUIET_S = 60.0
STUCK_S = 3.0
"""What is under way from a worker that has ended has arrived by then."""
PATIENCE_S = 5.0

GRACE_S = 30.0
NOTICE = signal.SIGUSR1
ANNOUNCE_AFTER_S = 1.0
"""A script that doesn't handle SIGTERM has ended by then, and no line about waiting is needed."""


@dataclass(frozen=True)
class Policy:
    """What the script asks of the launcher; the newest value of each field counts."""

    survive_worker_loss: bool = False
    hang_timeout_s: float = 600.0
    stops_on_request: bool = False

    def __post_init__(self) -> None:
        for name in ("survive_worker_loss", "stops_on_request"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}, neither true nor false")
        if not self.hang_timeout_s > 0 or math.isinf(self.hang_timeout_s):
            raise ValueError(f"hang_timeout_s is {self.hang_timeout_s!r}, not a number of seconds")


def success(processes: Sequence[Process]) -> Outcome | None:
    """The outcome when every process that is not lost has ended well; None otherwise."""
    lost = [process for process in processes if process.lost and process.ended]
    counted = [process for process in processes if not process.lost]
    if any(process.status not in ENDED_WELL or process.raised is not None for process in counted):
        return None
    if any(process.status == STOPPED_ON_REQUEST for process in counted):
        steps = [process.step for process in counted if process.step is not None]
        after = f" after step {max(steps)}" if steps else ""
        line = f"paceline: stopped on request{after}; start again to continue"
        return Outcome(STOPPED_ON_REQUEST, closing=(line,))
    if not lost:
        return Outcome(0, closing=uneven_evaluations(processes))
    how = "; ".join(f"{process.name} {what_happened(process, processes)}" for process in lost)
    return Outcome(0, closing=(f"paceline: warning: the job ended well, but without {count(lost)}: {how}",))


def uneven_evaluations(processes: Sequence[Process]) -> tuple[str, ...]:
    """Evaluations that only some workers have run, each over the part of the data that was dealt to it."""
    told = [(one.name, *one.evaluations) for one in processes if one.evaluations is not None and not one.is_server]
    if not told:
        return ()
    most, least = max(told, key=lambda one: one[2]), min(told, key=lambda one: one[1])
    if most[2] <= least[1]:
        return ()
    return (
        f"paceline: warning: {most[0]} has run through {most[2]} loops over prepared evaluation loaders, {least[0]} "
        f"has begun {least[1]}: such a loader deals its batches to all workers, so what one of them computes alone is "
        "of a part of the data. Run it on every worker and gather, or give that worker a DataLoader that "
        "engine.prepare() was not given",
    )


def can_go_on(processes: Sequence[Process], policy: Policy) -> bool:
    """Whether the job can do without the processes that have failed."""
    failed = [process for process in processes if process.failed_as is not None]
    served_by_worker_0 = not any(process.is_server for process in processes)
    needed = any(process.is_server or (served_by_worker_0 and process.rank == 0) for process in failed)
    left = any(process not in failed for process in processes if not process.is_server)
    return policy.survive_worker_loss and left and not needed


@dataclass(frozen=True)
class Check:
    """What a check of the running processes gives: lines to announce, or the end of the job."""

    lines: tuple[str, ...] = ()
    outcome: Outcome | None = None


def check_last_workers(processes: Sequence[Process], policy: Policy, now: float, warned: bool) -> Check:
    """Check the processes that still run after another worker has ended; one warning is enough."""
    counted = [process for process in processes if not process.lost]
    left = [process for process in counted if not process.ended]
    ends = [process.ended_at for process in processes if not process.is_server and process.ended_at is not None]
    if not left or not ends or any(process.failed_as is not None for process in counted):
        return Check()
    since = max(ends)
    if all(process.is_server for process in left):
        if now - since < SERVERS_END_S:
            return Check()
        late = f"{_names(left)}: still running {SERVERS_END_S:g} s after the last worker ended"
        return Check(outcome=_stopped(left, late))
    workers = [process for process in left if not process.is_server]
    if any(worker.phase is Phase.UNKNOWN for worker in workers):  # no Engine that would tell what they do
        if warned or now - since < QUIET_S:
            return Check()
        text = f"{_names(workers)}: still running {QUIET_S:g} s after the other workers ended; Ctrl-C leaves"
        return Check(lines=(f"paceline: {text}",))
    quiet_s = now - max(since, *(worker.heard_at for worker in workers))
    if quiet_s >= policy.hang_timeout_s:
        return Check(outcome=_stopped(workers, _silence(workers, policy.hang_timeout_s)))
    if quiet_s < QUIET_S or warned:
        return Check()
    text = f"{_silence(workers, QUIET_S)}; stopped when that lasts {policy.hang_timeout_s:g} s"
    return Check(lines=(f"paceline: {text}",))


def _stopped(hung: Sequence[Process], why: str) -> Outcome:
    return Outcome(
        WORKER_FAILED, (f"paceline: {why}; stopped, with these stacks:",), hung=tuple(process.rank for process in hung)
    )


def _silence(workers: Sequence[Process], quiet_s: float) -> str:
    return f"{_names(workers)}: no message, output or CPU use for {quiet_s:g} s, and the other workers have ended"


def _names(processes: Sequence[Process]) -> str:
    return ", ".join(f"{process.name}{process.at_step}" for process in processes)


# ---- stopping on request ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StopRequest:
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

    def announcement(self) -> str:
        """Where the engine is known to stop after a step."""
        what = "stopping after this step, then saving"
        if self.by == signal.SIGINT:
            return f"paceline: {what}; Ctrl-C again leaves at once"
        limit = "" if self.by == NOTICE else f", for at most {self.grace_s:g} s"
        return f"paceline: {self.how}{self.where}: {what}{limit}"

    def waiting(self, processes: Sequence[Process]) -> str:
        """Where it is not known what the script does with the signal."""
        limit = "" if self.by == NOTICE else f" up to {self.grace_s:g} s"
        again = " again" if self.by == signal.SIGINT else ""
        return f"paceline: waiting{limit} for {count(still_running(processes))} to end; Ctrl-C{again} leaves at once"


def stopped_as_asked(process: Process) -> bool:
    """It ended by the signal that we passed on, or because others did: no failure."""
    if process.raised is not None:
        return process.raised.is_consequence
    return process.status in (-signal.SIGTERM, -NOTICE)


def still_running(processes: Sequence[Process]) -> list[Process]:
    """Workers whose end is waited for; a lost one may be on a lost host, which can't report its end."""
    return [process for process in processes if not (process.is_server or process.ended or process.lost)]


def stopped_early(request: StopRequest, processes: Sequence[Process], *, late: Sequence[Process] = ()) -> Outcome:
    """The outcome of a job that was ended before its workers had: they were `late`, or are not waited for."""
    steps = [process.step for process in processes if process.step is not None]
    at = f" at step {max(steps)}" if steps else ""
    killed = f"; {count(late)} did not end within {request.grace_s:g} s" if late else ""
    return Outcome(128 + request.by, (f"paceline: stopped by {request.how}{request.where}{at}{killed}",))


# ---- workers that wait for others ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportedWait:
    """One line is enough for each place of the script."""

    rank: int
    waits: str


def check_waits(
    processes: Sequence[Process],
    policy: Policy,
    now: float,
    patience_s: float,
    reported: set[ReportedWait],
    is_missed: Callable[[Process], bool] = lambda process: True,
) -> Check:
    """`is_missed`: whether the others wait for a worker that has ended."""
    workers = [process for process in processes if not process.is_server and not process.lost]
    waiting = [(worker, worker.waits) for worker in workers if not worker.ended and worker.waits is not None]
    if not waiting or policy.survive_worker_loss or any(worker.failed_as is not None for worker in workers):
        return Check()
    gone = [worker for worker in workers if worker.status in ENDED_WELL and is_missed(worker)]
    if gone:
        since = max(worker.ended_at or 0.0 for worker in gone)
        stuck = [(worker, waits) for worker, waits in waiting if now - max(since, waits.since) >= STUCK_S]
        return Check(outcome=_waits_for_ended(*stuck[0], gone)) if stuck else Check()
    lines = []
    for worker, waits in waiting:
        wait = ReportedWait(worker.rank, str(waits))
        absent = [other for other in workers if not other.ended and is_elsewhere(other, waits)]
        if absent and now - waits.since >= patience_s and wait not in reported:
            reported.add(wait)
            # They wait for this one, as this line says.
            reported |= {ReportedWait(other.rank, str(other.waits)) for other in absent}
            where = " and ".join(f"{_name(other)}, which {whereabouts(other)}" for other in absent[:3])
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            lines.append(f"paceline: {_name(worker)} has waited {now - waits.since:.0f} s in {waits} for {where}{more}")
    return Check(lines=tuple(lines))


def _waits_for_ended(worker: Process, waits: Waits, gone: Sequence[Process]) -> Outcome:
    named = " and ".join(other.name for other in gone)
    exits = "exited with code 0" if all(other.status == 0 for other in gone) else "have ended"
    every = "every worker has to make this call, or none; the job is stopped"
    return Outcome(
        WORKER_FAILED,
        (f"paceline: {worker.name} waits in {waits} for {named}, which {exits} without reaching it; {every}",),
    )


def is_elsewhere(other: Process, waits: Waits) -> bool:
    if waits.call == LOOP and other.phase is Phase.TRAINING and (other.waits is None or other.waits.call == LOOP):
        return False
    return other.waits is None or other.waits.call != waits.call


def whereabouts(other: Process) -> str:
    if other.waits is not None:
        return f"waits in {other.waits}"
    if other.phase is Phase.TRAINING:
        return f"is training{other.at_step}"
    return "has not reached it"


def _name(process: Process) -> str:
    return f"{process.role} {process.number}"
