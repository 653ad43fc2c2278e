"""A slot: one place in an elastic job, given to one process after the other, and what is known of the one in it.

STARTING ─enter─▶ MEMBER ─ended well─▶ FINISHED
STARTING ─join──▶ WAITING ─admitted──▶ MEMBER            a replacement, of incarnation 1, 2, …
any of them ─▶ FENCED or DYING ─its exit─▶ VACANT ─▶ STARTING
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

Facts: TypeAlias = Mapping[str, str | int]
"""What must be the same in every worker for the same bits: versions, script, lanes, threads, …"""


class Standing(Enum):
    STARTING = "starting"
    MEMBER = "member"
    WAITING = "waiting"
    DYING = "dying"
    FENCED = "fenced"
    VACANT = "vacant"
    FINISHED = "finished"


PRESENT = (Standing.STARTING, Standing.MEMBER, Standing.WAITING)


@dataclass(frozen=True)
class Ready:
    step: int
    update: int
    check: int
    more: bool

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.update


@dataclass
class Slot:
    """One place in the job and what is known of the process in it."""

    number: int
    incarnation: int = 0
    standing: Standing = Standing.STARTING
    heard_at: float | None = None
    computed_at: float | None = None
    """When it was seen to use a processor though it said nothing."""
    excused: bool = False
    beating: bool = False
    ending: bool = False
    loop: int = 0
    in_loop: bool = False
    entered_at: int | None = None
    entered_in: int = 0
    """The generation in which it came to the first step of its loop."""
    ended_in: int = 0
    """The generation in which it ended well."""
    facts: Facts = field(default_factory=dict)
    ready: Ready | None = None
    grouped: bool = True
    since: float = 0.0
    attempts: int = 0
    """Replacements that died before they had joined."""
    asked: int = 0
    """The loop that a replacement stands in front of; 0: any."""
    called_to: int = 0
    """The loop that it was told to skip to."""
    came_in_vain: bool = False
    """It was admitted to a generation that was over before it had come, and hears only of generations now."""
    closed: str = ""
    """Why nobody may take the slot any more."""
    away: bool = False
    """Its host is not there."""
    has_joined: bool = False
    """It had a member once."""
    invited: bool = False
    """Its host has come into a running job: it gets a process whether or not dead ones are replaced."""

    def fall(self, now: float, *, fenced: bool) -> None:
        """Its process counts no more, and is still there."""
        self.standing, self.since = Standing.FENCED if fenced else Standing.DYING, now
        self.ready, self.in_loop = None, False

    def vacate(self) -> None:
        self.standing = Standing.VACANT
        self.ready, self.in_loop = None, False

    def start_again(self, now: float) -> None:
        self.incarnation += 1
        self.standing, self.heard_at, self.beating, self.ending = Standing.STARTING, now, False, False
        self.computed_at, self.excused = None, False
        self.loop, self.entered_at, self.called_to, self.came_in_vain = 0, None, 0, False
        self.invited = False


MODULE = "module "
"""How a fact about a module begins, which a process may import or not, by the way that it takes: only one that has read
a checkpoint needs what reads them. Where one side alone has it there is nothing to compare."""


def difference(members: Facts, joiner: Facts) -> str:
    """What does not match, in words; empty where everything does."""
    both = {name for name in {**members, **joiner} if not name.startswith(MODULE)} | (members.keys() & joiner.keys())
    names = [name for name in {**members, **joiner} if name in both and members.get(name) != joiner.get(name)]
    return ", ".join(
        f"{name} is {joiner.get(name, 'unknown')} there and {members.get(name, 'unknown')} here" for name in names
    )


def named(numbers: Sequence[int]) -> str:
    """`worker 2`, `workers 0, 1 and 3`."""
    ordered = [str(number) for number in sorted(numbers)]
    if len(ordered) == 1:
        return f"worker {ordered[0]}"
    return f"workers {', '.join(ordered[:-1])} and {ordered[-1]}"


def workers(n: int) -> str:
    return f"{n} worker" if n == 1 else f"{n} workers"
