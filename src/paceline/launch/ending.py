"""When is a job over? Pure rules over what the coordinator knows of its workers and servers.

| what has happened                                 | then                                                            |
|---------------------------------------------------|-----------------------------------------------------------------|
| everyone ended well                               | over, code 0                                                    |
| everyone ended well, or because a signal asked    | over, code 75: `stopping` tells how they were asked             |
| a worker or server failed                         | over: `verdict.judge` finds the cause                           |
| a worker failed, the policy is to survive that,   | the job goes on without it; when the others have ended well,    |
| another is left, and it was not the server        | over, code 0 and a warning                                      |
| only servers are left                             | they have `SERVERS_END_S` to end too, then over, code 1         |
| workers are left, engines' all, and each is quiet | a line after `QUIET_S`, then after the policy's hang_timeout_s  |
| since another one ended                           | over, code 1, with the stacks of those who hang                 |

*Quiet* is a worker that says nothing, prints nothing and uses no processor: one that saves or evaluates after its peers
have left is not, and a script without an engine is left alone, however long it sleeps.

The *policy* comes from the script while it runs, as words on the control channel, each field when it is known:

    client.tell("policy", survive_worker_loss=True)      an asynchronous strategy: the others don't need the dead one
    client.tell("policy", hang_timeout_s=600.0)          what the engine waits for a peer
    client.tell("policy", stops_on_request=True)         SIGTERM ends its loop after a step, and then it saves
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.launch.verdict import ENDED_WELL, WORKER_FAILED, Outcome, Phase, Process, count, happened
from paceline.world.control import STOPPED_ON_REQUEST

SERVERS_END_S = 10.0
QUIET_S = 60.0


@dataclass(frozen=True)
class Policy:
    """What the script asks of the launcher; the last word on each field counts."""

    survive_worker_loss: bool = False
    hang_timeout_s: float = 600.0
    stops_on_request: bool = False

    def __post_init__(self) -> None:
        for name in ("survive_worker_loss", "stops_on_request"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}, neither true nor false")
        if not self.hang_timeout_s > 0 or math.isinf(self.hang_timeout_s):
            raise ValueError(f"hang_timeout_s is {self.hang_timeout_s!r}, not a number of seconds")

    def told(self, words: Mapping[str, Any]) -> Policy:
        return replace(self, **words)


def good_end(processes: Sequence[Process]) -> Outcome | None:
    """The outcome when everyone the job still counts on has ended well; None: not yet, or not so."""
    lost = [process for process in processes if process.lost and process.ended]
    counted = [process for process in processes if not process.lost]
    if any(process.status not in ENDED_WELL or process.raised is not None for process in counted):
        return None
    if any(process.status == STOPPED_ON_REQUEST for process in counted):
        steps = [process.step for process in counted if process.step is not None]
        after = f" after step {max(steps)}" if steps else ""
        said = f"paceline: stopped on request{after}; start again to continue"
        return Outcome(STOPPED_ON_REQUEST, closing=(said,))
    if not lost:
        return Outcome(0)
    told = "; ".join(f"{process.name} {happened(process, processes)}" for process in lost)
    return Outcome(0, closing=(f"paceline: warning: the job ended well, but without {count(lost)}: {told}",))


def goes_on(processes: Sequence[Process], policy: Policy) -> bool:
    """Whether the job can do without those that have fallen."""
    fallen = [process for process in processes if process.failed_as is not None]
    served_by_worker_0 = not any(process.is_server for process in processes)
    needed = any(process.is_server or (served_by_worker_0 and process.rank == 0) for process in fallen)
    left = any(process not in fallen for process in processes if not process.is_server)
    return policy.survive_worker_loss and left and not needed


@dataclass(frozen=True)
class Look:
    """What a look at those who still run gives: something to say, or the end."""

    lines: tuple[str, ...] = ()
    outcome: Outcome | None = None


def look_at_the_last(processes: Sequence[Process], policy: Policy, now: float, warned: bool) -> Look:
    """Judge those who still run when another worker has ended; one warning is enough."""
    counted = [process for process in processes if not process.lost]
    left = [process for process in counted if not process.ended]
    ends = [process.ended_at for process in processes if not process.is_server and process.ended_at is not None]
    if not left or not ends or any(process.failed_as is not None for process in counted):
        return Look()
    since = max(ends)
    if all(process.is_server for process in left):
        return _look_at_servers(left, now - since)
    workers = [process for process in left if not process.is_server]
    if any(worker.phase is Phase.UNKNOWN for worker in workers):
        return Look()
    quiet_s = now - max(since, *(worker.heard_at for worker in workers))
    if quiet_s >= policy.hang_timeout_s:
        return Look(outcome=_stopped(workers, _silence(workers, policy.hang_timeout_s)))
    if quiet_s < QUIET_S or warned:
        return Look()
    text = f"{_silence(workers, QUIET_S)}; stopped when that lasts {policy.hang_timeout_s:g} s"
    return Look(lines=(f"paceline: {text}",))


def _look_at_servers(servers: Sequence[Process], waited_s: float) -> Look:
    if waited_s < SERVERS_END_S:
        return Look()
    return Look(outcome=_stopped(servers, f"{_names(servers)}: still there {SERVERS_END_S:g} s after the last worker"))


def _stopped(hung: Sequence[Process], why: str) -> Outcome:
    return Outcome(WORKER_FAILED, (f"paceline: {why}; stopped here:",), hung=tuple(process.rank for process in hung))


def _silence(workers: Sequence[Process], quiet_s: float) -> str:
    return f"{_names(workers)}: no sign of life for {quiet_s:g} s, and the other workers have ended"


def _names(processes: Sequence[Process]) -> str:
    return ", ".join(f"{process.name}{process.at_step}" for process in processes)
