"""What the coordinator of an elastic job may decide, as values.

`membership` makes them, the launcher carries them out, and workers receive the same values as messages: an event has
one form from the coordinator to the worker.

| decision   | carried out as                                                                                         |
|------------|--------------------------------------------------------------------------------------------------------|
| Commit     | a row of the step log, then `elastic.commit` to the members                                            |
| Begin      | `elastic.begin` to the members, who all stand at the first step of a loop                              |
| Generation | `elastic.generation` to its members; a process that waits for keys of an older one hears that it's over |
| Fence      | SIGKILL, by the supervisor of the slot's host                                                          |
| Replace    | a fresh process in the slot                                                                            |
| Refuse     | `elastic.refused` to a process that wants to join and doesn't fit                                      |
| Wait       | `elastic.wait` to one that stands in front of a loop which the members have left                       |
| Rewind     | the step log forgets the steps after this one: the job has resumed from a checkpoint                   |
| StartAnew  | no worker has the state: slots whose host is there get fresh processes, which meet as at the start     |
| Say        | one line for people                                                                                    |
| End        | the job is over                                                                                        |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from paceline.errors import LaunchError

TOO_FEW_LEFT = 4
"""Exit code: fewer workers are left than `--min-workers`."""

MOST_UPDATES = 1 << 10
LAST_UPDATE = MOST_UPDATES - 1
"""The number of the commit with which a step of several updates (`engine.update`) ends."""


@dataclass(frozen=True)
class Rules:
    """What the flags of an elastic job say; None for `max_workers` is the number that it starts with."""

    min_workers: int = 1
    max_workers: int | None = None
    restart_workers: bool = True
    heartbeat_timeout_s: float = 5.0
    step_timeout_s: float = 600.0
    regroup_timeout_s: float = 600.0  # a worker regroups when the item that it works on is done
    copies: int = 2

    def __post_init__(self) -> None:
        for name in ("heartbeat_timeout_s", "step_timeout_s", "regroup_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                flag = name.replace("_", "-")
                raise LaunchError(f"--{flag} {getattr(self, name):g}; it must be a number of seconds above 0")
        if self.min_workers < 1:
            raise LaunchError(f"--min-workers {self.min_workers}; a job has at least one worker")
        if self.copies < 1:
            raise LaunchError(f"--copies {self.copies}; of sharded state there is at least one copy")

    def check(self, workers: int) -> None:
        """Whether a job of so many workers can be held to them."""
        most = workers if self.max_workers is None else self.max_workers
        if not self.min_workers <= workers <= most:
            bounds = f"--min-workers {self.min_workers}" + (f" and --max-workers {most}" if most != workers else "")
            raise LaunchError(
                f"{workers} workers, but {bounds}; a job starts with at least the fewest and at most the most"
            )


@dataclass(frozen=True)
class Commit:
    """A step, or one update of a step that has several, counts: once, ever. The step log is a list of these."""

    step: int
    update: int
    generation: int
    members: tuple[int, ...]
    servers: tuple[int, ...] = ()
    """Server processes, by rank."""

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.update


@dataclass(frozen=True)
class Begin:
    loop: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """The workers that train together, by slot, from one change of them to the next."""

    number: int
    members: tuple[int, ...]
    joining: tuple[int, ...] = ()
    step: int = 0
    """Committed so far."""
    why: str = ""
    main: int = 0
    """Which worker shows progress and writes reports."""
    servers: tuple[int, ...] = ()
    """Server processes, by rank; where there are none and servers are needed, the first member is one too."""

    def includes(self, other: Generation) -> bool:
        """No process of the other one is missing here."""
        return set(other.members) <= set(self.members) and set(other.servers) <= set(self.servers)

    @property
    def staying(self) -> tuple[int, ...]:
        """Those that have the state."""
        return tuple(slot for slot in self.members if slot not in self.joining)

    def as_message(self) -> dict[str, Any]:
        message = {
            "generation": self.number,
            "members": list(self.members),
            "joining": list(self.joining),
            "step": self.step,
            "why": self.why,
            "main": self.main,
        }
        return message | ({"servers": list(self.servers)} if self.servers else {})

    @classmethod
    def of_message(cls, body: Mapping[str, Any]) -> Generation:
        return cls(
            int(body["generation"]),
            tuple(body["members"]),
            tuple(body["joining"]),
            int(body["step"]),
            str(body["why"]),
            int(body["main"]),
            tuple(body.get("servers", ())),
        )


@dataclass(frozen=True)
class Fence:
    slot: int


@dataclass(frozen=True)
class Replace:
    slot: int
    incarnation: int


@dataclass(frozen=True)
class Refuse:
    slot: int
    why: str


@dataclass(frozen=True)
class Wait:
    slot: int
    loop: int


@dataclass(frozen=True)
class Rewind:
    step: int


@dataclass(frozen=True)
class StartAnew:
    start: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Say:
    line: str


@dataclass(frozen=True)
class End:
    """`code` None: the launcher judges by what it knows of the processes, and `why` is added to that."""

    code: int | None
    why: str = ""


Decision: TypeAlias = Commit | Begin | Generation | Fence | Replace | Refuse | Wait | Rewind | StartAnew | Say | End
