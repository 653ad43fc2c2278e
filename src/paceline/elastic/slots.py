"""Slots: the places of an elastic job, each given to one process after the other, and what is known of the process.

    STARTING ─enter─▶ MEMBER ─ended well─▶ FINISHED
    STARTING ─ask───▶ WAITING ─admit─▶ MEMBER, joining ─arrive─▶ a member like the others
                         │  ▲             │
                         │  └─send_back───┘          its generation was over before it had arrived
                         └─call─▶ STARTING           the members are past the loop that it stands in front of
    any of them ─▶ FENCED or DYING ─its exit─▶ VACANT ─refill─▶ STARTING, with the next incarnation number

`SlotTable` knows which slots can have a process, which get one, and who joins; `SlotAssignment` which slots belong to
which host, and whether a host that comes later gets some.

A worker joins only where all members stand at the same place: after a commit, or at the first step of a loop. Until it
has arrived where the new generation meets it has no state, so it can't go on alone, and its death is one more attempt
of its slot. A slot's number is its own for the life of the job; slots that hosts bring later are added at the end.

Server processes (`--servers`) have slots too, numbered after those of the workers:

    lost            its keys go to                        in the next generation
    server 1 of 2   server 0                              the same workers, servers (0,)
    the last one    the first worker, who doubles as one  the same workers, no servers
    its fresh process stands in front of its work         after the next commit: the same workers, servers (0, 1)

A server says neither READY nor that it enters a loop. What it holds goes with a worker's part of the state to the
in-memory checkpoint before that worker is ready, so a commit is as safe as without it; who joins gets it from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from paceline.elastic.decisions import Replace, Rules, Wait
from paceline.errors import LaunchError

MOST_ATTEMPTS, MOST_STARTS = 5, 3

Facts: TypeAlias = Mapping[str, str | int]
"""What must be the same in every worker for the same bits: versions, script, lanes, threads, …"""

MODULE = "module "
"""How a fact about a module begins, which a process may import or not, by the way that it takes: only one that has read
a checkpoint needs what reads them. Where one side alone has it there is nothing to compare."""


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
    server_index: int | None = None
    heard_at: float | None = None
    computed_at: float | None = None
    """When it was seen to use a processor though it sent no heartbeat."""
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
    """Replacements that died before they had joined; of servers, before a step was committed with them."""
    joining: bool = False
    """It was admitted, and has not arrived where its generation meets: it has no state."""
    asked: int = 0
    """The loop that a replacement stands in front of; 0: any."""
    called_to: int = 0
    """The loop that it was told to skip to."""
    came_in_vain: bool = False
    """It was admitted to a generation that was over before it had arrived, and hears only of generations now."""
    closed: str = ""
    """Why no process may take the slot any more."""
    away: bool = False
    """Its host is not there."""
    has_joined: bool = False
    """It had a member once."""
    invited: bool = False
    """Its host has come into a running job: it gets a process whether or not dead ones are replaced."""

    @property
    def is_server(self) -> bool:
        return self.server_index is not None

    @property
    def name(self) -> str:
        return f"server {self.server_index}" if self.is_server else f"worker {self.number}"

    def fall(self, now: float, *, fenced: bool) -> None:
        """Its process counts no more, and is still there."""
        self.standing, self.since = Standing.FENCED if fenced else Standing.DYING, now
        self.ready, self.in_loop, self.joining = None, False, False

    def vacate(self) -> None:
        self.standing = Standing.VACANT
        self.ready, self.in_loop, self.joining = None, False, False

    def start_again(self, now: float) -> Replace:
        self.incarnation += 1
        self.standing, self.heard_at, self.beating, self.ending = Standing.STARTING, now, False, False
        self.computed_at, self.excused = None, False
        self.loop, self.entered_at, self.called_to, self.came_in_vain = 0, None, 0, False
        self.invited = False
        return Replace(self.number, self.incarnation)


def difference(members: Facts, joiner: Facts, *, only_shared: bool = False) -> str:
    """What does not match, in words; empty where everything does. `only_shared`: among what both sides know."""
    shared = members.keys() & joiner.keys()
    names = [
        name
        for name in {**members, **joiner}
        if (name in shared or not (only_shared or name.startswith(MODULE))) and members.get(name) != joiner.get(name)
    ]
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


class SlotTable:
    def __init__(self, workers: int, servers: int, rules: Rules) -> None:
        self._rules = rules
        self.workers = [Slot(number) for number in range(workers)]
        self.servers: list[Slot] = []
        self._start_servers(workers, servers)
        self.starters = workers
        """How many make the first generation."""
        self.starts = 0
        """How often all began anew without having come further than ever before."""
        self.stopping = False
        self._one_step_loops = self._had_more = False

    def __getitem__(self, number: int) -> Slot:
        """Of a worker, or by its rank of a server."""
        if self.servers and number >= self.servers[0].number:
            return self.servers[number - self.servers[0].number]
        return self.workers[number]

    @property
    def serving(self) -> tuple[int, ...]:
        """The servers that serve, by rank."""
        return tuple(slot.number for slot in self.servers if slot.standing is Standing.MEMBER)

    @property
    def here(self) -> list[Slot]:
        """The workers' slots whose host is there."""
        return [slot for slot in self.workers if not slot.away]

    # ---- a process for a slot -----------------------------------------------------------------------------

    def may_refill(self, slot: Slot) -> bool:
        asked_for = self._rules.restart_workers or slot.invited
        return asked_for and not (self.stopping or slot.closed or slot.away) and slot.attempts < MOST_ATTEMPTS

    def why_idle(self, numbers: Collection[int]) -> str:
        """Why none of these slots gets a process any more; empty where one has, or may get, one."""
        slots = [self[number] for number in numbers]
        if self.stopping or any(slot.standing is not Standing.VACANT or self.may_refill(slot) for slot in slots):
            return ""
        refused = [slot.closed for slot in slots if slot.closed]
        died = "none is started for one that died" if not self._rules.restart_workers else "they died too often"
        return refused[0] if refused else died

    def refill(self, now: float) -> list[Replace]:
        """Fresh processes for vacant slots."""
        vacant = [slot for slot in [*self.workers, *self.servers] if slot.standing is Standing.VACANT]
        return [slot.start_again(now) for slot in vacant if self.may_refill(slot)]

    def lose(self, numbers: Iterable[int], now: float, *, fence: bool) -> list[int]:
        """Their processes are gone, or have to go; those of them that were not lost before."""
        lost = [slot for slot in map(self.__getitem__, numbers) if slot.standing in PRESENT]
        for slot in lost:
            slot.attempts += slot.is_server or slot.standing is not Standing.MEMBER or slot.joining
            slot.fall(now, fenced=fence)
        return [slot.number for slot in lost]

    def instead(self, members: Sequence[int]) -> str:
        """Who serves from now on what a lost server did, in words."""
        if not members:
            return "no worker needs its keys any more"
        left = [str(slot.server_index) for slot in self.servers if slot.standing is Standing.MEMBER]
        if not left:
            return f"worker {members[0]} serves its keys"
        return f"its keys go to server{'s' if len(left) > 1 else ''} {' and '.join(left)}"

    def host_lost(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self[number].away, self[number].invited = True, False

    def host_came(self, numbers: Collection[int]) -> None:
        """Their host is there, for the first time or again; what befell older processes there counts no more."""
        for number in numbers:
            slot = self[number]
            slot.vacate()
            slot.away, slot.invited, slot.attempts, slot.closed = False, True, 0, ""

    def add(self, count: int) -> list[int]:
        """At the end, for a host that is about to come."""
        added = [Slot(len(self.workers) + index, standing=Standing.VACANT, away=True) for index in range(count)]
        self.workers += added
        return [slot.number for slot in added]

    # ---- all of them begin anew ---------------------------------------------------------------------------

    @property
    def restarts(self) -> bool:
        """Whether fresh processes are started for those that died."""
        return self._rules.restart_workers and not self.stopping

    def may_begin_anew(self) -> bool:
        return self.restarts and self.starts < MOST_STARTS

    def got_on(self) -> None:
        """A step was committed that none of the starts before had reached: what they cost is made up for."""
        self.starts = 0

    def begin_anew(self) -> tuple[int, ...]:
        """As at the start, but without those whose host is lost; the workers' slots that begin."""
        self.starts += 1
        self.workers = [
            Slot(one.number, standing=Standing.VACANT, away=True, has_joined=one.has_joined) if one.away
            else Slot(one.number)
            for one in self.workers
        ]  # fmt: skip
        self._start_servers(len(self.workers), len(self.servers))
        starting = tuple(slot.number for slot in self.here)
        self.starters = len(starting)
        return starting

    def _start_servers(self, workers: int, count: int) -> None:
        """They serve from the start on, without a word."""
        self.servers = [
            Slot(workers + index, standing=Standing.MEMBER, server_index=index, has_joined=True)
            for index in range(count)
        ]

    def begins_in_words(self) -> str:
        """Who begins anew."""
        left = f"the {workers(self.starters)} of the hosts that are left start{'s' if self.starters == 1 else ''}"
        who = "all start" if self.starters == len(self.workers) else left
        return f"{who} anew ({self.starts} of at most {MOST_STARTS} times)"

    # ---- joining ------------------------------------------------------------------------------------------

    def begin_loop(self, *, first: bool) -> None:
        self._one_step_loops, self._had_more = not first and not self._had_more, False

    def step_counts(self, *, more: bool) -> None:
        """A step was committed; `more` of the loop follow."""
        self._had_more |= more
        for slot in self.servers:
            slot.attempts = 0 if slot.standing is Standing.MEMBER else slot.attempts

    def ask(self, slot: Slot, loop: int, facts: Facts, known: Facts) -> str:
        """It stands in front of this loop, 0: any; how it differs from what is `known` of the members, if it does."""
        if unlike := difference(known, facts, only_shared=slot.is_server):
            slot.closed = unlike
            return unlike
        slot.standing, slot.loop, slot.asked, slot.facts = Standing.WAITING, loop, loop, facts
        return ""

    def call(self, slot: Slot, loop: int) -> Wait:
        """Loops of one step may be over whenever it comes to them: it is called to the next then, to be in time."""
        slot.called_to = loop + (slot.called_to > 0 and self._one_step_loops)
        slot.standing = Standing.STARTING
        return Wait(slot.number, slot.called_to)

    def call_in(self, loop: int) -> tuple[list[Wait], list[int]]:
        """Those who wait in front of a loop that is over skip to this one; and those who would not hear of it."""
        late = [slot for slot in self.workers if slot.standing is Standing.WAITING and 0 < slot.loop < loop]
        unreachable = [slot.number for slot in late if slot.came_in_vain]
        return [self.call(slot, loop) for slot in late if not slot.came_in_vain], unreachable

    def admit(self, loop: int) -> str:
        """Those who wait in front of this loop, which the members are in, and servers that wait; in words."""
        waiting = [slot for slot in [*self.workers, *self.servers] if slot.standing is Standing.WAITING]
        admitted = [slot for slot in waiting if slot.loop in (0, loop)]
        for slot in admitted:
            slot.standing, slot.loop, slot.in_loop, slot.entered_at = Standing.MEMBER, loop, True, None
            slot.joining = True
        numbers = [slot.number for slot in admitted if not slot.is_server]
        servers = [slot.name for slot in admitted if slot.is_server]
        return " and ".join([*([named(numbers)] if numbers else []), *servers])

    def begin_generation(self, members: Iterable[Slot]) -> None:
        for slot in members:
            slot.ready, slot.grouped = None, not slot.in_loop
        for slot in self.servers:
            slot.grouped = slot.standing is not Standing.MEMBER

    def arrive(self, slot: Slot) -> str:
        """It is where its generation meets: what that makes of one that joins, in words; empty where it was there."""
        slot.grouped = True
        if not slot.joining:
            return ""
        came = "is back" if slot.has_joined else "joined"
        slot.attempts = slot.attempts if slot.is_server else 0
        slot.has_joined, slot.joining = True, False
        return came

    def send_back(self) -> None:
        """Which worker was admitted and has not arrived, to have the state, waits for the next committed step."""
        for slot in self.workers:
            if slot.joining:
                slot.standing, slot.loop, slot.in_loop = Standing.WAITING, slot.asked, False
                slot.came_in_vain, slot.joining = True, False


@dataclass(frozen=True)
class HostSlots:
    first: int
    workers: int
    room: int
    """How many slots are its own, from the first on."""
    is_there: bool = True

    @property
    def slots(self) -> range:
        return range(self.first, self.first + self.workers)


class SlotAssignment:
    """Which slots the hosts of an elastic job have, and whether one that comes later gets some.

        host 0   slots 0 1      there
        host 1   slots 2 3      lost: it may come back to them
        host 2   slots 4 5      a further one: at the end, while --max-workers and the lanes allow it

    Every host has neighbouring slots. One that comes back with fewer workers leaves the last of its slots empty, and
    one that comes back with more gets new ones. Numbers are never given to another host. `workers` are those that each
    host began with, host 0 first; `most` of them may be there at a time.
    """

    def __init__(self, workers: Sequence[int], *, most: int, lanes: int, servers: int = 0) -> None:
        self._most, self._lanes, self._servers = most, lanes, servers
        self.size = 0
        """Slots in all, empty ones too."""
        self._hosts: dict[int, HostSlots] = {}
        for host, number in enumerate(workers):
            self._hosts[host] = HostSlots(self._add(number), number, number)

    def _add(self, number: int) -> int:
        first, self.size = self.size, self.size + number
        return first

    @property
    def workers_there(self) -> int:
        return sum(host.workers for host in self._hosts.values() if host.is_there)

    @property
    def most_hosts(self) -> int:
        """More than the highest number that any has had."""
        return max(self._hosts) + 1

    def is_there(self, host: int) -> bool:
        return host in self._hosts and self._hosts[host].is_there

    def was_there(self, host: int) -> bool:
        return host in self._hosts

    def slots_of(self, host: int) -> range:
        return self._hosts[host].slots

    def host_of(self, slot: int) -> int:
        for number, host in self._hosts.items():
            if host.first <= slot < host.first + host.room:
                return number
        raise LookupError(f"slot {slot} is no host's")

    def leave(self, host: int) -> None:
        self._hosts[host] = replace(self._hosts[host], is_there=False)

    def take(self, host: int, workers: int) -> HostSlots:
        """The slots of a host that comes with so many workers; `LaunchError` where it can't be let in."""
        if workers < 1:
            raise LaunchError(f"host {host} brings no worker")
        self._check_room(workers)
        known = self._hosts.get(host)
        if known is not None and workers <= known.room:
            assigned = HostSlots(known.first, workers, known.room)
        elif self._servers:
            raise LaunchError(
                f"a job with server processes gets no further workers; {self._at_most(known)}, or start it "
                "without --servers: a worker doubles as the server then"
            )
        else:
            assigned = HostSlots(self._add(workers), workers, workers)
        self._hosts[host] = assigned
        return assigned

    def _at_most(self, known: HostSlots | None) -> str:
        return "only its own hosts may come back" if known is None else f"come back with {workers(known.room)} at most"

    def _check_room(self, number: int) -> None:
        there = self.workers_there
        brings = f"it brings {workers(number)}, and {there} {'is' if there == 1 else 'are'} there"
        if there + number > self._most:
            raise LaunchError(f"{brings}: the job has at most {self._most} (--max-workers of host 0; if not given, "
                              "those that it began with)")  # fmt: skip
        if there + number > self._lanes:
            lanes = f"{self._lanes} lane{'s' if self._lanes > 1 else ''}"
            raise LaunchError(
                f"{brings}, but the job has {lanes}, fixed since its start; every worker has at least one"
            )
