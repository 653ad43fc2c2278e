"""Workers that wait for others who won't come, or don't: pure rules over what the coordinator knows of them.

| a worker waits in a call, and                          | then                                                        |
|--------------------------------------------------------|-------------------------------------------------------------|
| another has ended well without having come there       | over, code 1, `STUCK_S` after both are known                |
| another is somewhere else for the heartbeat's time     | one line that names both; they may still meet               |

Every worker is needed for a collective, so the wait for one that has ended has no end; only the supervisor knows
both. In a training loop workers wait for each other in every step: a slow one is nothing to tell of there. An
asynchronous strategy, which goes on without others, is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.launch.ending import Look, Policy
from paceline.launch.verdict import ENDED_WELL, WORKER_FAILED, Outcome, Phase, Process, Waits
from paceline.world.waiting import LOOP

STUCK_S = 3.0
"""What is under way from one that has ended has come by then."""
PATIENCE_S = 5.0


@dataclass(frozen=True)
class Told:
    """A line is said once for each place of the script."""

    rank: int
    waits: str


def look_at_waits(
    processes: Sequence[Process],
    policy: Policy,
    now: float,
    patience_s: float,
    said: set[Told],
    is_missed: Callable[[Process], bool] = lambda process: True,
) -> Look:
    """`is_missed`: one that has ended belongs to those whom the others wait for."""
    workers = [process for process in processes if not process.is_server and not process.lost]
    waiting = [(worker, worker.waits) for worker in workers if not worker.ended and worker.waits is not None]
    if not waiting or policy.survive_worker_loss or any(worker.failed_as is not None for worker in workers):
        return Look()
    gone = [worker for worker in workers if worker.status in ENDED_WELL and is_missed(worker)]
    if gone:
        since = max(worker.ended_at or 0.0 for worker in gone)
        stuck = [(worker, waits) for worker, waits in waiting if now - max(since, waits.since) >= STUCK_S]
        return Look(outcome=_in_vain(*stuck[0], gone)) if stuck else Look()
    lines = []
    for worker, waits in waiting:
        told = Told(worker.rank, str(waits))
        absent = [other for other in workers if not other.ended and _is_elsewhere(other, waits)]
        if absent and now - waits.since >= patience_s and told not in said:
            said.add(told)
            said |= {Told(other.rank, str(other.waits)) for other in absent}  # they wait for this one, as told here
            where = " and ".join(f"{_name(other)}, which {_whereabouts(other)}" for other in absent[:3])
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            lines.append(f"paceline: {_name(worker)} has waited {now - waits.since:.0f} s in {waits} for {where}{more}")
    return Look(lines=tuple(lines))


def _in_vain(worker: Process, waits: Waits, gone: Sequence[Process]) -> Outcome:
    named = " and ".join(other.name for other in gone)
    exits = "exited with code 0" if all(other.status == 0 for other in gone) else "have left"
    every = "every worker has to come there, or none; the job is stopped"
    return Outcome(
        WORKER_FAILED,
        (f"paceline: {worker.name} waits in {waits} for {named}, which {exits} without having come there; {every}",),
    )


def _is_elsewhere(other: Process, waits: Waits) -> bool:
    if waits.call == LOOP and other.phase is Phase.TRAINING and (other.waits is None or other.waits.call == LOOP):
        return False
    return other.waits is None or other.waits.call != waits.call


def _whereabouts(other: Process) -> str:
    if other.waits is not None:
        return f"waits in {other.waits}"
    if other.phase is Phase.TRAINING:
        return f"is training{other.at_step}"
    return "has not come there"


def _name(process: Process) -> str:
    return f"{process.role} {process.number}"
