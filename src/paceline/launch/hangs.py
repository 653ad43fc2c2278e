"""Hangs: a wait for other workers has lasted past its timeout. Who came, who did not, in which operation and step.

    worker 0   waits ───────────── time is up: {"kind": "wait_failed"} ─▶ coordinator
    worker 2        waits ──────── its connection breaks: likewise          │ LAST_TO_COME_S later, for what others say
    worker 1   … in the script, stopped, in another call                    ▼
                                                                  who has come, and who not
                                                                  ─▶ one line, and the stacks of those that have not

A worker has come if it waits, or its wait has failed, or it has ended with an error. The stack of one that has not is
written by faulthandler in a signal handler: it needs neither the interpreter's lock nor the main thread. A process that
is stopped can't write anything, which the kernel tells.

A job that is not elastic ends by the errors of those that waited. An elastic one goes on without the late workers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

from paceline.launch.exit_rules import is_elsewhere, whereabouts
from paceline.launch.failure_attribution import FailedWait, Process, numbers

LAST_TO_COME_S = 0.6
"""Less than a worker of an elastic job waits before it asks for another group (`worker_agent.ASK_AFTER_S`)."""
STACKS_SHOWN_S = 0.3
MOST_STACKS = 4
_ENDED_IN = re.compile(r"the timeout of ([\d.e+-]+) s ended in ([^;]+);")


@dataclass(frozen=True)
class Hang:
    line: str
    late: tuple[Process, ...]
    """Those that have not come, or are in another call: their stacks are to be shown."""
    absent: tuple[Process, ...]
    """Of them those that don't wait for others."""


def find_hang(processes: Sequence[Process], failed: FailedWait, waited: Set[int], where: str) -> Hang:
    """Among `processes` that take part, after a wait that has `failed`.

    `waited` are the ranks that waited at that moment, `where` is the step.
    """
    workers = [one for one in processes if not (one.is_server or one.lost or (one.ended and one.raised is None))]
    absent = [one for one in workers if not _has_come(one, failed, waited)]
    elsewhere = [one for one in workers if one.waits is not None and is_elsewhere(one, failed.waits)]
    elsewhere = [one for one in elsewhere if one not in absent and one.rank not in waited]
    came = [one for one in workers if one not in absent and one not in elsewhere]
    seconds, doing = failed.seconds, failed.doing or f"in {failed.waits.call}"
    if (told := _ENDED_IN.search(failed.text)) is not None:
        seconds, doing = float(told[1]), f"in {told[2]}"
    place = f" ({failed.waits.place})" if failed.waits.place else ""
    what = f"paceline: hang{where}: {numbers(came)} waited {seconds:.3g} s {doing}{place}"
    late = (*absent, *elsewhere)
    if not late:
        return Hang(f"{what}, and all workers have come: is the network between them broken?", (), ())
    gone = [f"{numbers(absent)}, which {'has' if len(absent) == 1 else 'have'} not come"] if absent else []
    gone += [f"{numbers([one])}, which {whereabouts(one)}" for one in elsewhere]
    stacks = "its stack" if len(late) == 1 else f"the stacks of {'the first ' * (len(late) > MOST_STACKS)}these"
    return Hang(f"{what} for {' and '.join(gone)}; {stacks}:", late, tuple(absent))


def _has_come(one: Process, failed: FailedWait, waited: Set[int]) -> bool:
    lately = one.failed_wait is not None and one.failed_wait.at >= failed.at - 2 * LAST_TO_COME_S
    return lately or one.rank in waited or one.waits is not None or one.raised is not None
