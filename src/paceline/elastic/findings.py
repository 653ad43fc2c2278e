"""What is found wrong in an elastic job, as values: `membership` asks for it, and decides what follows.

| finding        | what follows                                                                        |
|----------------|-------------------------------------------------------------------------------------|
| FenceWorkers   | they are taken out of the job; those who are left redo the step                     |
| FenceServers   | the same for server processes, whose keys go to others                              |
| MeetAgain      | a new generation of those who are members redoes the step                           |
| StateLost      | nobody has a copy of the state: all start anew, if they can                         |
| Hopeless       | the job ends                                                                        |

`steps` finds it in what workers say, `timekeeper` in what they don't, and `outlook` in who is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class FenceWorkers:
    how: Mapping[int, str]
    """By slot, what is said of it: `worker 2 gave no sign of life`."""


@dataclass(frozen=True)
class FenceServers:
    ranks: tuple[int, ...]
    how: str
    """What is said of each, after its name."""


@dataclass(frozen=True)
class MeetAgain:
    why: str
    said: str
    """For people."""


@dataclass(frozen=True)
class StateLost:
    why: str


@dataclass(frozen=True)
class Hopeless:
    why: str
    code: int | None = 1
    """As that of `End`."""


Finding: TypeAlias = FenceWorkers | FenceServers | MeetAgain | StateLost | Hopeless
